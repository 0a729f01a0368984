"""`servetwin serve-metrics`: a real server on the loopback, whose values move as the run did."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import cast
from urllib.request import Request, urlopen

import pytest
from exported_runs import mixed_run
from prometheus_client.parser import text_string_to_metric_families

from servetwin.sim.cli import run
from servetwin.sim.commands import serving_metrics
from servetwin.sim.commands.serving_metrics import Replay
from servetwin.sim.export.prometheus import RunMetrics
from servetwin.sim.runs import Run

OPENMETRICS = {"Accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.3"}
"""What Prometheus 2 asks for."""


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return mixed_run(tmp_path_factory.mktemp("serve") / "run")


@contextmanager
def served(log: Run, *flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server of its own process, and its address."""
    command = [
        sys.executable,
        "-c",
        "from servetwin.sim.cli import main; main()",
        "serve-metrics",
        str(log.path),
    ]
    server = subprocess.Popen(
        [*command, *(flags if "--port" in flags else ("--port", "0", *flags))],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stderr is not None
        line = server.stderr.readline()
        address = re.search(r"http://127\.0\.0\.1:\d+/metrics", line)
        assert address is not None, line
        yield server, address[0]
    finally:
        server.kill()
        server.wait()
        server.stderr.close() if server.stderr else None


def scrape(address: str) -> dict[str, float]:
    """Name of the sample -> sum over its labels."""
    with urlopen(Request(address, headers=OPENMETRICS), timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        text = answer.read().decode()
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            values[sample.name] = values.get(sample.name, 0.0) + sample.value
    return values


@pytest.mark.serial
def test_values_move_with_the_clock_and_stay_at_the_end(log: Run) -> None:
    """Ten simulated seconds a second; afterwards every request is counted, and nobody runs."""
    with served(log, "--speed", "10") as (server, address):
        first = scrape(address)
        due = monotonic() + 20
        seen = [first]
        while seen[-1]["vllm:request_success_total"] < 59 and monotonic() < due:
            sleep(0.05)
            seen.append(scrape(address))
        last = seen[-1]
        for name in (
            "vllm:generation_tokens_total",
            "vllm:num_preemptions_total",
            "vllm:request_success_total",
        ):
            values = [values[name] for values in seen]
            assert values == sorted(values) and len(set(values)) > 3, name
        assert first["vllm:request_success_total"] == 0
        assert len({values["vllm:num_requests_running"] for values in seen}) > 3
        assert last["vllm:request_success_total"] == (log.requests.finish_reason != "refused").sum() == 59
        sleep(0.3)
        assert scrape(address) == last and last["vllm:num_requests_running"] == 0
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=10) == 0
        assert server.stderr is not None and "the run is over" in server.stderr.read()


@pytest.mark.serial
def test_ctrl_c_ends_it_and_another_server_can_have_the_port(log: Run) -> None:
    with served(log) as (server, address):
        port = address.split(":")[2].split("/")[0]
        with socket.socket() as other, pytest.raises(OSError):
            other.bind(("127.0.0.1", int(port)))
        os.kill(server.pid, signal.SIGINT)
        assert server.wait(timeout=10) == 0
    with served(log, "--port", port) as (_, address):
        assert f":{port}/" in address


def test_the_clock_goes_through_the_run_once_or_again_and_again(
    log: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a clock of our own: the simulated second, and since when counters count."""
    now = 100.0
    monkeypatch.setattr(serving_metrics, "monotonic", lambda: now)
    monkeypatch.setattr(serving_metrics, "time", lambda: 5000.0 + now)
    asked: list[tuple[float, float]] = []

    class Recorded:
        end_s = 12.0

        def families(self, at_ns: float, created_s: float) -> list[object]:
            asked.append((at_ns / 1e9, created_s))
            return []

    metrics = cast(RunMetrics, Recorded())
    once = Replay(metrics, speed=4, from_s=2, loop=False)
    looped = Replay(metrics, speed=4, from_s=2, loop=True)
    assert once.lasts_s == looped.lasts_s == 2.5
    for later in (100.0, 101.0, 103.0):
        now = later
        once.collect()
        looped.collect()
    assert asked[0::2] == [(2.0, 5100.0), (6.0, 5100.0), (14.0, 5100.0)]
    assert asked[1::2] == [(2.0, 5100.0), (6.0, 5100.0), (4.0, 5102.5)]
    assert RunMetrics(log).end_s == pytest.approx(log.requests.finish_s.max())


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--port", "70000"], "--port 70000: must be from 1 to 65535"),
        (["--speed", "0"], "--speed 0: must be above 0"),
        (["--speed", "nan"], "--speed nan: must be above 0"),
        (["--from-s", "-2"], "--from-s -2: must be 0 or more"),
        (["--from-s", "1e6"], "--from-s 1e+06: the run ends at"),
    ],
)
def test_bad_input_is_one_line(
    log: Run, capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    assert run(["serve-metrics", str(log.path), *flags]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


@pytest.mark.serial
def test_a_port_that_is_taken_is_told(log: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert run(["serve-metrics", str(log.path), "--port", str(port)]) == 2
        assert f"--port {port}: cannot be served on: Address already in use" in capsys.readouterr().err


def test_a_folder_that_is_no_run_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve-metrics", str(tmp_path)]) == 2
    assert "is not a run folder" in capsys.readouterr().err


def test_a_run_in_which_no_time_passes_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its only request is refused at once; the message is not about a flag that nobody gave."""
    workload = tmp_path / "workload.jsonl"
    workload.write_text('{"request_id": "é", "arrival_s": 0, "prompt_tokens": 5000, "output_tokens": 5}\n')
    flags = ["--executor", "constant", "--step-time-s", "0.02", "--max-model-len", "1000"]
    assert run(["run", str(workload), *flags, "--out", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    assert run(["serve-metrics", str(tmp_path / "run"), "--loop"]) == 2
    err = capsys.readouterr().err
    assert "nothing to replay" in err and "--from-s" not in err and err.count("\n") == 1
