"""Compiles every Triton kernel for NVIDIA architectures without a GPU and reports what each variant costs.

    python benchmarks/compile_kernels.py [--arch sm_90 ...] [--variant KERNEL/NAME ...] [--add] [-o FILE]

Needs a process without TRITON_INTERPRET. The variants are those of kernel_variants.py; registers and stack are read
from the cubin by the tools in the triton wheel. Prints (and with -o writes) a JSON list of rows:

    kernel, variant, arch, triton   what was compiled, and with which version
    registers                       per thread; 255 is the hardware's limit
    spills                          instructions that move registers to or from local memory
    stack_bytes, shared_bytes       per thread, per block; the launch fails beyond 232,448 shared bytes on sm_90
    mma                             matrix instruction: UTCHMMA (sm_100), HGMMA (sm_90), HMMA (all), or none
    async_copies                    asynchronous global-to-shared copies, present when loads are pipelined
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from kernel_variants import VARIANTS, Variant
from triton.backends.compiler import GPUTarget

from servetwin.kernels.triton_launch import INTERPRETED, WARP_SIZE

ARCHES = ("sm_80", "sm_90", "sm_100")
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def capability(arch: str) -> int:
    """The compute capability times ten."""
    return int(arch.removeprefix("sm_"))


class OfflineDriver:
    """The little of a Triton driver that compilation asks for, for a GPU that is not there."""

    def __init__(self, arch: str) -> None:
        self._capability = capability(arch)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, WARP_SIZE)

    def get_current_device(self) -> int:
        # Compiled kernels are kept per device number, so each architecture poses as a device of its own.
        return self._capability

    def set_current_device(self, device: int) -> None:
        """There is one device."""

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")


def compile_variant(variant: Variant, arch: str) -> dict[str, Any]:
    """One row of the report."""
    triton.runtime.driver.set_active(OfflineDriver(arch))
    compiled = variant.plan().compile()
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        usage = _tool("cuobjdump", "-res-usage", file.name)
        assembly = _tool("nvdisasm", "-c", file.name)
    return {
        "kernel": variant.kernel,
        "variant": variant.name,
        "arch": arch,
        "triton": triton.__version__,
        "registers": _number(r"REG:(\d+)", usage),
        "spills": len(re.findall(r"\b(?:LDL|STL)\b", assembly)),
        "stack_bytes": _number(r"STACK:(\d+)", usage),
        "shared_bytes": compiled.metadata.shared,
        "mma": next((i for i in ("UTCHMMA", "HGMMA", "HMMA") if re.search(rf"\b{i}\b", assembly)), "none"),
        "async_copies": len(re.findall(r"\bLDGSTS\b", assembly)),
    }


def _tool(name: str, *args: str) -> str:
    return subprocess.run([TOOLS / name, *args], check=True, capture_output=True, text=True).stdout


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"no {pattern!r} in the output of cuobjdump: {text!r}")
    return int(match[1])


def rows(arches: list[str], ids: list[str]) -> Iterator[dict[str, Any]]:
    """One row per architecture and variant it can run, those of `ids` only unless it is empty."""
    for arch in arches:
        for variant in VARIANTS:
            wanted = not ids or variant.id in ids
            if wanted and capability(arch) >= variant.min_arch:
                yield compile_variant(variant, arch)


def rows_of_other_versions(path: Path) -> list[dict[str, Any]]:
    """What an earlier report holds of other versions of triton."""
    earlier = json.loads(path.read_text()) if path.exists() else []
    return [row for row in earlier if row["triton"] != triton.__version__]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arch", nargs="+", choices=ARCHES, default=list(ARCHES), help="default: all")
    ids = [v.id for v in VARIANTS]
    parser.add_argument("--variant", nargs="+", choices=ids, default=[], metavar="ID", help=", ".join(ids))
    parser.add_argument("-o", "--output", type=Path, help="also write the JSON to this file")
    parser.add_argument("--add", action="store_true", help="keep what FILE has of other versions of triton")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if INTERPRETED:
        sys.exit("TRITON_INTERPRET is set: nothing can be compiled in this process")
    kept = rows_of_other_versions(args.output) if args.add and args.output else []
    text = json.dumps(kept + list(rows(args.arch, args.variant)), indent=1)
    print(text)
    if args.output:
        args.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
