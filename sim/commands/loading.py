"""From the flags of a load to a workload."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from servetwin.sim.commands.errors import UsageError
from servetwin.sim.commands.flag_names import flags_named, given, spelled
from servetwin.sim.commands.flags import LoadFlags
from servetwin.sim.commands.trace_flags import TraceFlags
from servetwin.workloads import (
    Arrivals,
    BenchServe,
    ClosedLoop,
    ListWorkload,
    PrefixRepetitionDataset,
    RampUp,
    RandomDataset,
    ReadOptions,
    Synthetic,
    Tolerance,
    as_workload,
    open_workload,
    values_of,
)
from servetwin.workloads.checks import check_count, check_positive
from servetwin.workloads.traces.formats import FLAGS, named_format
from servetwin.workloads.traces.options import Tokenize
from servetwin.workloads.transform import scaled

DATASETS = {
    "random": ("random_", RandomDataset),
    "prefix_repetition": ("prefix_repetition_", PrefixRepetitionDataset),
}
"""Name of a dataset -> how its flags begin, and its model."""
DATASET_REQUESTS = 1000
RAMP_UP = ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps")


@dataclass(frozen=True)
class Load:
    """What is to be sent, as typed."""

    workload: str | None
    flags: LoadFlags
    trace: TraceFlags

    def check(self) -> None:
        """Raises UsageError for what can be seen before anything is opened."""
        flags = self.flags
        with flags_named(max_concurrency="--max-concurrency", rate_scale="--rate-scale"):
            check_positive("rate_scale", flags.rate_scale)
            if flags.max_concurrency is not None:
                check_count("max_concurrency", flags.max_concurrency)
        if (flags.dataset_name is None) == (self.workload is None):
            raise UsageError(
                "WORKLOAD is missing: a trace, our JSONL, a preset, or --dataset-name"
                if self.workload is None
                else f"--dataset-name {flags.dataset_name} stands in the place of WORKLOAD, {self.workload!r}"
            )
        if self.workload is None and (flag := next(iter(given(self.trace)), None)):
            raise UsageError(f"{flag} goes with a trace; --dataset-name {flags.dataset_name} is made up")
        self._check_rate()
        for name in self._without_effect():
            raise UsageError(f"{spelled(name)} goes with --dataset-name {_dataset(name)}")

    def _check_rate(self) -> None:
        flags = self.flags
        ramp = [spelled(name) for name in RAMP_UP if getattr(flags, name) is not None]
        if ramp and len(ramp) < len(RAMP_UP):
            raise UsageError(
                f"{ramp[0]} needs {', '.join(spelled(n) for n in RAMP_UP if spelled(n) not in ramp)}"
            )
        if ramp and flags.request_rate is not None:
            raise UsageError(
                "--request-rate cannot stand beside --ramp-up-strategy, which has rates of its own"
            )
        if flags.burstiness is not None and not ramp and flags.request_rate is None:
            raise UsageError("--burstiness goes with --request-rate or --ramp-up-strategy")

    def _without_effect(self) -> Iterator[str]:
        for dataset, (prefix, _) in DATASETS.items():
            if dataset != self.flags.dataset_name:
                names = (name for name in vars(self.flags) if name.startswith(prefix))
                yield from (name for name in names if getattr(self.flags, name) is not None)

    def open(self, seed: int) -> ListWorkload | ClosedLoop:
        """The workload. Raises UsageError, WorkloadError for what cannot be used."""
        opened, factor = self._as_given(seed), self.flags.rate_scale
        if factor == 1:
            return opened
        if len({*values_of(opened.requests, "arrival_s")}) < 2:
            raise UsageError(f"--rate-scale {factor:g} has no effect: all requests arrive at one time")
        with flags_named(speed_up="--rate-scale"):
            requests = scaled(opened.requests, speed_up=factor)
        about = opened.about | {"rate_scale": factor}
        return (
            ListWorkload(requests, about) if isinstance(opened, ListWorkload) else ClosedLoop(requests, about)
        )

    def _as_given(self, seed: int) -> ListWorkload | ClosedLoop:
        """At the times that the workload has."""
        flags = self.flags
        with flags_named(**self._flags()):
            process = self._process()
            if self.workload is None:
                return self._dataset(process, seed)
            return open_workload(
                self.workload,
                flags.num_prompts,
                flags.request_rate if process is None else None,
                seed,
                arrivals=process,
                loop=flags.loop,
                read=read_options(self.trace) if given(self.trace) else None,
            )

    def _flags(self) -> dict[str, str]:
        """The parameters that `open` sets -> what was typed for them."""
        flags = self.flags
        names = {"n": "num_prompts", "rate_per_s": "request_rate"}
        names |= {"start_rate_per_s": "ramp_up_start_rps", "end_rate_per_s": "ramp_up_end_rps"}
        names |= {name: name for name in ("num_prompts", "burstiness", "loop", "seed")}
        if flags.dataset_name is not None:
            prefix, dataset = DATASETS[flags.dataset_name]
            names |= {f.name: prefix + f.name for f in fields(dataset)}
        rates = ("request_rate", *RAMP_UP)
        typed = (f"{spelled(name)} {value}" for name in rates if (value := getattr(flags, name)) is not None)
        return {parameter: spelled(name) for parameter, name in names.items()} | {
            "arrivals": " ".join(typed),
            "read": " ".join(given(self.trace)),
        }

    def _process(self) -> Arrivals | None:
        """What the flags say of arrivals beyond a rate."""
        flags = self.flags
        burstiness = 1.0 if flags.burstiness is None else flags.burstiness
        if flags.ramp_up_strategy is not None:
            assert flags.ramp_up_start_rps is not None and flags.ramp_up_end_rps is not None, "checked before"
            return RampUp(
                strategy=flags.ramp_up_strategy,
                start_rate_per_s=flags.ramp_up_start_rps,
                end_rate_per_s=flags.ramp_up_end_rps,
                burstiness=burstiness,
            )
        if flags.burstiness is None or flags.request_rate is None:
            return None
        return BenchServe(rate_per_s=flags.request_rate, burstiness=burstiness)

    def _dataset(self, process: Arrivals | None, seed: int) -> ListWorkload | ClosedLoop:
        flags = self.flags
        assert flags.dataset_name is not None, "checked before"
        prefix, dataset = DATASETS[flags.dataset_name]
        typed = {
            n.removeprefix(prefix): v
            for n, v in vars(flags).items()
            if n.startswith(prefix) and v is not None
        }
        rate = float("inf") if flags.request_rate is None else flags.request_rate
        made = Synthetic(
            arrivals=process or BenchServe(rate_per_s=rate),
            prompts=dataset(**typed),
            n=DATASET_REQUESTS if flags.num_prompts is None else flags.num_prompts,
            seed=seed,
        )
        return as_workload(made.requests, made.about | {"dataset_name": flags.dataset_name}, flags.loop)


def read_options(flags: TraceFlags, tolerance: Tolerance = Tolerance.NORMAL, seed: int = 0) -> ReadOptions:
    """How to read a trace. Raises UsageError."""
    with flags_named(format="--trace-format", seed="--seed", **FLAGS):
        if flags.trace_format is not None:
            named_format(flags.trace_format)
        return ReadOptions(
            format=flags.trace_format,
            time_unit=flags.time_unit,
            block_size=flags.hash_block_size,
            columns=_columns(flags.columns),
            tokenize=None if flags.tokenizer is None else load_tokenize(flags.tokenizer),
            output_tokens=flags.trace_output_tokens,
            model=flags.trace_model,
            window_s=None if flags.window is None else _window(flags.window),
            seed=seed,
            tolerance=tolerance,
        )


def _columns(texts: tuple[str, ...]) -> dict[str, str]:
    columns: dict[str, str] = {}
    for field, name in map(_column, texts):
        if field in columns:
            raise UsageError(f"--columns {field}={name}: {field} is mapped already, to {columns[field]}")
        columns[field] = name
    return columns


def _column(text: str) -> tuple[str, str]:
    field, equals, name = text.partition("=")
    if not (field and equals and name):
        raise UsageError(f"--columns {text!r} must be field=name, for example prompt_tokens=input_len")
    return field, name


def _window(text: str) -> tuple[float, float]:
    try:
        start, end = map(float, text.split(":"))
    except ValueError as e:
        raise UsageError(f"--window {text!r} must be START:END in seconds") from e
    return start, end


def load_tokenize(path: Path) -> Tokenize:
    """Token ids by a tokenizer.json. Raises UsageError."""
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as e:
        raise UsageError("--tokenizer needs the package tokenizers: pip install 'servetwin[executor]'") from e
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise UsageError(f"--tokenizer {path}: there is no tokenizer.json")
    try:
        tokenizer: Any = Tokenizer.from_file(str(file))
    except Exception as e:
        raise UsageError(f"--tokenizer {file}: {e}") from e

    def tokenize(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    return tokenize


def _dataset(name: str) -> str:
    return next(dataset for dataset, (prefix, _) in DATASETS.items() if name.startswith(prefix))
