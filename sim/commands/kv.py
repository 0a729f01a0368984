"""`servetwin kv`: how many requests of a model fit on a card."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Group, Parameter

from servetwin.sim.commands.flag_kinds import count, flag, switch
from servetwin.sim.commands.flags import CACHE, MODEL, SCHEDULER, BlockSize, MaxModelLen

CARD = Group("Card", sort_key=1)
MIX = Group("Length mix", sort_key=5)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class KVFlags:
    """A model, the memory it gets, and the lengths to expect. None: the default applies."""

    model: Annotated[
        Path, flag(MODEL, "Local Hugging Face folder, or its config.json: nothing else is read.")
    ]
    gpu: Annotated[
        str | None, flag(CARD, "Card whose memory is shared out, e.g. H100, A100-80GB, RTX-4090, MI300X.")
    ] = None
    kv_cache_memory_bytes: Annotated[
        int | None, count(CARD, "Bytes of the KV cache on each card, instead of --gpu.")
    ] = None
    gpu_memory_utilization: Annotated[
        float | None,
        flag(CARD, "Part of the card's memory (0 to 1) that the engine may use (default 0.92)."),
    ] = None
    tensor_parallel_size: Annotated[int, count(CARD, "Cards that share every layer.")] = 1
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"],
        flag(MODEL, "Data type of what is not quantized; auto: the checkpoint's, bfloat16 for float32."),
    ] = "auto"
    max_model_len: MaxModelLen = None
    enforce_eager: Annotated[bool, switch(MODEL, "No CUDA graphs, so nothing is kept for them.")] = False
    block_size: BlockSize = 16
    kv_cache_dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"],
        flag(CACHE, "Data type of K and V; auto: as --dtype."),
    ] = "auto"
    max_num_seqs: Annotated[
        int | None,
        count(
            SCHEDULER,
            "Requests that may run at once: the sampler's share of the reserve, and the limit of the concurrency "
            "of a length mix (default: vLLM's for the card, 1,024 or 256).",
        ),
    ] = None
    max_num_batched_tokens: Annotated[
        int | None,
        count(
            SCHEDULER,
            "Tokens per step: activations, and what windowed layers keep (default: vLLM's for the card, 8,192 or "
            "2,048).",
        ),
    ] = None
    prompt_tokens: Annotated[int | None, count(MIX, "Mean prompt; with --output-tokens.")] = None
    output_tokens: Annotated[int | None, count(MIX, "Mean output; with --prompt-tokens.")] = None
    workload: Annotated[
        str | None,
        flag(MIX, "A trace, our JSONL, a run folder or a preset: its lengths, request by request."),
    ] = None
    json: Annotated[bool, Parameter(negative=(), help="Print one JSON object.")] = False


def kv(*, flags: KVFlags) -> int:
    """How many requests fit: weights, reserve, KV cache and concurrency of a model on a card.

    num_gpu_blocks = KV cache bytes // (KV bytes per token x block size); maximum concurrency = num_gpu_blocks /
    ceil(max_model_len / block size). All figures are per card; GiB is 2^30 bytes. The reserve for activations, CUDA
    graphs and libraries is an estimate: vLLM measures it at start-up. Exit code 3: it does not fit.
    """
    from servetwin.sim.commands.kv_answer import carry_out

    return carry_out(flags)
