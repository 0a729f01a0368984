"""The roofline step model: its parts by hand, its errors against measured runs, and `--executor roofline`."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servetwin.sim.cards import Card, find_card
from servetwin.sim.cli import run
from servetwin.sim.model_shape import Experts, LatentAttention, ModelShape
from servetwin.sim.quantization import Quantization
from servetwin.sim.runs import read_run
from servetwin.sim.steptime.features import StepFeatures, shape_of
from servetwin.sim.steptime.plan_rows import PlanRow
from servetwin.sim.steptime.roofline import Efficiencies, RooflineStepModel

SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "roofline_h100.py"
CONFIG = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "torch_dtype": "bfloat16",
    "max_position_embeddings": 8192, "tie_word_embeddings": False,
}  # fmt: skip
SHAPE = ModelShape(
    name="llama-8b",
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14336,
    vocab_size=128256,
)
IDEAL = Efficiencies(
    matmul=1,
    fp8_matmul=1,
    attention=1,
    memory=1,
    kv_memory=1,
    link=1,
    kernel_s=0,
    all_reduce_s=0,
    host_s=0,
    host_row_s=0,
)
CARD = Card("ideal", 1e15, 2e15, 1e12, 80 * 2**30, 100e9)
"""Round figures: 1,000 TFLOP/s, 1 TB/s, a link of 100 GB/s."""
LINEAR = SHAPE.dense_parameters
HEAD = SHAPE.head_parameters


def features(**values: int) -> StepFeatures:
    """One step; what is not named is 0."""
    return StepFeatures(**{f.name: np.array([values.get(f.name, 0)]) for f in fields(StepFeatures)})


def decode(rows: int, context: int) -> StepFeatures:
    return features(
        new_tokens=rows,
        rows=rows,
        logits_rows=rows,
        decode_rows=rows,
        decode_context_tokens=rows * context,
        decode_context_max_tokens=context,
    )


def chunk(tokens: int, cached: int = 0) -> StepFeatures:
    """A piece of a prompt that does not end it: no logits."""
    return features(
        new_tokens=tokens,
        rows=1,
        prefill_tokens=tokens,
        prefill_rows=1,
        prefill_pairs=tokens * (cached + tokens),
        prefill_context_tokens=cached + tokens,
    )


def seconds(
    step: StepFeatures, shape: ModelShape = SHAPE, *, cards: int = 1, e: Efficiencies = IDEAL
) -> float:
    model = RooflineStepModel(shape, CARD, tensor_parallel_size=cards, efficiencies=e)
    return float(model.durations_ns(step)[0]) / 1e9


def activations_s(tokens: int) -> float:
    """Norms, residuals and activation functions, in bytes over 1 TB/s."""
    return tokens * 32 * (8 * 4096 + 3 * 14336) * 2 / 1e12


# ---------------------------------------------------------------- the parts, by hand


def test_decoding_reads_weights_and_keys_and_values() -> None:
    """Eight rows are far below the ridge: 2 bytes a weight, 131,072 bytes a token of context, over 1 TB/s."""
    sampler = 8 * 128256 * 16
    moved = 2 * LINEAR + 2 * HEAD + 8 * 1000 * 131_072 + sampler
    assert seconds(decode(8, 1000)) == pytest.approx(moved / 1e12 + activations_s(8), rel=1e-6)


def test_a_large_chunk_is_bound_by_arithmetic() -> None:
    """2 FLOP a weight and token, 4 x head size a pair and head, half of the square; the head is not run."""
    flops = 2 * 8192 * LINEAR + 32 * 4 * 32 * 128 * 8192**2 / 2
    assert seconds(chunk(8192)) == pytest.approx(flops / 1e15 + activations_s(8192), rel=1e-6)


def test_a_later_chunk_also_multiplies_with_what_is_cached() -> None:
    pairs = 512 * (4096 + 512) - 512**2 / 2
    more = seconds(chunk(512, 4096)) - seconds(chunk(512))
    assert more == pytest.approx(32 * 4 * 32 * 128 * (pairs - 512**2 / 2) / 1e15, rel=1e-6)


def test_fp8_checkpoints_read_half_and_multiply_twice_as_fast() -> None:
    fp8 = replace(SHAPE, quantization=Quantization("fp8", 8, fp8_matmul=True))
    assert seconds(decode(1, 1)) - seconds(decode(1, 1), fp8) == pytest.approx(LINEAR / 1e12, rel=1e-5)
    assert seconds(chunk(8192)) - seconds(chunk(8192), fp8) == pytest.approx(8192 * LINEAR / 1e15, rel=1e-5)


def test_four_bit_weights_multiply_at_16_bits() -> None:
    four = replace(SHAPE, quantization=Quantization("awq", 4))
    assert seconds(chunk(8192), four) == seconds(chunk(8192))
    assert seconds(decode(1, 1), four) < seconds(decode(1, 1))


def test_an_fp8_cache_halves_the_reading_of_it() -> None:
    bf16, fp8 = (
        RooflineStepModel(SHAPE, CARD, kv_cache_dtype=t, efficiencies=IDEAL).durations_ns(decode(8, 4000))[0]
        for t in ("auto", "fp8")
    )
    assert bf16 - fp8 == pytest.approx(8 * 4000 * 65_536 / 1e3, rel=1e-5)


def test_experts_are_read_as_tokens_choose_them() -> None:
    """One token reads 8 of 128 experts; 64 tokens nearly all: 1 - (1 - 1 / 16)^64 of them."""
    moe = replace(SHAPE, experts=Experts(count=128, per_token=8, intermediate_size=768, num_layers=32))
    one = 2 * moe.expert_parameters / 16
    many = 2 * moe.expert_parameters * (1 - (15 / 16) ** 64)
    read = {n: seconds(features(new_tokens=n), moe) for n in (1, 64)}
    activation = 63 * 32 * (8 * 4096 + 3 * 8 * 768) * 2 / 1e12
    assert read[64] - read[1] == pytest.approx((many - one) / 1e12 + activation, rel=1e-5)


def test_a_window_cuts_what_is_read() -> None:
    """Half the layers see 1,000 of 4,000 tokens: five eighths of the bytes."""
    windowed = replace(SHAPE, num_windowed_layers=16, window_tokens=1000)
    full, cut = (seconds(decode(8, 4000), s) - seconds(decode(8, 0), s) for s in (SHAPE, windowed))
    assert cut == pytest.approx(full * 5 / 8, rel=1e-5)


def test_latent_attention_reads_the_latent() -> None:
    latent = replace(SHAPE, latent=LatentAttention(512, 64, 128, 128))
    read = seconds(decode(8, 4000), latent) - seconds(decode(8, 0), latent)
    assert read == pytest.approx(8 * 4000 * 32 * 576 * 2 / 1e12, rel=1e-5)
    assert seconds(chunk(4096), latent) > 0


def test_cards_share_the_work_and_exchange_it() -> None:
    """Two all-reduces a layer, a ring over 100 GB/s; latency once for two cards, twice for four."""
    sent = 64 * 8192 * 4096 * 2
    two = seconds(chunk(8192), cards=2)
    alone = 2 * 8192 * LINEAR + 32 * 4 * 32 * 128 * 8192**2 / 2
    local = 8192 * 32 * (8 * 4096 + 3 * 14336 / 2) * 2 / 1e12
    assert two == pytest.approx(alone / 2e15 + local + sent * 1.0 / 100e9, rel=1e-6)
    slow = replace(IDEAL, all_reduce_s=1e-3)
    for cards, times in ((2, 1), (4, 2), (8, 3)):
        gap = seconds(decode(1, 1), cards=cards, e=slow) - seconds(decode(1, 1), cards=cards)
        assert gap == pytest.approx(64e-3 * times)
    with pytest.raises(ValueError, match="does not divide"):
        RooflineStepModel(SHAPE, CARD, tensor_parallel_size=3)


def test_fixed_costs_are_added() -> None:
    fixed = replace(IDEAL, host_s=1e-3, host_row_s=1e-5, kernel_s=1e-6, kernels_per_layer=10)
    assert seconds(decode(8, 1), e=fixed) - seconds(decode(8, 1)) == pytest.approx(1e-3 + 8e-5 + 320e-6)


def test_many_steps_at_once_are_what_each_is_alone() -> None:
    """Vectorised and pure; a step without tokens takes none."""
    steps = [decode(1, 10), features(), chunk(512), decode(200, 3000), chunk(8, 8000)]
    model = RooflineStepModel(SHAPE, find_card("h100"))
    together = StepFeatures(
        **{f.name: np.concatenate([getattr(s, f.name) for s in steps]) for f in fields(StepFeatures)}
    )
    found = model.durations_ns(together)
    assert found.dtype == np.int64
    assert list(found) == [int(model.durations_ns(s)[0]) for s in steps]
    assert found[1] == 0
    assert (np.delete(found, 1) > 0).all()


SHAPES = {
    "dense": SHAPE,
    "experts": replace(SHAPE, experts=Experts(count=128, per_token=8, intermediate_size=768, num_layers=32)),
    "windowed": replace(SHAPE, num_windowed_layers=16, window_tokens=1000),
    "latent": replace(SHAPE, latent=LatentAttention(512, 64, 128, 128)),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@given(
    rows=st.integers(1, 300),
    context=st.integers(1, 10**6),
    new=st.integers(0, 9000),
    cards=st.sampled_from([1, 8]),
)
def test_one_step_as_numbers_is_to_the_ns_what_it_is_as_arrays(
    shape: ModelShape, rows: int, context: int, new: int, cards: int
) -> None:
    """And so are the steps of a leap, which are computed from what they have in common."""
    model = RooflineStepModel(shape, find_card("h100"), tensor_parallel_size=cards)
    step = shape_of([PlanRow("p", new, 7, new + 20, 0)] if new else [], 1, decode_rows=rows,
                    decode_context_tokens=context, decode_context_max_tokens=context)  # fmt: skip
    assert model.duration_ns(step) == int(model.durations_ns(StepFeatures.of([step]))[0])
    decodes = shape_of((), decode_rows=rows, decode_context_tokens=context)
    expected = model.durations_ns(StepFeatures.growing(decodes, 20))
    assert model.decode_durations_ns(decodes, 20).tolist() == expected.tolist()


def test_more_work_takes_longer_on_every_card() -> None:
    for name in ("a100", "h100", "mi300x", "rtx4090"):
        model = RooflineStepModel(SHAPE, find_card(name))
        times = [
            int(model.durations_ns(s)[0])
            for s in (decode(1, 10), decode(8, 10), decode(8, 9000), chunk(8192))
        ]
        assert times == sorted(times)
        assert len(set(times)) == 4


# ---------------------------------------------------------------- against measured runs


def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("roofline_h100", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_short_measured_runs_are_met(shared_data: Path) -> None:
    """Qwen3-32B on 2, 4 and 8 H100, 1,024 + 128 tokens, 8 to 128 in flight: within the targets (20 and 35 %)."""
    script = benchmark()
    table = script.read_rows(shared_data / "profiles" / "vllm_measured_h100.csv")
    rows = [r for r in table if (r.isl, r.osl) == (1024, 128)]
    *by_tp, _ = script.groups([script.predict(row) for row in rows])
    assert [group["tp"] for group in by_tp] == ["2", "4", "8"]
    for group in by_tp:
        assert group["rows"] == 5
        assert group["tpot_mape_percent"] <= 20
        assert group["ttft_mape_percent"] <= 35


@pytest.mark.full
@pytest.mark.parametrize(
    ("card", "arguments"),
    [("rtx4090", ["--num-gpu-blocks-override", "2588"]), ("rtxpro6000", ["--max-num-seqs", "128"])],
)
def test_cards_that_nobody_looked_at_are_met(
    card: str, arguments: list[str], shared_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs of vLLM 0.19 with Llama-3.1-8B on two other cards, saturated: mean TPOT within 20 %, TTFT within 35 %."""
    measured = shared_data / "traces" / "llmservingsim_vllm" / f"{card}_llama-3.1-8b" / "requests.jsonl"
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"max_position_embeddings": 32768}))
    engine = [
        "--executor",
        "roofline",
        "--gpu",
        card,
        "--model",
        str(tmp_path),
        "--max-num-batched-tokens",
        "2048",
    ]
    seats = [] if "--max-num-seqs" in arguments else ["--max-num-seqs", "256"]
    assert run(["run", str(measured), *engine, *arguments, *seats, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    rows = [json.loads(line) for line in measured.read_text().splitlines()]
    ttft_s = np.mean([r["first_token_ts"] - r["queued_ts"] for r in rows])
    tpot_s = np.mean([(r["last_token_ts"] - r["first_token_ts"]) / (r["output_toks"] - 1) for r in rows])
    assert summary["mean_tpot_ms"] == pytest.approx(1e3 * tpot_s, rel=0.20)
    assert summary["mean_ttft_ms"] == pytest.approx(1e3 * ttft_s, rel=0.35)


# ---------------------------------------------------------------- --executor roofline

Roofline = Callable[..., list[str]]


@pytest.fixture
def command(tmp_path: Path) -> Roofline:
    """A command line of `run` with the roofline, a config.json alone and eight small requests."""
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text(json.dumps(CONFIG))
    rows = [
        {"request_id": f"q{i}", "arrival_s": 0.0, "prompt_tokens": 500, "output_tokens": 20} for i in range(8)
    ]
    (tmp_path / "w.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    base = ["run", str(tmp_path / "w.jsonl"), "--executor", "roofline", "--model", str(tmp_path / "llama")]

    def line(*arguments: str) -> list[str]:
        return [*base, *arguments]

    return line


def test_every_output_says_estimate(
    command: Roofline, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Summary, run.json, the table and the log; the pool is that of `kv`, the limits are vLLM's on the card."""
    out = tmp_path / "out"
    assert run(command("--gpu", "h100", "--out", str(out))) == 0
    shown = capsys.readouterr()
    assert "note: estimate: step times are a roofline of H100-SXM" in shown.out.replace("\n", " ")
    assert "note: estimate" in shown.err
    assert "1,024 seats, 8,192 tokens per step" in shown.err
    log = read_run(out)
    assert "estimate" in log.summary["servetwin"]["notes"][0]
    described = json.loads((out / "run.json").read_text())["executor"]
    assert "estimate" in described["note"]
    assert described["efficiencies"]["matmul"] == Efficiencies().matmul
    assert set(log.steps.source) == {"roofline"}
    assert any("num_gpu_blocks" in text and "servetwin kv" in text for text in log.config["assumed"])


def test_the_pool_is_that_of_kv(
    command: Roofline, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def blocks(*arguments: str) -> int:
        out = tmp_path / "out"
        assert run(command("--gpu", "h100", "--out", str(out), "--overwrite", *arguments)) == 0
        found: int = read_run(out).config["engine"]["cache"]["num_gpu_blocks"]
        return found

    assert run(["kv", "--model", str(tmp_path / "llama"), "--gpu", "h100", "--json"]) == 0
    of_kv: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert blocks() == of_kv["num_gpu_blocks"]
    assert blocks("--kv-cache-memory-bytes", "10G") == 5120
    assert blocks("--kv-cache-memory-bytes", "10G", "--kv-cache-dtype", "fp8") == 10240
    assert blocks("--num-gpu-blocks-override", "900") == 900
    assert blocks("--gpu-memory-utilization", "0.5") < blocks("--enforce-eager")


def test_more_cards_are_faster(command: Roofline, tmp_path: Path) -> None:
    """By the flag and inside a pasted command line alike."""

    def busy_s(*arguments: str) -> float:
        out = tmp_path / "out"
        assert run(command("--gpu", "h100", "--out", str(out), "--overwrite", *arguments)) == 0
        found: float = read_run(out).summary["busy_time_s"]
        return found

    assert busy_s("--tensor-parallel-size", "2") < busy_s()
    assert busy_s("--tensor-parallel-size", "2") == busy_s("--vllm-args", "serve -tp 2")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--executor roofline needs --gpu NAME"),
        (["--gpu", "h1000"], "--gpu 'h1000' is not known; allowed: A100-40GB"),
        (["--gpu", "h100", "--step-time-s", "1"], "--step-time-s has no effect with --executor roofline"),
        (["--gpu", "h100", "--compile"], "--compile has no effect with --executor roofline"),
        (["--gpu", "h100", "--load-format", "dummy"], "--load-format has no effect"),
        (["--gpu", "h100", "--temperature", "1"], "have no effect with --executor roofline"),
        (["--gpu", "h100", "--kv-cache-dtype", "fp3"], "--kv-cache-dtype fp3: allowed are auto"),
        (
            ["--gpu", "h100", "--tensor-parallel-size", "3"],
            "--tensor-parallel-size: tensor_parallel_size 3 does not",
        ),
        (["--gpu", "h100", "--tensor-parallel-size", "0"], "--tensor-parallel-size 0 must be 1 or more"),
        (["--gpu", "h100", "--gpu-memory-utilization", "2"], "--gpu-memory-utilization 2.0 must be above 0"),
        (
            ["--gpu", "h100", "--num-gpu-blocks-override", "900", "--gpu-memory-utilization", "0.5"],
            "--gpu-memory-utilization has no effect beside --num-gpu-blocks-override",
        ),
    ],
)
def test_wrong_flags_are_refused(
    command: Roofline, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert run(command(*arguments)) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "flag", [["--gpu", "h100"], ["--tensor-parallel-size", "2"], ["--kv-cache-dtype", "fp8"]]
)
def test_card_flags_go_with_the_roofline_only(flag: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["run", "chat", "--executor", "constant", "--step-time-s", "0.01", *flag]) == 2
    assert f"{flag[0]} goes with --executor roofline" in capsys.readouterr().err


def test_a_model_that_does_not_fit_exits_3(command: Roofline, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command("--gpu", "rtx4090", "--dtype", "float32")) == 3
    assert "nothing is left for the KV cache" in capsys.readouterr().err
