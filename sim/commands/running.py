"""What `servetwin run` and `servetwin demo` do: build, simulate, write, show."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
from rich.console import Console

from servetwin.sim.cluster.config import DEFAULT_ROUTER, ClusterConfig
from servetwin.sim.cluster.fleet import ReplicaParts, simulate_cluster, timer_for_each
from servetwin.sim.cluster.router import load_router
from servetwin.sim.commands.cluster_flags import ClusterFlags, cluster_config, cluster_line
from servetwin.sim.commands.engine import Engine, build_engine, build_live_engine
from servetwin.sim.commands.errors import UsageError, policy_errors_told
from servetwin.sim.commands.flags import EngineFlags, RunFlags, SamplingFlags
from servetwin.sim.commands.interrupt import StopRequest
from servetwin.sim.commands.loading import Load
from servetwin.sim.commands.pace import Pace, check_pace
from servetwin.sim.commands.show import RunProgress, command_name, print_json, results, results_console, say
from servetwin.sim.commands.vllm_merge import with_vllm_args
from servetwin.sim.config import EngineConfig, RunConfig
from servetwin.sim.contract import SamplingParams, StepResult, to_json
from servetwin.sim.definitions import definitions
from servetwin.sim.event_figures import events_of_kind
from servetwin.sim.events import EventLog, MemorySink, Sink
from servetwin.sim.kv_bytes import kv_bytes
from servetwin.sim.leaping_process import OnProgress
from servetwin.sim.metrics import summarize
from servetwin.sim.model_shape_reader import read_model_shape
from servetwin.sim.policy import load_policy
from servetwin.sim.records import EngineCoreOutputs, Frame, StepObserver
from servetwin.sim.runs import RunWriter, check_room, read_run
from servetwin.sim.simulation import sampling_of, simulate, why_stepped
from servetwin.sim.steptime.modelled import ModelledStepTimer
from servetwin.sim.tables import Tables
from servetwin.sim.units import seconds_to_ns
from servetwin.workloads import ClosedLoop, ListWorkload, RequestSpec, values_of
from servetwin.workloads.columns import known_prompts
from servetwin.workloads.spec import MAX_TIME_S
from servetwin.workloads.traces.jsonl import to_jsonl

if TYPE_CHECKING:
    import pandas as pd

UNITS = {"time_unit": "times in", "block_size": "tokens per prefix id:"}
"""What was found out about a trace and decides how it is read."""
LOG_BLOCKS_BELOW_REQUESTS = 50_000


@dataclass(frozen=True)
class RunRequest:
    """One command line of `run`, as typed."""

    load: Load
    flags: RunFlags
    engine: EngineFlags
    sampling: SamplingFlags
    cluster: ClusterFlags = field(default_factory=ClusterFlags)
    quiet: bool = False
    """Print nothing on stdout: the caller shows the results."""

    def with_vllm_args(self) -> RunRequest:
        """The same with what --vllm-args says, which is told where it has no effect. Raises UsageError."""
        if self.engine.vllm_args is None:
            return self
        executor = "torch" if self.flags.live else str(self.flags.executor)
        engine, notes = with_vllm_args(self.engine, self.engine.vllm_args, executor=executor)
        for note in notes:
            say(note)
        return replace(self, engine=engine)

    def check(self) -> None:
        """Raises UsageError for what can be seen before anything is built."""
        flags = self.flags
        if flags.reset_prefix_cache_at and not self.engine.enable_prefix_caching:
            raise UsageError("--reset-prefix-cache-at has no effect with --no-enable-prefix-caching")
        for time_s in flags.reset_prefix_cache_at:
            if not 0 <= time_s < MAX_TIME_S:
                raise UsageError(f"--reset-prefix-cache-at {time_s} must be seconds, 0 or more")
        self._check_clock()
        check_pace(flags.pace)
        if flags.executor is None and not flags.live:
            raise UsageError(
                "--executor is missing: torch (with --model), constant (with --step-time-s), roofline (with --gpu and "
                "--model), or module:attribute"
            )
        definitions(flags.metric_defs)
        self.load.check()
        self._check_cluster()
        self._check_sampling()
        if flags.out is not None:
            check_room(flags.out, flags.overwrite)
        elif flags.save_tokens or flags.save_plans or flags.overwrite:
            raise UsageError(
                "--save-tokens, --save-plans and --overwrite need --out: there is no folder to write to"
            )

    def _check_clock(self) -> None:
        flags = self.flags
        if not flags.live:
            return
        if flags.executor not in (None, "torch"):
            raise UsageError(f"--live goes with --executor torch only, got {flags.executor}")
        if flags.reset_prefix_cache_at:
            raise UsageError("--reset-prefix-cache-at goes with simulated time only, not with --live")
        if flags.pace is not None:
            raise UsageError("--pace goes with simulated time only: --live has the pace of the clock")

    def _check_cluster(self) -> None:
        flags, cluster = self.flags, self.cluster_config()
        if cluster.is_plain:
            return
        load_router(cluster.router or DEFAULT_ROUTER, flags.seed)
        if flags.live or flags.executor == "torch" or str(flags.executor).startswith("recorded:"):
            how = "--live" if flags.live else f"--executor {flags.executor}"
            raise UsageError(f"the flags of a cluster go with modelled step times only, not with {how}")
        if flags.save_plans:
            raise UsageError("--save-plans writes the plans of one engine; it does not go with a cluster")

    def cluster_config(self) -> ClusterConfig:
        """What the cluster is. Raises UsageError."""
        return cluster_config(self.cluster, self._kv_bytes_per_token)

    def _kv_bytes_per_token(self) -> int | None:
        """Of the model, on all cards of a replica together; None where nothing tells the model."""
        engine = self.engine
        if engine.model is None:
            return None
        shape, cards = read_model_shape(engine.model), engine.tensor_parallel_size
        dtype = shape.dtype if engine.dtype == "auto" else engine.dtype
        return cards * kv_bytes(shape, dtype, engine.kv_cache_dtype, cards).per_token

    def _check_sampling(self) -> None:
        sampling = self.sampling
        SamplingParams(temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p)
        executor = self.flags.executor
        if executor in ("constant", "roofline") and sampling != SamplingFlags():
            raise UsageError(f"--temperature, --top-k and --top-p have no effect with --executor {executor}")


def carry_out(request: RunRequest) -> int:
    """Runs it and returns the exit code."""
    request = request.with_vllm_args()
    request.check()
    flags = request.flags
    workload = request.load.open(flags.seed)
    if flags.live:
        if not flags.leap:
            raise UsageError("--no-leap has no effect with --live, whose steps are run one by one")
        if flags.step_time_s is not None:
            raise UsageError("--step-time-s has no effect with --live, which measures its steps")
        engine = build_live_engine(request.engine, flags.seed)
    else:
        engine = build_engine(request.engine, str(flags.executor), flags.step_time_s, flags.seed)
    try:
        _check_leaping(flags, engine)
        _announce(workload, engine, trace_warnings=request.load.flags.trace_warnings)
        if not (cluster := request.cluster_config()).is_plain and engine.timer is not None:
            # Before a folder is made for what cannot be.
            timer_for_each(engine.timer)
            say(f"cluster: {cluster_line(cluster)}")
        summary = _serve(request, workload, engine)
    finally:
        engine.close()
    if flags.json:
        print_json(summary)
    elif not request.quiet:
        show(summary, live=flags.live)
        if flags.out is not None:
            Console().print(f"run folder   {flags.out}", soft_wrap=True)
            Console().print(f"dashboard    {command_name()} dash {flags.out}", soft_wrap=True)
    return 0


def _check_leaping(flags: RunFlags, engine: Engine) -> None:
    """Says why nothing is leapt over in a run with modelled steps; refuses to switch off what there is not."""
    if engine.timer is None:
        return
    policy = load_policy(engine.config.scheduler.policy)
    reason = why_stepped(engine.config, policy, engine.timer, engine.host)
    if flags.save_plans or flags.save_tokens:
        reason = reason or f"--save-{'plans' if flags.save_plans else 'tokens'} wants to see each"
    if reason is None or (flags.leap and not isinstance(engine.timer, ModelledStepTimer)):
        return
    if not flags.leap:
        raise UsageError(f"--no-leap has no effect here: every step is taken by itself anyway ({reason})")
    say(f"every step is taken by itself, which takes longer: {reason}")


def _announce(workload: ListWorkload | ClosedLoop, engine: Engine, *, trace_warnings: bool) -> None:
    """What is about to run, on stderr: what was left out, assumed, and not acted on."""
    about = workload.about
    if dropped := about.get("rows_dropped"):
        reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.items())
        say(f"dropped: {sum(dropped.values())} of {about['rows_read']} rows of no use ({reasons})")
    say(_workload_line(workload))
    for note in about.get("notes", ()):
        say(f"note: {note}")
    for warning in about.get("warnings", ()) if trace_warnings else ():
        say(f"warning: {warning}")
    if about.get("loop") == "closed":
        say("closed loop: later turns of a session wait for their answers, and for their think times")
        if not any(value is not None for value in values_of(workload.requests, "think_time_s")):
            say("assumed: think times of 0 s, which the workload does not tell")
    elif any(value is not None for value in values_of(workload.requests, "session_id")):
        say(
            "open loop: every turn of a session is sent at its arrival_s, whether the one before has ended or not"
        )
    elif any(value is not None for value in values_of(workload.requests, "think_time_s")):
        say("open loop: every request is sent at its arrival_s; its think_time_s is not acted on")
    if reuse := _reuse_line(workload):
        say(reuse)
    for text in _without_effect(workload, engine.config.scheduler.policy):
        say(f"note: {text}")
    for text in engine.notes:
        say(f"note: {text}")
    for text in engine.assumed:
        say(f"assumed: {text}")
    say(f"engine: {_engine_line(engine.config)}")


def _workload_line(workload: ListWorkload | ClosedLoop) -> str:
    """Format, size, span and unit: a misread unit shows here."""
    about, times_s = workload.about, values_of(workload.requests, "arrival_s")
    span_s = max(times_s) - min(times_s)
    rate = f", {len(times_s) / span_s:.3g} requests/s" if span_s else ""
    units = [f"{label} {about[key]}" for key, label in UNITS.items() if key in about]
    return (
        ", ".join([f"workload: {about.get('preset', about.get('format', 'made up'))}", *units])
        + f": {len(times_s):,} requests over {span_s:,.6g} s{rate}"
    )


def _reuse_line(workload: ListWorkload | ClosedLoop) -> str | None:
    """What a trace leaves open of what its prompts begin with; in sessions, more than a first turn's."""
    if "rows_read" not in workload.about:
        return None
    known, total = known_prompts(workload.requests), len(workload)
    if known == 0:
        return "prefix reuse: unknown to this trace; every prompt is unique, so prefix hits say nothing"
    if known < total and not any(v is not None for v in values_of(workload.requests, "context_tokens")):
        return (
            f"prefix reuse: known for {known:,} of {total:,} requests; the prompts of the others are unique"
        )
    return None


def _without_effect(workload: ListWorkload | ClosedLoop, policy: str) -> Iterator[str]:
    """What a policy goes by, where no request has it."""
    requests = workload.requests
    if policy == "fair" and not any(values_of(requests, "client_id")):
        yield "no request has a client_id, so the policy fair serves them like fcfs"
    if policy == "priority" and len({*values_of(requests, "priority")}) == 1:
        yield "all priorities are equal, so the policy priority serves by arrival"
    if policy == "sjf" and not any(values_of(requests, "predicted_output_tokens")):
        yield "no request has predicted_output_tokens: the policy sjf goes by output_tokens, the true length"


def _engine_line(config: EngineConfig) -> str:
    cache, scheduler = config.cache, config.scheduler
    switches = {
        "prefix caching": cache.enable_prefix_caching,
        "chunked prefill": scheduler.enable_chunked_prefill,
        "full-sequence gate": scheduler.scheduler_reserve_full_isl,
    }
    threshold = [f"prompts in pieces of {t:,}"] if (t := scheduler.long_prefill_token_threshold) else []
    corrections = [f"corrected: {' + '.join(c)}"] if (c := config.rules.corrections) else []
    spec = config.speculative
    drafts = [f"{spec.num_speculative_tokens} drafts ({spec.method})"] if spec else []
    off = [f"no {name}" for name, on in switches.items() if not on]
    return ", ".join(
        [
            f"{cache.num_gpu_blocks:,} blocks of {cache.block_size} tokens",
            f"max_model_len {config.model.max_model_len:,}",
            f"{scheduler.max_num_seqs:,} seats",
            f"{scheduler.token_budget:,} tokens per step",
            *threshold,
            scheduler.policy,
            "asynchronous scheduling" if scheduler.async_scheduling else "synchronous scheduling",
            *drafts,
            *off,
            *corrections,
        ]
    )


def show(summary: dict[str, Any], *, live: bool = False) -> None:
    """The results on stdout."""
    console = results_console()
    for item in results(summary, "wall clock" if live else "simulated"):
        console.print(item)


def _serve(request: RunRequest, workload: ListWorkload | ClosedLoop, engine: Engine) -> dict[str, Any]:
    flags, config = request.flags, run_config(request, engine)
    log_blocks = len(workload) < LOG_BLOCKS_BELOW_REQUESTS if flags.log_blocks is None else flags.log_blocks
    recorder = _Recorder(request, config, workload, engine)
    progress = RunProgress(len(workload), "of wall clock" if flags.live else "simulated")
    with StopRequest() as stop, recorder.ending(), progress:
        logs: list[EventLog] = []
        pace = _pace(flags, engine, logs, stop)

        def on_progress(num_steps: int, num_ended: int, now_ns: int) -> None:
            progress.steps(num_steps, num_ended, now_ns)
            stop.raise_if_asked()
            if pace is not None:
                pace.at(now_ns)

        def on_step(frame: Frame, result: StepResult, outputs: EngineCoreOutputs) -> None:
            recorder.plan(frame)

        def on_live_step(frame: Frame, result: StepResult, outputs: EngineCoreOutputs) -> None:
            recorder.plan(frame)
            on_progress(1, len(outputs.finished), frame.start_ns)

        with policy_errors_told(config.engine.scheduler.policy):
            if engine.server is not None:
                served = engine.server.serve(
                    workload,
                    EventLog(recorder.sink, log_blocks=log_blocks, save_tokens=flags.save_tokens),
                    tokens=engine.tokens,
                    sampling=sampling_of(config),
                    log_blocks=log_blocks,
                    on_request=recorder.request,
                    on_step=on_live_step,
                    on_tick=stop.raise_if_asked,
                    max_concurrency=config.max_concurrency,
                )
                recorder.sent(served.send_delays_ns)
                end_ns = served.end_ns
            else:
                end_ns = simulate_request(
                    request,
                    config,
                    workload,
                    engine,
                    recorder.sink,
                    log_blocks=log_blocks,
                    on_request=recorder.request,
                    on_step=on_step if flags.save_plans else None,
                    on_progress=on_progress,
                    on_log=logs.append,
                )
        progress.done(end_ns)
    return recorder.summary


def simulate_request(
    request: RunRequest,
    config: RunConfig,
    workload: ListWorkload | ClosedLoop,
    engine: Engine,
    sink: Sink,
    *,
    log_blocks: bool,
    on_request: Callable[[RequestSpec], None] | None = None,
    on_step: StepObserver | None = None,
    on_progress: OnProgress | None = None,
    on_log: Callable[[EventLog], object] | None = None,
) -> int:
    """Serves the workload in simulated time, as the flags say; returns the end in simulated ns.

    `on_log`: told of every log that writes to the sink, one for each replica.
    """
    assert engine.timer is not None, "an engine simulates or serves"
    save_tokens = request.flags.save_tokens
    if not config.cluster.is_plain:
        return simulate_cluster(
            config,
            workload,
            ReplicaParts(engine.config, timer_for_each(engine.timer), engine.host),
            sink,
            tokens=engine.tokens,
            log_blocks=log_blocks,
            save_tokens=save_tokens,
            on_request=on_request,
            on_progress=on_progress,
            leaps=request.flags.leap,
            cache_resets_ns=map(seconds_to_ns, request.flags.reset_prefix_cache_at),
            max_concurrency=config.max_concurrency,
            on_log=on_log,
        )
    log = EventLog(sink, log_blocks=log_blocks, save_tokens=save_tokens)
    if on_log is not None:
        on_log(log)
    return simulate(
        config,
        workload,
        engine.timer,
        log,
        tokens=engine.tokens,
        plan_tokens=engine.runs_a_model or request.flags.save_plans,
        log_blocks=log_blocks,
        host=engine.host,
        on_request=on_request,
        on_step=on_step,
        on_progress=on_progress,
        leaps=request.flags.leap,
        vocab_size=engine.config.model.vocab_size if engine.runs_a_model else None,
        cache_resets_ns=map(seconds_to_ns, request.flags.reset_prefix_cache_at),
        max_concurrency=config.max_concurrency,
    )


def _pace(flags: RunFlags, engine: Engine, logs: Sequence[EventLog], stop: StopRequest) -> Pace | None:
    """Something to watch: a run that is held back, or one whose steps take their time."""
    if engine.timer is None or (flags.pace is None and isinstance(engine.timer, ModelledStepTimer)):
        return None

    def flush() -> None:
        for log in logs:
            log.flush()

    return Pace(flags.pace, flush, stop.raise_if_asked)


def run_header(config: RunConfig, workload: ListWorkload | ClosedLoop, engine: Engine) -> dict[str, Any]:
    """What made the run, for `run.json`."""
    return {
        "config": config.model_dump(mode="json"),
        "workload": workload.about,
        "seed": config.seed,
        "step_time_source": config.executor,
        "executor": engine.described,
        "assumed": list(engine.assumed),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("servetwin", "simpy", "numpy")},
        },
        "host": {"machine": platform.machine(), "system": platform.system(), "cpus": os.cpu_count()},
    }


def run_config(request: RunRequest, engine: Engine) -> RunConfig:
    """Everything that makes the run what it is."""
    flags, load, sampling = request.flags, request.load.flags, request.sampling
    return RunConfig(
        engine=engine.config,
        cluster=request.cluster_config(),
        executor="torch" if flags.live else str(flags.executor),
        live=flags.live,
        max_concurrency=load.max_concurrency,
        seed=flags.seed,
        ignore_eos=load.ignore_eos,
        step_time_s=flags.step_time_s,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        num_prompts=load.num_prompts,
        draft_acceptance_rate=request.engine.draft_acceptance_rate,
        reset_prefix_cache_at=flags.reset_prefix_cache_at,
        assumed=engine.assumed,
    )


def _say_refusals(refused: pd.DataFrame, num_requests: int) -> None:
    """Refused requests are in no latency: say how many there were, and why the first was."""
    first = refused.iloc[0]
    say(f"refused: {len(refused)} of {num_requests} requests; {first.request_id}: {first.reason}")


def _say_cache_resets(resets: pd.DataFrame, asked_s: Sequence[float]) -> None:
    """What became of every reset of the prefix cache that was asked for."""
    several = resets.replica.nunique() > 1
    for reset in resets.itertuples():
        where = f" at replica {reset.replica}" if several else ""
        say(f"prefix-cache reset at {reset.time_s:.6g} s{where}: {reset.reason}")
    for time_s in sorted(asked_s)[resets.groupby("replica").size().max() if len(resets) else 0 :]:
        say(f"prefix-cache reset at {time_s:g} s: the run ended before")


class _Recorder:
    """Where the run goes: into its folder, or into memory when there is none."""

    def __init__(
        self, request: RunRequest, config: RunConfig, workload: ListWorkload | ClosedLoop, engine: Engine
    ) -> None:
        flags = request.flags
        self._metric_defs = flags.metric_defs
        self._save_plans = flags.save_plans
        self._cache_resets_s = flags.reset_prefix_cache_at
        self._notes = engine.notes
        self._fingerprint = hashlib.sha256()
        self.summary: dict[str, Any] = {}
        self.writer: RunWriter | None = None
        self.sink: RunWriter | MemorySink
        if flags.out is None:
            self.sink = MemorySink()
        else:
            self.writer = self.sink = RunWriter.create(
                flags.out,
                run_header(config, workload, engine),
                overwrite=flags.overwrite,
                save_tokens=flags.save_tokens,
            )

    def request(self, spec: RequestSpec) -> None:
        """A request as received."""
        line = orjson.dumps(to_jsonl(spec))
        self._fingerprint.update(line)
        if self.writer is not None:
            self.writer.workload().write_line(line)

    def plan(self, frame: Frame) -> None:
        """A plan that was run."""
        if self._save_plans and self.writer is not None:
            self.writer.plans().write(to_json(frame.plan))

    def sent(self, delays_ns: Sequence[int]) -> None:
        """How much later than due the requests of a live run were sent."""
        if not delays_ns:
            return
        p50, p99, most = (float(x) / 1e6 for x in np.percentile(delays_ns, (50, 99, 100)))
        say(f"sent later than due: {p50:.2f} ms at the median, {p99:.2f} ms at p99, {most:.2f} ms at most")
        if self.writer is not None:
            self.writer.add_to_header(send_delay_ms={"p50": p50, "p99": p99, "max": most})

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Ends the folder as what the run turned out to be: complete, interrupted, or failed with its error."""
        try:
            yield
        except BaseException as e:
            self._end("interrupted" if isinstance(e, KeyboardInterrupt) else f"{type(e).__name__}: {e}")
            if self.writer is not None:
                say(f"the folder {self.writer.path} holds what had happened until then")
            raise
        self._end(None)

    def _end(self, reason: str | None) -> None:
        log: Tables = read_run(self.writer.path) if self.writer is not None else self._memory()
        self.summary = summarize(log, self._metric_defs)
        if self._notes:
            self.summary["servetwin"]["notes"] = list(self._notes)
        ended = self.summary["servetwin"]["requests"]
        if ended.get("refused"):
            _say_refusals(events_of_kind(log, "refused"), sum(ended.values()))
        if self._cache_resets_s:
            _say_cache_resets(events_of_kind(log, "cache_reset"), self._cache_resets_s)
        if self.writer is None:
            return
        self.writer.write_summary(self.summary)
        self.writer.add_to_header(workload_fingerprint=f"sha256:{self._fingerprint.hexdigest()}")
        if reason is None:
            self.writer.complete()
        else:
            self.writer.fail(reason)

    def _memory(self) -> MemorySink:
        assert isinstance(self.sink, MemorySink)
        return self.sink
