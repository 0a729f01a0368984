"""`servetwin run --live`: the wall clock, an engine in a child process, the same run folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from servetwin.executor.live import LiveEngine, Served
from servetwin.executor.testing import TINY_VOCAB_SIZE, tiny_model
from servetwin.sim.columns import Part
from servetwin.sim.contract import EngineDeadError, SamplingParams
from servetwin.sim.engine_options import EngineOptions
from servetwin.sim.events import EventLog, MemorySink
from servetwin.sim.progress_guard import StalledError
from servetwin.sim.runs import Run, read_run
from servetwin.sim.token_source import TokenSource
from servetwin.workloads.spec import ListWorkload, RequestSpec

SERVETWIN = Path(sys.executable).with_name("servetwin")
ENGINE = ["--dtype", "float32", "--max-num-seqs", "3", "--block-size", "4", "--max-model-len", "64"]
ENGINE += ["--num-gpu-blocks-override", "40", "--max-num-batched-tokens", "32"]
PATIENCE_S = 60

# One after another: these start processes of two threads each and go by the wall clock.
pytestmark = pytest.mark.serial


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama", attention="sdpa").save_pretrained(folder)
    return folder


def rows(count: int, every_s: float, **fields: Any) -> list[dict[str, Any]]:
    return [
        {
            "request_id": f"r{i}",
            "arrival_s": i * every_s,
            "prompt_token_ids": [(7 * i + 3 * j) % TINY_VOCAB_SIZE for j in range(5 + i % 4)],
            "output_tokens": 6 + i % 3,
            **fields,
        }
        for i in range(count)
    ]


def write(path: Path, requests: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in requests))
    return path


def command(workload: Path, model: Path, out: Path, *flags: str) -> list[str]:
    return [str(SERVETWIN), "run", str(workload), "--model", str(model), *ENGINE, "--out", str(out), *flags]


def serve(workload: Path, model: Path, out: Path, *flags: str) -> tuple[Run, str]:
    """(the run, what it said on stderr)"""
    done = subprocess.run(
        command(workload, model, out, *flags),
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S * 2,
    )
    assert done.returncode == 0, done.stderr
    return read_run(out), done.stderr


@pytest.fixture(scope="module")
def mixed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run, str]:
    """One workload live and simulated: an abort and a prompt that is too long among twelve requests."""
    folder = tmp_path_factory.mktemp("mixed")
    requests = rows(12, 0.08)
    requests.append(
        {"request_id": "gone", "arrival_s": 0.3, "prompt_tokens": 6, "output_tokens": 50, "abort_s": 0.31}
    )
    requests.append({"request_id": "long", "arrival_s": 0.2, "prompt_tokens": 64, "output_tokens": 2})
    workload = write(folder / "w.jsonl", requests)
    live, said = serve(workload, model, folder / "live", "--live", "--save-tokens", "--save-plans")
    simulated, _ = serve(
        workload, model, folder / "simulated", "--executor", "torch", "--save-tokens", "--save-plans"
    )
    return live, simulated, said


def test_everything_sent_is_accounted_for(mixed: tuple[Run, Run, str]) -> None:
    live, _, _ = mixed
    ends = live.requests.set_index("request_id").finish_reason.to_dict()
    assert live.state == "complete"
    assert len(ends) == 14
    assert ends["long"] == "refused"
    assert ends["gone"] == "abort"
    assert {ends[f"r{i}"] for i in range(12)} == {"length"}


def test_tokens_are_those_of_the_simulation(mixed: tuple[Run, Run, str]) -> None:
    """One scheduler, one executor: the clock changes when a token comes, not which."""
    live, simulated, _ = mixed

    def tokens(run: Run) -> dict[str, list[int]]:
        ordered = run.tokens.sort_values(["request_id", "index"])
        return {str(i): group.token_id.tolist() for i, group in ordered.groupby("request_id") if i != "gone"}

    assert tokens(live) == tokens(simulated)


def test_times_lie_in_the_order_in_which_things_happen(mixed: tuple[Run, Run, str]) -> None:
    live, _, _ = mixed
    done = live.requests[live.requests.finish_reason == "length"]
    assert (done.arrival_s <= done.queued_s).all()
    assert (done.queued_s <= done.first_scheduled_s).all()
    assert (done.first_scheduled_s < done.first_token_s).all()
    assert (done.first_token_s < done.last_token_s).all()
    steps = live.steps
    assert steps.start_s.is_monotonic_increasing
    assert steps.end_s.is_monotonic_increasing
    assert (steps.start_s <= steps.prepare_start_s).all()
    assert (steps.prepare_start_s + steps.prepare_s - steps.device_start_s).abs().max() < 1e-6
    assert (steps.device_start_s + steps.device_s <= steps.end_s + 1e-9).all()


def test_blocks_add_up_and_all_are_free_at_the_end(mixed: tuple[Run, Run, str]) -> None:
    """The last step is the one that tells the worker of the last request, however the process is scheduled."""
    live, _, _ = mixed
    steps = live.steps
    assert (steps.used_blocks + steps.cached_free_blocks + steps.free_blocks == 39).all()
    assert steps.used_blocks.iloc[-1] == 0
    assert len(live.blocks) > 0


def test_requests_are_sent_when_they_are_due_and_not_before(mixed: tuple[Run, Run, str]) -> None:
    live, _, said = mixed
    sent_s = live.requests.set_index("request_id").arrival_s
    assert all(sent_s[f"r{i}"] >= i * 0.08 - 1e-9 for i in range(12))
    assert "sent later than due:" in said
    assert live.header["send_delay_ms"]["p50"] >= 0


def test_the_engine_speaks_for_itself(mixed: tuple[Run, Run, str]) -> None:
    """Log lines of the child carry its name and say whether scheduling is asynchronous."""
    _, _, said = mixed
    assert "(EngineCore pid=" in said
    assert "synchronous scheduling is" in said.replace("Asynchronous", "asynchronous")


def test_a_live_run_replays_from_its_folder(mixed: tuple[Run, Run, str], model: Path, tmp_path: Path) -> None:
    """workload.jsonl.zst holds every request as it was sent."""
    live, _, _ = mixed
    again, _ = serve(
        live.path / "workload.jsonl.zst", model, tmp_path / "again", "--executor", "torch", "--no-log-blocks"
    )
    assert again.requests.arrival_s.tolist() == live.requests.arrival_s.tolist()


def test_plans_of_a_live_run_run_again(mixed: tuple[Run, Run, str], model: Path, tmp_path: Path) -> None:
    live, _, _ = mixed
    out = tmp_path / "executed"
    subprocess.run(
        [
            str(SERVETWIN), "execute", str(live.path / "plans.jsonl.zst"), "--model", str(model), "--out", str(out),
            "--save-tokens",
        ],
        check=True,
        capture_output=True,
        timeout=PATIENCE_S,
    )  # fmt: skip
    executed = read_run(out).tokens.sort_values(["request_id", "index"])
    live_tokens = live.tokens.sort_values(["request_id", "index"])
    kept = [i for i in live_tokens.request_id.unique() if i != "gone"]
    for request_id in kept:
        assert (
            executed[executed.request_id == request_id].token_id.tolist()
            == live_tokens[live_tokens.request_id == request_id].token_id.tolist()
        )


def test_max_concurrency_holds_requests_back(model: Path, tmp_path: Path) -> None:
    """With one in flight at most, each is sent when the one before has ended."""
    workload = write(tmp_path / "w.jsonl", rows(6, 0.0))
    run, _ = serve(workload, model, tmp_path / "run", "--live", "--max-concurrency", "1")
    requests = run.requests.sort_values("arrival_s")
    assert (requests.arrival_s.iloc[1:].to_numpy() >= requests.finish_s.iloc[:-1].to_numpy()).all()
    assert run.config["max_concurrency"] == 1


# ---------------------------------------------------------------- the client, without a command around it

ONLY_PAIRS = """
from servetwin.sim.policy import FCFS

class OnlyPairs(FCFS):
    def may_admit(self, request, state):
        return state.num_waiting > 1 or bool(state.running)
"""


class CountingSink(MemorySink):
    """Counts how often something was written."""

    def __init__(self) -> None:
        super().__init__()
        self.writes = 0

    def write(self, parts: Mapping[str, Part]) -> None:
        super().write(parts)
        self.writes += 1


def live_engine(model: Path, **options: Any) -> LiveEngine:
    small: dict[str, Any] = {
        "max_num_seqs": 3,
        "block_size": 4,
        "max_model_len": 64,
        "num_gpu_blocks_override": 40,
    }
    return LiveEngine(
        EngineOptions(model=model, dtype="float32", max_num_batched_tokens=32, **small, **options)
    )


@pytest.fixture(scope="module")
def shared_engine(model: Path) -> Iterator[LiveEngine]:
    engine = live_engine(model)
    yield engine
    engine.close()


def spec(request_id: str, arrival_s: float = 0.0, output_tokens: int = 2, **fields: Any) -> RequestSpec:
    return RequestSpec(
        request_id=request_id, arrival_s=arrival_s, prompt_tokens=5, output_tokens=output_tokens, **fields
    )


def serve_with(
    engine: LiveEngine,
    requests: list[RequestSpec],
    sink: MemorySink,
    on_tick: Any = lambda: None,
    **options: Any,
) -> Served:
    return engine.serve(
        ListWorkload(requests),
        EventLog(sink, log_blocks=False),
        tokens=TokenSource(TINY_VOCAB_SIZE, 0),
        sampling=lambda r: SamplingParams(temperature=0, max_tokens=r.output_tokens, ignore_eos=True),
        log_blocks=False,
        on_request=lambda _: None,
        on_step=lambda *_: None,
        on_tick=on_tick,
        **options,
    )


def test_whoever_gave_up_before_its_turn_is_not_sent(shared_engine: LiveEngine) -> None:
    """It is logged as arrived and aborted, and the engine never had it."""
    sink = MemorySink()
    requests = [spec("first", output_tokens=20), spec("gone", abort_s=0.0), spec("last")]
    served = serve_with(shared_engine, requests, sink, max_concurrency=1)
    ends = sink.requests.set_index("request_id").finish_reason.to_dict()
    assert ends == {"first": "length", "gone": "abort", "last": "length"}
    gone = sink.events[sink.events.request_id == "gone"]
    assert gone.kind.tolist() == ["arrived", "aborted"]
    assert gone[["computed_tokens", "blocks"]].to_numpy().max() == 0
    assert len(served.send_delays_ns) == 2


def test_a_slow_run_is_written_while_it_goes_on(shared_engine: LiveEngine) -> None:
    """Long before it has a hundred steps, what is over by then is there."""
    sink = CountingSink()
    serve_with(shared_engine, [spec("early"), spec("late", 1.5)], sink)
    assert sink.writes == 2
    first, *_ = sink.parts("requests")
    assert first.column("request_id").to_pylist() == ["early"]


def test_a_policy_that_lets_nobody_in_ends_the_run(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When nothing else will come: not while there is another request to be sent. The wait has its reason."""
    (tmp_path / "only_pairs.py").write_text(ONLY_PAIRS)
    monkeypatch.syspath_prepend(tmp_path)
    engine, sink = live_engine(model, scheduling_policy="only_pairs:OnlyPairs"), MemorySink()
    try:
        with pytest.raises(StalledError, match="may_admit of the policy only_pairs:OnlyPairs refuses 'c'"):
            serve_with(engine, [spec("a"), spec("b", 0.3), spec("c", 0.8)], sink)
    finally:
        engine.close()
    ends = sink.requests.set_index("request_id").finish_reason.to_dict()
    assert (ends["a"], ends["b"]) == ("length", "length")
    waits = sink.events[sink.events.kind == "wait"]
    assert [(w.request_id, w.reason) for w in waits.itertuples()] == [("a", "policy"), ("c", "policy")]


def test_an_engine_that_dies_while_it_has_nothing_to_do_ends_the_run(model: Path) -> None:
    """At once: not when the next request is due."""
    this = psutil.Process()
    before = this.children()
    engine = live_engine(model)
    [child] = [c for c in this.children() if c not in before]

    def on_tick() -> None:
        if child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
            child.kill()

    try:
        with pytest.raises(EngineDeadError, match="was killed by SIGKILL"):
            serve_with(engine, [spec("much-later", 100_000.0)], MemorySink(), on_tick)
    finally:
        engine.close()


@pytest.fixture
def long_run(model: Path, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A live run of half a minute that has begun to write, in a process group of its own."""
    out = tmp_path / "run"
    workload = write(tmp_path / "w.jsonl", rows(300, 0.1))
    process = subprocess.Popen(
        command(workload, model, out, "--live"),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + PATIENCE_S
    while not list(out.glob("requests/*.parquet")) and time.monotonic() < deadline:
        time.sleep(0.05)
    yield process, out
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def child_of(process: subprocess.Popen[str]) -> psutil.Process:
    children: list[psutil.Process] = psutil.Process(process.pid).children(recursive=True)
    assert len(children) == 1
    return children[0]


def assert_ends(process: psutil.Process) -> None:
    _, alive = psutil.wait_procs([process], timeout=5)
    assert not alive


def test_ctrl_c_ends_both_processes_and_leaves_a_whole_folder(
    long_run: tuple[subprocess.Popen[str], Path],
) -> None:
    process, out = long_run
    child = child_of(process)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=10)
    assert process.returncode == 130
    assert "Traceback" not in said
    assert_ends(child)
    run = read_run(out)
    assert (run.state, run.reason) == ("failed", "interrupted")
    assert len(run.requests) > 0


def test_a_killed_engine_ends_the_run_with_one_clear_line(
    long_run: tuple[subprocess.Popen[str], Path],
) -> None:
    process, out = long_run
    child_of(process).kill()
    _, said = process.communicate(timeout=10)
    assert process.returncode == 1
    assert "Traceback" not in said
    assert "engine" in said.lower()
    run = read_run(out)
    assert run.state == "failed"
    assert "EngineDeadError" in run.reason


def test_a_killed_client_leaves_no_engine_behind(long_run: tuple[subprocess.Popen[str], Path]) -> None:
    process, out = long_run
    child = child_of(process)
    process.kill()
    process.wait()
    assert_ends(child)
    assert read_run(out).state == "partial"
