"""The drivers of an engine that is one of several: what reaches it is not known ahead.

A leap is planned, and taken when it is over: of as many steps as there were until something came. So everything that
is known of a replica is as old as the step it is in, with leaps and without.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import simpy

from servetwin.sim.cluster.inbox import Inbox
from servetwin.sim.cluster.instants import Moment, Runner, turn_of
from servetwin.sim.contract import SamplingParams
from servetwin.sim.driver import Driver
from servetwin.sim.engine_process import EngineProcess
from servetwin.sim.leaping_process import LeapingProcess, LeapPlan
from servetwin.sim.progress_guard import StalledError
from servetwin.sim.records import ScheduleRecord
from servetwin.sim.request import Request
from servetwin.workloads.spec import RequestSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from servetwin.sim.driver import SamplingOf

FIRST_STEPS, MORE_STEPS = 32, 4
"""Of a planned leap: as many at first, and then so many times what the last one came to, so that what is planned in
vain costs little."""


class ReplicaDriver(Driver[Any]):
    """To be mixed into a driver whose workload is an Inbox; `join` must be called before it runs.

    It never ends: with nothing to do it waits for mail, or for `stop`.
    """

    _inbox: Inbox
    _index: int
    _runner: Runner
    _is_over: Callable[[], bool]
    dies_ns: int | None = None
    """When it will be stopped in the middle of whatever it does."""
    stuck: ScheduleRecord | None = None
    """Why nothing can be scheduled, while it waits for mail or an abort."""
    _listens = False
    _computes_prompts = False

    def join(
        self, inbox: Inbox, index: int, is_over: Callable[[], bool], *, computes_prompts: bool = False
    ) -> None:
        """It is replica `index`. `is_over`: nothing is left that could be sent to anybody. `computes_prompts`: and no
        more of a request, the rest of which is done elsewhere."""
        self._inbox, self._index, self._is_over = inbox, index, is_over
        self._computes_prompts = computes_prompts
        if computes_prompts:
            self._sampling = one_token(self._sampling)
        self._runner = Runner(self.run())

    def start(self) -> None:
        self._runner.start()

    def stop(self) -> None:
        """It is gone; tells the log what that does not know yet."""
        self._runner.stop()
        self.settle()

    def notice(self) -> None:
        """Mail has come."""
        if self._listens:
            self._listens = False
            self._runner.redirect(Moment(self.env, turn_of(self._index)))

    def stalled(self) -> StalledError:
        """What to say when nothing will ever happen to it."""
        assert self.stuck is not None, "it waits"
        return self._stalled(self.stuck)

    def requests_in_flight(self) -> Mapping[str, tuple[RequestSpec, Request]]:
        """Those that it has taken in, in that order."""
        return self._in_flight

    @property
    def num_waiting(self) -> int:
        """Requests that no step has begun to serve, and preempted ones."""
        return len(self.core.scheduler.waiting) + len(self._inbox)

    def used_blocks(self) -> int:
        """KV blocks in use after the last schedule call."""
        return self.core.config.cache.usable_blocks - self.core.scheduler.kv.pool.num_free

    # ------------------------------------------------------------ waiting

    def _others(self) -> simpy.Event | None:
        """Step ends elsewhere and the front door, if anything else happens at this instant."""
        self._listens, self.stuck = False, None
        return Moment(self.env, turn_of(self._index)) if self.env.peek() == self.env.now else None

    def _rest(self) -> simpy.Event | None:
        return self._listen([*self._cache_resets][:1])

    def _sit_until(self, times_ns: list[int], record: ScheduleRecord) -> simpy.Event:
        self.stuck = record
        return self._listen(times_ns)

    def _listen(self, times_ns: list[int]) -> simpy.Event:
        """Mail, or the next of these instants unless the run is over by then."""
        self._listens = True
        waiting = self.env.event()
        if self._inbox.due_ns is not None:
            self._listens = False
            return Moment(self.env, turn_of(self._index))
        if times_ns:
            delay_ns = max(min(times_ns) - self.now, 0)

            def wake() -> None:
                if self._listens and waiting.callbacks and not self._is_over():
                    self._listens = False
                    self._runner.redirect(Moment(self.env, turn_of(self._index)))

            Moment(self.env, turn_of(self._index), delay_ns, wake)
        return waiting

    # ------------------------------------------------------------ requests

    def _log_arrival(self, spec: RequestSpec, now: int, sent_ns: int) -> None:
        mail = self._inbox.last
        assert mail is not None, "it has just been taken out"
        if mail.begun is not None:
            self.log.taken_over(mail.begun, now)
        else:
            self.log.arrived(spec, now, sent_ns=sent_ns, again=mail.again)

    def _token_refusal(self, spec: RequestSpec) -> str | None:
        if self._computes_prompts:
            # Else whoever computes the rest would find out.
            whole = self.core.config.refusal(spec.prompt_tokens, spec.output_tokens, spec.min_tokens)
            return whole or super()._token_refusal(spec)
        return super()._token_refusal(spec)

    def _request(self, spec: RequestSpec, arrival_ns: int) -> Request:
        request = super()._request(spec, arrival_ns)
        mail = self._inbox.last
        if mail is not None and mail.begun is not None:
            request.num_external_tokens = spec.prompt_tokens - 1
        return request


class SteppedReplica(ReplicaDriver, EngineProcess):
    """A replica whose steps are plans."""


class LeapingReplica(ReplicaDriver, LeapingProcess):
    """A replica that takes many steps at once."""

    _planned: LeapPlan | None = None
    _steps = 0
    """Of the planned leap, as far as is known."""
    _most_steps = FIRST_STEPS

    def notice(self) -> None:
        plan = self._planned
        if plan is None:
            super().notice()
            return
        steps = plan.steps_until(self.now)
        if steps < self._steps:
            self._steps = steps
            self._runner.redirect(self.env.timeout(plan.end_ns(steps) - self.now))

    def used_blocks(self) -> int:
        used = super().used_blocks()
        if self._planned is not None:
            used += self._scheduler.blocks_begun(self._planned.begun_before(self.now))
        return used

    def settle(self) -> None:
        if self._planned is not None:
            # The run breaks off: what lies in the past has happened.
            plan, self._planned = self._planned, None
            over = plan.steps_until(self.now)
            over -= plan.end_ns(over) > self.now
            if over:
                self._take_off(plan, over)
        super().settle()

    def _leap(self) -> simpy.Event | None:
        plan = self._plan_leap(self._next_event_ns(), self._most_steps)
        if plan is None:
            return None
        self._planned, self._steps = plan, plan.num_steps
        return self.env.timeout(plan.end_ns(plan.num_steps) - self.now)

    def _land(self) -> None:
        plan, self._planned = self._planned, None
        if plan is not None:
            self._most_steps = max(MORE_STEPS * self._steps, FIRST_STEPS)
            self._take_off(plan, self._steps)
        super()._land()

    def _abort_ns(self) -> int | None:
        abort_ns = super()._abort_ns()
        if self.dies_ns is None:
            return abort_ns
        return self.dies_ns if abort_ns is None else min(abort_ns, self.dies_ns)


def one_token(sampling: SamplingOf) -> SamplingOf:
    """The same for requests of which only the prompt is wanted: the model gives a token with it."""

    def sampling_of(spec: RequestSpec) -> SamplingParams:
        params = sampling(spec)
        return replace(params, max_tokens=1, min_tokens=0)

    return sampling_of
