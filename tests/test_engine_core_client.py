"""The engine core in a child process: what it gives out, and that its end, however it comes, is noticed and leaves
nothing behind."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from core_loops import Told, engine_args, fetch, request, tokens_of

from servetwin.executor import core_process
from servetwin.executor.core_process import CoreProcess, make_private_folder
from servetwin.executor.engine_core_client import (
    EngineCoreClient,
    EngineDeadError,
    InprocClient,
    MPClient,
    make_client,
)
from servetwin.executor.engine_log import LEVEL_VARIABLE, log_to_stderr
from servetwin.executor.testing import tiny_model
from servetwin.sim.progress_guard import StalledError
from servetwin.sim.records import Frame

pytestmark = pytest.mark.serial

NOTICED_S = 1.0
"""A death must be noticed within this time."""
PATIENCE_S = 60
"""Longer than anything takes: only a test that fails waits so long."""

MOODY_POLICY = """
from servetwin.sim.policy import FCFS

class Moody(FCFS):
    def may_admit(self, request, state):
        if request.priority == 13:
            raise ZeroDivisionError("thirteen")
        return state.num_waiting > 1 or bool(state.running)
"""

CLIENT_SCRIPT = """
import sys, time
from servetwin.executor.engine_args import EngineArgs
from servetwin.executor.engine_core_client import make_client
from servetwin.sim.contract import EngineCoreRequest, SamplingParams

client = make_client(EngineArgs(model=sys.argv[1], num_gpu_blocks_override=40), multiprocess=True)
print(client.pid, flush=True)

def serve():
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    client.add_request(EngineCoreRequest("a", [1, 2, 3], params, time.monotonic_ns()))
    tokens = []
    while len(tokens) < 3:
        for output in client.get_outputs():
            tokens += output.new_token_ids
"""
WAITS_FOR_SIGNALS = """
try:
    time.sleep(600)
except KeyboardInterrupt:
    serve()
    print("served", flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module", autouse=True)
def folder_of_sockets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Clients, and those of scripts, make their folders here, where nobody else makes any."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("s")
        patch.setattr(tempfile, "tempdir", str(folder))
        patch.setenv("TMPDIR", str(folder))
        yield folder


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model("llama", attention="sdpa").save_pretrained(folder)
    return folder


@dataclass
class Listened:
    """A client that several tests share, and what its engine told."""

    client: MPClient
    told: Told


@pytest.fixture(scope="module")
def listened(model_folder: Path) -> Iterator[Listened]:
    told = Told()
    client = MPClient(engine_args(model_folder), listener=told)
    yield Listened(client, told)
    client.shutdown()


@pytest.fixture(scope="module")
def inproc(model_folder: Path) -> Iterator[InprocClient]:
    client = InprocClient(engine_args(model_folder))
    yield client
    client.shutdown()


@dataclass(frozen=True)
class Held:
    """What this process holds that a client could leave behind."""

    descriptors: int
    threads: int
    children: frozenset[int]
    folders: frozenset[str]

    @classmethod
    def now(cls) -> Held:
        gc.collect()
        this = psutil.Process()
        folders = frozenset(path.name for path in Path(tempfile.gettempdir()).glob("servetwin-*"))
        return cls(this.num_fds(), this.num_threads(), frozenset(c.pid for c in this.children()), folders)


def gone(pid: int) -> bool:
    """No such process runs (one that nobody has waited for runs no more either)."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def seconds_until(condition: Callable[[], bool]) -> float:
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < PATIENCE_S, "it never happened"
        time.sleep(0.01)
    return time.monotonic() - start


# ---------------------------------------------------------------- service


def test_both_clients_give_the_same_tokens(listened: Listened, inproc: InprocClient) -> None:
    """More requests than seats, greedy and seeded: token for token, with log probabilities where asked for."""
    names = [f"same-{i}" for i in range(8)]

    def requests() -> Iterator[Any]:
        for i, name in enumerate(names):
            drawn: dict[str, Any] = {"temperature": 1.0, "seed": i} if i % 2 else {"logprobs": 2}
            yield request(name, 5 + 3 * i, max_tokens=4 + i, **drawn)

    got: list[dict[str, Any]] = []
    for client in (listened.client, inproc):
        for each in requests():
            client.add_request(each)
        got.append(fetch(client, names))
    for i, name in enumerate(names):
        child, here = (tokens_of(outputs[name]) for outputs in got)
        assert child == here
        assert len(child) == 4 + i
        probabilities = [output.logprobs for output in got[0][name]]
        assert all(p is not None and len(p.logprobs) == 1 for p in probabilities) == (i % 2 == 0)


def test_both_clients_have_the_same_configuration(listened: Listened, inproc: InprocClient) -> None:
    assert listened.client.config == inproc.config
    assert listened.client.config.scheduler.async_scheduling
    here, there = ({**client.described, "load_average": None} for client in (listened.client, inproc))
    assert here == there


def test_steps_go_on_while_nobody_reads(listened: Listened) -> None:
    """After a pause all tokens are there at once, and every one of them came before the first was read."""
    names = [f"pause-{i}" for i in range(3)]
    for name in names:
        listened.client.add_request(request(name, max_tokens=20))
    time.sleep(1)
    read_ns = time.monotonic_ns()
    listened.told.calls.clear()
    outputs = listened.client.get_outputs(timeout_s=0)
    assert {
        name: len(tokens_of(o for o in outputs if o.request_id == name)) for name in names
    } == dict.fromkeys(names, 20)
    ends_ns = [end_ns for _, _, _, end_ns, outputs in listened.told.of("stepped") if outputs.new_token_ids]
    assert len(ends_ns) >= 20
    assert max(ends_ns) < read_ns
    events = [event.timestamp_ns for output in outputs for event in output.events]
    assert len(events) == 2 * len(names)
    assert max(events) < read_ns


def test_the_child_tells_the_listener_in_the_contracts_own_types(listened: Listened) -> None:
    listened.told.calls.clear()
    listened.client.add_request(request("told", max_tokens=3))
    listened.client.add_request(request("too-long", 64))
    fetch(listened.client, ["told", "too-long"])
    told = listened.told
    assert [arguments[0] for arguments in told.of("arrived")] == ["told"]
    assert [arguments[0] for arguments in told.of("refused")] == ["too-long"]
    frames = [frame for (frame,) in told.of("scheduled")]
    assert all(isinstance(frame, Frame) and isinstance(frame.plan.finished_req_ids, set) for frame in frames)
    [new] = [new for frame in frames for new in frame.plan.scheduled_new_reqs]
    assert (new.req_id, type(new.block_ids)) == ("told", tuple)
    tokens = [outputs.new_token_ids.get("told", []) for *_, outputs in told.of("stepped")]
    assert sum(map(len, tokens)) == 3


def test_a_request_that_cannot_be_served_gets_its_error_and_the_engine_lives_on(listened: Listened) -> None:
    listened.client.add_request(request("long", 30, max_tokens=30))
    listened.client.add_request(request("long"))
    got: list[Any] = []
    while len(got) < 2:
        got += [o for o in listened.client.get_outputs() if o.finish_reason is not None]
    assert [output.finish_reason for output in got] == ["error", "length"]
    assert got[0].error == "request_id 'long' is in use by an unfinished request"


def test_an_abort_frees_everything_the_request_had(listened: Listened) -> None:
    """What is out by then is all that comes, and the pool is free again."""
    listened.client.add_request(request("given-up", 30, max_tokens=30))
    listened.client.abort_requests(["given-up", "never-heard-of"])
    listened.client.add_request(request("next", max_tokens=2))
    fetch_next = fetch_only(listened.client, "next")
    assert len(fetch_next) == 2
    assert listened.client.reset_prefix_cache()
    assert listened.client.get_outputs(timeout_s=0) == []


def fetch_only(client: EngineCoreClient, request_id: str) -> list[int]:
    """The tokens of one request; what others got is dropped."""
    tokens: list[int] = []
    ended = False
    while not ended:
        own = [output for output in client.get_outputs() if output.request_id == request_id]
        tokens += tokens_of(own)
        ended = any(output.finish_reason is not None for output in own)
    return tokens


def test_the_prefix_cache_is_not_reset_while_a_request_holds_blocks(inproc: InprocClient) -> None:
    inproc.add_request(request("holds", max_tokens=5))
    inproc.get_outputs()
    assert not inproc.reset_prefix_cache()
    fetch_only(inproc, "holds")
    assert inproc.reset_prefix_cache()


def test_the_environment_chooses_the_engine_in_this_process(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVETWIN_ENABLE_MULTIPROCESSING", "0")
    client = make_client(engine_args(model_folder))
    assert isinstance(client, InprocClient)
    client.shutdown()
    client.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        client.get_outputs()


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize("multiprocess", [True, False])
def test_a_bad_start_says_what_is_wrong_and_leaves_nothing(multiprocess: bool, tmp_path: Path) -> None:
    """The engine's own message, whichever process it came from."""
    before = Held.now()
    for args, message in (
        (engine_args(tmp_path / "nowhere"), "nowhere"),
        (engine_args(tmp_path, block_size=0), "block_size 0: Input should be greater than 0"),
    ):
        with pytest.raises(ValueError) as caught:
            make_client(args, multiprocess=multiprocess)
        assert message in str(caught.value)
        assert "pid" not in str(caught.value)
    after = Held.now()
    assert (after.children, after.folders) == (before.children, before.folders)


def test_a_policy_of_the_callers_folder_may_wait_and_may_fail(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The child finds it. A wait that nothing would end is an error, not a hang; its exception is the engine's end."""
    (tmp_path / "moody.py").write_text(MOODY_POLICY)
    monkeypatch.syspath_prepend(tmp_path)
    client = MPClient(engine_args(model_folder, scheduling_policy="moody:Moody"))
    client.add_request(request("a", max_tokens=2))
    assert client.stalled is None
    with pytest.raises(StalledError, match="may_admit of the policy moody:Moody refuses 'a'"):
        client.get_outputs()
    assert "refuses 'a'" in (client.stalled or "")
    assert client.get_outputs(timeout_s=0.05) == []
    client.add_request(request("b", max_tokens=2))
    assert client.stalled is None
    fetch(client, ["a", "b"])
    unlucky = request("c")
    unlucky.priority = 13
    client.add_request(unlucky)
    for _ in range(2):
        with pytest.raises(
            EngineDeadError,
            match=rf"pid {client.pid}.* failed: the scheduling policy moody:Moody raised ZeroDivisionError: thirteen "
            r"\(.*moody.py, line 7, in may_admit\)",
        ):
            client.get_outputs()
    with pytest.raises(EngineDeadError, match="thirteen"):
        client.add_request(request("d"))
    assert gone(client.pid)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        {"block_size": 0},
        {"gpu_memory_utilization": 1.5},
        {"num_gpu_blocks_override": 0},
        {"kv_cache_memory_bytes": 0, "num_gpu_blocks_override": None},
    ],
)
def test_what_no_model_could_be_served_with_is_refused_without_a_child(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one line that names the option."""
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a child was started"))
    with pytest.raises(ValueError) as caught:
        MPClient(engine_args(**options))
    assert next(iter(options)).removesuffix("_override") in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("num_blocks", [10**13, 10**17])
def test_a_cache_that_no_memory_holds_is_one_line(num_blocks: int, model_folder: Path) -> None:
    """Whichever way torch's allocator says so."""
    with pytest.raises(ValueError, match=r"does not fit into memory: .+; lower num_gpu_blocks") as caught:
        InprocClient(engine_args(model_folder, num_gpu_blocks_override=num_blocks))
    assert "\n" not in str(caught.value)


def test_an_unknown_level_of_the_log_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LEVEL_VARIABLE, "Loud")
    with pytest.raises(ValueError, match=r"SERVETWIN_LOGGING_LEVEL 'Loud' is not known; allowed: .*INFO"):
        log_to_stderr()


# ---------------------------------------------------------------- the end of the child


def kill_in_the_midst(client: MPClient, after_s: float) -> None:
    """SIGKILL while requests run; the next reads give what came before, then the error, at once and for ever."""
    for i in range(4):
        client.add_request(request(f"r{i}", max_tokens=55))
    time.sleep(after_s)
    os.kill(client.pid, signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(EngineDeadError, match=rf"\(pid {client.pid}\) was killed by SIGKILL"):
        while True:
            client.get_outputs()
    assert time.monotonic() - start < NOTICED_S
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        client.add_request(request("late"))
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        client.reset_prefix_cache()


@pytest.mark.parametrize("seed", range(3))
def test_a_child_killed_while_it_starts_is_noticed_at_once(seed: int, model_folder: Path) -> None:
    before, killed_s = Held.now(), [0.0]

    def kill() -> None:
        this = psutil.Process()
        seconds_until(lambda: {c.pid for c in this.children()} > before.children)
        time.sleep(random.Random(seed).uniform(0, 0.8))
        [pid] = {c.pid for c in this.children()} - before.children
        os.kill(pid, signal.SIGKILL)
        killed_s[0] = time.monotonic()

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(EngineDeadError, match="was killed by SIGKILL while it started"):
        MPClient(engine_args(model_folder))
    killer.join()
    assert time.monotonic() - killed_s[0] < NOTICED_S
    assert Held.now() == before


@pytest.mark.full
@pytest.mark.parametrize("seed", range(20))
def test_a_child_killed_in_the_midst_is_noticed_at_once(seed: int, model_folder: Path) -> None:
    before = Held.now()
    client = MPClient(engine_args(model_folder))
    kill_in_the_midst(client, random.Random(seed).uniform(0, 0.2))
    client.shutdown()
    assert Held.now() == before


def test_three_clients_and_three_ends_leave_nothing_behind(model_folder: Path) -> None:
    """Shut down (twice), dropped, killed: as many descriptors, threads and children as before, and no sockets."""
    before = Held.now()
    client = MPClient(engine_args(model_folder))
    pid = client.pid
    client.add_request(request("runs", max_tokens=50))
    client.shutdown()
    client.shutdown()
    assert gone(pid)
    assert Held.now() == before

    client = MPClient(engine_args(model_folder))
    pid = client.pid
    del client
    assert Held.now() == before
    assert gone(pid)

    client = MPClient(engine_args(model_folder))
    kill_in_the_midst(client, 0.01)
    assert Held.now() == before


# ---------------------------------------------------------------- the end of the parent


def start_script(code: str, model_folder: Path) -> subprocess.Popen[str]:
    """A caller without an `if __name__` guard, in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", code, str(model_folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_signals_to_the_parent(model_folder: Path) -> None:
    """Ctrl-C reaches the whole group, and the engine serves on; when the parent is killed the child ends, too."""
    before = Held.now().folders
    with start_script(CLIENT_SCRIPT + WAITS_FOR_SIGNALS, model_folder) as script:
        assert script.stdout is not None and script.stderr is not None
        pid = int(script.stdout.readline())
        # So that nothing can be left even if both are killed.
        assert Held.now().folders == before
        os.killpg(script.pid, signal.SIGINT)
        assert script.stdout.readline() == "served\n"
        script.kill()
        assert seconds_until(lambda: gone(pid)) < NOTICED_S
        assert Held.now().folders == before
        log = script.stderr.read()
    assert f"(EngineCore pid={pid}) INFO " in log
    assert "Asynchronous scheduling is enabled." in log
    assert "KV cache size: " in log
    assert "KeyboardInterrupt" not in log


def test_a_script_may_end_without_shutting_down(model_folder: Path) -> None:
    """Its end is the engine's: nothing hangs, nothing is left, nothing is complained about."""
    before = Held.now().folders
    with start_script(CLIENT_SCRIPT + "serve()\n", model_folder) as script:
        output, log = script.communicate(timeout=PATIENCE_S)
    assert script.returncode == 0, log
    assert gone(int(output))
    assert Held.now().folders == before
    assert "Traceback" not in log
    assert "Warning" not in log


def test_ctrl_c_during_the_start_ends_both(model_folder: Path) -> None:
    before = Held.now().folders
    with start_script(CLIENT_SCRIPT, model_folder) as script:
        children: list[psutil.Process] = []
        seconds_until(lambda: bool(children.extend(psutil.Process(script.pid).children()) or children))
        os.killpg(script.pid, signal.SIGINT)
        output, log = script.communicate(timeout=PATIENCE_S)
    assert script.returncode == -signal.SIGINT, log
    assert output == ""
    assert log.count("KeyboardInterrupt") == 1
    assert all(gone(child.pid) for child in children)
    assert Held.now().folders == before


def test_ctrl_c_while_the_child_is_born_does_not_lose_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes when the child is held, and ends it."""
    before = Held.now()
    popen, born = subprocess.Popen, []

    def interrupted(*args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
        born.append(popen(*args, **kwargs))
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        return born[0]

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    with pytest.raises(KeyboardInterrupt):
        CoreProcess()
    assert born[0].returncode is not None
    assert Held.now() == before


# ---------------------------------------------------------------- the surroundings


def test_a_folder_with_a_long_name_is_not_used_for_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A socket's path has a limit: a shorter folder is taken, or the message says what to do."""
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    folder = make_private_folder()
    assert folder.parent == Path("/tmp")
    folder.rmdir()
    monkeypatch.setattr(core_process, "SHORT_TEMPORARY_FOLDER", str(tmp_path / "nowhere"))
    with pytest.raises(OSError, match=r"xxx is too long .* cannot be used \(No such file.*set TMPDIR"):
        make_private_folder()
    assert not list(long.iterdir())


def test_a_fork_has_no_part_in_its_parents_engine(listened: Listened) -> None:
    """Every call says whose it is, ending it does nothing, and the parent is served on."""
    client = listened.client
    calls: list[Callable[[], object]] = [
        client.get_outputs,
        client.reset_prefix_cache,
        lambda: client.add_request(request("forked")),
        lambda: client.abort_requests(["forked"]),
    ]
    pid = os.fork()
    if pid == 0:
        refused = [says_whose_it_is(call, os.getppid()) for call in calls]
        client.shutdown()
        os._exit(0 if all(refused) else 1)
    assert os.waitpid(pid, 0)[1] == 0
    client.add_request(request("parents", max_tokens=2))
    assert len(fetch_only(client, "parents")) == 2


def says_whose_it_is(call: Callable[[], object], owner_pid: int) -> bool:
    try:
        call()
    except EngineDeadError as e:
        return f"belongs to process {owner_pid}" in str(e)
    return False


def test_no_thread_of_a_client_runs_on(inproc: InprocClient) -> None:
    """The parent has no thread of ours; the engine in this process has its worker alone."""
    ours = [t.name for t in threading.enumerate() if t.name.startswith("servetwin")]
    assert len(ours) == 1
