"""What `servetwin execute` does: read plans, run them one after another, write what they took and gave."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console

from servetwin.sim.columns import SCHEMAS, Columns, arrow_schema
from servetwin.sim.commands.errors import UsageError
from servetwin.sim.commands.interrupt import StopRequest
from servetwin.sim.commands.show import print_json
from servetwin.sim.config import ExecutorOptions
from servetwin.sim.contract import SamplingParams, SchedulerOutput, StepResult, StepTimer, from_json
from servetwin.sim.plugins import load
from servetwin.sim.runs import PLANS, RunFolderError, RunWriter, read_json_lines, read_run
from servetwin.sim.steptime.plan_rows import PlanReader, PlanRow
from servetwin.sim.units import ns_to_seconds

if TYPE_CHECKING:
    import pyarrow as pa

PART_STEPS = 5_000


@dataclass(frozen=True, kw_only=True)
class ExecuteRequest:
    """One command line of `execute`, as typed."""

    plans: Path
    model: Path
    out: Path
    overwrite: bool
    save_tokens: bool
    executor: str
    load_format: Literal["auto", "dummy"]
    dtype: Literal["auto", "float32", "bfloat16"]
    block_size: int | None
    num_gpu_blocks: int | None
    max_model_len: int | None
    threads: int | None
    seed: int
    json: bool


def carry_out(request: ExecuteRequest) -> int:
    """Runs it and returns the exit code."""
    path = request.plans / PLANS if request.plans.is_dir() else request.plans
    if not path.is_file():
        raise UsageError(f"{path}: no such file; record plans with `servetwin run ... --save-plans`")
    plans = _opened(path)
    options = _options(request, path)
    executor = load("servetwin.executors", request.executor)(options)
    writer = RunWriter.create(
        request.out,
        {
            "config": {"execute": str(path), **options.model_dump(mode="json")},
            "versions": {"servetwin": version("servetwin")},
            "executor": executor.describe() if hasattr(executor, "describe") else {},
        },
        overwrite=request.overwrite,
        save_tokens=request.save_tokens,
    )
    eos_token_id = getattr(getattr(executor, "model_config", None), "eos_token_id", None)
    execution = _Execution(writer, request.save_tokens, eos_token_id)
    try:
        with StopRequest() as stop:
            execution.run(plans, executor, stop)
    except BaseException as e:
        execution.flush()
        writer.fail("interrupted" if isinstance(e, KeyboardInterrupt) else f"{type(e).__name__}: {e}")
        raise
    execution.flush()
    writer.complete()
    if request.json:
        print_json(execution.totals())
    else:
        totals = execution.totals()
        Console().print(
            f"{totals['steps']:,} steps, {totals['output_tokens']:,} tokens, "
            f"busy {totals['busy_time_s']:.3f} s: {request.out}"
        )
    return 0


def _opened(path: Path) -> Iterator[SchedulerOutput]:
    """The plans of a file whose first one could be read: nothing is built for a file that holds none."""
    plans = read_plans(path)
    first = next(plans, None)
    if first is None:
        raise UsageError(f"{path}: holds no plans")
    return chain([first], plans)


def read_plans(path: Path) -> Iterator[SchedulerOutput]:
    """The plans of a file, in order. Raises UsageError with the line number of one that is none."""
    for number, data in enumerate(read_json_lines(path), start=1):
        try:
            yield from_json(data)
        except ValueError as e:
            raise UsageError(f"{path}: line {number}: {e}") from e


def _options(request: ExecuteRequest, plans: Path) -> ExecutorOptions:
    """What was asked for, completed from the run that the plans were recorded in."""
    recorded, dtype = _recorded_limits(plans.parent)
    asked = {
        "block_size": request.block_size,
        "num_gpu_blocks": request.num_gpu_blocks,
        "max_model_len": request.max_model_len,
    }
    limits = recorded | {name: value for name, value in asked.items() if value is not None}
    missing = [name for name in asked if name not in limits]
    if missing:
        flags = ", ".join(
            "--" + m.replace("_", "-").replace("num-gpu-blocks", "num-gpu-blocks-override") for m in missing
        )
        raise UsageError(f"{plans.parent} holds no run.json of a run: give {flags}")
    return ExecutorOptions(
        model=request.model,
        load_format=request.load_format,
        dtype=dtype if request.dtype == "auto" and dtype in ("float32", "bfloat16") else request.dtype,
        threads=request.threads,
        seed=request.seed,
        **limits,
    )


def _recorded_limits(folder: Path) -> tuple[dict[str, Any], Any]:
    """(limits, dtype) of the run in the folder; nothing where there is none."""
    try:
        header = read_run(folder).header
        engine = header["config"]["engine"]
    except (RunFolderError, KeyError):
        return {}, None
    return {
        "block_size": engine["cache"]["block_size"],
        "num_gpu_blocks": engine["cache"]["num_gpu_blocks"],
        "max_model_len": engine["model"]["max_model_len"],
        "max_num_seqs": engine["scheduler"]["max_num_seqs"],
        "max_num_batched_tokens": engine["scheduler"]["max_num_batched_tokens"],
    }, header.get("executor", {}).get("dtype")


@dataclass
class _StepRows:
    """Rows of `steps/` of which only what an executor knows is filled in; the scheduler's counts are null."""

    rows: list[dict[str, Any]] = field(default_factory=list)

    def to_arrow(self) -> pa.Table:
        import pyarrow as pa

        return pa.Table.from_pylist(self.rows, schema=arrow_schema(SCHEMAS["steps"]))


class StopRules:
    """Ends requests as the scheduler does. A plan made before the end was known may still compute for them."""

    def __init__(self, eos_token_id: int | None) -> None:
        self._eos_token_id = eos_token_id
        self._params: dict[str, SamplingParams] = {}
        self._ended: set[str] = set()

    def read(self, plan: SchedulerOutput) -> None:
        for request_id in plan.finished_req_ids:
            self._params.pop(request_id, None)
            self._ended.discard(request_id)
        self._params |= {r.req_id: r.sampling_params for r in plan.scheduled_new_reqs}

    def kept(self, request_id: str, num_output_tokens: int, sampled: list[int]) -> list[int]:
        """The tokens that the request gets: those up to its stop token."""
        if request_id in self._ended:
            return []
        params = self._params[request_id]
        for count, token in enumerate(sampled, start=1):
            eos = token == self._eos_token_id and not params.ignore_eos
            long_enough = num_output_tokens + count >= params.min_tokens
            if long_enough and (eos or token in params.stop_token_ids):
                self._ended.add(request_id)
                return sampled[:count]
        return sampled


class _Execution:
    """Runs plans and collects their rows."""

    def __init__(self, writer: RunWriter, save_tokens: bool, eos_token_id: int | None) -> None:
        self._writer = writer
        self._save_tokens = save_tokens
        self._steps = _StepRows()
        self._tokens = Columns("tokens")
        self._now_ns = 0
        self._num_steps = 0
        self._num_tokens = 0
        self._reader = PlanReader()
        self._stops = StopRules(eos_token_id)

    def run(self, plans: Iterator[SchedulerOutput], executor: StepTimer, stop: StopRequest) -> None:
        for plan in plans:
            result = executor.run(plan)
            self._stops.read(plan)
            self._note(self._reader.rows(plan), result)
            stop.raise_if_asked()

    def flush(self) -> None:
        parts: dict[str, Any] = {"steps": self._steps} if self._steps.rows else {}
        if self._save_tokens and len(self._tokens):
            parts["tokens"] = self._tokens
        self._writer.write(parts)
        self._steps, self._tokens = _StepRows(), Columns("tokens")

    def totals(self) -> dict[str, Any]:
        return {
            "steps": self._num_steps,
            "output_tokens": self._num_tokens,
            "busy_time_s": ns_to_seconds(self._now_ns),
        }

    def _note(self, rows: list[PlanRow], result: StepResult) -> None:
        decode = [r for r in rows if r.is_decode]
        decode_tokens = sum(r.num_scheduled_tokens for r in decode)
        self._steps.rows.append(
            {
                "start_s": ns_to_seconds(self._now_ns),
                "prepare_s": ns_to_seconds(result.prepare_ns),
                "device_s": ns_to_seconds(result.device_ns),
                "host_s": 0.0,
                "schedule_s": 0.0,
                "prepare_start_s": ns_to_seconds(self._now_ns),
                "device_start_s": ns_to_seconds(self._now_ns + result.prepare_ns),
                "end_s": ns_to_seconds(self._now_ns + result.prepare_ns + result.device_ns),
                "source": result.source,
                "prefill_tokens": sum(r.num_scheduled_tokens for r in rows) - decode_tokens,
                "decode_tokens": decode_tokens,
                "rows": len(rows),
                "decode_rows": len(decode),
                "graph_tokens": result.graph_tokens,
            }
        )
        self._num_steps += 1
        self._now_ns += result.prepare_ns + result.device_ns
        for row in rows:
            sampled = result.output.sampled_token_ids[result.output.req_id_to_index[row.request_id]]
            tokens = self._stops.kept(row.request_id, row.num_output_tokens, sampled)
            self._num_tokens += len(tokens)
            for index, token in enumerate(tokens, start=row.num_output_tokens):
                self._tokens.append(row.request_id, index, token, self._now_ns)
        if len(self._steps.rows) >= PART_STEPS:
            self.flush()
