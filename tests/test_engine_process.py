"""The engine in simulated time: what happens in which order, when, and that nothing else is waited for.

Times in these tests are whole seconds where possible; a step takes one second unless said.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import simpy
from engines import engine_config
from numpy.typing import NDArray

from servetwin.sim.config import EngineConfig, RunConfig
from servetwin.sim.contract import SamplingParams, SchedulerOutput, StepResult, StepTimer
from servetwin.sim.engine_core import EngineCore
from servetwin.sim.engine_process import EngineProcess
from servetwin.sim.events import EventLog, MemorySink
from servetwin.sim.host_model import LinearHostModel
from servetwin.sim.metrics import summarize
from servetwin.sim.policy import FCFS, AdmissionState
from servetwin.sim.progress_guard import StalledError
from servetwin.sim.records import EngineCoreOutputs, Frame, ScheduleRecord
from servetwin.sim.request import Request
from servetwin.sim.runs import differences, tables_equal
from servetwin.sim.scheduler import Scheduler
from servetwin.sim.simulation import simulate
from servetwin.sim.steptime.features import StepFeatures
from servetwin.sim.steptime.modelled import ConstantStepModel, ModelledStepTimer
from servetwin.sim.token_source import TokenSource
from servetwin.workloads import ListWorkload, RequestSpec, Workload, open_workload, write_jsonl

S = 1_000_000_000
ROOT = Path(__file__).resolve().parent.parent


def spec(
    request_id: str, arrival_s: float = 0.0, prompt: int = 4, output: int = 1, **rest: object
) -> RequestSpec:
    return RequestSpec(
        request_id=request_id,
        arrival_s=arrival_s,
        prompt_tokens=prompt,
        output_tokens=output,
        **rest,  # type: ignore[arg-type]
    )


@dataclass
class Served:
    """An engine process and what it did."""

    env: simpy.Environment
    core: EngineCore
    sink: MemorySink
    log: EventLog
    process: EngineProcess
    steps: list[tuple[int, int, int]] = field(default_factory=list)
    """(start, end, rows) of every step, in ns."""

    def run(self) -> Served:
        try:
            self.env.run(self.env.process(self.process.run()))
        finally:
            self.log.close(self.now)
        return self

    @property
    def now(self) -> int:
        return int(self.env.now)

    def starts_s(self) -> list[float]:
        """Starts of the steps that had rows."""
        return [start / S for start, _, rows in self.steps if rows]

    def happened(self, at_s: float | None = None) -> list[tuple[str, str]]:
        """(kind, request) of the events, or of those at one instant, in order; waits left out."""
        events = self.sink.events
        kept = events[(events.kind != "wait") & ((events.time_s == at_s) | (at_s is None))]
        return list(zip(kept.kind, kept.request_id, strict=True))

    def row(self, request_id: str) -> dict[str, object]:
        """The request's row of the log."""
        requests = self.sink.requests
        (row,) = requests[requests.request_id == request_id].to_dict("records")
        return {str(k): v for k, v in row.items()}


def engine(
    workload: Workload | list[RequestSpec],
    config: EngineConfig | None = None,
    *,
    env: simpy.Environment | None = None,
    step_ns: int = S,
    timer: StepTimer | None = None,
    host: LinearHostModel | None = None,
    core: EngineCore | None = None,
) -> Served:
    """An engine process that has not run yet."""
    env = env or simpy.Environment(0)
    core = core or EngineCore(config or engine_config(), plan_tokens=False)
    tokens, sink = TokenSource(1000), MemorySink()
    log = EventLog(sink, log_blocks=False)
    steps: list[tuple[int, int, int]] = []

    def on_step(frame: Frame, result: StepResult, outputs: EngineCoreOutputs) -> None:
        steps.append((frame.start_ns, int(env.now), len(frame.plan.num_scheduled_tokens)))

    process = EngineProcess(
        env,
        core,
        timer or ModelledStepTimer(ConstantStepModel(step_ns), tokens, "constant"),
        ListWorkload(workload) if isinstance(workload, list) else workload,
        log,
        tokens=tokens,
        sampling=lambda r: SamplingParams(
            max_tokens=r.output_tokens, min_tokens=r.min_tokens, ignore_eos=True
        ),
        host=host,
        on_step=on_step,
    )
    return Served(env, core, sink, log, process, steps)


def serve(
    workload: Workload | list[RequestSpec], config: EngineConfig | None = None, **options: object
) -> Served:
    """Serves a workload to its end."""
    return engine(workload, config, **options).run()  # type: ignore[arg-type]


# ---------------------------------------------------------------- the order at one instant


def test_at_one_instant_aborts_come_before_the_update() -> None:
    """A client that gives up at the very end of a step does not get that step's token."""
    served = serve([spec("r", output=9, abort_s=3.0)])
    assert served.row("r")["finish_reason"] == "abort"
    assert served.row("r")["num_output_tokens"] == 2
    assert served.row("r")["finish_s"] == 3.0


def test_at_one_instant_the_update_comes_before_the_next_schedule() -> None:
    """The seat that a finished request leaves is taken in the same instant."""
    served = serve([spec("a", output=2), spec("b", 0.5)], engine_config(max_num_seqs=1))
    assert served.happened(2.0) == [("finished", "a"), ("scheduled", "b")]


def test_at_one_instant_arrivals_come_before_the_schedule() -> None:
    """A request that arrives as a step ends is in the next one."""
    served = serve([spec("a", output=3), spec("b", 1.0)])
    assert served.row("b")["first_scheduled_s"] == 1.0


def test_the_whole_order_at_one_instant() -> None:
    """Aborts due, update, arrivals, aborts again, schedule: all at t = 3, in one list."""
    served = serve(
        [
            spec("gives up", output=9, abort_s=3.0),
            spec("ends", output=3),
            spec("comes", 3.0, output=2),
            spec("comes and goes", 3.0, abort_s=3.0),
        ]
    )
    assert served.happened(3.0) == [
        ("aborted", "gives up"),
        ("finished", "ends"),
        ("arrived", "comes"),
        ("arrived", "comes and goes"),
        ("aborted", "comes and goes"),
        ("scheduled", "comes"),
    ]


def test_requests_that_arrive_together_keep_the_order_of_the_workload() -> None:
    """Ties are broken by nothing else."""
    served = serve([spec(name, 1.0) for name in "cab"])
    assert served.happened(1.0)[:3] == [("arrived", "c"), ("arrived", "a"), ("arrived", "b")]
    assert [r for kind, r in served.happened() if kind == "scheduled"] == ["c", "a", "b"]


# ---------------------------------------------------------------- the clock


def test_idle_time_is_skipped() -> None:
    """No step is begun while there is nothing to do."""
    served = serve([spec("a", output=2), spec("b", 1000.0, output=2)])
    assert served.starts_s() == [0.0, 1.0, 1000.0, 1001.0]
    assert served.now == 1002 * S


def test_a_step_moves_the_clock_by_its_duration_exactly() -> None:
    """In whole nanoseconds, however odd."""
    odd = 333_333_337
    served = serve([spec("r", output=7)], step_ns=odd)
    assert served.steps == [(i * odd, (i + 1) * odd, 1) for i in range(7)] + [(7 * odd, 7 * odd, 0)]


def test_an_arrival_during_a_step_is_seen_by_the_next() -> None:
    """Queued and scheduled when the step has ended; its arrival keeps its own date."""
    served = serve([spec("a", output=3), spec("b", 1.25)])
    row = served.row("b")
    assert (row["arrival_s"], row["queued_s"], row["first_scheduled_s"]) == (1.25, 2.0, 2.0)


def test_the_step_that_only_reports_an_end_takes_no_time() -> None:
    """Neither the worker nor the host: the run is over when the last token is out."""
    served = serve([spec("r")], host=LinearHostModel(schedule_base_ns=5, update_base_ns=7))
    assert served.steps == [(0, S + 12, 1), (S + 12, S + 12, 0)]
    assert served.now == S + 12


class PreparingTimer:
    """A timer whose worker prepares for `prepare_ns` before each step with tokens."""

    def __init__(self, prepare_ns: int, device_ns: int) -> None:
        self._inner = ModelledStepTimer(ConstantStepModel(device_ns), TokenSource(1000), "constant")
        self._prepare_ns = prepare_ns

    def run(self, plan: SchedulerOutput) -> StepResult:
        result = self._inner.run(plan)
        return replace(result, prepare_ns=self._prepare_ns) if plan.num_scheduled_tokens else result


def test_the_synchronous_period_is_the_sum_of_its_parts() -> None:
    """Schedule, prepare, device and update follow one another: s + p + d + u, to the nanosecond."""
    s, p, d, u = 1_001, 20_003, 300_007, 4_000_037
    served = serve(
        [spec("r", output=5)],
        timer=PreparingTimer(p, d),
        host=LinearHostModel(schedule_base_ns=s, update_base_ns=u),
    )
    period = s + p + d + u
    assert [start for start, _, rows in served.steps if rows] == [i * period for i in range(5)]
    assert served.now == 5 * period
    steps = served.sink.steps
    assert (steps.host_s[0], steps.prepare_s[0], steps.device_s[0]) == ((s + u) / S, p / S, d / S)


def test_host_time_counts_rows_and_new_requests() -> None:
    """Two new rows, then two known ones: a constant, a cost a row, a cost a new request."""
    host = LinearHostModel(
        schedule_base_ns=1,
        schedule_per_row_ns=10,
        schedule_per_new_ns=100,
        update_base_ns=1_000,
        update_per_row_ns=10_000,
    )
    served = serve([spec("a", output=2), spec("b", output=2)], host=host)
    first, second = 1 + 20 + 200 + 1_000 + 20_000, 1 + 20 + 1_000 + 20_000
    assert [end - start - S for start, end, rows in served.steps if rows] == [first, second]


def test_a_step_that_only_preempts_takes_no_time_and_is_logged() -> None:
    """The request behind the victim sits this step out and goes on in the same instant."""
    served = serve(
        [spec("b", prompt=11, output=9, priority=9), spec("c", 1.0, prompt=5, output=3)],
        engine_config(usable_blocks=5, policy="priority"),
    )
    assert [(start / S, rows) for start, _, rows in served.steps[:4]] == [(0, 1), (1, 2), (2, 0), (2, 1)]
    assert served.happened(2.0) == [("preempted", "b")]
    assert served.row("b")["preemptions"] == 1
    assert served.row("b")["finish_reason"] == "length"


# ---------------------------------------------------------------- aborts and refusals


def test_an_abort_before_the_arrival_is_kept_until_then() -> None:
    """It is applied right after the request was taken in; the request is never scheduled."""
    served = serve([spec("r", 5.0, abort_s=1.0), spec("other", output=2)])
    assert served.happened(5.0) == [("arrived", "r"), ("aborted", "r")]
    assert np.isnan(served.row("r")["first_scheduled_s"])  # type: ignore[call-overload]
    assert served.now == 5 * S


def test_an_abort_after_the_end_changes_nothing() -> None:
    """The client's date passes without effect, and nobody waits for it."""
    served = serve([spec("r", output=2, abort_s=100.0)])
    assert served.row("r")["finish_reason"] == "length"
    assert served.now == 2 * S


def test_a_request_that_can_never_run_is_refused_and_the_rest_go_on() -> None:
    """It is logged with its reason at its arrival, holds nobody up, and is not in the engine."""
    served = serve(
        [spec("too long", prompt=16, output=3), spec("min", prompt=10, output=9, min_tokens=9), spec("fits")],
        engine_config(max_model_len=16),
    )
    assert {r: served.row(r)["finish_reason"] for r in ("too long", "min", "fits")} == {
        "too long": "refused",
        "min": "refused",
        "fits": "length",
    }
    refusals = served.sink.events[served.sink.events.kind == "refused"]
    assert [r.split(" ")[0] for r in refusals.reason] == ["prompt", "min_tokens"]
    assert served.now == S


# ---------------------------------------------------------------- a stuck engine


class StuckScheduler(Scheduler):
    """Has no seat to give. Counts its calls."""

    def __init__(self, config: EngineConfig) -> None:
        seatless = config.scheduler.model_copy(update={"max_num_seqs": 0})
        super().__init__(config.model_copy(update={"scheduler": seatless}))
        self.calls = 0

    def schedule(self, now: int) -> tuple[SchedulerOutput, ScheduleRecord]:
        self.calls += 1
        return super().schedule(now)


def stuck_core() -> tuple[EngineCore, StuckScheduler]:
    core = EngineCore(engine_config())
    core.scheduler = scheduler = StuckScheduler(core.config)
    return core, scheduler


def test_a_stuck_engine_is_an_error_that_names_the_requests() -> None:
    """Instead of spinning at one instant."""
    core, scheduler = stuck_core()
    with pytest.raises(
        StalledError,
        match=r"at 3 s nothing can be scheduled.*unfinished requests: a, b; 'b' waits for: seats",
    ):
        serve([spec("b"), spec("a", 3.0)], core=core)
    assert scheduler.calls == 2


def test_a_stuck_engine_waits_for_an_abort() -> None:
    """An event that may free it is waited for, not polled."""
    core, scheduler = stuck_core()
    served = serve([spec("r", abort_s=7.0)], core=core)
    assert served.row("r")["finish_reason"] == "abort"
    assert served.now == 7 * S
    assert scheduler.calls == 2


# ---------------------------------------------------------------- closed loop


class Closed(FCFS):
    """Admits nobody to an empty engine but a pair."""

    def may_admit(self, request: Request, state: AdmissionState) -> bool:
        return bool(state.running) or state.num_waiting > 1


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_policy_that_admits_nobody_does_not_spin(asynchronous: bool) -> None:
    """The empty steps that asynchronous scheduling puts in flight must not keep an instant going round."""
    config = engine_config(async_scheduling=asynchronous)
    lonely = engine([spec("a", output=3)], core=EngineCore(config, Closed(), plan_tokens=False))
    with pytest.raises(StalledError, match="unfinished requests: a"):
        lonely.run()
    core = EngineCore(config, Closed(), plan_tokens=False)
    served = engine([spec("a", output=3), spec("b", 4, output=1), spec("c", 30, output=1)], core=core)
    with pytest.raises(StalledError, match="unfinished requests: c"):
        served.run()
    assert served.row("a")["first_scheduled_s"] == served.row("b")["first_scheduled_s"] == 4
    waits = served.sink.events[served.sink.events.kind == "wait"]
    assert [(w.request_id, w.reason, w.time_s, w.until_s) for w in waits.itertuples()] == [
        ("a", "policy", 0, 4)
    ]


class Sessions:
    """A closed loop: each request may have a successor, which is sent some seconds after it ended."""

    def __init__(self, first: list[RequestSpec], after: dict[str, tuple[str, float]]) -> None:
        self._ready = list(first)
        self._after = after
        self.told: list[tuple[str, int]] = []

    def next(self) -> RequestSpec | None:
        return self._ready.pop(0) if self._ready else None

    def finished(self, request_id: str, now_ns: int) -> None:
        self.told.append((request_id, now_ns))
        if request_id in self._after:
            name, think_s = self._after[request_id]
            self._ready.append(spec(name, now_ns / S + think_s))


def test_a_successor_may_be_due_before_a_request_named_earlier() -> None:
    """The end of `first` produces `second` at t = 4, before `late`, which was known already."""
    workload = Sessions([spec("first", output=3), spec("late", 100.0)], {"first": ("second", 1.0)})
    served = serve(workload)
    assert served.starts_s() == [0, 1, 2, 4, 100]
    assert served.row("second")["first_scheduled_s"] == 4.0


def test_a_successor_is_sent_although_nothing_else_was_known() -> None:
    """Between two turns the engine is empty and the workload has no request to name."""
    served = serve(Sessions([spec("a", output=2)], {"a": ("b", 3.0), "b": ("c", 0.0)}))
    assert served.starts_s() == [0, 1, 5, 6]


def test_the_workload_hears_of_every_end_once() -> None:
    """Finished, aborted and refused, each at its time."""
    workload = Sessions(
        [spec("done", output=2), spec("gone", output=9, abort_s=1.5), spec("never", prompt=10_000)], {}
    )
    serve(workload)
    assert workload.told == [("never", 0), ("gone", 2 * S), ("done", 2 * S)]


def test_a_refused_request_has_its_successor() -> None:
    """A refusal ends a turn like any other end."""
    served = serve(Sessions([spec("never", prompt=10_000)], {"never": ("next", 2.0)}))
    assert served.row("next")["finish_s"] == 3.0


# ---------------------------------------------------------------- runs are values


def two_loads() -> tuple[list[RequestSpec], list[RequestSpec]]:
    a = [spec(f"r{i}", i / 4, prompt=5 + i % 7, output=3 + i % 5) for i in range(20)]
    b = [spec(f"r{i}", i / 3, prompt=9 + i % 4, output=2 + i % 9, priority=i % 3) for i in range(20)]
    return a, b


def test_two_runs_in_one_process_do_not_meet() -> None:
    """Two engines side by side on one clock, with the same request ids, log what each logs alone."""
    config = engine_config(usable_blocks=9, max_num_seqs=3, policy="priority", caching=True)
    env = simpy.Environment(0)
    together = [engine(load, config, env=env) for load in two_loads()]
    processes = [env.process(e.process.run()) for e in together]
    env.run(env.all_of(processes))
    for e, load in zip(together, two_loads(), strict=True):
        e.log.close(e.now)
        assert differences(e.sink, serve(load, config).sink) == []


CLOCKS = {"time", "datetime", "timeit"}
MAY_READ_WALL_TIME = {"runs.py", "run_files.py", "processes.py"}


def simulation_modules() -> Iterator[Path]:
    for path in sorted((ROOT / "sim").rglob("*.py")):
        inside = path.relative_to(ROOT / "sim")
        if inside.parts[0] != "commands" and inside.name not in MAY_READ_WALL_TIME:
            yield path


def imported_modules(path: Path) -> set[str]:
    """Top-level names of all modules that a file imports, also inside functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names.add(node.module.partition(".")[0])
    return names


def test_nothing_that_simulates_reads_wall_time() -> None:
    """Only the run folder, the processes and the commands know this machine's clock."""
    modules = list(simulation_modules())
    assert len(modules) > 15
    assert {p.name: CLOCKS & imported_modules(p) for p in modules if CLOCKS & imported_modules(p)} == {}


# ---------------------------------------------------------------- field reports


def test_report_61_ttft_includes_the_queue() -> None:
    """One seat, four seconds a prompt, three requests at once: first tokens at 4, 8, 12."""
    served = serve([spec(name) for name in "abc"], engine_config(max_num_seqs=1), step_ns=4 * S)
    assert served.sink.requests.first_token_s.tolist() == [4.0, 8.0, 12.0]


def test_report_62_a_step_takes_time() -> None:
    """A constant of 0 is refused; between steps with tokens the clock always moves."""
    with pytest.raises(ValueError, match="at least 1 ns, got 0 ns"):
        ConstantStepModel(0)
    served = serve([spec(f"r{i}", i / 10, output=3) for i in range(20)], step_ns=1)
    starts = [start for start, _, rows in served.steps if rows]
    assert all(a < b for a, b in pairwise(starts))


class NothingCosts:
    """A step model with all coefficients 0."""

    def durations_ns(self, features: StepFeatures) -> NDArray[np.int64]:
        return np.zeros(len(features), dtype=np.int64)


def test_report_62_a_model_that_costs_nothing_is_an_error() -> None:
    """It is named, with the step that it gave no time."""
    timer = ModelledStepTimer(NothingCosts(), TokenSource(1000), "free lunch")
    with pytest.raises(ValueError, match="'free lunch' gives 0 ns for a step of 4 tokens"):
        serve([spec("r")], timer=timer)


def test_report_62_an_idle_engine_has_no_steps() -> None:
    """Not one before the first arrival."""
    assert serve([spec("r", 50.0)]).starts_s() == [50.0]
    assert serve([]).steps == []


@pytest.mark.parametrize("rate", [20.0, 60.0])
def test_report_64_a_replay_is_the_run(rate: float, tmp_path: Path) -> None:
    """200 requests, written down as received and read again, give the same log, time for time."""
    limits = engine_config(
        usable_blocks=900, block_size=16, max_num_seqs=32, max_num_batched_tokens=2048, caching=True
    )
    config = RunConfig(engine=limits, executor="constant")

    def run(workload: Workload) -> tuple[MemorySink, list[RequestSpec]]:
        sink, received = MemorySink(), list[RequestSpec]()
        tokens = TokenSource(config.engine.model.vocab_size)
        simulate(
            config,
            workload,
            ModelledStepTimer(ConstantStepModel(10_000_000), tokens, "constant"),
            EventLog(sink),
            tokens=tokens,
            plan_tokens=False,
            log_blocks=True,
            on_request=received.append,
        )
        return sink, received

    first, received = run(open_workload("code", 200, rate, 3))
    file = tmp_path / "workload.jsonl.zst"
    write_jsonl(file, received)
    again, received_again = run(open_workload(str(file), None, None, 0))
    assert len(first.requests) == 200
    assert received_again == [replace(r, source_row=i) for i, r in enumerate(received, start=1)]
    assert differences(first, again) == []
    assert tables_equal(first, again)


def test_report_69_a_token_is_out_when_its_step_has_ended() -> None:
    """A prompt of 100 ms, then steps of 10 ms: tokens at 100 and 110 ms."""

    class PromptThenDecode:
        def durations_ns(self, features: StepFeatures) -> NDArray[np.int64]:
            return np.where(features.prefill_rows > 0, 100_000_000, 10_000_000).astype(np.int64)

    timer = ModelledStepTimer(PromptThenDecode(), TokenSource(1000), "two speeds")
    row = serve([spec("r", output=2)], timer=timer).row("r")
    assert (row["first_token_s"], row["last_token_s"]) == (0.1, 0.11)


# ---------------------------------------------------------------- what the figures count


def test_busy_time_leaves_the_host_out() -> None:
    """Two steps of 1 s with 2 s of host time around each: busy for 2 s, over after 6 s."""
    host = LinearHostModel(schedule_base_ns=S, update_base_ns=S)
    served = serve([spec("r", output=2)], host=host)
    summary = summarize(served.sink)
    assert summary["busy_time_s"] == 2.0
    assert summary["duration"] == 6.0


def test_ttft_counts_from_the_arrival_not_from_the_queue() -> None:
    """It arrives in the middle of a step, is queued at its end, and answered a step later: 1.5 s, not 1 s."""
    served = serve([spec("first", output=1), spec("second", arrival_s=0.5)])
    assert served.row("second")["queued_s"] == 1.0
    assert summarize(served.sink)["servetwin"]["latency"]["ttft_ms"]["max"] == 1500.0
