"""`servetwin kv`: what fits on a card or into given bytes, told in vLLM's words; exit 3 where it does not fit."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from servetwin.sim.cards import GIB, find_card
from servetwin.sim.cli import run
from servetwin.sim.length_mix import mean_holding
from servetwin.sim.model_shape_reader import read_model_shape

LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "torch_dtype": "bfloat16",
    "max_position_embeddings": 131072, "tie_word_embeddings": False,
}  # fmt: skip
GIVEN_40_GIB = ["--kv-cache-memory-bytes", str(40 * GIB), "--max-model-len", "8192"]

Kv = Callable[..., dict[str, Any]]


@pytest.fixture
def model(tmp_path: Path) -> Callable[..., str]:
    """Writes the 8B Llama shape with changes, a config.json alone, and returns the folder."""

    def write(**change: Any) -> str:
        (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B | change))
        return str(tmp_path)

    return write


@pytest.fixture
def kv(model: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> Kv:
    """Runs the command with --json and returns the object."""

    def call(*arguments: str, **change: Any) -> dict[str, Any]:
        assert run(["kv", "--model", model(**change), "--json", *arguments]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return call


def refused(capsys: pytest.CaptureFixture[str], code: int, *arguments: str) -> str:
    assert run(["kv", *arguments]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


# ---------------------------------------------------------------- given bytes


def test_case_71(kv: Kv) -> None:
    """40 GiB at 131,072 bytes a token: 20,480 blocks of 16, 327,680 tokens, 40 requests of 8,192."""
    found = kv(*GIVEN_40_GIB)
    assert found["kv_bytes_per_token"] == 131_072
    assert found["num_gpu_blocks"] == 20_480
    assert found["num_tokens"] == 327_680
    assert found["max_concurrency"] == 40.0


def test_fp8_doubles_what_fits(kv: Kv) -> None:
    found = kv(*GIVEN_40_GIB, "--kv-cache-dtype", "fp8")
    assert (found["kv_bytes_per_token"], found["num_gpu_blocks"], found["max_concurrency"]) == (
        65_536,
        40_960,
        80.0,
    )


def test_a_request_takes_whole_blocks(kv: Kv) -> None:
    """8,200 tokens are 513 blocks; tokens are concurrency x max_model_len, as vLLM prints them."""
    found = kv("--kv-cache-memory-bytes", str(40 * GIB), "--max-model-len", "8200")
    assert found["max_concurrency"] == 20_480 / 513
    assert found["num_tokens"] == 20_480 * 8_200 // 513


def test_latent_attention_keeps_one_latent_for_all_heads(kv: Kv) -> None:
    """DeepSeek's attention in this shape: 32 layers x (512 + 64) x 2 bytes, on every card."""
    latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    found = kv(*GIVEN_40_GIB, "--tensor-parallel-size", "8", **latent)
    assert found["kv_bytes_per_token"] == 36_864
    assert found["num_gpu_blocks"] == 40 * GIB // (36_864 * 16)
    assert "512 latent + 64 rotary values" in found["kv_formula"]


def test_windowed_layers_are_counted_in_full_and_vllms_manager_beside(kv: Kv) -> None:
    """Half the layers with a window of 1,024: 16 full layers and 16 windowed ones are two groups of 16.

    A block of a group is 16 tokens x 16 layers x 4,096 bytes = 1 MiB: 40,960 blocks; a request of 8,192 takes 512 of
    the full group and ceil((1,023 + 2,048) / 16) + 1 = 193 of the windowed one.
    """
    kinds = ["sliding_attention", "full_attention"] * 16
    found = kv(*GIVEN_40_GIB, sliding_window=1024, layer_types=kinds)
    assert (found["num_gpu_blocks"], found["max_concurrency"]) == (20_480, 40.0)
    hybrid = found["hybrid_kv_cache_manager"]
    assert (hybrid["num_gpu_blocks"], hybrid["max_concurrency"]) == (40_960, 40_960 / (512 + 193))
    assert any("hybrid KV cache manager" in note for note in found["notes"])
    narrow = kv(*GIVEN_40_GIB, "--max-num-batched-tokens", "512", sliding_window=1024, layer_types=kinds)
    assert narrow["hybrid_kv_cache_manager"]["max_concurrency"] == 40_960 / (512 + 97)


def test_unequal_kinds_of_layers_are_cut_to_the_smaller(kv: Kv) -> None:
    """28 windowed and 4 full layers: groups of 4, seven windowed and one full."""
    kinds = (["sliding_attention"] * 7 + ["full_attention"]) * 4
    hybrid = kv(*GIVEN_40_GIB, sliding_window=1024, layer_types=kinds)["hybrid_kv_cache_manager"]
    assert hybrid["num_gpu_blocks"] == 40 * GIB // (4_096 * 16 * 4)
    assert hybrid["max_concurrency"] == hybrid["num_gpu_blocks"] / (512 + 7 * 193)


# ---------------------------------------------------------------- a card


def test_a_cards_memory_less_weights_and_reserve(kv: Kv) -> None:
    """0.92 of the card, less the weights, less the reserve that is called an estimate; all in bytes."""
    found = kv("--gpu", "h100", "--max-model-len", "8192")
    reserve = found["reserve"]
    kept = reserve["activation_bytes"] + reserve["cuda_graph_bytes"] + reserve["outside_torch_bytes"]
    assert reserve["estimate"] is True
    assert found["weight_bytes"] == 16_059_990_016
    assert found["kv_cache_bytes"] == int(0.92 * find_card("h100").memory_bytes) - 16_059_990_016 - kept
    assert found["num_gpu_blocks"] == found["kv_cache_bytes"] // (131_072 * 16)


def test_the_rule_meets_a_measured_pool(kv: Kv) -> None:
    """vLLM 0.19 found 2,588 blocks on an RTX 4090 with 0.9 of the memory, 256 seats and 2,048 tokens (no graphs)."""
    found = kv(
        "--gpu", "rtx4090", "--gpu-memory-utilization", "0.9", "--enforce-eager", "--max-model-len", "32768"
    )
    assert found["num_gpu_blocks"] == pytest.approx(2_588, rel=0.02)


def test_cards_share_weights_and_heads(kv: Kv) -> None:
    one, two = (kv("--gpu", "h100", "--max-model-len", "8192", "--tensor-parallel-size", n) for n in "12")
    assert two["weight_bytes"] * 2 == one["weight_bytes"]
    assert two["kv_bytes_per_token"] * 2 == one["kv_bytes_per_token"]
    assert two["num_gpu_blocks"] > 2 * one["num_gpu_blocks"]


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--enforce-eager"], "cuda_graph_bytes"),
        (["--max-num-seqs", "64"], "activation_bytes"),
    ],
)
def test_what_makes_the_reserve_smaller(kv: Kv, flags: list[str], part: str) -> None:
    base = ["--gpu", "h100", "--max-model-len", "8192"]
    assert kv(*base, *flags)["reserve"][part] < kv(*base)["reserve"][part]


def test_more_tokens_a_step_take_more_room(kv: Kv) -> None:
    base = ["--gpu", "h100", "--max-model-len", "8192", "--max-num-seqs", "64"]
    few, many = (kv(*base, "--max-num-batched-tokens", n)["num_gpu_blocks"] for n in ("8192", "65536"))
    assert many < few


def test_a_float32_checkpoint_runs_in_bfloat16(kv: Kv) -> None:
    """As vLLM's --dtype auto; float32 on demand."""
    assert kv(*GIVEN_40_GIB, torch_dtype="float32")["kv_bytes_per_token"] == 131_072
    assert kv(*GIVEN_40_GIB, "--dtype", "float32", torch_dtype="float32")["kv_bytes_per_token"] == 262_144


def test_a_model_without_positions_takes_the_length_given(kv: Kv) -> None:
    """BLOOM and its like have no limit of their own."""
    assert kv(*GIVEN_40_GIB, max_position_embeddings=None)["max_model_len"] == 8192


# ---------------------------------------------------------------- a mix of lengths


def test_mean_holding_is_the_sum_over_the_life() -> None:
    """Closed form against counting, step by step; longer outputs are found running more often."""
    lengths = [(5, 1), (16, 17), (33, 50)]
    held = [p + k for p, o in lengths for k in range(o)]
    found = mean_holding(lengths, 16)
    assert found.tokens == sum(held) / len(held)
    assert found.blocks == sum(-(-t // 16) for t in held) / len(held)
    assert found.requests == 3


def test_the_concurrency_of_a_mix(kv: Kv) -> None:
    """A prompt of 1,000 and 1 output hold 63 blocks: (20,480 - 1) / 63 requests, at most the seats."""
    lengths = ["--prompt-tokens", "1000", "--output-tokens", "1"]
    mix = kv(*GIVEN_40_GIB, *lengths, "--max-num-seqs", "1024")["length_mix"]
    assert mix["expected_concurrency"] == 20_479 / 63
    seats = kv(*GIVEN_40_GIB, *lengths)["length_mix"]
    assert seats["expected_concurrency"] == 256.0
    assert seats["kv_concurrency"] == 20_479 / 63


def test_the_lengths_of_a_workload(kv: Kv, tmp_path: Path) -> None:
    """Requests that cannot run are left out, outputs end at max_model_len."""
    rows = [(1000, 100), (8192, 5), (8000, 1000)]
    trace = tmp_path / "mix.jsonl"
    trace.write_text(
        "".join(
            json.dumps({"request_id": str(i), "arrival_s": 0, "prompt_tokens": p, "output_tokens": o}) + "\n"
            for i, (p, o) in enumerate(rows)
        )
    )
    mix = kv(*GIVEN_40_GIB, "--workload", str(trace))["length_mix"]
    assert mix["requests"] == 2
    assert mix["mean_blocks_held"] == mean_holding([(1000, 100), (8000, 192)], 16).blocks


# ---------------------------------------------------------------- for people


def test_the_lines_people_quote(model: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run(["kv", "--model", model(), *GIVEN_40_GIB, "--prompt-tokens", "1000", "--output-tokens", "1"]) == 0
    )
    out = capsys.readouterr().out
    for line in (
        "Available KV cache memory: 40.00 GiB",
        "GPU KV cache size: 327,680 tokens",
        "Maximum concurrency for 8,192 tokens per request: 40.00x",
        "2 (K and V) x 32 layers x 8 KV heads x 128 x 2 bytes = 131,072 bytes",
        "Expected concurrency for this length mix: 256.0 requests (limited by max_num_seqs 256)",
    ):
        assert line in out
    assert "GB" not in out.replace("GiB", "")


def test_the_reserve_is_called_an_estimate(
    model: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["kv", "--model", model(), "--gpu", "h100", "--max-model-len", "8192"]) == 0
    out = capsys.readouterr().out
    assert "estimate: activations" in out
    assert "note: the reserve is an estimate" in out


def test_it_starts_without_tables_and_science(model: Callable[..., str]) -> None:
    """No torch, pandas, scipy, numpy or pydantic: the answer is there at once."""
    code = (
        "import sys\nfrom servetwin.sim.cli import run\n"
        f"assert run(['kv', '--model', {model()!r}, '--gpu', 'h100', '--max-model-len', '8192', '--json']) == 0\n"
        "print(sorted({'torch', 'pandas', 'scipy', 'numpy', 'pyarrow', 'pydantic'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


# ---------------------------------------------------------------- what does not fit, and what is refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kv-cache-memory-bytes", "10G", "--max-model-len", "100000"], "needs 6,250 blocks (12.21 GiB"),
        (["--gpu", "rtx4090", "--dtype", "float32"], "nothing is left for the KV cache"),
        (["--gpu", "rtx4090"], "lower --max-model-len to at most"),
    ],
)
def test_exit_3_when_it_does_not_fit(
    model: Callable[..., str], capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert message in refused(capsys, 3, "--model", model(), *arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give one of --gpu NAME and --kv-cache-memory-bytes N"),
        (["--gpu", "h100", "--kv-cache-memory-bytes", "1G"], "give one of --gpu NAME"),
        (["--gpu", "h1000"], "--gpu 'h1000' is not known; allowed: A100-40GB"),
        (
            ["--gpu", "h100", "--max-model-len", "200000"],
            "--max-model-len: max_model_len 200000 is above the 131072",
        ),
        (["--gpu", "h100", "--block-size", "0"], "--block-size 0 must be 1 or more"),
        (
            ["--gpu", "h100", "--tensor-parallel-size", "3"],
            "--tensor-parallel-size: tensor_parallel_size 3 does not",
        ),
        (
            ["--gpu", "h100", "--gpu-memory-utilization", "1.5"],
            "--gpu-memory-utilization 1.5 must be above 0",
        ),
        (["--gpu", "h100", "--prompt-tokens", "5"], "--prompt-tokens and --output-tokens go together"),
        (["--gpu", "h100", "--prompt-tokens", "200000", "--output-tokens", "5"], "no prompt is shorter than"),
        (["--kv-cache-memory-bytes", "40G", "--enforce-eager"], "--enforce-eager has no effect"),
        (["--kv-cache-memory-bytes", "40G", "--max-num-seqs", "5"], "--max-num-seqs has no effect"),
        (["--gpu", "h100", "--kv-cache-dtype", "fp3"], "fp3"),
    ],
)
def test_wrong_input_exits_2(
    model: Callable[..., str], capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert message in refused(capsys, 2, "--model", model(), *arguments)


def test_an_architecture_that_cannot_be_counted_exits_2(
    model: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert "mamba_d_state" in refused(capsys, 2, "--model", model(mamba_d_state=16), "--gpu", "h100")


def test_a_missing_folder_exits_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "No such file" in refused(capsys, 2, "--model", str(tmp_path / "none"), "--gpu", "h100")


def test_the_shape_of_the_examples_is_read() -> None:
    """The shipped configuration: 8 layers of 2 KV heads of 40 in float32."""
    example = Path(__file__).resolve().parent.parent / "examples" / "llama-10m"
    assert read_model_shape(example).num_kv_heads == 2
