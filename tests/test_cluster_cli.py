"""`servetwin run` with replicas: what it writes and prints, and what it refuses."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from servetwin.sim.cli import run
from servetwin.sim.commands.run_fields import groups
from servetwin.sim.runs import read_run, tables_equal

CHAT = ["run", "chat", "--num-prompts", "60", "--request-rate", "20"]
CONSTANT = ["--executor", "constant", "--step-time-s", "0.02", "--max-num-seqs", "8"]
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def serve(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs 60 chat requests with these flags: exit code, stdout, stderr."""

    def command(*flags: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = run([*CHAT, *CONSTANT, *map(str, flags)])
        out, err = capsys.readouterr()
        return code, out, err

    return command


def test_a_cluster_is_said_and_summed_up(serve: Command, tmp_path: Path) -> None:
    """One folder, one `requests/`; what the cluster is on stderr, how even its load was in the summary."""
    code, out, err = serve("--replicas", 3, "--router", "least_requests", "--json", "--out", tmp_path / "r")
    assert code == 0
    assert "cluster: 3 replicas, router least_requests\n" in err
    figures = json.loads(out)["servetwin"]["cluster"]
    assert [one["replica"] for one in figures["of_each"]] == [0, 1, 2]
    assert sum(one["completed"] for one in figures["of_each"]) == json.loads(out)["completed"] == 60
    log = read_run(tmp_path / "r")
    assert set(log.requests.replica) == set(log.steps.replica) == {0, 1, 2}
    assert log.config["cluster"]["replicas"] == 3
    assert json.loads((tmp_path / "r" / "summary.json").read_text()) == json.loads(out)


def test_leaps_change_nothing(serve: Command, tmp_path: Path) -> None:
    """Failures, scaling and a queue limit in one run, whose words on stderr are these."""
    flags = [
        *(
            "--replicas",
            2,
            "--router",
            "power_of_two",
            "--replica-failure",
            "1@1-2",
            "--on-failure",
            "reroute",
        ),
        *("--autoscale", "queue", "--scale-up-at", 1, "--scale-down-at", 0.1, "--max-replicas", 3),
        *("--scale-interval-s", 0.5, "--startup-delay-s", 0.25, "--max-queued-requests", 9),
    ]
    code, _, err = serve(*flags, "--out", tmp_path / "leaps")
    assert code == 0
    assert (
        "cluster: 2 replicas, router power_of_two, 1 to 3 by queue (up above 1, down below 0.1; every 0.5 s, start in "
        "0.25 s), at most 9 waiting at each, 1 failures (reroute)"
    ) in err
    assert serve(*flags, "--no-leap", "--out", tmp_path / "steps")[0] == 0
    leaps, steps = read_run(tmp_path / "leaps"), read_run(tmp_path / "steps")
    assert tables_equal(leaps, steps)
    assert {"replica_failed", "replica_recovered", "replica_starting", "retried"} <= set(leaps.events.kind)


def test_prefill_and_decode_replicas(serve: Command, tmp_path: Path) -> None:
    """How many of each, and the wire: bytes of KV as the model says, or as given."""
    apart = ["--prefill-replicas", 1, "--decode-replicas", 2, "--kv-transfer-bandwidth", "1e9"]
    code, _, err = serve(*apart, "--kv-bytes-per-token", 131072, "--kv-transfer-latency-s", 0.01)
    assert code == 0
    assert (
        "cluster: 3 replicas (1 for prompts, 2 for answers), router round_robin, 131,072 bytes of KV a token at 1e+09 "
        "bytes/s, latency 0.01 s"
    ) in err
    # 2 (K and V) x 4 layers x 4 KV heads x 64 x 2 bytes.
    model = json.loads(Path("examples/llama-10m/config.json").read_text())
    heads, layers = model["num_key_value_heads"], model["num_hidden_layers"]
    size = model.get("head_dim", model["hidden_size"] // model["num_attention_heads"])
    width = {"float32": 4, "bfloat16": 2}[model.get("dtype", model.get("torch_dtype", "bfloat16"))]
    code, _, err = serve(*apart, "--model", "examples/llama-10m", "--max-model-len", 4096)
    assert code == 0
    assert f"{2 * layers * heads * size * width:,} bytes of KV a token" in err


SCALED = ("--autoscale", "kv", "--scale-up-at", 0.5, "--scale-down-at", 0.1, "--max-replicas", 3)
APART = ("--prefill-replicas", 1, "--decode-replicas", 1)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--replicas", 0), "--replicas 0: Input should be greater than 0"),
        (("--replicas", 20_000), "--replicas 20000: Input should be less than or equal to 10000"),
        (
            ("--router", "fastest"),
            "router 'fastest' is not known; allowed: random, round_robin, least_requests",
        ),
        (("--max-queued-requests", 0), "--max-queued-requests 0: Input should be greater than 0"),
        (
            ("--replica-failure", "1"),
            "--replica-failure '1' must be REPLICA@FROM-TO in seconds, for example 0@60-90",
        ),
        (("--replica-failure", "0@9-3"), "it must end after 9 s, not at 3 s"),
        (("--replica-failure", "4@1-2"), "failure of replica 4: there are replicas 0 to 0"),
        (
            ("--replicas", 2, "--replica-failure", "1@1-5", "--replica-failure", "1@4-6"),
            "failures of replica 1 overlap at 4 s",
        ),
        (("--on-failure", "retry"), "--on-failure retry has no effect without --replica-failure"),
        (("--scale-up-at", 3), "--scale-up-at has no effect without --autoscale"),
        (("--autoscale", "queue"), "--autoscale queue needs --scale-up-at"),
        (
            ("--autoscale", "kv", "--scale-up-at", 0.5, "--scale-down-at", 0.6, "--max-replicas", 3),
            "--scale-down-at 0.6 must be below scale_up_at 0.5",
        ),
        (
            (*SCALED, "--replicas", 4),
            "--replicas 4 is not between min_replicas 1 and max_replicas 3",
        ),
        (("--prefill-replicas", 2), "--prefill-replicas needs --decode-replicas"),
        (("--kv-transfer-latency-s", 1), "--kv-transfer-latency-s has no effect without --prefill-replicas"),
        (
            (*APART, "--kv-transfer-bandwidth", 1e9),
            "--kv-transfer-bandwidth needs --kv-bytes-per-token, or --model",
        ),
        (
            (*APART, "--kv-bytes-per-token", 5),
            "--kv-bytes-per-token has no effect without --kv-transfer-bandwidth",
        ),
        (
            (*APART, "--replicas", 3),
            "--replicas 3 must be prefill_replicas 1 + decode_replicas 1, or be left out",
        ),
        (
            (
                *APART,
                "--replica-failure",
                "0@1-2",
                "--on-failure",
                "retry",
            ),
            "--on-failure retry does not go with prefill and decode replicas",
        ),
        (("--replicas", 2, "--save-plans"), "--save-plans writes the plans of one engine"),
    ],
)
def test_what_cannot_be_is_refused(
    serve: Command, tmp_path: Path, flags: tuple[object, ...], message: str
) -> None:
    """One line that names the flag and what is allowed, exit code 2, and no folder."""
    code, out, err = serve(*flags, "--out", tmp_path / "run")
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("executor", "message"),
    [
        (("--executor", "torch", "--model", "examples/llama-10m"), "not with --executor torch"),
        (("--live", "--model", "examples/llama-10m"), "not with --live"),
        (("--executor", "recorded:nowhere"), "not with --executor recorded:nowhere"),
    ],
)
def test_measured_steps_are_refused(
    executor: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One model, one recording: one engine."""
    assert run([*CHAT, *executor, "--replicas", "2"]) == 2
    assert f"the flags of a cluster go with modelled step times only, {message}" in capsys.readouterr().err


def test_a_step_source_of_one_s_own_that_is_not_modelled_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may keep what it likes from plan to plan."""
    (tmp_path / "own_timer.py").write_text(
        "class Timer:\n    def run(self, plan): raise NotImplementedError\n"
        "def build(options): return Timer()\n"
    )
    monkeypatch.chdir(tmp_path)
    assert run([*CHAT, "--executor", "own_timer:build", "--replicas", "2", "--out", "run"]) == 2
    assert "several replicas need modelled step times" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_example_of_a_router(serve: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long prompts go to the last replica, the others to the rest."""
    monkeypatch.syspath_prepend(str(Path("examples").resolve()))
    code, _, err = serve("--replicas", 3, "--router", "my_router:LongPromptsApart", "--out", tmp_path / "run")
    assert code == 0, err
    rows = read_run(tmp_path / "run").requests
    long = rows.num_prompt_tokens >= 2_000
    assert long.any() and set(rows.replica[long]) == {2}
    assert set(rows.replica[~long]) == {0, 1}


def test_cache_resets_are_told_of_each_replica(serve: Command) -> None:
    """Each has a cache of its own."""
    code, _, err = serve("--replicas", 2, "--reset-prefix-cache-at", 1, "--reset-prefix-cache-at", 999)
    assert code == 0
    assert len(re.findall(r"prefix-cache reset at [\d.]+ s at replica [01]: refused", err)) == 2
    assert "prefix-cache reset at 999 s: the run ended before" in err


def test_every_flag_of_the_cluster_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    """Under a heading of their own."""
    assert run(["run", "--help"]) == 0
    text = capsys.readouterr().out
    assert "Cluster (modelled step times)" in text
    for name in vars(groups()["cluster"]):
        assert "--" + name.replace("_", "-") in text


@pytest.mark.serial
def test_ctrl_c_leaves_a_folder_of_all_replicas(tmp_path: Path) -> None:
    """Exit code 130, reason interrupted; every table of every replica can be read."""
    out = tmp_path / "run"
    command = [
        *(sys.executable, "-c", "from servetwin.sim.cli import main; main()"),
        *("run", "chat", "--num-prompts", "60000", "--request-rate", "40", *CONSTANT),
        *("--replicas", "4", "--out", str(out)),
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        end = time.monotonic() + 60
        while not _parts(out, "steps") > 8:
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130, err
    log = read_run(out)
    assert (log.state, log.reason) == ("failed", "interrupted")
    assert set(log.steps.replica) == {0, 1, 2, 3}
    open_ones = log.requests.finish_reason.isna()
    assert open_ones.any() and (log.requests.finish_reason[~open_ones] == "length").all()
    assert log.summary["servetwin"]["requests"]["open"] == open_ones.sum()


def _parts(out: Path, table: str) -> int:
    header = out / "run.json"
    if not header.exists():
        return 0
    parts: dict[str, Any] = json.loads(header.read_text())["parts"]
    return len(parts[table])
