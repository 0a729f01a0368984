"""What `servetwin kv` does: checks its flags, sizes the cache, and tells what fits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from servetwin.sim.cards import GIB, UNKNOWN_CARD_LIMITS, Card
from servetwin.sim.commands.card_checks import check_sizes, kv_settings, named_card
from servetwin.sim.commands.errors import InfeasibleError, UsageError
from servetwin.sim.commands.kv import KVFlags
from servetwin.sim.hf_config import ModelFolderError, read_hf_config
from servetwin.sim.kv_capacity import Capacity, full_capacity, hybrid_capacity
from servetwin.sim.kv_sizing import KVSettings, KVSizing, cache_on, given_cache
from servetwin.sim.length_mix import MeanHolding, mean_holding
from servetwin.sim.model_shape import ModelShape
from servetwin.sim.model_shape_reader import shape_of


@dataclass(frozen=True)
class Answer:
    """Everything that is told."""

    shape: ModelShape
    card: Card | None
    settings: KVSettings
    sizing: KVSizing
    capacity: Capacity
    """Every layer keeps every token: what the scheduler here counts."""
    hybrid: Capacity | None
    """vLLM's hybrid KV cache manager, for a model with windowed layers."""
    mix: MeanHolding | None

    @property
    def mix_concurrency(self) -> float | None:
        """Requests of the mix that run at once: what the pool holds, at most max_num_seqs."""
        if self.mix is None:
            return None
        return min(self.mix.concurrency(self.capacity.num_gpu_blocks), float(self.settings.max_num_seqs))


def carry_out(flags: KVFlags) -> int:
    """Prints the answer and returns 0. Raises UsageError and other ValueErrors (exit 2), InfeasibleError (exit 3)."""
    from servetwin.sim.commands.kv_report import lines, to_json
    from servetwin.sim.commands.show import print_json, results_console

    found = answer(flags)
    if flags.json:
        print_json(to_json(found))
    else:
        console = results_console()
        for line in lines(found):
            console.print(line, soft_wrap=True, markup=False, highlight=False)
    return 0


def answer(flags: KVFlags) -> Answer:
    """Raises as `carry_out`."""
    _check(flags)
    config = read_hf_config(flags.model)
    try:
        max_model_len = config.max_model_len(flags.max_model_len)
    except ModelFolderError as e:
        raise UsageError(f"--max-model-len: {e}") from e
    shape = shape_of(config)
    card = None if flags.gpu is None else named_card(flags.gpu)
    settings = _settings(flags, card)
    try:
        sizing = _sizing(flags, shape, card, settings)
    except ValueError as e:
        raise UsageError(f"--tensor-parallel-size: {e}") from e
    capacity = full_capacity(sizing.num_gpu_blocks, settings.block_size, max_model_len)
    hybrid = None
    if shape.num_windowed_layers:
        hybrid = hybrid_capacity(
            shape,
            sizing.kv,
            sizing.cache_bytes,
            settings.block_size,
            max_model_len,
            settings.max_num_batched_tokens,
        )
    _check_fits(capacity, hybrid, sizing)
    return Answer(shape, card, settings, sizing, capacity, hybrid, _mix(flags, max_model_len))


def _check(flags: KVFlags) -> None:
    """Raises UsageError for a value out of range, and for a flag that would change nothing."""
    check_sizes(
        flags, "kv_cache_memory_bytes", "tensor_parallel_size", "max_model_len", "block_size", "max_num_seqs",
        "max_num_batched_tokens", "prompt_tokens", "output_tokens",
    )  # fmt: skip
    if (flags.gpu is None) == (flags.kv_cache_memory_bytes is None):
        raise UsageError(
            "give one of --gpu NAME and --kv-cache-memory-bytes N: the memory that the cache comes from"
        )
    if (flags.prompt_tokens is None) != (flags.output_tokens is None):
        raise UsageError("--prompt-tokens and --output-tokens go together")
    if flags.workload is not None and flags.prompt_tokens is not None:
        raise UsageError("--workload has lengths of its own: give it or --prompt-tokens and --output-tokens")
    if flags.gpu is None:
        _refuse_without_card(flags)


def _refuse_without_card(flags: KVFlags) -> None:
    has_mix = flags.workload is not None or flags.prompt_tokens is not None
    inert = {
        "--gpu-memory-utilization": flags.gpu_memory_utilization is not None,
        "--enforce-eager": flags.enforce_eager,
        "--max-num-seqs": flags.max_num_seqs is not None and not has_mix,
    }
    for name in (n for n, given in inert.items() if given):
        raise UsageError(f"{name} has no effect with --kv-cache-memory-bytes, which is what the cache gets")


def _settings(flags: KVFlags, card: Card | None) -> KVSettings:
    seqs, tokens = UNKNOWN_CARD_LIMITS if card is None else card.default_limits()
    return kv_settings(flags, flags.max_num_seqs or seqs, flags.max_num_batched_tokens or tokens)


def _sizing(flags: KVFlags, shape: ModelShape, card: Card | None, settings: KVSettings) -> KVSizing:
    if card is not None:
        return cache_on(shape, card, settings)
    assert flags.kv_cache_memory_bytes is not None, "checked before"
    return given_cache(shape, flags.kv_cache_memory_bytes, settings)


def _check_fits(capacity: Capacity, hybrid: Capacity | None, sizing: KVSizing) -> None:
    """One request of max_model_len must fit; as in vLLM the null block counts as room."""
    if capacity.max_concurrency >= 1 or (hybrid is not None and hybrid.max_concurrency >= 1):
        return
    needed = capacity.blocks_per_request * sizing.block_size * sizing.kv.per_token
    raise InfeasibleError(
        f"one request of {capacity.max_model_len:,} tokens needs {capacity.blocks_per_request:,} blocks "
        f"({needed / GIB:.2f} GiB at {sizing.kv.per_token:,} bytes per token); the KV cache of "
        f"{sizing.cache_bytes / GIB:.2f} GiB has {capacity.num_gpu_blocks:,} blocks: lower --max-model-len to at most "
        f"{capacity.num_gpu_blocks * sizing.block_size:,}, or give the cache more memory"
    )


def _mix(flags: KVFlags, max_model_len: int) -> MeanHolding | None:
    """Over the requests that can run; the engine ends one at max_model_len, and refuses a prompt of that length."""
    lengths: Iterable[tuple[int, int]]
    if flags.workload is not None:
        lengths = _lengths(flags.workload)
    elif flags.prompt_tokens is not None and flags.output_tokens is not None:
        lengths = [(flags.prompt_tokens, flags.output_tokens)]
    else:
        return None
    runs = ((p, min(o, max_model_len - p)) for p, o in lengths if p < max_model_len)
    try:
        return mean_holding(runs, flags.block_size)
    except ValueError as e:
        name = "--workload" if flags.workload is not None else "--prompt-tokens"
        raise UsageError(f"{name}: no prompt is shorter than max_model_len {max_model_len}") from e


def _lengths(workload: str) -> Iterable[tuple[int, int]]:
    # Imported here: whoever gives two means need not wait for the trace readers.
    from servetwin.workloads import open_workload, values_of

    requests = open_workload(workload).requests
    return zip(values_of(requests, "prompt_tokens"), values_of(requests, "output_tokens"), strict=True)
