"""The event log: everything that happened in a run, appended to columns and handed to a sink in parts.

The driver calls one method per thing that happens, in order of simulated time. Nothing else in the product
counts anything: summaries, charts and exports are functions of these tables (`sim/tables.py`).
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

from servetwin.sim.contract import StepResult
from servetwin.sim.records import BlockChange, EngineCoreOutputs, Frame, ScheduleRecord, WaitReason
from servetwin.sim.residency import Residency, ResidencyTracker
from servetwin.sim.steptime.features import shape_of
from servetwin.sim.steptime.plan_rows import PlanReader, num_admitted
from servetwin.sim.tables import NEVER, SHAPE_COLUMNS, Columns, Part, Tables
from servetwin.sim.timeline import StepTimes
from servetwin.sim.units import seconds_to_ns
from servetwin.sim.waits import WaitTracker
from servetwin.workloads import RequestSpec

if TYPE_CHECKING:
    import pyarrow as pa

PART_ROWS = 50_000
"""A part is written when a table has this many rows ..."""
FIRST_FLUSH_STEPS, LAST_FLUSH_STEPS = 100, 50_000
"""... or after a number of steps that grows with the run between these two, so that a killed run has left at
least half of its steps while a long one does not fall into thousands of small parts."""

COMPLETED = ("length", "stop")
"""Finish reasons of a request that got its whole answer."""


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
    sent_ns: int = NEVER
    queued_ns: int = NEVER
    first_scheduled_ns: int = NEVER
    num_output_tokens: int = 0
    output_ns: array[int] = field(default_factory=lambda: array("q"))
    """When each of its outputs came (one output a step, of one or more tokens)."""
    preemptions: int = 0
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    blocks: int = 0
    """Blocks it holds."""


class EventLog:
    """Appends to the tables; `close` must be called at the end, also of a run that failed."""

    def __init__(self, sink: Sink, *, log_blocks: bool = True, save_tokens: bool = False) -> None:
        self._sink = sink
        self._columns = {t: Columns(t) for t in ("requests", "steps", "events", "itl")}
        if log_blocks:
            self._columns["blocks"] = Columns("blocks")
        if save_tokens:
            self._columns["tokens"] = Columns("tokens")
        self._open: dict[str, OpenRequest] = {}
        self._waits = WaitTracker(self._wait_ended)
        self._residencies = ResidencyTracker(self._residency_ended)
        self._steps = 0
        self._plans = PlanReader()
        self._flush_at_step = FIRST_FLUSH_STEPS

    # ------------------------------------------------------------ what the driver tells

    def arrived(self, spec: RequestSpec, queued_ns: int, *, sent_ns: int | None = None) -> None:
        """The engine takes a request in; the event itself is dated to its arrival.

        `sent_ns`: when the client sent it, if it held it back after its arrival.
        """
        self._open[spec.request_id] = OpenRequest(spec, _sent_ns(spec, sent_ns), queued_ns=queued_ns)
        self._event(seconds_to_ns(spec.arrival_s), spec.request_id, "arrived")
        self._waits.queued(spec.request_id, queued_ns)

    def refused(self, spec: RequestSpec, now_ns: int, reason: str, *, sent_ns: int | None = None) -> None:
        """A request that can never run is turned away instead of queued; `sent_ns` as for `arrived`."""
        self._open[spec.request_id] = OpenRequest(spec, _sent_ns(spec, sent_ns))
        self._event(seconds_to_ns(spec.arrival_s), spec.request_id, "arrived")
        self._event(now_ns, spec.request_id, "refused", reason)
        self._ended(spec.request_id, "refused", now_ns)
        self._flush_if_due()

    def scheduled(self, frame: Frame) -> None:
        """A schedule call has been made: its preemptions, admissions and waits, dated `frame.start_ns`."""
        record, now_ns = frame.record, frame.start_ns
        self._note_new_blocks(frame)
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
        self._step_row(frame, result, times, end_ns, outputs)
        if "tokens" in self._columns:
            self._save_tokens(outputs, end_ns)
        self._note_outputs(outputs, end_ns)
        if outputs.finished:
            self._note_finished(outputs, end_ns)
        self._steps += 1
        self._flush_if_due()

    def sat_out(self, frame: Frame) -> None:
        """A schedule call found nothing to do; those who wait do so for its reasons."""
        self._waits.scheduled(frame.record, frame.start_ns)

    def cache_reset(self, now_ns: int, *, done: bool) -> None:
        """Somebody asked for a reset of the prefix cache, which works only while nobody holds a block."""
        self._event(now_ns, None, "cache_reset", "done" if done else "refused: blocks are in use")

    def block_changes(self, changes: Iterable[BlockChange], now_ns: int) -> None:
        """What the block pool did, in its order; only for a log with `log_blocks`."""
        for change in changes:
            self._residencies.change(change, now_ns)

    def flush(self) -> None:
        """Hands every row that is complete to the sink."""
        full = {table: columns for table, columns in self._columns.items() if len(columns)}
        if full:
            self._sink.write(full)
            self._columns |= {table: Columns(table) for table in full}
        self._flush_at_step = self._steps + min(max(self._steps, FIRST_FLUSH_STEPS), LAST_FLUSH_STEPS)

    def close(self, end_ns: int) -> None:
        """The run is over: ends open waits, writes what has not ended (without an end), flushes."""
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
        self._columns["events"].append(time_ns, request_id, kind, reason, until_ns, computed_tokens, blocks)

    def _wait_ended(self, request_id: str, reason: WaitReason, from_ns: int, until_ns: int) -> None:
        self._event(from_ns, request_id, "wait", reason.value, until_ns=until_ns)

    def _residency_ended(self, r: Residency) -> None:
        to_ns = NEVER if r.to_ns is None else r.to_ns
        self._columns["blocks"].append(
            r.block_id, r.request_id, r.prefix_id, r.from_ns, to_ns, r.ended, r.peak_references
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
            if not admitted.resumed:
                request.first_scheduled_ns = now_ns
                request.cached_tokens = admitted.hit_tokens
            kind = "resumed" if admitted.resumed else "scheduled"
            self._event(now_ns, admitted.request_id, kind, None, admitted.hit_tokens, admitted.blocks)

    def _step_row(
        self, frame: Frame, result: StepResult, times: StepTimes, end_ns: int, outputs: EngineCoreOutputs
    ) -> None:
        record, prefix = frame.record, frame.record.prefix
        self._columns["steps"].append(
            frame.start_ns,
            result.prepare_ns,
            result.device_ns,
            times.schedule_ns + times.update_ns,
            result.source,
            None,
            record.prefill_tokens,
            record.decode_tokens,
            len(frame.plan.num_scheduled_tokens),
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
            outputs.draft_rows,
            outputs.draft_tokens,
            outputs.accepted_draft_tokens,
            times.schedule_ns,
            times.prepare_start_ns,
            times.device_start_ns,
            end_ns,
            result.graph_tokens,
            int(result.outside),
            *self._shape_columns(frame, result),
        )

    def _shape_columns(self, frame: Frame, result: StepResult) -> Iterator[int]:
        shape = result.shape
        if shape is None:
            # Plans say what changes, so all must be read in order, by the timer or here.
            shape = shape_of(self._plans.rows(frame.plan), num_admitted(frame.plan))
        return (getattr(shape, name) for name in SHAPE_COLUMNS)

    def _note_outputs(self, outputs: EngineCoreOutputs, end_ns: int) -> None:
        """The one loop over all rows of a step, so kept short."""
        gaps: dict[int, int] = {}
        requests = self._open
        for request_id, new_token_ids in outputs.new_token_ids.items():
            request = requests[request_id]
            if before := request.output_ns:
                gap_ns = end_ns - before[-1]
                gaps[gap_ns] = gaps.get(gap_ns, 0) + 1
            before.append(end_ns)
            request.num_output_tokens += len(new_token_ids)
        for gap_ns, samples in sorted(gaps.items()):
            self._columns["itl"].append(end_ns, gap_ns, samples)

    def _save_tokens(self, outputs: EngineCoreOutputs, end_ns: int) -> None:
        for request_id, new_token_ids in outputs.new_token_ids.items():
            first = self._open[request_id].num_output_tokens
            for index, token_id in enumerate(new_token_ids, start=first):
                self._columns["tokens"].append(request_id, index, token_id, end_ns)

    def _note_finished(self, outputs: EngineCoreOutputs, end_ns: int) -> None:
        for request_id, finish in outputs.finished.items():
            request = self._open[request_id]
            # The last token it got is never computed.
            computed_tokens = request.spec.prompt_tokens + request.num_output_tokens - 1
            self._event(end_ns, request_id, "finished", finish.reason, computed_tokens, request.blocks)
            # Asynchronous scheduling: its last token may come in after it was preempted.
            self._waits.left(request_id, end_ns)
            self._ended(request_id, finish.reason, end_ns)

    def _ended(self, request_id: str, reason: str, finish_ns: int) -> None:
        if reason not in COMPLETED:
            self._take_back_gaps([self._open[request_id]])
        self._request_row(request_id, reason, finish_ns)

    def _request_row(self, request_id: str, reason: str | None, finish_ns: int) -> None:
        request = self._open.pop(request_id)
        spec, outputs = request.spec, request.output_ns
        self._columns["requests"].append(
            request_id,
            spec.prompt_tokens,
            request.num_output_tokens,
            seconds_to_ns(spec.arrival_s),
            request.queued_ns,
            request.first_scheduled_ns,
            outputs[0] if outputs else NEVER,
            outputs[-1] if outputs else NEVER,
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

    def _take_back_gaps(self, requests: Iterable[OpenRequest]) -> None:
        """Latencies are those of completed requests: the pool must not keep the gaps of others."""
        gaps = Counter((now, now - before) for r in requests for before, now in pairwise(r.output_ns))
        for (now_ns, gap_ns), samples in sorted(gaps.items()):
            self._columns["itl"].append(now_ns, gap_ns, -samples)

    def _flush_if_due(self) -> None:
        if self._steps >= self._flush_at_step or max(map(len, self._columns.values())) >= PART_ROWS:
            self.flush()


def _sent_ns(spec: RequestSpec, sent_ns: int | None) -> int:
    return seconds_to_ns(spec.arrival_s) if sent_ns is None else sent_ns
