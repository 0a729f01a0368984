"""Two measured vLLM runs against their simulation: the figures of step times from per-kernel tables.

    python benchmarks/validate_vllm.py [--data FOLDER] [-o FILE]

For both cards of `profiles/` in the reference data (RTX 4090, KV cache saturated; RTX PRO 6000, seats saturated) the
run of `traces/llmservingsim_vllm` is simulated again, asynchronously, with that card's tables: without any calibration,
and with one factor of the dense operators fitted to the mean TPOT of requests 0-149 and tested on 150-299. For the
4090 also with other numbers of KV blocks. Takes some minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from servetwin.sim.commands.validate import ValidateFlags
from servetwin.sim.commands.validate_report import to_json
from servetwin.sim.commands.validating import Validation, validation

CARDS = ("rtx4090_llama-3.1-8b", "rtxpro6000_llama-3.1-8b")
RUNS = "traces/llmservingsim_vllm"
WORKLOAD = "sharegpt-llama-3.1-8b-300-sps10.lengths.jsonl"
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
"""Dimensions of Llama-3.1-8B."""
OTHER_BLOCKS = (2_700, 3_400)
UNCALIBRATED = {"ttft": 5.0, "tpot": 4.0, "e2e": 4.5}
CALIBRATED = {"ttft": 1.5, "tpot": 1.0, "e2e": 1.0}


def flags(data: Path, card: str, model: Path) -> ValidateFlags:
    return ValidateFlags(
        profile=data / "profiles" / card,
        model=model,
        workload=data / RUNS / WORKLOAD,
        noise_runs=3,
    )


def show(title: str, found: Validation, limits: dict[str, float]) -> dict[str, Any]:
    """Prints the errors of the judged requests beside their limits; gives everything as JSON."""
    print(f"\n{title}" + (f", factor {found.factor:.4f}" if found.factor is not None else ""))
    for name, comparison in found.judged.items():
        errors = [comparison.error_percent(of) for of in ("mean_s", "p50_s", "p90_s", "p99_s")]
        said = " ".join("      -" if e is None else f"{e:+7.2f}" for e in errors)
        limit = f"  mean within {limits[name]:g}" if name in limits else ""
        noise = found.noise_percent.get(name)
        chance = "" if noise is None else f"  chance ±{noise:.2f}"
        median = comparison.median_request_error_percent
        print(f"  {name:18} {said} %  median request {median or 0:5.2f} %{chance}{limit}")
    for name, curve in found.curves.items():
        print(
            f"  curve {name:12} mean absolute error {curve.mean_absolute_error:.2f} of mean {curve.mean_measured:.1f}"
        )
    bands = ", ".join(f"{b.rows} rows {b.tpot_error_percent:+.1f} %" for b in found.bands)
    print(f"  TPOT error by rows: {bands}; preemptions {found.simulated.preemptions}")
    return to_json(found)


def measure(data: Path, model: Path) -> dict[str, Any]:
    report: dict[str, Any] = {}
    for card in CARDS:
        path, plain = data / RUNS / card, flags(data, card, model)
        report[card] = {
            "uncalibrated": show(f"{card}, uncalibrated", validation(path, plain), UNCALIBRATED),
            "calibrated": show(
                f"{card}, calibrated on the first half, the second half",
                validation(path, replace(plain, calibrate="first-half")),
                CALIBRATED,
            ),
        }
    card = CARDS[0]
    for blocks in OTHER_BLOCKS:
        other = replace(flags(data, card, model), num_gpu_blocks_override=blocks, noise_runs=0)
        title = f"{card}, {blocks:,} blocks"
        report[card][f"{blocks} blocks"] = show(title, validation(data / RUNS / card, other), {})
    return report


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = Path(os.environ.get("SERVETWIN_DATA", "../shared"))
    parser.add_argument("--data", type=Path, default=default, help="reference data (default: SERVETWIN_DATA)")
    parser.add_argument("-o", "--output", type=Path, help="also write everything there, as JSON")
    options = parser.parse_args()
    if not (options.data / RUNS).is_dir():
        parser.error(f"--data {options.data}: there is no folder {RUNS}")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(LLAMA))
        report = {
            "date": datetime.now(UTC).date().isoformat(),
            "machine": platform.machine(),
            "python": platform.python_version(),
            "cards": measure(options.data, Path(folder)),
        }
    if options.output:
        # Runs by their places in the reference data.
        options.output.write_text(json.dumps(report, indent=1).replace(f"{options.data}/", "") + "\n")


if __name__ == "__main__":
    main()
