"""Published figures of accelerators. All of them are peaks; a step model says what part of them it counts on."""

from __future__ import annotations

from dataclasses import dataclass

MIB, GIB = 2**20, 2**30
UNKNOWN_CARD_LIMITS = (256, 2048)
"""(max_num_seqs, max_num_batched_tokens) of `vllm serve` 0.22.0 on a card that its device rule does not know."""


@dataclass(frozen=True, slots=True)
class Card:
    """One accelerator."""

    name: str
    bf16_flops: float
    """Dense (never sparse) bf16 FLOP/s with float32 accumulation."""
    fp8_flops: float
    """Dense fp8 FLOP/s with float32 accumulation; as bf16 where the card has no fp8 units."""
    bandwidth_bytes_per_s: float
    """Of the memory."""
    memory_bytes: int
    """As CUDA and HIP report it to a process (torch's `total_memory`), which vLLM takes its share of: neither the GB of
    the name nor the somewhat larger figure of `nvidia-smi`. Differs by some hundred MiB between drivers."""
    link_bytes_per_s: float
    """To its neighbours, in one direction: NVLink, Infinity Fabric, or PCIe where there is nothing else."""

    def flops(self, *, fp8: bool) -> float:
        """Dense FLOP/s of matrix products in the given type."""
        return self.fp8_flops if fp8 else self.bf16_flops

    def default_limits(self) -> tuple[int, int]:
        """(max_num_seqs, max_num_batched_tokens) of `vllm serve` 0.22.0 on this card, by its device rule."""
        large = self.memory_bytes >= 70 * GIB and not self.name.startswith("A100")
        return (1024, 8192) if large else UNKNOWN_CARD_LIMITS


def _gib(size: float) -> int:
    return round(size * GIB)


_CARDS = (
    Card("A100-40GB", 312e12, 312e12, 1.555e12, _gib(39.39), 300e9),
    Card("A100-80GB", 312e12, 312e12, 2.039e12, _gib(79.15), 300e9),
    Card("H100-SXM", 989.4e12, 1978.9e12, 3.35e12, _gib(79.11), 450e9),
    Card("H100-PCIe", 756e12, 1513e12, 2.0e12, _gib(79.11), 64e9),
    Card("H200", 989.4e12, 1978.9e12, 4.8e12, _gib(139.81), 450e9),
    Card("B200", 2250e12, 4500e12, 8.0e12, _gib(178.35), 900e9),
    Card("L40S", 362e12, 733e12, 0.864e12, _gib(44.40), 32e9),
    Card("RTX-4090", 165.2e12, 330.3e12, 1.008e12, _gib(23.52), 32e9),
    Card("RTX-PRO-6000", 503.8e12, 1007.6e12, 1.792e12, _gib(94.97), 64e9),
    Card("MI300X", 1307.4e12, 2614.9e12, 5.3e12, _gib(191.98), 448e9),
)
"""Sources, data sheets of the makers unless said otherwise; sparse figures halved, totals of both directions halved:

- A100: "NVIDIA A100 Tensor Core GPU" (SXM, 40 and 80 GB; NVLink 600 GB/s in all).
- H100: "NVIDIA H100 Tensor Core GPU" (SXM: NVLink 900 GB/s in all; PCIe: Gen5 x16, without the optional bridge).
- H200: "NVIDIA H200 Tensor Core GPU" (SXM, 141 GB).
- B200: "NVIDIA DGX B200", an eighth of the system (180 GB usable; NVLink 1.8 TB/s in all).
- L40S: "NVIDIA L40S" (PCIe Gen4 x16).
- RTX 4090: "NVIDIA Ada GPU architecture" white paper, rows with FP32 accumulate (PCIe Gen4 x16).
- RTX PRO 6000: "NVIDIA RTX Blackwell PRO" white paper, workstation edition (PCIe Gen5 x16).
- MI300X: "AMD Instinct MI300X accelerator" (7 Infinity Fabric links of 64 GB/s in each direction).
"""

_SHORT = {
    "a100": "a10080gb",
    "a100sxm": "a10080gb",
    "h100": "h100sxm",
    "h10080gb": "h100sxm",
    "h200sxm": "h200",
    "b200sxm": "b200",
}
"""Names that leave the variant open: the one that is usual for serving."""
_NOISE = (
    "nvidia", "geforce", "amd", "instinct", "tensorcoregpu", "blackwell", "workstationedition", "serveredition",
    "sxm4", "sxm5", "hbm3e", "hbm3",
)  # fmt: skip
"""What drivers put around a name."""


def card_names() -> list[str]:
    """All names, as they are printed."""
    return [card.name for card in _CARDS]


def find_card(name: str) -> Card:
    """The card of that name; case, spaces, `-` and `_` do not count, nor does the maker's name.

    Raises ValueError with the list of names.
    """
    wanted = _plain(name)
    wanted = _SHORT.get(wanted, wanted)
    for card in _CARDS:
        if wanted in (_plain(card.name), _plain(card.name).removeprefix("rtx")):
            return card
    raise ValueError(f"gpu {name!r} is not known; allowed: {', '.join(card_names())}")


def _plain(name: str) -> str:
    text = "".join(c for c in name.lower() if c.isalnum())
    for word in _NOISE:
        text = text.replace(word, "")
    return text
