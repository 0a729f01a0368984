"""A run as a value: what decides it, its hash, and the same figures as `servetwin run` gives."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servetwin.sim.cli import run
from servetwin.sim.commands.errors import UsageError
from servetwin.sim.commands.run_fields import groups, kinds_of, parsed, run_fields
from servetwin.sim.planning.one_run import EndRun, run_one
from servetwin.sim.planning.spec import RunSpec

CONSTANT: dict[str, Any] = {"executor": "constant", "step_time_s": 0.01}
SMALL: dict[str, Any] = {"num_prompts": 30, "request_rate": 20.0, "max_num_seqs": 8}

OTHER: dict[str, Any] = {
    "executor": "roofline",
    "metric_defs": "guidellm",
    "reset_prefix_cache_at": "1.5 2",
    "request_rate": "inf",
    "columns": "arrival_s=t output_tokens=n",
    "replica_failure": "0@1-2",
    "cudagraph_capture_sizes": "1 2 4",
    "speculative_config": '{"method": "ngram", "num_speculative_tokens": 2}',
    "vllm_compat": "0.22:safe",
}
"""Fields whose values have a form of their own -> one that is not their default."""


def other_value(name: str) -> Any:
    """A value of this field that is not its default, as a text."""
    default = run_fields()[name].default
    if name in OTHER:
        return OTHER[name]
    if isinstance(default, bool):
        return "false" if default else "true"
    kinds = kinds_of(name)
    for allowed in (get_args(kind) for kind in kinds if get_origin(kind) is Literal):
        return next(value for value in allowed if value != default)
    texts = {bool: "true", int: "7", float: "0.5", Path: "a/b", str: "a:b"}
    return next(text for kind, text in texts.items() if kind in kinds)


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    path = tmp_path / "workload.jsonl"
    rows = [
        {"request_id": f"q{i}", "arrival_s": 0.02 * i, "prompt_tokens": 40, "output_tokens": 5 + i % 7}
        for i in range(20)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_every_field_of_run_is_reached_by_name_and_changes_the_hash() -> None:
    """Texts as typed; equal after a round trip through JSON and pickle; no two changes hash alike."""
    base = RunSpec.from_fields("chat", **CONSTANT)
    hashes = {base.content_hash()}
    for name in run_fields():
        changed = base.with_(**{name: other_value(name)})
        assert changed[name] != base[name], name
        assert list(changed.differences(base)) == [name]
        assert RunSpec.from_json(json.loads(json.dumps(changed.to_json()))) == changed
        assert pickle.loads(pickle.dumps(changed)) == changed
        hashes.add(changed.content_hash())
    assert len(hashes) == len(run_fields()) + 1


def test_the_groups_are_those_that_run_takes() -> None:
    """A flag that `servetwin run` grows is a field of a spec without another line; what is written is none."""
    names = set(run_fields())
    assert {"load", "engine", "flags", "trace", "sampling", "cluster"} <= set(groups())
    assert {"max_num_seqs", "num_prompts", "executor", "seed", "columns", "temperature"} <= names
    assert not {"out", "json", "overwrite", "live", "save_plans", "save_tokens"} & names


def test_unknown_names_and_values_that_are_not_allowed_are_refused() -> None:
    """Near names are told; values are refused in the words of the command line."""
    spec = RunSpec.from_fields("chat", **CONSTANT)
    with pytest.raises(UsageError, match="'max_num_sequences' is no field of a run; near are: max_num_seqs"):
        spec.with_(max_num_sequences=3)
    with pytest.raises(UsageError, match="--max-num-seqs: 'many' is not a whole number"):
        spec.with_(max_num_seqs="many")
    with pytest.raises(UsageError, match='Invalid value "sideways" for --loop'):
        spec.with_(loop="sideways")
    with pytest.raises(UsageError, match="--block-size: must have a value"):
        spec.with_(block_size=None)
    with pytest.raises(UsageError, match="measures its steps"):
        spec.with_(executor="torch").check()


def test_python_values_are_read_as_typed_ones() -> None:
    """A spec from Python equals the one from texts; suffixes are vLLM's."""
    spec = RunSpec.from_fields("chat", **CONSTANT)
    python = spec.with_(
        max_num_seqs=64, request_rate=0.1, enable_prefix_caching=False, columns=("a=b", "c=d")
    )
    typed = spec.with_(
        max_num_seqs="64", request_rate="0.1", enable_prefix_caching="false", columns="a=b c=d"
    )
    assert python == typed
    assert parsed("max_num_batched_tokens", "8k") == 8000
    assert (
        spec.with_(max_num_seqs=64, dataset_name="random").with_(max_num_seqs=None, dataset_name=None) == spec
    )


def test_vllm_args_are_merged_once_so_that_a_field_set_later_wins(capsys: pytest.CaptureFixture[str]) -> None:
    """Also where the later value is the default, which beside --vllm-args on one command line would lose."""
    spec = RunSpec.from_fields(
        "chat", **CONSTANT, vllm_args="serve m --no-enable-prefix-caching --max-num-seqs 9"
    )
    assert (spec["enable_prefix_caching"], spec["max_num_seqs"], spec["vllm_args"]) == (False, 9, None)
    assert "--model FOLDER" in capsys.readouterr().err
    assert spec.with_(enable_prefix_caching=True)["enable_prefix_caching"] is True


@settings(max_examples=60)
@given(st.binary(min_size=1, max_size=40), st.binary(min_size=1, max_size=40))
def test_the_hash_goes_with_the_bytes_of_the_workload(
    tmp_path_factory: pytest.TempPathFactory, one: bytes, other: bytes
) -> None:
    """Same path, same bytes: same hash; any other byte: another."""
    path = tmp_path_factory.mktemp("bytes") / "w.jsonl"
    hashes = []
    for content in (one, other, one):
        path.write_bytes(content)
        hashes.append(RunSpec.from_fields(path, **CONSTANT).content_hash())
    assert hashes[0] == hashes[2]
    assert (hashes[0] == hashes[1]) == (one == other)


def test_the_hash_goes_with_profile_model_recorded_run_and_own_module(
    tmp_path: Path, workload: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever file a field names: a changed byte is another run."""
    monkeypatch.chdir(tmp_path)
    for name in ("profile.json", "policies.py", "model/config.json", "model/weights.bin", "rec/run.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x = 1")
    spec = RunSpec.from_fields(workload, **CONSTANT)
    named = {
        "profile.json": spec.with_(executor="profile.json"),
        "policies.py": spec.with_(scheduling_policy="policies:Mine"),
        "model/config.json": spec.with_(model="model"),
        "rec/run.json": spec.with_(executor="recorded:rec"),
    }
    before = {name: one.content_hash() for name, one in named.items()}
    (tmp_path / "model/weights.bin").write_text("a simulation reads no weights")
    assert {name: one.content_hash() for name, one in named.items()} == before
    for name, one in named.items():
        (tmp_path / name).write_text("x = 2")
        assert one.content_hash() != before[name], name


def test_a_run_of_a_spec_is_the_run_of_the_command_line(tmp_path: Path, workload: Path) -> None:
    """All figures of summary.json, to the last digit; with a log of blocks fewer steps would be leapt over."""
    out = tmp_path / "out"
    flags = ["--executor", "constant", "--step-time-s", "0.01", "--max-num-seqs", "3", "--seed", "5"]
    flags += ["--no-log-blocks"]
    assert run(["run", str(workload), *flags, "--out", str(out), "--num-prompts", "15"]) == 0
    spec = RunSpec.from_fields(workload, **CONSTANT, max_num_seqs=3, seed=5, num_prompts=15)
    result = run_one(spec)
    assert result.summary == json.loads((out / "summary.json").read_text())
    assert result.config.model_dump(mode="json") == json.loads((out / "run.json").read_text())["config"]
    assert any("num_gpu_blocks 40000" in note for note in result.notes)


def test_a_run_can_be_ended_from_outside(workload: Path) -> None:
    """Its log and its figures tell how far it had come."""
    seen: list[int] = []

    def watch(num_steps: int, num_ended: int, now_ns: int) -> None:
        seen.append(num_ended)
        if sum(seen) >= 5:
            raise EndRun("five are enough")

    result = run_one(RunSpec.from_fields(workload, **CONSTANT), on_progress=watch)
    assert result.ended_early == "five are enough"
    assert 5 <= result.summary["completed"] < 20
    unfinished = result.log.requests.finish_reason.isna()
    assert unfinished.any()
    assert (~unfinished).sum() == result.summary["completed"]
    assert result.end_ns > 0


def test_the_rate_can_be_scaled(workload: Path) -> None:
    """Times are divided by it; without a span there is nothing to scale."""
    spec = RunSpec.from_fields(workload, **CONSTANT)
    arrivals = [run_one(spec.with_(rate_scale=f)).log.requests.arrival_s.max() for f in (1, 2)]
    assert arrivals == [pytest.approx(0.38), pytest.approx(0.19)]
    at_once = RunSpec.from_fields("chat", **CONSTANT, **SMALL).with_(request_rate="inf", rate_scale=2)
    with pytest.raises(UsageError, match="--rate-scale 2 has no effect: all requests arrive at one time"):
        run_one(at_once)
    with pytest.raises(UsageError, match=r"--rate-scale 0\.0: must be a finite number above 0"):
        spec.with_(rate_scale=0).check()
