"""A second model of the scheduler of vLLM 0.22.0 V1, written from its specification and kept deliberately naive.

It shares no code with the product: plain lists and dicts, linear searches, whole prefixes as cache keys, and
recomputation where an engine would count (a block's references are the tables that hold it). It is fast enough for
the recorded decisions and for drawn scenarios of a few requests, which is all that it is for.

`_Blocks` is the memory, `_Scheduler` the two passes and the update, `_Engine` time, arrivals, aborts and the lines.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

Json = dict[str, Any]
Key = tuple[int, ...]

STEPS_AT_MOST = 20_000
QUEUE_DEPTH = 2
"""Frames in flight under asynchronous scheduling."""

CONFIG_DEFAULTS: Json = {
    "max_num_seqs": 16,
    "max_num_batched_tokens": 256,
    "max_num_scheduled_tokens": None,
    "block_size": 16,
    "num_gpu_blocks": 1000,
    "max_model_len": 512,
    "enable_chunked_prefill": True,
    "enable_prefix_caching": True,
    "policy": "fcfs",
    "long_prefill_token_threshold": 0,
    "scheduler_reserve_full_isl": True,
    "async_scheduling": False,
    "use_v2_model_runner": False,
    "spec": None,
}


class NoEndError(Exception):
    """The scenario was still going after the steps allowed; `lines` are those so far."""

    def __init__(self, lines: list[Json]) -> None:
        super().__init__(f"no end after {len(lines)} steps")
        self.lines = lines


def decide(scenario: Json, steps_at_most: int = STEPS_AT_MOST) -> list[Json]:
    """The decision lines of a scenario, one per engine iteration, fields in the order of the recorded ones.

    Raises NoEndError after `steps_at_most` iterations: requests that preempt one another for ever.
    """
    engine = _Engine(scenario)
    lines: list[Json] = []
    while engine.wake():
        if len(lines) == steps_at_most:
            raise NoEndError(lines)
        lines.append(engine.iterate())
    return lines


def _crc(text: str) -> int:
    return crc32(text.encode("ascii"))


def _crc_of(ids: Iterable[object]) -> int:
    return _crc(",".join(str(i) for i in ids))


def _cdiv(a: int, b: int) -> int:
    return (a + b - 1) // b


@dataclass(frozen=True)
class _Model:
    """The functions that stand for the model: prompts, outputs, drafts and their verification."""

    seed: int
    vocab_size: int
    eos_token_id: int | None

    def output(self, out_key: str, index: int) -> int:
        return _crc(f"o|{self.seed}|{out_key}|{index}") % self.vocab_size

    def prompt(self, request: Json) -> list[int]:
        if request.get("prompt_token_ids") is not None:
            return list(request["prompt_token_ids"])
        return [
            self.output(key, i) if kind == "o" else _crc(f"p|{key}|{i}") % self.vocab_size
            for kind, key, start, length in request["prompt_segments"]
            for i in range(start, start + length)
        ]

    def drafts(self, spec: Json, out_key: str, known: int) -> list[int]:
        """The drafter's guesses once `known` outputs are known."""
        count = spec["num_speculative_tokens"]
        if spec.get("variable_length"):
            count = _crc(f"n|{self.seed}|{out_key}|{known}") % (count + 1)
        tokens = []
        for i in range(count):
            wrong = _crc(f"a|{self.seed}|{out_key}|{known}|{i}") % 100 >= spec["accept_percent"]
            tokens.append((self.output(out_key, known + i) + wrong) % self.vocab_size)
        return tokens

    def verify(self, out_key: str, known: int, drafts: Sequence[int]) -> list[int]:
        """The accepted drafts and one token more."""
        tokens = [self.output(out_key, known)]
        for draft in drafts:
            if draft != tokens[-1]:
                break
            tokens.append(self.output(out_key, known + len(tokens)))
        return tokens


@dataclass(eq=False)
class _Request:
    id: str
    prompt: list[int]
    max_tokens: int
    min_tokens: int
    priority: int
    arrival: float
    eos: int | None
    stops: Sequence[int]
    out_key: str
    out: list[int] = field(default_factory=list)
    spec: list[int] = field(default_factory=list)
    computed: int = 0
    ph: int = 0
    """Output tokens in flight (`num_output_placeholders`)."""
    status: str = "WAITING"
    preemptions: int = 0
    prefill_chunk: bool = False

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.out

    @property
    def place(self) -> tuple[int, float, str]:
        return self.priority, self.arrival, self.id

    def finish_reason(self, max_model_len: int) -> tuple[str | None, int | None]:
        """(finish reason, stop reason) after the last output token; the order of the tests matters."""
        last = self.out[-1]
        if len(self.out) < self.min_tokens:
            return None, None
        if last == self.eos:
            return "stop", None
        if last in self.stops:
            return "stop", last
        if len(self.tokens) >= max_model_len or len(self.out) >= self.max_tokens:
            return "length", None
        return None, None


class _Blocks:
    """Block tables, the free queue and the prefix cache."""

    def __init__(self, config: Json) -> None:
        self.size: int = config["block_size"]
        self.caching: bool = config["enable_prefix_caching"]
        self.max_model_len: int = config["max_model_len"]
        self.drops_a_hit = (config["spec"] or {}).get("method") == "eagle"
        self.free = list(range(1, config["num_gpu_blocks"]))  # block 0 is the null block
        self.tables: dict[str, list[int]] = {}
        self.key_of: dict[int, Key] = {}
        self.cached: dict[Key, list[int]] = {}
        """Blocks by the whole sequence up to their end, the oldest of equal ones first."""

    def lookup(self, request: _Request) -> list[int]:
        """The cached blocks that the request can start from; at least one token stays to be computed."""
        tokens = tuple(request.tokens)
        hits: list[int] = []
        if self.caching:
            for end in range(self.size, (len(tokens) - 1) // self.size * self.size + 1, self.size):
                if tokens[:end] not in self.cached:
                    break
                hits.append(self.cached[tokens[:end]][0])
        return hits[:-1] if self.drops_a_hit else hits

    def allocate(
        self, request: _Request, n: int, hits: Sequence[int] = (), lookahead: int = 0, gate: bool = False
    ) -> list[int] | None:
        """The fresh blocks that n more tokens need, taken; None and nothing changed where they do not fit."""
        computed = min(request.computed + len(hits) * self.size, self.max_model_len)
        slots = min(computed + n + lookahead, self.max_model_len)
        wanted = [slots] + [min(len(request.tokens), self.max_model_len)] * gate
        if any(self._need(request, hits, tokens) > len(self.free) for tokens in wanted):
            return None
        table = self.tables.setdefault(request.id, [])
        self.free = [b for b in self.free if b not in hits]
        table += hits
        fresh = [self._take() for _ in range(_cdiv(slots, self.size) - len(table))]
        table += fresh
        self.store(request, min(computed + n, len(request.tokens)))
        return fresh

    def _need(self, request: _Request, hits: Sequence[int], tokens: int) -> int:
        held = len(self.tables.get(request.id, [])) + len(hits)
        return max(_cdiv(tokens, self.size) - held, 0) + sum(b in self.free for b in hits)

    def _take(self) -> int:
        """The front of the free queue; what it cached is forgotten."""
        block = self.free.pop(0)
        key = self.key_of.pop(block, None)
        if key is not None:
            self.cached[key].remove(block)
            if not self.cached[key]:
                del self.cached[key]
        return block

    def store(self, request: _Request, num_tokens: int) -> None:
        """Full blocks among the first `num_tokens` enter the cache."""
        if not self.caching:
            return
        tokens = tuple(request.tokens)
        for i, block in enumerate(self.tables[request.id][: num_tokens // self.size]):
            if block not in self.key_of:
                self.key_of[block] = tokens[: (i + 1) * self.size]
                self.cached.setdefault(self.key_of[block], []).append(block)

    def release(self, request: _Request) -> None:
        """The table goes back, last block first; blocks that no other table holds become free."""
        table = self.tables.pop(request.id, [])
        self.free += [b for b in reversed(table) if not any(b in t for t in self.tables.values())]

    def common_prefix(self, running: Sequence[_Request]) -> int:
        """Leading blocks of the first running request that every table holds."""
        count = 0
        if self.caching and running:
            for block in self.tables[running[0].id]:
                if not all(block in t for t in self.tables.values()):
                    break
                count += 1
        return count


@dataclass
class _Plan:
    """What one schedule call decided, and what of it the update needs."""

    step: int
    budget: int
    counts: dict[str, int] = field(default_factory=dict)
    """Tokens by request id, in order of scheduling."""
    blocks: dict[str, list[int] | None] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    """N new, C running before, R resumed."""
    spec: dict[str, list[int]] = field(default_factory=dict)
    preempted: list[str] = field(default_factory=list)
    unscheduled: list[str] = field(default_factory=list)
    lookups: list[tuple[bool, int, int]] = field(default_factory=list)
    """(preempted before, queried tokens, hit tokens)"""
    samples: list[str] = field(default_factory=list)
    """Requests that reach their last token and so get a new one."""

    def of_kind(self, kind: str) -> list[str]:
        return [r for r in self.counts if self.kinds[r] == kind]

    def give_back(self, victim: _Request) -> bool:
        """Takes a victim out again; whether it had been scheduled."""
        if victim.id not in self.counts:
            return False
        self.budget += self.counts.pop(victim.id)
        self.spec.pop(victim.id, None)
        self.unscheduled.append(victim.id)
        return True

    def prefix(self) -> Json:
        stats = {}
        for before, name in ((False, ""), (True, "preempted_")):
            mine = [(queries, hits) for b, queries, hits in self.lookups if b == before]
            stats[f"{name}requests"] = len(mine)
            stats[f"{name}queries"] = sum(q for q, _ in mine)
            stats[f"{name}hits"] = sum(h for _, h in mine)
        return stats


class _Scheduler:
    def __init__(self, config: Json, model: _Model) -> None:
        self.config = config
        self.model = model
        self.spec: Json | None = config["spec"]
        self.is_async: bool = config["async_scheduling"]
        self.max_model_len: int = config["max_model_len"]
        self.blocks = _Blocks(config)
        self.waiting: list[_Request] = []
        self.running: list[_Request] = []
        self.finished: list[str] = []
        """Ids not yet told to the worker."""
        self.previous: list[str] = []
        """Ids of the step before."""

    # -- requests come and go

    def live(self) -> list[_Request]:
        return self.running + self.waiting

    def find(self, request_id: str) -> _Request | None:
        return next((r for r in self.live() if r.id == request_id), None)

    def add(self, request: _Request) -> None:
        self.waiting.append(request)
        self._order()

    def _order(self) -> None:
        if self.config["policy"] == "priority":
            self.waiting.sort(key=lambda r: r.place)

    def finish(self, request: _Request) -> None:
        """Ends a request wherever it is; its id is told with the next plan, also if it never ran."""
        for queue in (self.running, self.waiting):
            if request in queue:
                queue.remove(request)
        self.blocks.release(request)
        self.finished.append(request.id)

    # -- schedule

    def schedule(self, step: int) -> _Plan:
        plan = _Plan(step, self.config["max_num_scheduled_tokens"] or self.config["max_num_batched_tokens"])
        self._running_pass(plan)
        if not plan.preempted:
            self._waiting_pass(plan)
        return plan

    def _running_pass(self, plan: _Plan) -> None:
        i = 0
        while i < len(self.running) and plan.budget > 0:
            request = self.running[i]
            n = 0 if self._will_end_by_length(request) else self._wanted(request, plan.budget)
            if n == 0:
                i += 1
                continue
            fresh, moved = self._allocate_or_preempt(request, n, plan)
            if fresh is None:
                break
            i += 1 - moved
            self._place(request, "C", n, fresh or None, plan)
            self._schedule_drafts(request, n, plan)

    def _will_end_by_length(self, request: _Request) -> bool:
        """Asynchronous only: the frames in flight bring the last token that it may have."""
        done = request.computed + 2 - request.ph
        return request.ph > 0 and done >= len(request.prompt) + request.max_tokens

    def _wanted(self, request: _Request, budget: int) -> int:
        n = len(request.tokens) + len(request.spec) + request.ph - request.computed
        return min(self._clamp_long_prefill(n), budget, self.max_model_len - 1 - request.computed)

    def _clamp_long_prefill(self, n: int) -> int:
        threshold: int = self.config["long_prefill_token_threshold"]
        return min(n, threshold) if threshold > 0 else n

    def _allocate_or_preempt(self, request: _Request, n: int, plan: _Plan) -> tuple[list[int] | None, int]:
        """(fresh blocks, how many scheduled requests before it left the running list).

        None where the request itself was the last victim. A victim before it that was not scheduled is not
        counted: 0.22.0 then skips a request. n stays as it is although a victim may give tokens back.
        """
        lookahead = 0
        if self.spec is not None and self.spec["method"] != "ngram":
            lookahead = self.spec["num_speculative_tokens"]
        moved = 0
        while (fresh := self.blocks.allocate(request, n, lookahead=lookahead)) is None:
            victim = self._victim()
            moved += plan.give_back(victim)
            self._preempt(victim, plan)
            if victim is request:
                break
        return fresh, moved

    def _victim(self) -> _Request:
        if self.config["policy"] == "fcfs":
            return self.running[-1]
        return max(self.running, key=lambda r: r.place[:2])  # the first of equal ones: no id here

    def _preempt(self, victim: _Request, plan: _Plan) -> None:
        self.running.remove(victim)
        self.blocks.release(victim)
        victim.status = "PREEMPTED"
        victim.computed = 0
        victim.spec = []
        victim.preemptions += 1
        self.waiting.insert(0, victim)
        self._order()
        plan.preempted.append(victim.id)

    def _place(self, request: _Request, kind: str, n: int, blocks: list[int] | None, plan: _Plan) -> None:
        plan.counts[request.id] = n
        plan.kinds[request.id] = kind
        plan.blocks[request.id] = blocks
        plan.budget -= n

    def _schedule_drafts(self, request: _Request, n: int, plan: _Plan) -> None:
        """Drafts that fit go with the request, the others are dropped."""
        m = n + request.computed - len(request.tokens) - request.ph
        if request.spec and m > 0:
            plan.spec[request.id] = request.spec[:m]
        request.spec = []

    def _waiting_pass(self, plan: _Plan) -> None:
        """Admits from the head of the queue until one does not fit: nobody overtakes it."""
        while self.waiting and plan.budget > 0 and len(self.running) < self.config["max_num_seqs"]:
            request = self.waiting[0]
            hits = self._look_up(request, plan)
            computed = len(hits) * self.blocks.size
            n = self._clamp_long_prefill(len(request.tokens) - computed)
            if n > plan.budget and not self.config["enable_chunked_prefill"]:
                break
            n = min(n, plan.budget)
            gate = self.config["scheduler_reserve_full_isl"]
            if self.blocks.allocate(request, n, hits, gate=gate) is None:
                break
            self.waiting.remove(request)
            self.running.append(request)
            told_as_new = request.status == "WAITING" or self.config["use_v2_model_runner"]
            whole_table = list(self.blocks.tables[request.id])
            self._place(request, "N" if told_as_new else "R", n, whole_table, plan)
            request.computed = computed
            request.status = "RUNNING"

    def _look_up(self, request: _Request, plan: _Plan) -> list[int]:
        """Counted at every attempt, also at those that fail."""
        hits = self.blocks.lookup(request)
        if self.config["enable_prefix_caching"]:
            hit_tokens = len(hits) * self.blocks.size
            plan.lookups.append((request.preemptions > 0, len(request.tokens), hit_tokens))
        return hits

    def after_schedule(self, plan: _Plan) -> None:
        """Progress is booked before the model has run."""
        self.previous = list(plan.counts)
        self.finished = []
        for request in (r for r in self.running if r.id in plan.counts):
            request.computed += plan.counts[request.id]
            request.prefill_chunk = request.computed < len(request.tokens) + request.ph
            if request.prefill_chunk:
                continue
            plan.samples.append(request.id)
            if self.is_async:
                request.ph += 1 + len(plan.spec.get(request.id, []))
                request.spec = [-1] * (self.spec["num_speculative_tokens"] if self.spec else 0)

    # -- update

    def update(self, plan: _Plan) -> tuple[list[list[Any]], list[str]]:
        """(output rows, ids of the requests that ended) once the tokens of a plan are known."""
        rows: list[list[Any]] = []
        ended = []
        for request_id in plan.counts:
            request = self.find(request_id)
            if request is None or request_id not in plan.samples:
                continue
            kept, finish_reason, stop_reason = self._take_tokens(request, plan)
            rows.append([request_id, kept, finish_reason, stop_reason])
            if finish_reason is not None:
                self.finish(request)
                ended.append(request_id)
        self._hand_out_drafts(plan)
        return rows, ended

    def _sampled(self, request: _Request, plan: _Plan) -> list[int]:
        drafts = plan.spec.get(request.id, [])
        if drafts and self.is_async and self.spec is not None:
            # The scheduler has placeholders only: the worker knows the drafts.
            drafts = self.model.drafts(self.spec, request.out_key, len(request.out))[: len(drafts)]
        return self.model.verify(request.out_key, len(request.out), drafts)

    def _take_tokens(self, request: _Request, plan: _Plan) -> tuple[list[int], str | None, int | None]:
        """Rolls back rejected drafts, then appends token by token until one ends the request."""
        tokens = self._sampled(request, plan)
        rejected = len(plan.spec.get(request.id, [])) - (len(tokens) - 1)
        request.computed -= rejected if request.computed > 0 else 0
        request.ph -= rejected if request.ph > 0 else 0
        kept: list[int] = []
        reasons: tuple[str | None, int | None] = (None, None)
        for token in tokens:
            kept.append(token)
            request.out.append(token)
            reasons = request.finish_reason(self.max_model_len)
            if reasons[0] is not None:
                break
        if self.is_async:
            request.ph -= len(kept)
            if request.status == "RUNNING":
                self.blocks.store(request, request.computed - request.ph)
        return kept, *reasons

    def _hand_out_drafts(self, plan: _Plan) -> None:
        if self.spec is None or self.is_async:
            return
        for request in (r for r in self.live() if r.id in plan.counts):
            drafts = self.model.drafts(self.spec, request.out_key, len(request.out))
            request.spec = [] if request.prefill_chunk else drafts


class _Engine:
    """The driver: time, arrivals, aborts, the queue of frames, and the lines."""

    def __init__(self, scenario: Json) -> None:
        self.config = CONFIG_DEFAULTS | scenario.get("config", {})
        model = scenario["model"]
        self.model = _Model(model["seed"], model["vocab_size"], model.get("eos_token_id"))
        self.scheduler = _Scheduler(self.config, self.model)
        self.clock: bool = scenario.get("time_mode", "step") == "clock"
        self.step_time: Json = scenario.get("step_time") or {}
        self.unit = "ns" if self.clock else "step"
        self.step = 0
        self.now = 0
        self.arrivals = sorted(scenario["requests"], key=lambda r: r[f"arrival_{self.unit}"])
        self.aborts = sorted(
            (r for r in scenario["requests"] if r.get(f"abort_{self.unit}") is not None),
            key=lambda r: r[f"abort_{self.unit}"],
        )
        self.frames: list[_Plan] = []

    def wake(self) -> bool:
        """Moves an idle engine to the next arrival; False when there is nothing left to do."""
        if self._due_arrivals() or self._has_work() or self.frames:
            return True
        if not self.arrivals:
            return False
        self.now = self.arrivals[0][f"arrival_{self.unit}"]
        return True

    def _has_work(self) -> bool:
        return bool(self.scheduler.live() or self.scheduler.finished)

    def iterate(self) -> Json:
        """One engine iteration; returns its line."""
        line: Json = {"step": self.step if self.clock else self.now}
        if self.clock:
            line["t_ns"] = self.now
        line["arrived"] = self._add_arrivals()
        line["aborted_before"] = self._abort("before")
        in_flight = self._schedule(line)
        if in_flight:
            line["updated_step"] = None
        else:
            line["aborted_during"] = self._abort("during")
            self._update(line)
        self.step += 1
        self.now += not self.clock
        return line

    def _due_arrivals(self) -> list[Json]:
        return [r for r in self.arrivals if r[f"arrival_{self.unit}"] <= self.now]

    def _add_arrivals(self) -> list[str]:
        due = self._due_arrivals()
        self.arrivals = self.arrivals[len(due) :]
        for r in due:
            self.scheduler.add(
                _Request(
                    id=r["id"],
                    prompt=self.model.prompt(r),
                    max_tokens=r["max_tokens"],
                    min_tokens=r.get("min_tokens", 0),
                    priority=r.get("priority", 0),
                    arrival=float(r[f"arrival_{self.unit}"]),
                    eos=None if r.get("ignore_eos", False) else self.model.eos_token_id,
                    stops=r.get("stop_token_ids") or (),
                    out_key=r.get("out_key") or r["id"],
                )
            )
        return [r["id"] for r in due]

    def _abort(self, phase: str) -> list[list[str]]:
        """Ends the requests whose abort is due; what is unknown or finished is dropped."""
        due = [r for r in self.aborts if self._is_due(r, phase)]
        self.aborts = [r for r in self.aborts if r not in due]
        aborted = []
        for r in due:
            request = self.scheduler.find(r["id"])
            if request is not None:
                aborted.append([request.id, request.status])
                self.scheduler.finish(request)
        return aborted

    def _is_due(self, r: Json, phase: str) -> bool:
        at: int = r[f"abort_{self.unit}"]
        later = not self.clock and phase == "before" and r.get("abort_phase") == "during"
        return at < self.now if later else at <= self.now

    def _schedule(self, line: Json) -> bool:
        """Plans a frame where there is work; True if the engine goes on without waiting for a result."""
        if not self._has_work():
            return False
        scheduler = self.scheduler
        plan = scheduler.schedule(line["step"])
        line.update(self._plan_fields(plan))
        scheduler.after_schedule(plan)
        line["after_schedule"] = self._state()
        self.frames.append(plan)
        if self.clock:
            self.now += self._duration_ns(plan)
        return self.config["async_scheduling"] and bool(plan.counts) and len(self.frames) < QUEUE_DEPTH

    def _duration_ns(self, plan: _Plan) -> int:
        times = self.step_time
        if not plan.counts:
            return int(times.get("empty_ns", 0))
        per_token, per_request = times.get("per_token_ns", 0), times.get("per_req_ns", 0)
        return int(times["base_ns"] + per_token * sum(plan.counts.values()) + per_request * len(plan.counts))

    def _plan_fields(self, plan: _Plan) -> Json:
        scheduler = self.scheduler
        cached, resumed = plan.of_kind("C"), plan.of_kind("R")
        starved = [r for r in cached + resumed if r not in scheduler.previous]
        fields = {
            "new": self._new_ids(plan),
            "cached": cached,
            "resumed": resumed,
            "sched": [self._row(r, plan) for r in plan.counts],
            "total_tokens": sum(plan.counts.values()),
            "preempted": plan.preempted,
            "unscheduled": plan.unscheduled,
            "finished_req_ids": sorted(scheduler.finished),
            "all_token_lens": {r: len(self._live(r).tokens) for r in sorted(starved)},
            "common_prefix_blocks": scheduler.blocks.common_prefix(scheduler.running),
        }
        if plan.spec:
            fields["spec_tokens"] = plan.spec
        return fields | {"prefix": plan.prefix()}

    def _live(self, request_id: str) -> _Request:
        return next(r for r in self.scheduler.live() if r.id == request_id)

    def _new_ids(self, plan: _Plan) -> list[str]:
        """New requests; those that the V2 runner is told as new although they resume come last."""
        return sorted(plan.of_kind("N"), key=lambda r: self._live(r).preemptions > 0)

    def _row(self, request_id: str, plan: _Plan) -> list[Any]:
        request, kind = self._live(request_id), plan.kinds[request_id]
        num_output_tokens = len(request.out) + (0 if kind == "N" else request.ph)
        n, blocks = plan.counts[request_id], plan.blocks[request_id]
        return [request_id, kind, n, request.computed, blocks, num_output_tokens]

    def _update(self, line: Json) -> None:
        plan = self.frames.pop(0)
        line["updated_step"] = plan.step
        line["outputs"], ended = self.scheduler.update(plan)
        line["freed_ids"] = sorted(ended)
        line["after_update"] = self._state()

    def _state(self) -> Json:
        scheduler, blocks = self.scheduler, self.scheduler.blocks
        return {
            "waiting": len(scheduler.waiting),
            "running": len(scheduler.running),
            "free": len(blocks.free),
            "cached": len(blocks.cached),
            "waiting_crc": _crc_of(r.id for r in scheduler.waiting),
            "running_crc": _crc_of(r.id for r in scheduler.running),
            "free_crc": _crc_of(blocks.free),
        }
