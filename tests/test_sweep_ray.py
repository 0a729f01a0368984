"""Sweeps on a real Ray cluster on the loopback: the tables of local ones."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sweeping import CONSTANT, assert_same_table, started, write_workload

from servetwin.sim.cli import run
from servetwin.sim.planning import read_results

PATIENCE_S = 120
RAY = [sys.executable, "-m", "ray.scripts.scripts"]

pytestmark = [pytest.mark.full, pytest.mark.serial]


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a cluster of two processors, which ends with the tests."""
    pytest.importorskip("ray")
    # Its sockets' paths must be short.
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    flags = ["--head", "--node-ip-address=127.0.0.1", f"--port={address.partition(':')[2]}", "--num-cpus=2"]
    flags += [
        "--include-dashboard=false",
        "--disable-usage-stats",
        "--object-store-memory=100000000",
        "--block",
    ]
    process = subprocess.Popen(
        [*RAY, "start", *flags, f"--temp-dir={folder}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        wait_for(address, process)
        yield address
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE_S)
        shutil.rmtree(folder, ignore_errors=True)


def wait_for(address: str, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        assert process.poll() is None, process.communicate()
        done = subprocess.run([*RAY, "health-check", "--address", address], capture_output=True, check=False)
        if done.returncode == 0:
            return
        time.sleep(0.5)
    raise AssertionError("no cluster")


def test_ray_gives_the_table_of_local_processes(tmp_path: Path, cluster: str) -> None:
    """Identical but for what tells where and how long; stdout holds the JSON object alone."""
    workload = str(write_workload(tmp_path / "workload.jsonl", 60))
    failing = ["--max-num-batched-tokens", "64", "--param", "max_num_seqs=2,8,32,128"]
    arguments = [workload, *CONSTANT, *failing, "--seeds", "3"]
    local, remote = tmp_path / "local", tmp_path / "ray"
    assert run(["sweep", *arguments, "--jobs", "2", "--out", str(local)]) == 1
    ray = ["--backend", "ray", "--ray-address", cluster, "--json"]
    process = started(*arguments, *ray, "--out", str(remote))
    out, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1, said
    told = json.loads(out)
    assert (told["done"], told["failed"]) == (9, 3)
    assert_same_table(local, remote)
    again = started(*arguments, *ray, "--out", str(remote), "--resume")
    assert json.loads(again.communicate(timeout=PATIENCE_S)[0])["reused"] == 12


def test_optuna_on_ray_finds_the_same_points(tmp_path: Path, cluster: str) -> None:
    """Batches are of one size, wherever they run."""
    workload = str(write_workload(tmp_path / "workload.jsonl"))
    flags = ["--param", "step_time_s=0.001..0.1:log", "--method", "optuna", "--runs", "6"]
    arguments = [workload, "--executor", "constant", *flags, "--objective", "mean_e2el_ms"]
    assert run(["sweep", *arguments, "--jobs", "1", "--out", str(tmp_path / "local")]) == 0
    process = started(
        *arguments, "--backend", "ray", "--ray-address", cluster, "--out", str(tmp_path / "ray")
    )
    _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, said
    assert_same_table(tmp_path / "local", tmp_path / "ray")


def test_ctrl_c_ends_a_sweep_on_ray(tmp_path: Path, cluster: str) -> None:
    """Exit code 130 within seconds; the cluster is free for the next."""
    long = str(write_workload(tmp_path / "long.jsonl", 60_000))
    short = str(write_workload(tmp_path / "short.jsonl", 10))
    out = tmp_path / "out"
    flags = [*CONSTANT, "--no-leap", "--param", f"workload={short},{long}", "--seeds", "2"]
    process = started(*flags, "--backend", "ray", "--ray-address", cluster, "--out", str(out))
    end = time.monotonic() + PATIENCE_S
    while len([*out.glob("runs/*.json")]) < 2:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    asked = time.monotonic()
    _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, said
    assert time.monotonic() - asked < 15
    assert "Traceback" not in said
    assert read_results(out).frame.workload.tolist() == [short, short]


def test_a_cluster_that_does_not_answer_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line, exit code 1, nothing written."""
    workload = str(write_workload(tmp_path / "workload.jsonl"))
    process = started(
        workload,
        *CONSTANT,
        "--backend",
        "ray",
        "--ray-address",
        "127.0.0.1:1",
        "--out",
        str(tmp_path / "out"),
    )
    _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1, said
    assert "--ray-address 127.0.0.1:1: no Ray cluster answers;" in said
    assert "Traceback" not in said
    assert not (tmp_path / "out").exists()
