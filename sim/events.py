"""The event log: everything that happened in a run, appended to columns and handed to a sink in parts.

The driver calls one method per thing that happens, in order of simulated time. Nothing else in the product
counts anything: summaries, charts and exports are functions of these tables (`sim/tables.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Protocol

from servetwin.sim.columns import COMPLETED, NEVER, SHAPE_COLUMNS, Columns, Part
from servetwin.sim.contract import StepResult, StepShape
from servetwin.sim.light_frames import Leap, LightFrame, LightOutputs, StepCost, Woken
from servetwin.sim.records import AnyFrame, BlockChange, EngineCoreOutputs, Frame, ScheduleRecord, WaitReason
from servetwin.sim.request import Request
from servetwin.sim.residency import Residency, ResidencyTracker
from servetwin.sim.step_rows import LISTS, Row, StepRows
from servetwin.sim.steptime.features import shape_of
from servetwin.sim.steptime.plan_rows import PlanReader, num_admitted
from servetwin.sim.tables import Tables
from servetwin.sim.timeline import StepTimes
from servetwin.sim.units import seconds_to_ns
from servetwin.sim.waits import WaitTracker
from servetwin.workloads import RequestSpec

if TYPE_CHECKING:
    import pyarrow as pa

FIRST_FLUSH_ROWS, LAST_FLUSH_ROWS = 400, 100_000
"""Parts are written after a number of rows (of all tables) that grows with the run between these two, so that a killed
run has left at least half of them while a long one does not fall into thousands of small parts."""


_SHAPE_COLUMNS = attrgetter(*SHAPE_COLUMNS)
_LISTS = attrgetter(*LISTS)
_ONE_TOKEN = [0]
"""Nobody asks which."""
_NO_EXTRAS = (0,) * 4
"""Of a step without recomputation and drafts."""
_NO_PREFILL = (0,) * 6
"""Of a step without rows of prompts: their part of its shape, and its new requests."""


class Sink(Protocol):
    """Takes complete parts: at one flush one part of every table that has new rows."""

    def write(self, parts: Mapping[str, Part]) -> None: ...


class MemorySink(Tables):
    """Keeps the parts in memory: for tests and for runs without a folder."""

    def __init__(self) -> None:
        self._parts: dict[str, list[pa.Table]] = {}

    def write(self, parts: Mapping[str, Part]) -> None:
        for table, columns in parts.items():
            self._parts.setdefault(table, []).append(columns.to_arrow())

    def parts(self, table: str) -> Sequence[pa.Table]:
        return self._parts.get(table, [])


@dataclass(slots=True)
class OpenRequest:
    """A request that the engine has seen and that has not ended."""

    spec: RequestSpec
    arrival_ns: int
    sent_ns: int = NEVER
    queued_ns: int = NEVER
    first_scheduled_ns: int = NEVER
    first_token_ns: int = NEVER
    last_token_ns: int = NEVER
    num_output_tokens: int = 0
    since_step: int = NEVER
    """It had an output in every step from this one (a row of the table of steps) ..."""
    last_step: int = NEVER
    """... to this one."""
    earlier: list[tuple[int, int]] | None = None
    """Its unbroken series of outputs before that: first and last step."""
    odd_gaps: list[tuple[int, int]] | None = None
    """The gaps between them: end and length in ns."""
    preemptions: int = 0
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    blocks: int = 0
    """Blocks it holds."""


class EventLog:
    """Appends to the tables; `close` must be called at the end, also of a run that failed.

    `replica`: the engine that it is the log of; None: of the door, where no step is taken.
    """

    def __init__(
        self, sink: Sink, *, log_blocks: bool = True, save_tokens: bool = False, replica: int | None = 0
    ) -> None:
        self._sink = sink
        self._replica = replica
        tables = ["requests", "events", "itl", *["blocks"] * log_blocks, *["tokens"] * save_tokens]
        self._columns = {t: Columns(t, replica) for t in tables}
        self._step_rows = StepRows(replica or 0)
        self._open: dict[str, OpenRequest] = {}
        self._waits = WaitTracker(self._wait_ended)
        self._residencies = ResidencyTracker(self._residency_ended)
        self._steps = 0
        self._last_end_ns = NEVER
        self._plans = PlanReader()
        self._rows = 0
        """Of all tables, so far."""
        self._flush_at_row = self._first_flush = FIRST_FLUSH_ROWS
        self._last_flush = LAST_FLUSH_ROWS

    @property
    def saves_tokens(self) -> bool:
        """It wants to know every token."""
        return "tokens" in self._columns

    # ------------------------------------------------------------ what the driver tells

    def arrived(
        self, spec: RequestSpec, queued_ns: int, *, sent_ns: int | None = None, again: bool = False
    ) -> None:
        """The engine takes a request in; the event itself is dated to its arrival.

        `sent_ns`: when the client sent it, if it held it back after its arrival. `again`: it was lost by another engine
        and begins anew.
        """
        request_id, arrival_ns = spec.request_id, seconds_to_ns(spec.arrival_s)
        sent_ns = arrival_ns if sent_ns is None else sent_ns
        self._open[request_id] = OpenRequest(spec, arrival_ns, sent_ns, queued_ns)
        if not again:
            self._rows += 1
            self._columns["events"].add((arrival_ns, request_id, "arrived", None, NEVER, 0, 0))
        elif queued_ns != NEVER:
            self._event(queued_ns, request_id, "retried")
        self._waits.queued(request_id, queued_ns)

    def taken_over(self, request: OpenRequest, queued_ns: int) -> None:
        """The engine takes in a request whose prompt another has computed."""
        request_id = request.spec.request_id
        self._open[request_id] = request
        self._event(queued_ns, request_id, "received")
        self._waits.queued(request_id, queued_ns)

    def lost(
        self, request_id: str, now_ns: int, *, computed_tokens: int = 0, blocks: int = 0, final: bool
    ) -> None:
        """The engine is gone, and what the request had; unless `final` it begins anew elsewhere."""
        self._event(now_ns, request_id, "lost", None, computed_tokens, blocks)
        self._waits.left(request_id, now_ns)
        if final:
            self._ended(request_id, "lost", now_ns)
        else:
            self._take_back_gaps([self._open.pop(request_id)])

    def contents_lost(self, now_ns: int) -> None:
        """All blocks lose what they have."""
        self._residencies.all_lost(now_ns)

    def replica_changed(self, kind: str, now_ns: int, reason: str | None = None) -> None:
        """The engine comes or goes."""
        self._event(now_ns, None, kind, reason)

    @property
    def num_steps(self) -> int:
        """Steps so far."""
        return self._steps

    def refused(self, spec: RequestSpec, now_ns: int, reason: str, *, sent_ns: int | None = None) -> None:
        """A request that can never run is turned away instead of queued; `sent_ns` as for `arrived`."""
        arrival_ns = seconds_to_ns(spec.arrival_s)
        sent_ns = arrival_ns if sent_ns is None else sent_ns
        self._open[spec.request_id] = OpenRequest(spec, arrival_ns, sent_ns)
        self._event(arrival_ns, spec.request_id, "arrived")
        self._event(now_ns, spec.request_id, "refused", reason)
        self._ended(spec.request_id, "refused", now_ns)
        self.flush_if_due()

    def scheduled(self, frame: Frame) -> None:
        """A schedule call has been made: its preemptions, admissions and waits, dated `frame.start_ns`."""
        self._note_new_blocks(frame)
        self.decided(frame.record, frame.start_ns)

    def decided(self, record: ScheduleRecord, now_ns: int) -> None:
        """What was decided in a schedule call at `now_ns`: preemptions, admissions, waits."""
        for lost in record.preempted:
            request = self._open[lost.request_id]
            request.preemptions += 1
            request.blocks = 0
            self._event(now_ns, lost.request_id, "preempted", None, lost.computed_tokens, lost.blocks)
        self._note_admissions(record, now_ns)
        for request_id, recomputed in record.recomputed.items():
            self._open[request_id].recomputed_tokens += recomputed
        self._waits.scheduled(record, now_ns)

    def aborted(self, request_id: str, now_ns: int, computed_tokens: int, blocks: int) -> None:
        """The client gave up; what the request had computed and held is gone."""
        self._event(now_ns, request_id, "aborted", None, computed_tokens, blocks)
        self._waits.left(request_id, now_ns)
        self._ended(request_id, "abort", now_ns)

    def stepped(
        self, frame: Frame, result: StepResult, times: StepTimes, end_ns: int, outputs: EngineCoreOutputs
    ) -> None:
        """A step is complete: `end_ns` dates its tokens and whatever finished with it."""
        regular = self._note_outputs(outputs.new_token_ids, end_ns)
        self._step_row(
            frame.record,
            self._shape_of(frame, result),
            len(frame.plan.num_scheduled_tokens),
            StepCost(result.prepare_ns, result.device_ns, result.outside, result.graph_tokens),
            result.source,
            frame.start_ns,
            times,
            end_ns,
            regular,
            (outputs.draft_rows, outputs.draft_tokens, outputs.accepted_draft_tokens),
        )
        if self.saves_tokens:
            self._save_tokens(outputs, end_ns)
        if outputs.finished:
            self._note_finished(outputs, end_ns)
        self.flush_if_due()

    def stepped_lightly(
        self,
        frame: LightFrame,
        cost: StepCost,
        source: str,
        times: StepTimes,
        end_ns: int,
        outputs: LightOutputs,
    ) -> None:
        """The same for a step most of whose rows sleep; `source`: where its duration comes from."""
        regular = outputs.regular + self._note_outputs(outputs.new_token_ids, end_ns)
        shape = frame.shape
        self._step_row(frame.record, shape, shape.rows, cost, source, frame.start_ns, times, end_ns, regular)
        self._note_ended(outputs, end_ns)
        self.flush_if_due()

    def leapt(
        self,
        leap: Leap,
        cost: StepCost,
        source: str,
        start_ns: int,
        times: StepTimes,
        end_ns: int,
        outputs: LightOutputs,
    ) -> None:
        """The same for a leap from `start_ns` to `end_ns`; `cost` and `times` are those of its first step."""
        shape, rows = leap.shape, leap.shape.rows
        self._step_rows.append(
            source,
            (
                start_ns,
                cost.prepare_ns,
                cost.device_ns,
                times.schedule_ns + times.update_ns,
                0,
                rows,
                rows,
                rows,
                leap.running,
                leap.waiting,
                leap.used_blocks,
                leap.cached_free_blocks,
                leap.free_blocks,
                0,
                leap.evictions,
                *leap.lookup,
                *_NO_EXTRAS,
                times.schedule_ns,
                times.prepare_start_ns,
                times.device_start_ns,
                leap.each_end_ns[0] if leap.each_end_ns else times.device_end_ns + times.update_ns,
                NEVER if cost.graph_tokens is None else cost.graph_tokens,
                cost.outside,
                rows,
                shape.decode_context_tokens,
                shape.decode_context_max_tokens,
                *_NO_PREFILL,
                leap.num_steps,
                leap.growth_ns,
                outputs.regular,
                0,
                *_LISTS(leap),
            ),
        )
        self._steps += leap.num_steps
        self._rows += 1
        self._last_end_ns = end_ns
        self._note_ended(outputs, end_ns)
        self.flush_if_due()

    def ran(self, source: str, row: Row, num_steps: int, end_ns: int) -> None:
        """Steps of sleeping rows and of those that came in; a row as `StepRows.append` wants it."""
        self._step_rows.append(source, row)
        self._steps += num_steps
        self._rows += 1
        self._last_end_ns = end_ns

    def came_in(self, request_id: str, hit_tokens: int, blocks: int, start_ns: int, end_ns: int) -> None:
        """A request is admitted for the first time, whole, and has its first token with the step that is told next."""
        request = self._open[request_id]
        request.blocks, request.cached_tokens = blocks, hit_tokens
        request.first_scheduled_ns = start_ns
        request.first_token_ns = request.last_token_ns = end_ns
        request.since_step = request.last_step = self._steps
        request.num_output_tokens = 1
        self._rows += 1
        self._columns["events"].add((start_ns, request_id, "scheduled", None, NEVER, hit_tokens, blocks))
        self._waits.left(request_id, start_ns)

    def let_in(self, request: Request, hit_tokens: int, recomputed: int, start_ns: int) -> None:
        """Any request is admitted: it finds so many tokens and computes so many anew."""
        request_id = request.request_id
        known = self._open[request_id]
        known.blocks, resumed = len(request.block_ids), request.num_preemptions > 0
        if not resumed and known.first_scheduled_ns < 0:
            known.first_scheduled_ns, known.cached_tokens = start_ns, hit_tokens
        kind = "resumed" if resumed else "scheduled"
        self._event(start_ns, request_id, kind, None, hit_tokens, known.blocks)
        known.recomputed_tokens += recomputed
        self._waits.left(request_id, start_ns)

    def sampled(self, requests: Iterable[Request], end_ns: int) -> None:
        """The step that is told next brings each of these a token, and it is the first since it was admitted."""
        self._note_outputs({request.request_id: _ONE_TOKEN for request in requests}, end_ns)

    def slept_to_its_end(self, request: Request, blocks: int, end_ns: int) -> None:
        """A request that slept got its last token with the step that was told last, and held so many blocks."""
        request_id = request.request_id
        known = self._open[request_id]
        self._slept(known, request.length_limit - request.num_prompt_tokens)
        computed_tokens = request.length_limit - 1
        self._rows += 1
        self._columns["events"].add(
            (end_ns, request_id, "finished", "length", NEVER, computed_tokens, blocks)
        )
        self._request_row(request_id, "length", end_ns)

    def flush_if_due(self) -> None:
        """Writes parts where enough rows wait for it."""
        if self._rows >= self._flush_at_row:
            self.flush()

    def kept_out(self, head: str, reason: WaitReason | None, now_ns: int) -> None:
        """A schedule call admits nobody: this request heads the queue, and waits for this reason."""
        self._waits.headed_by(head, reason, now_ns)

    def queued_behind(self) -> None:
        """Whoever arrived waits for the head of the queue, which waits for the reason it had."""
        self._waits.queued_behind()

    def woke(self, rows: Iterable[Woken]) -> None:
        """Requests that had an output in every step until now, which nobody told."""
        for row in rows:
            if row.since_step < self._steps:
                self._slept(self._open[row.request_id], row.num_output_tokens)

    def _slept(self, request: OpenRequest, num_output_tokens: int) -> None:
        request.last_step, request.last_token_ns = self._steps - 1, self._last_end_ns
        request.num_output_tokens = num_output_tokens

    def sat_out(self, frame: AnyFrame) -> None:
        """A schedule call found nothing to do; those who wait do so for its reasons."""
        self._waits.scheduled(frame.record, frame.start_ns)

    def cache_reset(self, now_ns: int, *, done: bool) -> None:
        """Somebody asked for a reset of the prefix cache, which works only while nobody holds a block."""
        self._event(now_ns, None, "cache_reset", "done" if done else "refused: blocks are in use")

    def block_changes(self, changes: Iterable[BlockChange], now_ns: int) -> None:
        """What the block pool did, in its order; only for a log with `log_blocks`."""
        for change in changes:
            self._residencies.change(change, now_ns)

    def flush_at_rows(self, rows: int) -> None:
        """Writes parts of about so many rows, instead of parts that grow with the run."""
        self._flush_at_row = self._first_flush = self._last_flush = rows

    def flush(self) -> None:
        """Hands every row that is complete to the sink."""
        full: dict[str, Part] = {table: columns for table, columns in self._columns.items() if len(columns)}
        self._columns |= {table: Columns(table, self._replica) for table in full}
        if len(self._step_rows):
            full["steps"], self._step_rows = self._step_rows, StepRows(self._replica or 0)
        if full:
            self._sink.write(full)
        self._flush_at_row = self._rows + min(max(self._rows, self._first_flush), self._last_flush)

    def close(self, end_ns: int) -> None:
        """The run is over: ends open waits, writes what has not ended (without an end), flushes."""
        end_ns = max(end_ns, self._last_end_ns)
        self._waits.close(end_ns)
        self._residencies.close()
        self._take_back_gaps(self._open.values())
        for request_id in [*self._open]:
            self._request_row(request_id, None, NEVER)
        self.flush()

    # ------------------------------------------------------------ rows

    def _event(
        self,
        time_ns: int,
        request_id: str | None,
        kind: str,
        reason: str | None = None,
        computed_tokens: int = 0,
        blocks: int = 0,
        until_ns: int = NEVER,
    ) -> None:
        self._rows += 1
        self._columns["events"].add((time_ns, request_id, kind, reason, until_ns, computed_tokens, blocks))

    def _wait_ended(self, request_id: str, reason: WaitReason, from_ns: int, until_ns: int) -> None:
        self._event(from_ns, request_id, "wait", reason.value, until_ns=until_ns)

    def _residency_ended(self, r: Residency) -> None:
        to_ns = NEVER if r.to_ns is None else r.to_ns
        self._rows += 1
        self._columns["blocks"].append(
            r.block_id,
            r.request_id,
            r.prefix_id,
            r.from_ns,
            to_ns,
            r.ended,
            r.peak_references,
            NEVER if r.released_ns is None else r.released_ns,
            r.shared,
        )

    def _note_new_blocks(self, frame: Frame) -> None:
        cached = frame.plan.scheduled_cached_reqs
        for request_id, new_blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            # A resumed request's table is new as a whole: its admission says how many blocks it has.
            if new_blocks is not None and request_id not in cached.resumed_req_ids:
                self._open[request_id].blocks += len(new_blocks[0])

    def _note_admissions(self, record: ScheduleRecord, now_ns: int) -> None:
        for admitted in record.admitted:
            request = self._open[admitted.request_id]
            request.blocks = admitted.blocks
            if not admitted.resumed and request.first_scheduled_ns < 0:
                request.first_scheduled_ns = now_ns
                request.cached_tokens = admitted.hit_tokens
            kind = "resumed" if admitted.resumed else "scheduled"
            self._event(now_ns, admitted.request_id, kind, None, admitted.hit_tokens, admitted.blocks)

    def _step_row(
        self,
        record: ScheduleRecord,
        shape: StepShape,
        rows: int,
        cost: StepCost,
        source: str,
        start_ns: int,
        times: StepTimes,
        end_ns: int,
        regular: int,
        drafts: tuple[int, int, int] = (0, 0, 0),
    ) -> None:
        prefix = record.prefix
        self._step_rows.append(
            source,
            (
                start_ns,
                cost.prepare_ns,
                cost.device_ns,
                times.schedule_ns + times.update_ns,
                record.prefill_tokens,
                record.decode_tokens,
                rows,
                record.decode_rows,
                record.running,
                record.waiting,
                record.used_blocks,
                record.cached_free_blocks,
                record.free_blocks,
                len(record.preempted),
                record.evictions,
                prefix.queries,
                prefix.hits,
                prefix.preempted_queries,
                prefix.preempted_hits,
                sum(record.recomputed.values()),
                *drafts,
                times.schedule_ns,
                times.prepare_start_ns,
                times.device_start_ns,
                end_ns,
                NEVER if cost.graph_tokens is None else cost.graph_tokens,
                int(cost.outside),
                *_shape_columns(shape),
                1,
                0,
                regular,
                0,
            ),
        )
        self._steps += 1
        self._rows += 1
        self._last_end_ns = end_ns

    def _shape_of(self, frame: Frame, result: StepResult) -> StepShape:
        if result.shape is not None:
            return result.shape
        # Plans say what changes, so all must be read in order, by the timer or here.
        return shape_of(self._plans.rows(frame.plan), num_admitted(frame.plan))

    def _note_outputs(self, new_token_ids_of: Mapping[str, list[int]], end_ns: int) -> int:
        """The one loop over the rows of a step, so kept short; returns those with a gap over this step alone."""
        step, regular = self._steps, 0
        requests = self._open
        for request_id, new_token_ids in new_token_ids_of.items():
            request = requests[request_id]
            if request.last_step < 0:
                request.first_token_ns = end_ns
                request.since_step = step
            elif request.last_step == step - 1:
                regular += 1
            else:
                self._odd_gap(request, end_ns)
            request.last_step = step
            request.last_token_ns = end_ns
            request.num_output_tokens += len(new_token_ids)
        return regular

    def _odd_gap(self, request: OpenRequest, end_ns: int) -> None:
        """A gap over more than one step."""
        gap = (end_ns, end_ns - request.last_token_ns)
        if request.earlier is None or request.odd_gaps is None:
            request.earlier, request.odd_gaps = [], []
        request.odd_gaps.append(gap)
        request.earlier.append((request.since_step, request.last_step))
        self._rows += 1
        self._columns["itl"].append(*gap, 1, NEVER, NEVER, request.spec.request_id)
        request.since_step = self._steps

    def _save_tokens(self, outputs: EngineCoreOutputs, end_ns: int) -> None:
        for request_id, new_token_ids in outputs.new_token_ids.items():
            first = self._open[request_id].num_output_tokens - len(new_token_ids)
            for index, token_id in enumerate(new_token_ids, start=first):
                self._columns["tokens"].append(request_id, index, token_id, end_ns)
            self._rows += len(new_token_ids)

    def _note_finished(self, outputs: EngineCoreOutputs, end_ns: int) -> None:
        for request_id, finish in outputs.finished.items():
            request = self._open[request_id]
            # The last token it got is never computed.
            computed_tokens = request.spec.prompt_tokens + request.num_output_tokens - 1
            self._event(end_ns, request_id, "finished", finish.reason, computed_tokens, request.blocks)
            # Asynchronous scheduling: its last token may come in after it was preempted.
            self._waits.left(request_id, end_ns)
            self._ended(request_id, finish.reason, end_ns)

    def _note_ended(self, outputs: LightOutputs, end_ns: int) -> None:
        """What finished with a light step or a leap, in its order."""
        for ended in outputs.ended:
            request_id = ended.request.request_id
            request, reason = self._open[request_id], outputs.finished[request_id].reason
            if ended.slept:
                self._slept(request, ended.request.num_output_tokens)
            computed_tokens = request.spec.prompt_tokens + request.num_output_tokens - 1
            self._event(end_ns, request_id, "finished", reason, computed_tokens, ended.blocks)
            self._waits.left(request_id, end_ns)
            self._ended(request_id, reason, end_ns)

    def _ended(self, request_id: str, reason: str, finish_ns: int) -> None:
        if reason not in COMPLETED:
            self._take_back_gaps([self._open[request_id]])
        self._request_row(request_id, reason, finish_ns)

    def _request_row(self, request_id: str, reason: str | None, finish_ns: int) -> None:
        request = self._open.pop(request_id)
        spec = request.spec
        self._rows += 1
        self._columns["requests"].add(
            (
                request_id,
                spec.prompt_tokens,
                request.num_output_tokens,
                request.arrival_ns,
                request.queued_ns,
                request.first_scheduled_ns,
                request.first_token_ns,
                request.last_token_ns,
                finish_ns,
                request.preemptions,
                request.cached_tokens,
                request.recomputed_tokens,
                reason,
                spec.priority,
                spec.session_id,
                spec.client_id,
                request.sent_ns,
            )
        )

    def _take_back_gaps(self, requests: Iterable[OpenRequest]) -> None:
        """Latencies are those of completed requests: the pool must not keep the gaps of others."""
        for request in requests:
            request_id = request.spec.request_id
            for from_step, to_step in (*(request.earlier or ()), (request.since_step, request.last_step)):
                if to_step > from_step:
                    self._rows += 1
                    self._columns["itl"].append(NEVER, NEVER, -1, from_step, to_step, request_id)
            for end_ns, gap_ns in request.odd_gaps or ():
                self._rows += 1
                self._columns["itl"].append(end_ns, gap_ns, -1, NEVER, NEVER, request_id)


def _shape_columns(shape: StepShape) -> tuple[int, ...]:
    columns: tuple[int, ...] = _SHAPE_COLUMNS(shape)
    return columns
