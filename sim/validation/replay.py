"""Simulates a measured run again: the same requests at the same times, with modelled step times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, Any

import numpy as np

from servetwin.sim.config import EngineConfig, RunConfig
from servetwin.sim.events import EventLog, MemorySink
from servetwin.sim.host_model import HostModel
from servetwin.sim.simulation import simulate
from servetwin.sim.steptime.features import Ints, StepFeatures, StepModel
from servetwin.sim.steptime.modelled import ModelledStepTimer
from servetwin.sim.tables import Tables
from servetwin.sim.token_source import TokenSource
from servetwin.sim.validation.measured import MeasuredRun, MeasuredRunError
from servetwin.workloads import ListWorkload, RequestSpec

if TYPE_CHECKING:
    import pandas as pd

PROMPT_FIELDS = (
    "prompt_token_ids",
    "prefix_ids",
    "prefix_block_tokens",
    "context_tokens",
    "session_id",
    "cache_salt",
    "priority",
    "client_id",
    "predicted_output_tokens",
)
"""What a workload says of a request besides its lengths."""
STOP_TOKEN_ID = 1
"""Ends the answers of requests that were ended by a token."""


@dataclass(frozen=True)
class SimulatedRun:
    """Frames as in `MeasuredRun`, the requests in the same order, and the tables as of a run folder."""

    requests: pd.DataFrame
    curves: pd.DataFrame
    log: Tables
    preemptions: int

    @property
    def steps(self) -> pd.DataFrame:
        return self.log.steps


def requests_of(run: MeasuredRun, prompts: Sequence[RequestSpec] | None) -> list[RequestSpec]:
    """The requests of a measured run; `prompts`: the workload it was fed with, joined row by row.

    Raises MeasuredRunError where the two are not of one length, or a prompt is not.
    """
    rows = run.requests
    if prompts is not None and len(prompts) != len(rows):
        raise MeasuredRunError(
            f"the workload has {len(prompts):,} requests, the run {len(rows):,}: they are joined row by row"
        )
    columns = (rows[name].tolist() for name in ("request_id", "arrival_s", "prompt_tokens", "output_tokens"))
    ends = rows["finish_reason"] if "finish_reason" in rows else repeat("length", len(rows))
    sent = repeat(None, len(rows)) if prompts is None else prompts
    return [
        RequestSpec(
            request_id=str(request_id),
            arrival_s=float(arrival_s),
            prompt_tokens=int(prompt_tokens),
            **_answer(str(end), int(output_tokens), spec),
            **({} if spec is None else _prompt(spec, place, int(prompt_tokens))),
        )
        for place, (request_id, arrival_s, prompt_tokens, output_tokens, end, spec) in enumerate(
            zip(*columns, ends, sent, strict=True)
        )
    ]


def _answer(end: str, output_tokens: int, sent: RequestSpec | None) -> dict[str, Any]:
    """An end by a token is known a step later than one by length (asynchronous scheduling), so it must stay one."""
    if end != "stop":
        return {"output_tokens": output_tokens}
    return {
        "output_tokens": output_tokens + 1 if sent is None else max(output_tokens, sent.output_tokens),
        "output_token_ids": (*[0] * (output_tokens - 1), STOP_TOKEN_ID),
        "stop_token_ids": (STOP_TOKEN_ID,),
        "ignore_eos": True,
    }


def _prompt(spec: RequestSpec, place: int, prompt_tokens: int) -> dict[str, Any]:
    if spec.prompt_tokens != prompt_tokens:
        raise MeasuredRunError(
            f"row {place + 1}: the prompt has {spec.prompt_tokens} tokens in the workload, {prompt_tokens} in the run"
        )
    return {name: getattr(spec, name) for name in PROMPT_FIELDS}


def simulated(
    requests: Sequence[RequestSpec],
    engine: EngineConfig,
    model: StepModel,
    host: HostModel | None = None,
    *,
    max_concurrency: int | None = None,
) -> SimulatedRun:
    """Serves the requests with step times from `model`; all of them must be ones that the engine can serve.

    `max_concurrency`: requests that the client keeps in flight, holding the others back.
    """
    tokens = TokenSource(engine.model.vocab_size, seed=0)
    sink = MemorySink()
    simulate(
        RunConfig(engine=engine, executor="validate"),
        ListWorkload(requests),
        ModelledStepTimer(model, tokens, "modelled"),
        EventLog(sink, log_blocks=False),
        tokens=tokens,
        plan_tokens=False,
        log_blocks=False,
        host=host,
        max_concurrency=max_concurrency,
    )
    frame = sink.requests.set_index("request_id").loc[[spec.request_id for spec in requests]].reset_index()
    refused = frame[frame["finish_reason"] == "refused"]
    if len(refused):
        raise MeasuredRunError(
            f"the simulated engine refuses {len(refused)} requests that the real one served, the first "
            f"{refused['request_id'].iloc[0]!r}: give its --max-model-len and --num-gpu-blocks-override"
        )
    steps = sink.steps
    usable = steps["used_blocks"] + steps["cached_free_blocks"] + steps["free_blocks"]
    curves = steps.assign(time_s=steps["start_s"], kv_percent=100 * steps["used_blocks"] / usable)
    return SimulatedRun(
        requests=frame.rename(
            columns={"num_prompt_tokens": "prompt_tokens", "num_output_tokens": "output_tokens"}
        ),
        curves=curves[["time_s", "running", "waiting", "kv_percent"]],
        log=sink,
        preemptions=int(frame["preemptions"].sum()),
    )


class NoisyModel:
    """A StepModel whose steps vary at random, as those of a real engine do, by `spread` (standard deviation)."""

    pure = False

    def __init__(self, model: StepModel, spread: float, seed: int) -> None:
        self._model, self._spread = model, spread
        self._random = np.random.default_rng(seed)
        self.overlaps_preparation = getattr(model, "overlaps_preparation", True)
        self.turnaround_ns = getattr(model, "turnaround_ns", 0)
        if hasattr(model, "prepare_ns"):
            self.prepare_ns: Callable[[StepFeatures], Ints] = model.prepare_ns

    def durations_ns(self, features: StepFeatures) -> Ints:
        # Lognormal: no factor is 0 or less, however wild the machine.
        factors = np.exp(self._spread * np.clip(self._random.standard_normal(len(features)), -3, 3))
        exact = self._model.durations_ns(features)
        return np.where(exact > 0, np.maximum(np.rint(exact * factors), 1), 0).astype(np.int64)
