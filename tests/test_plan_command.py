"""`servetwin plan` from the command line and from Python."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from planned import evenly, poisson, write_workload

from servetwin.sim.cli import run
from servetwin.sim.planning import Plan, Study, plan
from servetwin.sim.planning.prices import ANY_CARD
from servetwin.sim.vllm_args import parse_vllm_args

ROOT = Path(__file__).parents[1]
MODEL = str(ROOT / "examples" / "llama-8b")
ENGINE = [
    "--executor", "constant", "--step-time-s", "0.05", "--max-num-seqs", "16", "--no-async-scheduling",
    "--no-enable-prefix-caching",
]  # fmt: skip
KEYS = {"max_request_rate", "replicas", "simulations", "binding", "headroom"}


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_workload(tmp_path_factory.mktemp("w") / "even.jsonl", evenly(300), 64, 20))


def asked(capsys: pytest.CaptureFixture[str], *args: str, code: int = 0) -> dict[str, Any]:
    """What --json prints: one object and nothing else."""
    assert run(["plan", *args, "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def refused(capsys: pytest.CaptureFixture[str], *args: str, code: int = 2) -> str:
    assert run(["plan", *args]) == code
    shown = capsys.readouterr()
    assert shown.out == "" and "Traceback" not in shown.err
    line: str = shown.err.splitlines()[-1]
    assert line.startswith("servetwin: ")
    return line


def test_the_json_of_the_contract(workload: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = asked(capsys, workload, *ENGINE, "--ttft", "120.5", "--price", "2")
    assert found.keys() >= KEYS
    assert found["max_request_rate"] == pytest.approx(16, rel=0.02)
    assert found["replicas"] == 1 and found["binding"] == "seats" and found["feasible"]
    assert 4 < found["simulations"] < 15
    assert 0 <= found["headroom"] < 0.08
    one = found["configurations"][0]
    assert len(one["probes"]) == found["simulations"]
    assert [row["rate"] for row in one["curve"]] == sorted(row["rate"] for row in one["curve"])
    assert {"stable", "overloaded"} <= {row["verdict"] for row in one["curve"]}
    cost = found["cost"]
    # 16 requests of 20 tokens a second from one GPU of 2 USD an hour.
    assert cost["usd_per_million_output_tokens"] == pytest.approx(2 / (320 * 3600) * 1e6, rel=0.03)
    assert cost["gpu_hours_per_million_requests"] == pytest.approx(1e6 / (16 * 3600), rel=0.03)


def test_without_a_price_there_is_no_cost(workload: str, capsys: pytest.CaptureFixture[str]) -> None:
    cost = asked(capsys, workload, *ENGINE, "--max-simulations", "4")["cost"]
    assert cost["usd_per_hour"] is None and cost["usd_per_million_tokens"] is None
    assert cost["gpu_hours_per_million_output_tokens"] > 0


def test_a_price_that_no_configuration_needs_is_told(
    workload: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for price, is_told in (("H100=2", True), ("2", False)):
        assert run(["plan", workload, *ENGINE, "--max-simulations", "4", "--price", price]) == 0
        assert ("the price of H100-SXM is not used" in capsys.readouterr().err) == is_told


def test_infeasible_is_3_with_the_nearest_point(workload: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = asked(capsys, workload, *ENGINE, "--tpot", "49.9", code=3)
    assert found["max_request_rate"] is None and found["headroom"] is None and not found["feasible"]
    assert found["binding"] == "compute"
    assert found["nearest"]["tpot_ms"] == pytest.approx(50)
    assert run(["plan", workload, *ENGINE, "--tpot", "49.9"]) == 3
    assert "TPOT 50 ms against 49.9 ms" in " ".join(capsys.readouterr().out.split())


def test_flags_are_varied(workload: str, capsys: pytest.CaptureFixture[str]) -> None:
    args = (
        workload,
        *ENGINE,
        "--vary",
        "max_num_seqs=8,16",
        "--vary",
        "block-size=16,32",
        "--max-simulations",
        "5",
    )
    found = asked(capsys, *args)
    settings = [row["settings"] for row in found["configurations"]]
    assert settings == [{"max_num_seqs": s, "block_size": b} for s in (8, 16) for b in (16, 32)]
    rates = [row["max_request_rate"] for row in found["configurations"]]
    assert rates[2] == pytest.approx(2 * rates[0], rel=0.1)
    assert found["settings"]["max_num_seqs"] == 16
    assert found["simulations"] == sum(row["simulations"] for row in found["configurations"])


def test_the_tables(workload: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run(["plan", workload, *ENGINE, "--ttft", "120", "--vary", "max_num_seqs=8,16", "--price", "3"]) == 0
    )
    shown = capsys.readouterr()
    words = " ".join(shown.out.split())
    for text in (
        "best max_num_seqs 16 (most requests per USD)",
        "bound by seats",
        "LIMIT",
        "KNEE",
        "95 % interval",
    ):
        assert text in words, text
    assert words.endswith("vllm serve MODEL --no-enable-prefix-caching --no-async-scheduling --max-num-seqs 16 "
                          "--max-num-batched-tokens 2048")  # fmt: skip
    assert max(len(line) for line in shown.out.splitlines() if "vllm" not in line) <= 80
    assert "run 1: all at once" in shown.err


# ------------------------------------------------------------ the line to use


@pytest.mark.parametrize("card", ["H100", "RTX-4090"])
def test_the_line_says_what_differs_from_vllms_defaults(
    card: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Read back, it is the same engine; --gpu decides which defaults need no word."""
    found = asked(
        capsys,
        "--dataset-name", "random", "--num-prompts", "40", "--random-output-len", "16", "--executor", "roofline",
        "--gpu", card, "--model", MODEL, "--max-model-len", "8192", "--max-num-seqs", "256", "--max-simulations", "4",
        "--kv-cache-dtype", "fp8", "--long-prefill-token-threshold", "512",
    )  # fmt: skip
    line = found["vllm_serve"]
    assert line.startswith(f"vllm serve {MODEL} ")
    assert ("--max-num-seqs 256" in line) == (card == "H100")
    assert "--max-num-batched-tokens" not in line
    assert parse_vllm_args(line).engine == {
        "model": Path(MODEL), "max_model_len": 8192, "kv_cache_dtype": "fp8", "long_prefill_token_threshold": 512,
    } | ({"max_num_seqs": 256} if card == "H100" else {})  # fmt: skip


def test_a_pasted_line_comes_back_with_what_does_not_matter_here(
    workload: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pasted = "vllm serve my/model --max-num-seqs 8 --port 9000 --block-size 32 --served-model-name a b"
    found = asked(
        capsys, workload, "--executor", "constant", "--step-time-s", "0.05", "--vllm-args", pasted,
        "--vary", "max_num_seqs=16", "--max-simulations", "4",
    )  # fmt: skip
    line = found["vllm_serve"]
    assert line.startswith("vllm serve my/model ")
    for text in ("--port 9000", "--block-size 32", "--served-model-name a b", "--max-num-seqs 16"):
        assert text in line
    assert "--max-num-seqs 8" not in line


# ------------------------------------------------------------ cards and their prices


def test_the_cheapest_card(capsys: pytest.CaptureFixture[str]) -> None:
    args = (
        "--dataset-name", "random", "--num-prompts", "60", "--random-input-len", "512", "--random-output-len", "64",
        "--executor", "roofline", "--gpu", "H100,L40S", "--model", MODEL, "--max-model-len", "4096", "--ttft", "1000",
        "--max-simulations", "6",
    )  # fmt: skip
    dear = asked(capsys, *args, "--price", "h100=2", "--price", "L40S=1.9")
    cheap = asked(capsys, *args, "--price", "h100=20", "--price", "L40S=0.5")
    assert dear["settings"] == {"gpu": "H100"} and cheap["settings"] == {"gpu": "L40S"}
    rates = [row["max_request_rate"] for row in dear["configurations"]]
    assert rates == [row["max_request_rate"] for row in cheap["configurations"]] and rates[0] > rates[1]
    assert asked(capsys, *args)["settings"] == {"gpu": "H100"}


def test_a_model_that_does_not_fit_is_a_row_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    """In bfloat16 8B parameters are 16 GB: with half of an RTX 4090 there is no room."""
    args = (
        "--dataset-name", "random", "--num-prompts", "20", "--random-output-len", "4", "--executor", "roofline",
        "--model", MODEL, "--max-model-len", "2048", "--gpu-memory-utilization", "0.5", "--max-simulations", "4",
    )  # fmt: skip
    found = asked(capsys, *args, "--gpu", "RTX-4090,H100")
    assert [row["feasible"] for row in found["configurations"]] == [False, True]
    assert "KV cache" in found["configurations"][0]["problem"]
    assert "KV cache" in refused(capsys, *args, "--gpu", "RTX-4090", code=3)


# ------------------------------------------------------------ replicas


def test_the_fewest_replicas_for_a_load(workload: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One serves 16 a second: for 31 two are just enough, which is tried after three, the safe guess."""
    args = (workload, *ENGINE, "--ttft", "400", "--target-rate", "31", "--price", "2")
    found = asked(capsys, *args)
    assert found["replicas"] == 2 and found["max_request_rate"] == found["target_rate"] == 31
    assert found["headroom"] == pytest.approx(32 / 31 - 1, abs=0.01)
    assert found["cost"]["gpus"] == 2 and found["cost"]["usd_per_hour"] == 4
    probes = found["configurations"][0]["probes"]
    assert [p["replicas"] for p in probes if p["rate"] == 31 and p["good"]] == [2, 3]
    assert found["simulations"] == len(probes) <= 6
    assert asked(capsys, workload, *ENGINE, "--ttft", "400", "--target-rate", "33")["replicas"] == 3
    assert run(["plan", *args]) == 0
    assert "2 of these, behind a router (round_robin):" in capsys.readouterr().out


def test_too_few_replicas_is_3(workload: str, capsys: pytest.CaptureFixture[str]) -> None:
    args = (workload, *ENGINE, "--ttft", "200", "--target-rate", "40", "--replicas-at-most", "2")
    found = asked(capsys, *args, code=3)
    assert found["replicas"] is None and found["nearest"]["replicas"] == 2
    assert found["nearest"]["good"] and found["nearest"]["rate"] == pytest.approx(32, rel=0.06)


def test_no_number_of_replicas_makes_a_step_shorter(
    workload: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is seen from one nearly idle engine."""
    found = asked(capsys, workload, *ENGINE, "--tpot", "49", "--target-rate", "40", code=3)
    assert found["simulations"] == 2 and found["nearest"]["tpot_ms"] == pytest.approx(50)


def test_a_fleet_has_the_load_of_its_replicas(workload: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = asked(
        capsys, workload, *ENGINE, "--replicas", "2", "--router", "least_requests", "--max-simulations", "8"
    )
    assert found["replicas"] == 2
    assert found["max_request_rate"] == pytest.approx(32, rel=0.06)


def test_replicas_that_come_and_go_are_paid_for_while_they_are_there(
    workload: str, capsys: pytest.CaptureFixture[str]
) -> None:
    scaling = ["--autoscale", "queue", "--scale-up-at", "4", "--scale-down-at", "1", "--max-replicas", "3"]
    scaling += ["--scale-interval-s", "1"]
    found = asked(
        capsys, workload, *ENGINE, *scaling, "--price", "1", "--max-simulations", "5", "--ttft", "2000"
    )
    probes = found["configurations"][0]["probes"]
    assert any(1 < probe["mean_replicas"] < 3 for probe in probes)
    at_limit = next(probe for probe in probes if probe["rate"] == found["max_request_rate"])
    assert found["cost"]["usd_per_hour"] == found["cost"]["gpus"] == at_limit["mean_replicas"]


# ------------------------------------------------------------ the error of the step times


def test_the_error_of_a_profile_is_propagated(workload: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = asked(
        capsys, workload, "--executor", "epyc-2cpu-llama-10m", "--max-simulations", "8", "--tolerance", "0.03"
    )
    error = found["step_time_error"]
    assert 0.1 < error["error"] < 0.5
    slow, fast, rate = (
        error["max_request_rate_slower"],
        error["max_request_rate_faster"],
        found["max_request_rate"],
    )
    assert slow == pytest.approx(rate / (1 + error["error"]), rel=0.06)
    assert fast == pytest.approx(rate / (1 - error["error"]), rel=0.06)
    assert error["simulations"] > 0


def test_an_error_can_be_given(workload: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = asked(capsys, workload, *ENGINE, "--step-time-error", "20")
    error = found["step_time_error"]
    assert error["error"] == 0.2
    assert error["max_request_rate_slower"] == pytest.approx(16 / 1.2, rel=0.04)
    assert error["max_request_rate_faster"] == pytest.approx(16 / 0.8, rel=0.04)
    assert asked(capsys, workload, *ENGINE, "--max-simulations", "4")["step_time_error"]["error"] is None


# ------------------------------------------------------------ from Python


def test_python_mirrors_it(workload: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = {
        "executor": "constant", "step_time_s": 0.05, "async_scheduling": False, "enable_prefix_caching": False,
    }  # fmt: skip
    question: dict[str, Any] = {
        "ttft": 120.5,
        "prices": {ANY_CARD: 2.0},
        "vary": {"max_num_seqs": [8, 16]},
        "max_simulations": 5,
    }
    found = plan(workload, **flags, **question)
    again = Study(workload, **flags).plan(**question)
    assert isinstance(found, Plan) and found.to_json() == again.to_json()
    typed = asked(
        capsys,
        workload,
        *ENGINE[:4],
        *ENGINE[6:],
        "--ttft",
        "120.5",
        "--price",
        "2",
        "--vary",
        "max_num_seqs=8,16",
        "--max-simulations",
        "5",
    )
    assert json.loads(json.dumps(found.to_json())) == typed
    table = found.configurations
    assert table.max_num_seqs.tolist() == [8, 16] and table.feasible.all()
    assert table.usd_per_million_output_tokens.is_monotonic_decreasing
    assert len(found.probes) == found.simulations and set(found.probes.verdict) >= {"stable"}


# ------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--ttft", "0"], "--ttft 0"),
        (["--ttft", "soon"], "--ttft"),
        (["--percentile", "100"], "--percentile 100"),
        (["--attainment", "0.9"], "--attainment needs a limit"),
        (["--target-rate", "-1"], "--target-rate -1: must be requests/s"),
        (["--target-rate", "10", "--replicas", "2"], "--replicas cannot stand beside --target-rate"),
        (["--vary", "max_num_seqs"], "--vary 'max_num_seqs' must be"),
        (["--vary", "max_num_seq=8"], "max_num_seqs"),
        (["--vary", "max_num_seqs=8..16"], "draws none"),
        (["--vary", "max_num_seqs=eight"], "eight"),
        (["--price", "H100"], "--price"),
        (["--price", "H100=-1"], "--price 'H100=-1'"),
        (["--price", "X100=1"], "X100"),
        (["--price", "1", "--price", "2"], "has a price already"),
        (["--seeds", "0"], "--seeds 0"),
        (["--max-simulations", "2"], "--max-simulations"),
        (["--tolerance", "2"], "--tolerance 2: must be"),
        (["--step-time-error", "100"], "--step-time-error 100: must be percent"),
        (["--max-concurrency", "4"], "--max-concurrency"),
        (["--executor", "torch"], "measures its steps"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    workload: str, args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = [] if "--executor" in args else ENGINE
    assert message in refused(capsys, workload, *engine, *args)


def test_a_workload_without_times_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    together = str(write_workload(tmp_path / "w.jsonl", [0.0] * 5, 64, 20))
    assert "all requests arrive at one time" in refused(capsys, together, *ENGINE)
    assert "no-such-file" in refused(capsys, "no-such-file", *ENGINE)


def test_help_shows_the_flags_of_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--help"]) == 0
    shown = capsys.readouterr().out
    for flag in (
        "--ttft",
        "--target-rate",
        "--max-num-seqs",
        "--request-rate",
        "--vllm-args",
        "--replicas",
        "--vary",
    ):
        assert flag in shown
    assert "in ms" in shown


def test_arrivals_may_be_random(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn = str(write_workload(tmp_path / "w.jsonl", poisson(400), 64, 20))
    found = asked(capsys, drawn, *ENGINE, "--ttft", "500", "--percentile", "90")
    assert 10 < found["max_request_rate"] < 16
    assert found["configurations"][0]["interval"][0] < found["max_request_rate"]
