"""`servetwin decide`: a scenario through the scheduler, one JSON-ready line per engine iteration.

The loop is the reference loop of the recorded decisions: arrivals, aborts, schedule, (clock), aborts, update; with
asynchronous scheduling the update is that of the step before.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from pydantic import ValidationError

from servetwin.sim.block_hash import TokenPrompt
from servetwin.sim.config import EngineConfig, explain
from servetwin.sim.contract import DraftTokenIds, ModelRunnerOutput, SamplingParams, SchedulerOutput
from servetwin.sim.engine_core import EngineCore
from servetwin.sim.progress_guard import ProgressGuard
from servetwin.sim.records import Frame, ScheduleRecord
from servetwin.sim.request import Request
from servetwin.sim.rules import Rules
from servetwin.sim.scenario import Scenario, ScenarioError, ScenarioRequest, list_crc
from servetwin.sim.steptime.plan_rows import PlanReader, PlanRow

Line = dict[str, Any]

_STALLED_AFTER = 1000
"""Iterations without a token, an arrival or an end after which a scenario counts as stalled for ever."""


def decide(scenario: Scenario, rules: Rules | None = None) -> Iterator[Line]:
    """The lines of a scenario, by the rules of 0.22.0 unless others are given.

    Raises ScenarioError for a request that can never run, or when nothing moves.
    """
    yield from ScenarioLoop(scenario, rules).lines()


class ScenarioLoop:
    """The state of one scenario's iterations."""

    def __init__(self, scenario: Scenario, rules: Rules | None = None) -> None:
        self.scenario = scenario
        self.by_clock = scenario.time_mode == "clock"
        self.core = EngineCore(_engine_config(scenario, rules or Rules.exact()))
        self._guard = ProgressGuard()
        self.step = 0
        self.clock_ns = 0
        self.out_keys = {r.id: r.out_key or r.id for r in scenario.requests}
        self._model = ScenarioWorker(scenario, self.out_keys)
        self._results: deque[ModelRunnerOutput] = deque()
        self._frame_steps: deque[int] = deque()
        self.arrivals = sorted(scenario.requests, key=self._arrival)
        self.aborts = sorted(
            (r for r in scenario.requests if self._abort(r) is not None), key=self._abort_key
        )
        for r in scenario.requests:
            if (problem := self.core.refusal(self._request(r))) is not None:
                raise ScenarioError(f"request {r.id!r}: {problem}")

    def lines(self) -> Iterator[Line]:
        idle = 0
        while self._move_on():
            line = self._iteration()
            quiet = not any(line.get(f) for f in ("total_tokens", "arrived", "freed_ids", "finished_req_ids"))
            idle = idle + 1 if quiet else 0
            if idle > _STALLED_AFTER:
                waiting = sorted(self.core.scheduler.requests)
                raise ScenarioError(
                    f"nothing has moved for {idle} iterations; unfinished: {', '.join(waiting)}"
                )
            yield line

    # ------------------------------------------------------------ time

    @property
    def now(self) -> int:
        return self.clock_ns if self.by_clock else self.step

    def _arrival(self, request: ScenarioRequest) -> int:
        value = request.arrival_ns if self.by_clock else request.arrival_step
        assert value is not None, "checked by Scenario"
        return value

    def _abort(self, request: ScenarioRequest) -> int | None:
        return request.abort_ns if self.by_clock else request.abort_step

    def _abort_key(self, request: ScenarioRequest) -> int:
        value = self._abort(request)
        assert value is not None, "only requests with an abort are sorted"
        return value

    def _move_on(self) -> bool:
        """Jumps to the next arrival when there is nothing to do; False at the end."""
        if not self.core.has_work() and not self.core.in_flight:
            if not self.arrivals:
                return False
            arrival = self._arrival(self.arrivals[0])
            if self.by_clock:
                self.clock_ns = max(self.clock_ns, arrival)
            else:
                self.step = max(self.step, arrival)
        return True

    # ------------------------------------------------------------ one iteration

    def _iteration(self) -> Line:
        line: Line = {"step": self.step}
        if self.by_clock:
            line["t_ns"] = self.clock_ns
        line["arrived"] = self._arrive()
        line["aborted_before"] = self._abort_due("before")
        frame = self.core.begin(self.now)
        if frame is not None:
            line |= self._submit(frame)
        if frame is not None and frame.has_tokens and self.core.has_room:
            line["updated_step"] = None
        else:
            line |= self._update()
        self.step += 1
        return line

    def _submit(self, frame: Frame) -> Line:
        """The step is planned and handed to the model, which runs it at once (its results wait their turn)."""
        plan = frame.plan
        self._frame_steps.append(self.step)
        self._results.append(self._model.run(plan))
        line = _plan_fields(plan, frame.record) | {"after_schedule": self._state()}
        if self.scenario.step_time is not None and self.by_clock:
            self.clock_ns += self.scenario.step_time.duration_ns(
                plan.total_num_scheduled_tokens, len(plan.num_scheduled_tokens)
            )
        return line

    def _update(self) -> Line:
        """The oldest step in flight brings its tokens."""
        line: Line = {"aborted_during": self._abort_due("during")}
        frame = self.core.in_flight[0]
        outputs = self.core.complete(frame, self._results.popleft())
        self._guard.step(frame, outputs, self.core.scheduler.requests.values())
        if frame.plan.num_scheduled_tokens and not self.core.config.scheduler.async_scheduling:
            self.core.update_draft_tokens(self._drafts(frame.plan))
        line["updated_step"] = self._frame_steps.popleft()
        line["outputs"] = [
            [o.request_id, o.new_token_ids, o.finish_reason, o.stop_reason] for o in outputs.outputs
        ]
        line["freed_ids"] = sorted(outputs.finished)
        line["after_update"] = self._state()
        return line

    def _drafts(self, plan: SchedulerOutput) -> DraftTokenIds:
        requests = self.core.scheduler.requests
        alive = [r for r in plan.num_scheduled_tokens if r in requests]
        return DraftTokenIds(
            alive, [self.scenario.drafts(self.out_keys[r], requests[r].num_output_tokens) for r in alive]
        )

    def _arrive(self) -> list[str]:
        arrived = []
        while self.arrivals and self._arrival(self.arrivals[0]) <= self.now:
            request = self.arrivals.pop(0)
            self.core.add_request(self._request(request), self.now)
            arrived.append(request.id)
        return arrived

    def _abort_due(self, phase: str) -> list[list[object]]:
        """Aborts whose time has come, one call per id; in step mode each waits for its phase."""
        done: list[list[object]] = []
        left = []
        for request in self.aborts:
            early = self._abort_key(request) > self.now
            other_phase = not self.by_clock and request.abort_phase == "during" and phase == "before"
            if early or (other_phase and self._abort_key(request) == self.now):
                left.append(request)
                continue
            known = self.core.scheduler.requests.get(request.id)
            if known is not None:
                done.append([request.id, known.status.name])
                self.core.abort_requests([request.id])
        self.aborts = left
        return done

    def _request(self, r: ScenarioRequest) -> Request:
        config = self.core.config
        return Request(
            r.id,
            TokenPrompt(self.scenario.prompt(r)),
            SamplingParams(
                temperature=0.0,
                max_tokens=r.max_tokens,
                min_tokens=r.min_tokens,
                stop_token_ids=list(r.stop_token_ids),
                ignore_eos=r.ignore_eos,
            ),
            block_size=config.cache.block_size,
            max_model_len=config.model.max_model_len,
            arrival_ns=self._arrival(r),
            priority=r.priority,
            eos_token_id=config.model.eos_token_id,
        )

    def _state(self) -> Line:
        scheduler = self.core.scheduler
        pool = scheduler.kv.pool
        waiting = [r.request_id for r in scheduler.waiting]
        running = [r.request_id for r in scheduler.running]
        return {
            "waiting": len(waiting),
            "running": len(running),
            "free": pool.num_free,
            "cached": pool.num_cached_hashes,
            "waiting_crc": list_crc(waiting),
            "running_crc": list_crc(running),
            "free_crc": list_crc(pool.free_queue()),
        }


def _engine_config(scenario: Scenario, rules: Rules) -> EngineConfig:
    try:
        return scenario.engine_config(rules)
    except ValidationError as e:
        raise ScenarioError(explain(e)) from e


class ScenarioWorker:
    """The scenario's model: it knows the plans and what it has put out, and nothing of the scheduler."""

    def __init__(self, scenario: Scenario, out_keys: dict[str, str]) -> None:
        self._scenario = scenario
        self._out_keys = out_keys
        self._reader = PlanReader()
        self._num_outputs: Counter[str] = Counter()

    def run(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """The next outputs of every request whose known tokens are all computed."""
        rows = self._reader.rows(plan)
        sampled = [self._tokens(row, plan) if row.samples else [] for row in rows]
        ids = [row.request_id for row in rows]
        return ModelRunnerOutput(ids, {r: i for i, r in enumerate(ids)}, sampled)

    def _tokens(self, row: PlanRow, plan: SchedulerOutput) -> list[int]:
        key, known = self._out_keys[row.request_id], self._num_outputs[row.request_id]
        drafts = plan.scheduled_spec_decode_tokens.get(row.request_id, [])
        if self._scenario.config.async_scheduling:
            # The plan only has room for them; what was drafted is known here.
            drafts = self._scenario.drafts(key, known, len(drafts))
        tokens = self._scenario.verified(key, known, drafts)
        self._num_outputs[row.request_id] += len(tokens)
        return tokens


def _plan_fields(plan: SchedulerOutput, record: ScheduleRecord) -> Line:
    cached = plan.scheduled_cached_reqs
    resumed = [r for r in cached.req_ids if r in cached.resumed_req_ids]
    rows = _rows(plan)
    return {
        "new": [r.req_id for r in plan.scheduled_new_reqs],
        "cached": [r for r in cached.req_ids if r not in cached.resumed_req_ids],
        "resumed": resumed,
        "sched": [rows[request_id] for request_id in plan.num_scheduled_tokens],
        "total_tokens": plan.total_num_scheduled_tokens,
        "preempted": [p.request_id for p in record.preempted],
        "unscheduled": [p.request_id for p in record.preempted if p.unscheduled],
        "finished_req_ids": sorted(plan.finished_req_ids),
        "all_token_lens": {r: len(ids) for r, ids in sorted(cached.all_token_ids.items())},
        "common_prefix_blocks": plan.num_common_prefix_blocks[0],
        **({"spec_tokens": drafts} if (drafts := plan.scheduled_spec_decode_tokens) else {}),
        "prefix": asdict(record.prefix),
    }


def _rows(plan: SchedulerOutput) -> dict[str, list[object]]:
    """Per scheduled request: [id, N/C/R, tokens, computed before, block ids, number of output tokens]."""
    count, cached = plan.num_scheduled_tokens, plan.scheduled_cached_reqs
    rows: dict[str, list[object]] = {
        r.req_id: [r.req_id, "N", count[r.req_id], r.num_computed_tokens, r.block_ids[0], r.num_output_tokens]
        for r in plan.scheduled_new_reqs
    }
    for i, request_id in enumerate(cached.req_ids):
        blocks = cached.new_block_ids[i]
        rows[request_id] = [
            request_id,
            "R" if request_id in cached.resumed_req_ids else "C",
            count[request_id],
            cached.num_computed_tokens[i],
            None if blocks is None else blocks[0],
            cached.num_output_tokens[i],
        ]
    return rows
