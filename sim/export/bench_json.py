"""A run as a result of `vllm bench serve --save-result --save-detailed` (0.22.0), for scripts that read those.

Scalars ending in _ms are milliseconds; every other time is in seconds: also `ttfts`, `itls`, `start_times`.
Completed requests ended by length or stop; all others are failed: they have no output tokens, no times and a text in
`errors`. Totals, rates and statistics are those of completed requests; duration = last finish of one - first arrival;
standard deviations divide by n, percentiles are linear. The arrays are in order of arrival, one entry a request.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from servetwin.sim.columns import COMPLETED
from servetwin.sim.definitions import definitions
from servetwin.sim.metrics import distribution, summarize, timestamps
from servetwin.sim.tables import ns_array
from servetwin.sim.token_times import OutputTimes
from servetwin.sim.units import NS_PER_S

if TYPE_CHECKING:
    import pandas as pd

    from servetwin.sim.runs import Run

BACKEND = "servetwin"
NS_PER_MS = 1e6
TOTALS = (
    "duration",
    "completed",
    "failed",
    "total_input_tokens",
    "total_output_tokens",
    "request_throughput",
    "request_goodput",
    "output_throughput",
    "total_token_throughput",
    "max_output_tokens_per_s",
    "max_concurrent_requests",
)
DRAFTING = (
    "spec_decode_acceptance_rate",
    "spec_decode_acceptance_length",
    "spec_decode_num_drafts",
    "spec_decode_draft_tokens",
    "spec_decode_accepted_tokens",
)
ARRAYS = ("input_lens", "output_lens", "ttfts", "itls", "start_times", "generated_texts", "errors")
"""One entry a request; no other keys may have these names, also where the arrays are left out."""
ROWS_AT_ONCE = 4096
_RATE = re.compile(r"\brate_per_s=(inf|[\d.]+(?:e[+-]?\d+)?)")
_SHAPE = re.compile(r"\b(burstiness|cv)=([\d.]+(?:e[+-]?\d+)?)")


def bench_json(
    run: Run,
    *,
    percentiles: Sequence[float] = (99,),
    goodput_ms: Mapping[str, float] | None = None,
    metadata: Mapping[str, str] | None = None,
    label: str | None = None,
    detailed: bool = True,
) -> Iterator[bytes]:
    """The JSON object in pieces. `goodput_ms`: limits as for `metrics.summarize`; `metadata`: keys of their own.

    `percentiles`: 0..100, each a key `pN_..._ms`. Without `detailed` the arrays are left out. Raises LogTooOldError.
    """
    whole = orjson.dumps(_scalars(run, percentiles, goodput_ms, metadata or {}, label))
    yield whole[:-1]
    if detailed:
        yield from _arrays(run)
    yield b"}\n"


def percentile_key(p: float) -> str:
    """As vLLM writes it: p99, p99.9."""
    return f"p{int(p)}" if p == int(p) else f"p{p}"


def _scalars(
    run: Run,
    percentiles: Sequence[float],
    goodput_ms: Mapping[str, float] | None,
    metadata: Mapping[str, str],
    label: str | None,
) -> dict[str, Any]:
    summary = summarize(run, "vllm-bench", goodput_ms)
    header = _header(run, label)
    totals = {name: summary[name] for name in TOTALS}
    # Audio seconds per second, which vLLM writes for every backend.
    totals["rtfx"] = 0.0
    drafting = {name: summary[name] for name in DRAFTING if name in summary}
    if drafting:
        # Which position of a draft was accepted is not in the log.
        drafting["spec_decode_per_position_acceptance_rates"] = None
    statistics = _statistics(run, percentiles)
    taken = {*header, *totals, *statistics, *drafting, *ARRAYS}
    if both := sorted(taken & metadata.keys()):
        raise ValueError(f"metadata {both[0]!r} is a key of the result itself")
    return {**header, **metadata, **totals, **statistics, **drafting}


def _header(run: Run, label: str | None) -> dict[str, Any]:
    model = run.config.get("engine", {}).get("model", {}).get("name")
    rate, burstiness = _rate(run)
    return {
        "date": _compact(run.header["wall_started"]),
        "endpoint_type": BACKEND,
        "backend": BACKEND,
        "label": label,
        "model_id": model,
        "tokenizer_id": model,
        "num_prompts": len(run.requests),
        "request_rate": rate,
        "burstiness": burstiness,
        "max_concurrency": run.config.get("max_concurrency"),
    }


def _compact(instant: str) -> str:
    """20261130-225802 of an instant in ISO 8601."""
    day, time = re.sub("[-:]", "", instant).split("T")
    return f"{day}-{time[:6]}"


def _rate(run: Run) -> tuple[float | str | None, float | None]:
    """Requests/s and shape of the gaps as the workload was asked for, else the mean rate at which it was sent."""
    workload = run.header.get("workload") or {}
    arrivals = str(workload.get("arrivals", ""))
    shape = _SHAPE.search(arrivals)
    burstiness = None
    if shape is not None:
        burstiness = float(shape[2]) if shape[1] == "burstiness" else 1 / float(shape[2]) ** 2
    stated = _RATE.search(arrivals)
    rate = float(stated[1]) if stated is not None else _sent_per_s(run.requests)
    return "inf" if rate == float("inf") else rate, burstiness


def _sent_per_s(requests: pd.DataFrame) -> float | None:
    if not len(requests):
        return None
    span_s = float(requests.arrival_s.max() - requests.arrival_s.min())
    return len(requests) / span_s if span_s else float("inf")


def _statistics(run: Run, percentiles: Sequence[float]) -> dict[str, float | None]:
    metrics = definitions("vllm-bench")
    times = timestamps(run.requests[run.requests.finish_reason.isin(COMPLETED)])
    found: dict[str, float | None] = {}
    for name, metric in (
        ("ttft", metrics.ttft),
        ("tpot", metrics.tpot),
        ("itl", metrics.itl),
        ("e2el", metrics.e2e),
    ):
        samples = distribution(metric, times, run)
        figures = {"mean": samples.mean, "median": samples.percentile(50), "std": samples.std}
        figures |= {percentile_key(p): samples.percentile(p) for p in percentiles}
        found |= {f"{figure}_{name}_ms": _ms(value) for figure, value in figures.items()}
    return found


def _ms(ns: float | None) -> float | None:
    return None if ns is None else ns / NS_PER_MS


# ---------------------------------------------------------------- one entry a request


def _arrays(run: Run) -> Iterator[bytes]:
    requests = run.requests
    done = requests.finish_reason.isin(COMPLETED).to_numpy()
    sent_ns = ns_array(requests.sent_s.fillna(requests.arrival_s))
    ttfts = np.where(done, (ns_array(requests.first_token_s) - sent_ns) / NS_PER_S, 0.0)
    lengths = {
        "input_lens": requests.num_prompt_tokens.to_numpy(dtype=np.int64),
        "output_lens": np.where(done, requests.num_output_tokens, 0).astype(np.int64),
        "ttfts": ttfts,
    }
    for name, array in lengths.items():
        yield _member(name) + orjson.dumps(array, option=orjson.OPT_SERIALIZE_NUMPY)
    yield _member("itls")
    yield from _itls(run, done)
    yield _member("start_times") + orjson.dumps(sent_ns / NS_PER_S, option=orjson.OPT_SERIALIZE_NUMPY)
    yield _member("generated_texts") + orjson.dumps([""] * len(requests))
    errors = [
        "" if ok else str(reason or "open") for ok, reason in zip(done, _reasons(requests), strict=True)
    ]
    yield _member("errors") + orjson.dumps(errors)


def _reasons(requests: pd.DataFrame) -> list[str | None]:
    reasons = requests.finish_reason.astype(object)
    known: list[str | None] = reasons.where(reasons.notna(), None).tolist()
    return known


def _itls(run: Run, done: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Iterator[bytes]:
    """A list of gaps in s for each request; they add up to last - first token."""
    each = OutputTimes(run).of_each(run.requests)
    piece: list[bytes] = []
    before = b"["
    for times, completed in zip(each, done.tolist(), strict=True):
        gaps = np.diff(times) / NS_PER_S if completed else np.zeros(0)
        piece.append(orjson.dumps(gaps, option=orjson.OPT_SERIALIZE_NUMPY))
        if len(piece) == ROWS_AT_ONCE:
            yield before + b",".join(piece)
            before, piece = b",", []
    yield (before if piece or before == b"[" else b"") + b",".join(piece) + b"]"


def _member(name: str) -> bytes:
    return b"," + orjson.dumps(name) + b":"
