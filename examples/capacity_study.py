"""A capacity study, from one engine to a fleet: how many GPUs for this load and these limits, at what cost, how sure.

    python examples/capacity_study.py [--small] [--price CARD=USD_PER_GPU_HOUR ...]

Load: the preset `chat`, drawn to the published statistics of a conversation service (Azure 2023: 5.53 requests/s,
prompts of 1,155 and answers of 211 tokens in the mean). Engine: an 8B model of the Llama 3 shape in bfloat16. Step
times: the roofline of each card, an estimate from published peaks; nothing was measured. Limits: 99 % of the requests
with their first token within 500 ms and 50 ms for each further one. Prices are yours: without any, costs are left out.

`--small` draws 200 requests (a test runs it so); without it each answer is searched for with as many as it needs.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pandas as pd

from servetwin.sim.planning import Plan, Study, plan

MODEL = Path(__file__).parent / "llama-8b"
LIMITS = {"ttft": 500, "tpot": 50}
TARGET_RATE = 40.0
SHOWN = ["max_request_rate", "knee_rate", "headroom", "replicas", "binding", "usd_per_million_output_tokens"]


def one_engine(**scale: Any) -> Plan:
    """What one H100 serves, and how far an error of the step times would go."""
    return plan("chat", executor="roofline", gpu="H100", model=MODEL, **LIMITS, step_time_error=0.15, **scale)


def which_seats(**scale: Any) -> Plan:
    """Whether fewer requests at once keep the limits at a higher load."""
    study = Study("chat", executor="roofline", gpu="H100", model=MODEL, **_flags(scale))
    return study.plan(**LIMITS, vary={"max_num_seqs": [32, 128, 512]}, **_question(scale))


def which_card(prices: dict[str, float], **scale: Any) -> Plan:
    """The fewest replicas for the target, on three cards."""
    return plan(
        "chat",
        executor="roofline",
        model=MODEL,
        max_model_len=16_384,
        router="least_requests",
        **LIMITS,
        target_rate=TARGET_RATE,
        vary={"gpu": ["H100", "A100-80GB", "L40S"]},
        prices=prices,
        **scale,
    )


def _flags(scale: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in scale.items() if name == "num_prompts"}


def _question(scale: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in scale.items() if name != "num_prompts"}


def show(title: str, answer: Plan) -> None:
    print(f"\n{title}")
    table = answer.configurations
    columns = [*answer.question.vary, *(c for c in SHOWN if c in table and table[c].notna().any())]
    with pd.option_context("display.width", 120, "display.precision", 3, "display.max_columns", 20):
        print(table[columns].to_string(index=False))
    assert answer.best is not None and answer.best.capacity is not None
    print(f"bound by {answer.best.capacity.binding}: {answer.best.capacity.reason}")
    slow, fast = answer.rate_interval
    if slow is not None and fast is not None and answer.error is not None:
        print(f"steps {100 * answer.error:.0f} % longer: {slow:.3g} requests/s; shorter: {fast:.3g}")
    print(answer.best.line)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--price", action="append", default=[])
    args = parser.parse_args()
    prices = {name: float(usd) for name, _, usd in (text.partition("=") for text in args.price)}
    scale: dict[str, Any] = {"seeds": 1}
    if args.small:
        scale |= {"num_prompts": 200, "max_simulations": 5, "tolerance": 0.1}
    show("One H100", one_engine(**scale))
    show("How many at once", which_seats(**scale))
    show(f"Cards for {TARGET_RATE:g} requests/s", which_card(prices, **scale))


if __name__ == "__main__":
    main()
