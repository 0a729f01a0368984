"""What commands that are told of a card check and read alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

from servetwin.sim.cards import Card, find_card
from servetwin.sim.commands.errors import UsageError
from servetwin.sim.kv_sizing import GPU_MEMORY_UTILIZATION, KVSettings

if TYPE_CHECKING:
    from servetwin.sim.commands.flags import EngineFlags
    from servetwin.sim.commands.kv import KVFlags


def named_card(name: str) -> Card:
    """The card of `--gpu`. Raises UsageError with the known ones."""
    try:
        return find_card(name)
    except ValueError as e:
        raise UsageError(f"--{e}") from e


def check_sizes(flags: EngineFlags | KVFlags, *names: str) -> None:
    """Raises UsageError for one of these fields, or a share of memory, that is out of range."""
    for name in names:
        if (value := getattr(flags, name)) is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} {value} must be 1 or more")
    share = flags.gpu_memory_utilization
    if share is not None and not 0 < share <= 1:
        raise UsageError(f"--gpu-memory-utilization {share} must be above 0 and at most 1")


def kv_settings(flags: EngineFlags | KVFlags, max_num_seqs: int, max_num_batched_tokens: int) -> KVSettings:
    """What the size of the cache depends on."""
    share = flags.gpu_memory_utilization
    return KVSettings(
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        dtype=flags.dtype,
        kv_cache_dtype=flags.kv_cache_dtype,
        block_size=flags.block_size,
        tensor_parallel_size=flags.tensor_parallel_size,
        gpu_memory_utilization=GPU_MEMORY_UTILIZATION if share is None else share,
        graphs=not flags.enforce_eager,
    )
