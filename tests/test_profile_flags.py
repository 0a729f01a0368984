"""Step times from tables on several cards, and with the padding of CUDA graphs: the rules, `run` and `validate`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernel_folders import dense_us, write_model, write_tables

from servetwin.sim.cards import find_card
from servetwin.sim.cli import run
from servetwin.sim.contract import StepShape
from servetwin.sim.cuda_graph_sizes import cuda_graph_sizes
from servetwin.sim.model_shape_reader import read_model_shape
from servetwin.sim.runs import read_run
from servetwin.sim.steptime.all_reduce import AllReduces
from servetwin.sim.steptime.features import StepFeatures, shape_of
from servetwin.sim.steptime.kernel_model import KernelStepModel
from servetwin.sim.steptime.kernel_tables import KernelTables, TableError, read_tables
from servetwin.sim.steptime.plan_rows import PlanRow
from servetwin.sim.steptime.profiles import load_profile
from servetwin.sim.steptime.tensor_parallel import OF_HEADS, OF_WIDTH, TensorParallel
from servetwin.sim.tables import differences

LAUNCH_US, ATTENTION_LAUNCH_US = 2.01, 8.0
"""The shortest operator and about the shortest attention call of the made-up tables."""
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs one command line; gives its exit code, stdout and stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        code = run([str(a) for a in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    return write_tables(tmp_path / "tables")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Four layers, four heads, two KV heads, 256 wide, bfloat16."""
    return write_model(tmp_path / "model")


@pytest.fixture
def simulate(tmp_path: Path, command: Command, tables: Path, model: Path) -> Command:
    """`run` with the tables and six small requests."""
    path = tmp_path / "workload.jsonl"
    rows = [
        {"request_id": f"r{i}", "arrival_s": 0.003 * i, "prompt_tokens": 40 + i, "output_tokens": 5 + i}
        for i in range(6)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    def call(*arguments: object) -> tuple[int, str, str]:
        pool = ("--num-gpu-blocks-override", 400)
        return command("run", path, "--executor", tables, "--model", model, *pool, *arguments)

    return call


def measured_on(tables: Path, gpu: str, **more: object) -> None:
    lines = {"gpu": gpu, "model": "made up"} | more
    (tables / "meta.yaml").write_text("".join(f"{k}: {v}\n" for k, v in lines.items()), encoding="utf-8")


def decoding(rows: int, context: int = 100) -> StepFeatures:
    return StepFeatures.of([shape_of([PlanRow("d", 1, context - 1, context, 1)] * rows)])


# ---------------------------------------------------------------- several cards: the rule


def test_a_ring_sends_each_card_part_of_the_bytes() -> None:
    """4 layers x 2 x (2 x 3 / 4 of 8,192 bytes a token over 1 GB/s + 6 us, twice for four cards)."""
    reduces = AllReduces(cards=4, num_layers=4, hidden_bytes=8192, link_bytes_per_s=1e9, efficiency=1)
    tokens = np.array([1.0, 100.0])
    assert reduces.seconds(tokens) == pytest.approx(8 * (tokens * 8192 * 1.5 / 1e9 + 12e-6))
    assert replace(reduces, cards=1).seconds(tokens).tolist() == [0, 0]


def on_cards(tables: Path, model: Path, cards: int, measured: int = 1) -> tuple[KernelTables, KernelTables]:
    """(as they were measured, as one of the cards would show them)"""
    before = read_tables(tables)
    shape = read_model_shape(model)
    return before, TensorParallel(shape, cards, measured, find_card("h100")).sharded(before)


def test_what_cards_share_shrinks_above_the_launch(tables: Path, model: Path) -> None:
    before, after = on_cards(tables, model, 2)
    for name in (*OF_HEADS, *OF_WIDTH):
        full = (before.per_sequence if name == "lm_head" else before.dense)[name]["time_us"]
        half = (after.per_sequence if name == "lm_head" else after.dense)[name]["time_us"]
        assert (half - LAUNCH_US).to_numpy() == pytest.approx((full - LAUNCH_US).to_numpy() / 2)
    full, half = before.attention["time_us"], after.attention["time_us"]
    assert half.min() == full.min() >= ATTENTION_LAUNCH_US
    assert (half - half.min()).to_numpy() == pytest.approx((full - full.min()).to_numpy() / 2)


def test_what_every_card_runs_whole_does_not_shrink(tables: Path, model: Path) -> None:
    before, after = on_cards(tables, model, 2)
    for name in ("embedding", "layernorm", "final_layernorm"):
        assert after.dense[name].equals(before.dense[name])
    assert after.per_sequence["sampler"].equals(before.per_sequence["sampler"])


def test_repeated_kv_heads_are_read_whole(tables: Path, model: Path) -> None:
    """Four cards, two KV heads: attention halves, qkv goes from 4 + 2 x 2 heads to 1 + 2 x 1."""
    before, after = on_cards(tables, model, 4)
    full, part = (t.attention["time_us"].max() - t.attention["time_us"].min() for t in (before, after))
    assert part == pytest.approx(full / 2)
    full, part = (t.dense["qkv_proj"]["time_us"].max() - LAUNCH_US for t in (before, after))
    assert part == pytest.approx(full * 3 / 8)
    full, part = (t.dense["o_proj"]["time_us"].max() - LAUNCH_US for t in (before, after))
    assert part == pytest.approx(full / 4)


def test_tables_of_two_cards_shrink_by_half_for_four(tables: Path, model: Path) -> None:
    before, after = on_cards(tables, model, 4, measured=2)
    full, part = (t.dense["o_proj"]["time_us"].max() - LAUNCH_US for t in (before, after))
    assert part == pytest.approx(full / 2)


def test_a_step_of_two_cards_is_shorter_kernels_and_all_reduces(tables: Path, model: Path) -> None:
    """Two a layer: 4 tokens x 512 bytes over 450 GB/s at 85 %, and 6 us; every step is outside what was measured."""
    profile = load_profile(tables)
    parallel = TensorParallel(read_model_shape(model), 2, 1, find_card("h100"))
    step = decoding(4)
    one, two = profile.step_model(4).parts(step), profile.step_model(4, parallel=parallel)
    shared = LAUNCH_US + (dense_us(4) - LAUNCH_US) / 2
    assert two.parts(step).dense == pytest.approx(4 * (6 * shared + 2 * dense_us(4)) + 2 * (2 + 4 / 100))
    assert two.parts(step).all_reduce == pytest.approx(4 * 2 * (4 * 512 / (450e9 * 0.85) + 6e-6) * 1e6)
    assert one.all_reduce == 0
    parts = two.parts(step)
    total_us = parts.dense + parts.attention + parts.skew + parts.head + parts.all_reduce
    assert two.durations_ns(step) == pytest.approx(1e3 * total_us, abs=1)
    assert two.outside(step).tolist() == [True]
    assert profile.step_model(4).outside(step).tolist() == [False]
    empty = StepFeatures.of([StepShape(*[0] * len(StepShape._fields))])
    assert two.durations_ns(empty).tolist() == [0]


def test_padding_is_exchanged_too(tables: Path, model: Path) -> None:
    parallel = TensorParallel(read_model_shape(model), 2, 1, find_card("h100"))
    times = load_profile(tables).times()
    plain = KernelStepModel(times, 4, all_reduces=parallel.all_reduces())
    padded = replace(plain, capture_sizes=(64,))
    assert padded.parts(decoding(3)).all_reduce == plain.parts(decoding(64)).all_reduce


@pytest.mark.parametrize(
    ("meta", "cards"),
    [
        ({}, 1),
        ({"tp_degrees": "[1, 2]"}, 1),
        ({"tp_degrees": "[2]"}, 2),
        ({"tensor_parallel_size": 4, "tp_degrees": "[1, 4]"}, 4),
    ],
)
def test_tables_say_of_how_many_cards_they_are(tables: Path, meta: dict[str, Any], cards: int) -> None:
    measured_on(tables, "H100", **meta)
    assert load_profile(tables).measured_cards == cards


def test_a_number_of_cards_that_is_none_is_refused(tables: Path) -> None:
    measured_on(tables, "H100", tensor_parallel_size="two")
    with pytest.raises(TableError, match=r"meta.yaml: tensor_parallel_size 'two' must be a whole number"):
        read_tables(tables)


# ---------------------------------------------------------------- several cards: commands


def test_a_run_on_two_cards_is_an_estimate(simulate: Command, tables: Path, tmp_path: Path) -> None:
    """By the flag and inside a pasted command line alike: the note says so, and every step is marked."""
    measured_on(tables, "NVIDIA H100 80GB HBM3")
    one, two, pasted = (tmp_path / name for name in ("one", "two", "pasted"))
    assert simulate("--out", one)[0] == 0
    code, out, _ = simulate("--tensor-parallel-size", 2, "--out", two, "--json")
    assert code == 0
    summary = json.loads(out)["servetwin"]
    assert "estimate: of 2 cards nothing was measured" in summary["notes"][0]
    assert "link of a H100-SXM (450 GB/s x 0.85, 6 us)" in summary["notes"][0]
    steps = read_run(two).steps.query("rows > 0")
    assert steps.predicted_outside.all()
    assert summary["predicted_outside_steps"] == len(steps)
    assert not read_run(one).steps.predicted_outside.any()
    assert read_run(two).summary["busy_time_s"] < read_run(one).summary["busy_time_s"]
    args = "serve --dtype bfloat16 -tp 2 --enforce-eager --kv-cache-dtype fp8"
    code, _, err = simulate("--vllm-args", args, "--out", pasted)
    assert code == 0, err
    assert "--dtype, --kv-cache-dtype" in err
    assert differences(read_run(two), read_run(pasted)) == []


def test_the_card_of_the_link_is_named_where_the_tables_do_not(simulate: Command) -> None:
    code, _, err = simulate("--tensor-parallel-size", 2)
    assert code == 2
    assert "its card 'made up' is not known: give --gpu, one of A100-40GB" in err
    assert err.count("\n") == 1

    def busy_s(gpu: str) -> float:
        code, out, _ = simulate("--tensor-parallel-size", 2, "--gpu", gpu, "--json")
        assert code == 0
        found: float = json.loads(out)["busy_time_s"]
        return found

    assert busy_s("h100") < busy_s("rtx4090")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--tensor-parallel-size", 3, "--gpu", "h100"],
            "--tensor-parallel-size: tensor_parallel_size 3 does not",
        ),
        (["--tensor-parallel-size", 0], "--tensor-parallel-size 0: must be 1 or more"),
        (["--tensor-parallel-size", 2, "--gpu", "h1000"], "--gpu 'h1000' is not known; allowed: A100-40GB"),
        (["--gpu", "h100"], "--gpu h100 has no effect with a profile on one card"),
    ],
)
def test_cards_that_cannot_be_are_refused(simulate: Command, arguments: list[object], message: str) -> None:
    code, _, err = simulate(*arguments)
    assert code == 2
    assert message in err


def test_tables_of_two_cards_need_two(simulate: Command, tables: Path) -> None:
    measured_on(tables, "H100", tensor_parallel_size=2)
    code, _, err = simulate()
    assert code == 2
    assert "--tensor-parallel-size 1: must be 2 or more, as the profile was measured" in err
    code, out, _ = simulate("--tensor-parallel-size", 2, "--json")
    assert code == 0
    assert "estimate: what 2 cards exchange was not measured" in json.loads(out)["servetwin"]["notes"][0]


def test_a_run_on_two_cards_is_its_own_twin(
    command: Command, simulate: Command, tables: Path, model: Path, tmp_path: Path
) -> None:
    """`validate` takes the number of cards from the run, and says what it could not measure."""
    measured_on(tables, "H100")
    out = tmp_path / "measured"
    assert simulate("--tensor-parallel-size", 2, "--out", out)[0] == 0

    def compared(*more: object) -> tuple[int, str, str]:
        flags = ("--profile", tables, "--model", model, "--noise-runs", 0, "--json")
        return command("validate", out, *flags, *more)

    code, text, _ = compared()
    assert code == 0
    found = json.loads(text)
    assert found["metrics"]["tpot"]["error_percent"]["mean"] == pytest.approx(0, abs=1e-6)
    assert found["steps_outside_measured_region"] == read_run(out).steps.predicted_outside.sum()
    assert any("estimate: of 2 cards" in line for line in found["assumed"])
    assert json.loads(compared("--gpu", "rtx4090")[1])["metrics"]["tpot"]["error_percent"]["mean"] > 0
    code, _, err = compared("--tensor-parallel-size", 4)
    assert code == 2
    assert "--tensor-parallel-size 4: the run was measured with 2" in err


# ---------------------------------------------------------------- CUDA graphs


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((3, 2048), (1, 2, 4)),
        ((20, 2048), (1, 2, 4, 8, 16, 24, 32, 40)),
        ((256, 2048), (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))),
        ((256, 30), (1, 2, 4, 8, 16, 24)),
        ((4, 2048, None, 20), (1, 2, 4, 8, 16)),
        ((4, 2048, [64, 5, 5, 4096]), (5, 64)),
    ],
)
def test_sizes_follow_the_rule_of_vllm(arguments: tuple[Any, ...], expected: tuple[int, ...]) -> None:
    assert cuda_graph_sizes(*arguments) == expected


def test_no_step_of_a_profile_is_padded_unless_asked_for(simulate: Command, tmp_path: Path) -> None:
    """steps/ says at which size a step ran; --enforce-eager is what holds anyway."""
    plain, eager, padded, default = (tmp_path / name for name in ("plain", "eager", "padded", "default"))
    assert simulate("--out", plain)[0] == 0
    assert simulate("--enforce-eager", "--out", eager)[0] == 0
    assert simulate("--cudagraph-capture-sizes", 100, 4, "--out", padded)[0] == 0
    assert simulate("--max-cudagraph-capture-size", 24, "--out", default)[0] == 0
    assert read_run(plain).steps.graph_tokens.isna().all()
    assert differences(read_run(plain), read_run(eager)) == []
    steps = read_run(padded).steps
    tokens, sizes = steps.prefill_tokens + steps.decode_tokens, steps.graph_tokens
    for least, most, size in ((1, 4, 4), (5, 100, 100)):
        assert set(sizes[tokens.between(least, most)]) == {size}
    assert sizes[~tokens.between(1, 100)].isna().all()
    assert set(read_run(default).steps.graph_tokens.dropna()) <= {1, 2, 4, 8, 16, 24}
    busy_s = [read_run(out).summary["busy_time_s"] for out in (plain, padded)]
    assert busy_s[0] < busy_s[1]
    assert json.loads((padded / "run.json").read_text())["executor"]["cudagraph_capture_sizes"] == [4, 100]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cudagraph-capture-sizes", 0], "cudagraph_capture_sizes.0 0: "),
        (["--cudagraph-capture-sizes", 4, "--enforce-eager"], "enforce_eager captures nothing"),
        (
            ["--cudagraph-capture-sizes", 4096],
            "-sizes: none is at most max_num_batched_tokens, 2048",
        ),
        (["--cudagraph-capture-sizes", 4, "--max-cudagraph-capture-size", 8], "is not the largest of"),
    ],
)
def test_sizes_that_cannot_be_are_refused(simulate: Command, arguments: list[object], message: str) -> None:
    code, _, err = simulate(*arguments)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1


def test_validate_pads_as_run_does(
    command: Command, simulate: Command, tables: Path, model: Path, tmp_path: Path
) -> None:
    out, sizes = tmp_path / "measured", ("--cudagraph-capture-sizes", 128)
    assert simulate(*sizes, "--out", out)[0] == 0

    def error(*more: object) -> float:
        flags = ("--profile", tables, "--model", model, "--noise-runs", 0, "--json", "--max-tpot-error", 99)
        found: float = json.loads(command("validate", out, *flags, *more)[1])["metrics"]["tpot"][
            "error_percent"
        ]["mean"]
        return found

    assert error(*sizes) == pytest.approx(0, abs=1e-6)
    assert error() < -1
