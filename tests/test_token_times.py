"""The instants of outputs that follow from steps and long gaps are those of the tokens, to the nanosecond."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from test_metrics import log_of_a_run, workloads

from servetwin.sim.cli import run
from servetwin.sim.runs import read_run
from servetwin.sim.tables import Tables
from servetwin.sim.token_times import LogTooOldError, OutputTimes
from servetwin.workloads import RequestSpec

S = 1_000_000_000
TIGHT = ["--max-num-seqs", "16", "--num-gpu-blocks-override", "120", "--max-model-len", "1600"]
LOAD = [
    "--dataset-name",
    "random",
    "--random-input-len",
    "150",
    "--random-output-len",
    "120",
    "--num-prompts",
    "60",
]
CONSTANT = ["--executor", "constant", "--step-time-s", "0.0123"]
NGRAM = [
    "--speculative-config",
    '{"method": "ngram", "num_speculative_tokens": 3}',
    "--draft-acceptance-rate",
    "0.6",
]


def check(log: Tables) -> int:
    """Every request's outputs are its tokens (those of one step once); returns how many had a long gap."""
    times = OutputTimes(log)
    by_id = {
        name: np.unique(np.rint(t.time_s * S)).astype(int).tolist()
        for name, t in log.tokens.groupby("request_id")
    }
    for row, found in zip(log.requests.itertuples(), times.of_each(log.requests), strict=True):
        assert found.tolist() == by_id.get(row.request_id, []), row.request_id
    return len(times._gaps)


@given(workloads())
def test_outputs_are_those_of_the_tokens(requests: list[RequestSpec]) -> None:
    """A pool that is soon too small, requests that are given up."""
    check(log_of_a_run(requests))


@pytest.mark.parametrize("flags", [[], ["--no-async-scheduling"], NGRAM])
def test_outputs_of_a_run_with_preemptions(tmp_path: Path, flags: list[str]) -> None:
    """Steps in flight, drafts; and the same run without its tokens, which leaps."""
    command = ["run", *LOAD, "--request-rate", "8", *CONSTANT, *TIGHT, *flags]
    assert run([*command, "--save-tokens", "--out", str(tmp_path / "a")]) == 0
    assert run([*command, "--out", str(tmp_path / "b")]) == 0
    log, leapt = read_run(tmp_path / "a"), read_run(tmp_path / "b")
    assert check(log) >= 2
    if flags != NGRAM:
        assert leapt.summary["servetwin"]["leapt_steps"] > 100
    both = [[times.tolist() for times in OutputTimes(one).of_each(one.requests)] for one in (log, leapt)]
    assert both[0] == both[1]


def test_a_log_that_does_not_say_whose_gaps_it_has_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    assert run(["run", *LOAD, *CONSTANT, *TIGHT, "--out", str(folder)]) == 0
    for part in (folder / "itl").iterdir():
        table = pq.read_table(part, partitioning=None)
        pq.write_table(table.drop_columns("request_id"), part)
        assert isinstance(table, pa.Table)
    with pytest.raises(LogTooOldError, match="run it again"):
        OutputTimes(read_run(folder))
