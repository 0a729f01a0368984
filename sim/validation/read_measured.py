"""Reads measured runs from their folders and files."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from servetwin.sim.columns import COMPLETED
from servetwin.sim.metrics import Distribution
from servetwin.sim.runs import HEADER, RunFolderError, read_run
from servetwin.sim.units import NS_PER_S
from servetwin.sim.validation.measured import MeasuredRun, MeasuredRunError, gaps_of

if TYPE_CHECKING:
    import pandas as pd

REQUESTS, META, SERIES = "requests.jsonl", "meta.json", "timeseries.csv"
_LLMSERVINGSIM = {
    "request_id": "request_id",
    "input_toks": "prompt_tokens",
    "output_toks": "output_tokens",
    "arrival_time": "arrival_s",
    "queued_ts": "queued_s",
    "scheduled_ts": "first_scheduled_s",
    "first_token_ts": "first_token_s",
    "last_token_ts": "last_token_s",
}
_CLOCK = ("queued_s", "first_scheduled_s", "first_token_s", "last_token_s")


def read_measured(path: str | Path) -> MeasuredRun:
    """Raises MeasuredRunError (what is missing, with the row), RunFolderError, OSError."""
    path = Path(path)
    if not path.exists():
        raise MeasuredRunError(f"{path}: no such file or folder")
    if path.is_dir() and (path / HEADER).is_file():
        return _run_folder(path)
    if path.is_dir() and (path / REQUESTS).is_file():
        return _request_lines(path)
    if path.is_file():
        return _bench_result(path)
    raise MeasuredRunError(
        f"{path}: is neither a run folder, nor a folder with {REQUESTS}, nor a result of vllm bench serve"
    )


# ---------------------------------------------------------------- our runs


def _run_folder(path: Path) -> MeasuredRun:
    run = read_run(path)
    if run.state == "running":
        raise RunFolderError(f"{path}: the run has not ended")
    done = run.requests[run.requests["finish_reason"].isin(COMPLETED)]
    requests = done.rename(
        columns={"num_prompt_tokens": "prompt_tokens", "num_output_tokens": "output_tokens"}
    ).reset_index(drop=True)
    # A client with a limit of its own sends later than a request arrives.
    requests["arrival_s"] = requests["sent_s"].fillna(requests["arrival_s"])
    # On the wall clock a request is on its way to the engine; what it waits for there is the engine's doing.
    requests["arrival_s"] += (requests["queued_s"] - requests["arrival_s"]).min()
    steps = run.steps
    usable = steps["used_blocks"] + steps["cached_free_blocks"] + steps["free_blocks"]
    curves = steps.assign(time_s=steps["start_s"], kv_percent=100 * steps["used_blocks"] / usable)
    executor = run.header.get("executor") or {}
    if run.config.get("engine", {}).get("speculative") is not None:
        raise MeasuredRunError(
            f"{path}: its steps verified drafts, which step times of plain steps say nothing of"
        )
    sources = set(run.steps.loc[run.steps["rows"] > 0, "source"]) - {"measured"}
    engine = _engine_of(run.config)
    engine["simulated_by"] = ", ".join(sorted(map(str, sources))) or None
    engine["max_concurrency"] = run.config.get("max_concurrency")
    if (cards := executor.get("tensor_parallel_size")) is not None:
        engine["tensor_parallel_size"] = cards
    return MeasuredRun(
        source="run folder",
        path=str(path),
        requests=_checked(requests, path),
        engine=engine,
        hardware=executor.get("device"),
        about=executor,
        curves=curves[["time_s", "running", "waiting", "kv_percent"]],
        gaps=gaps_of(run),
        log=run,
    )


def _engine_of(config: dict[str, Any]) -> dict[str, Any]:
    engine = config.get("engine", {})
    scheduler, cache, model = (engine.get(name, {}) for name in ("scheduler", "cache", "model"))
    names = ("max_num_seqs", "max_num_batched_tokens", "long_prefill_token_threshold", "async_scheduling")
    more = ("enable_chunked_prefill", "max_num_scheduled_tokens", "scheduler_reserve_full_isl")
    found = {name: scheduler.get(name) for name in (*names, *more)}
    found["scheduling_policy"] = scheduler.get("policy")
    found["rules"] = engine.get("rules")
    found |= {name: cache.get(name) for name in ("block_size", "enable_prefix_caching")}
    found |= {
        "num_gpu_blocks_override": cache.get("num_gpu_blocks"),
        "max_model_len": model.get("max_model_len"),
    }
    return {name: value for name, value in found.items() if value is not None}


# ---------------------------------------------------------------- LLMServingSim's


def _request_lines(folder: Path) -> MeasuredRun:
    import pandas as pd

    path = folder / REQUESTS
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError as e:
            raise MeasuredRunError(f"{path}, row {number}: is not JSON ({e})") from e
        if not isinstance(row, dict):
            raise MeasuredRunError(f"{path}, row {number}: must be an object")
        rows.append(_measured_row(row, f"{path}, row {number}"))
    if not rows:
        raise MeasuredRunError(f"{path}: there are no requests")
    frame = _on_one_clock(pd.DataFrame(rows).assign(row=range(len(rows))))
    meta = _read_meta(folder / META)
    return MeasuredRun(
        source="requests.jsonl",
        path=str(folder),
        requests=_checked(frame, path),
        rows=frame["row"].tolist(),
        engine=_engine_of_meta(meta),
        hardware=meta.get("hardware", {}).get("device_name"),
        curves=_series(folder / SERIES),
        curves_have_own_clock=True,
    )


def _on_one_clock(frame: pd.DataFrame) -> pd.DataFrame:
    """Arrivals are of the client's clock, the rest of the engine's: joined where a request was queued soonest."""
    frame = frame.sort_values("arrival_s", kind="stable").reset_index(drop=True)
    engine_behind_client_s = float((frame["queued_s"] - frame["arrival_s"]).min())
    origin_s = float(frame["arrival_s"].iloc[0])
    frame["arrival_s"] -= origin_s
    for name in _CLOCK:
        frame[name] -= engine_behind_client_s + origin_s
    return frame


def _measured_row(row: dict[str, Any], place: str) -> dict[str, Any]:
    """One request under our names. Raises MeasuredRunError with the field's own."""
    for name, ours in _LLMSERVINGSIM.items():
        if name not in row:
            raise MeasuredRunError(f"{place}: {name} is missing")
        if ours == "request_id":
            continue
        value, count = row[name], ours.endswith("_tokens")
        is_number = isinstance(value, int if count else (int, float)) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or (count and value < 1):
            allowed = "a whole number of tokens, 1 or more" if count else "a number of seconds"
            raise MeasuredRunError(f"{place}: {name} {value!r} must be {allowed}")
    return {ours: row[name] for name, ours in _LLMSERVINGSIM.items()}


def _read_meta(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        meta = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as e:
        raise MeasuredRunError(f"{path}: is not JSON ({e})") from e
    return meta if isinstance(meta, dict) else {}


def _engine_of_meta(meta: dict[str, Any]) -> dict[str, Any]:
    asked = meta.get("engine_kwargs", {})
    cache = meta.get("kv_cache", {})
    scheduler = meta.get("resolved_config_subset", {}).get("scheduler_config", {})
    names = ("max_num_seqs", "max_num_batched_tokens", "long_prefill_token_threshold", "async_scheduling")
    found: dict[str, Any] = {name: scheduler.get(name, asked.get(name)) for name in names}
    found["tensor_parallel_size"] = asked.get("tensor_parallel_size")
    found["max_model_len"] = asked.get("max_model_len")
    found["num_gpu_blocks_override"] = cache.get("num_gpu_blocks")
    found |= {name: cache.get(name) for name in ("block_size", "enable_prefix_caching")}
    return {name: value for name, value in found.items() if value is not None}


def _series(path: Path) -> pd.DataFrame | None:
    if not path.is_file():
        return None
    import pandas as pd

    frame = pd.read_csv(path).rename(columns={"t": "time_s", "kv_cache_pct": "kv_percent"})
    for name in ("time_s", "running", "waiting"):
        if name not in frame.columns:
            raise MeasuredRunError(f"{path}: there is no column {name!r}")
    # A column of zeros was not recorded: requests hold blocks.
    if "kv_percent" not in frame.columns or not frame["kv_percent"].any():
        frame["kv_percent"] = np.nan
    return frame[["time_s", "running", "waiting", "kv_percent"]]


# ---------------------------------------------------------------- vllm bench serve


def _bench_result(path: Path) -> MeasuredRun:
    import pandas as pd

    try:
        result = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as e:
        raise MeasuredRunError(f"{path}: is not one JSON document ({e})") from e
    arrays = ("input_lens", "output_lens", "start_times", "ttfts", "itls")
    for name in arrays:
        if not isinstance(result, dict) or not isinstance(result.get(name), list) or not result[name]:
            raise MeasuredRunError(
                f"{path}: {name} is missing: vllm bench serve writes it with --save-result --save-detailed"
            )
    counts = {len(result[name]) for name in arrays}
    if len(counts) > 1:
        raise MeasuredRunError(f"{path}: {', '.join(arrays)} must be of one length, found {sorted(counts)}")
    frame = pd.DataFrame({"prompt_tokens": result["input_lens"], "output_tokens": result["output_lens"]})
    frame["request_id"] = [f"request-{place}" for place in range(len(frame))]
    frame["arrival_s"] = np.array(result["start_times"], dtype=np.float64)
    frame["arrival_s"] -= frame["arrival_s"].min()
    frame["first_token_s"] = frame["arrival_s"] + np.array(result["ttfts"], dtype=np.float64)
    frame["last_token_s"] = frame["first_token_s"] + [float(sum(gaps)) for gaps in result["itls"]]
    frame["queued_s"] = frame["first_scheduled_s"] = np.nan
    frame["row"] = range(len(frame))
    served = frame[frame["output_tokens"] > 0].sort_values("arrival_s", kind="stable").reset_index(drop=True)
    return MeasuredRun(
        source="vllm bench serve",
        path=str(path),
        requests=_checked(served, path),
        rows=served["row"].tolist(),
        gaps=_gaps_ns(result["itls"][row] for row in served["row"]),
    )


def _gaps_ns(itls: Iterable[list[float]]) -> Distribution:
    seconds = np.array(list(chain.from_iterable(itls)), dtype=np.float64)
    return Distribution.of(np.rint(seconds * NS_PER_S))


def _checked(requests: pd.DataFrame, path: Path) -> pd.DataFrame:
    """Raises MeasuredRunError where a request ends before it began."""
    if requests.empty:
        raise MeasuredRunError(f"{path}: no request was completed")
    order = (
        ("first_token_s", "last_token_s"),
        ("first_scheduled_s", "first_token_s"),
        ("queued_s", "first_token_s"),
    )
    for earlier, later in order:
        wrong = requests[requests[later] < requests[earlier]]
        if len(wrong):
            first = wrong.iloc[0]
            raise MeasuredRunError(
                f"{path}: request {first['request_id']!r} has {later} {first[later]:.6f} before {earlier} "
                f"{first[earlier]:.6f}"
            )
    return requests
