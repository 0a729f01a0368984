"""What must hold after every action of every story, whatever the policy: numbered, each with one sentence.

An invariant looks at a `Scene` and gives None, or what it found, with figures. They are asked in the order of
`INVARIANTS`, which goes from the particular to the general, so that the first that fails says most.

**No starvation, the bound.** A policy may let later requests go first: shorter ones for a while, or those of a
client that was served less. It must not do so for ever. So a request that got nothing new for `PATIENCE_NS` counts
the new tokens that go to requests which were received later, are not more urgent (priority value equal or higher),
and were let in after its patience was over. A policy that orders by receipt, priority or age gives them none. One
that shares between two clients (stories have no more) owes the other client the lead of the waiting one, which is
at most everything computed before the wait, and then as much as the waiting client's own earlier requests get; an
output token may be charged as two. Beyond that every seat may take one request before the accounts even out, and
hold it for its whole length. Hence at most
`2 x (tokens computed before the wait + tokens for earlier requests since + seats x tokens of the longest overtaker)`.

**Progress, the bound.** Between two signs of life (an output, a receipt, an end) each unfinished request may compute
all its known tokens once, and once more for each other one that pushed it out: at most
`(unfinished + 1) x known tokens`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from servetwin.sim.policy import FCFS
from servetwin.sim.testing.arrival import EOS_TOKEN_ID
from servetwin.sim.testing.ledger import PATIENCE_NS, Entry
from servetwin.sim.testing.scene import Scene
from servetwin.sim.units import NS_PER_S

SERVICE_WEIGHT = 2
"""How much more than a prompt token an output token may count in a policy's accounts."""


@dataclass(frozen=True)
class Invariant:
    """One rule. `check` gives what it found wrong, with figures, or None."""

    number: int
    name: str
    sentence: str
    check: Callable[[Scene], str | None]

    def __str__(self) -> str:
        return f"invariant {self.number}, {self.name}"


# ---------------------------------------------------------------- policy and engine


def _noted_elsewhere(scene: Scene) -> str | None:
    """Broken while an action runs: whoever runs the action reports it."""
    return None


def _same_decisions(scene: Scene) -> str | None:
    return scene.lane_difference


# ---------------------------------------------------------------- blocks


def _refusals_change_nothing(scene: Scene) -> str | None:
    return scene.allocation_complaints[0] if scene.allocation_complaints else None


def _blocks_conserved(scene: Scene) -> str | None:
    books = scene.books
    free, held = Counter(books.free_queue), books.holders()
    if 0 in free or 0 in held:
        return "the null block 0 was handed out"
    for block in range(1, len(books.references)):
        if free[block] and block in held:
            return f"block {block} is free and stands in a table"
        if free[block] > 1:
            return f"block {block} is free {free[block]} times"
        if not free[block] and block not in held:
            return f"block {block} is neither free nor in a table"
    if books.num_free != len(books.free_queue):
        return f"the pool counts {books.num_free} free blocks; {len(books.free_queue)} are"
    return None


def _references_are_tables(scene: Scene) -> str | None:
    held = scene.books.holders()
    for block, references in enumerate(scene.books.references[1:], start=1):
        if references != held[block]:
            return f"block {block} has {references} references and stands in {held[block]} tables"
    running = {r.request_id for r in scene.core.scheduler.running}
    idle = sorted(set(scene.books.tables) - running)
    return f"{idle[0]} does not run and holds blocks {list(scene.books.tables[idle[0]])}" if idle else None


def _index_agrees(scene: Scene) -> str | None:
    books, pool = scene.books, scene.core.scheduler.kv.pool
    contents = {h for h in books.hashes if h is not None}
    for content in contents:
        block = pool.find(content)
        if block is None:
            return f"block {books.hashes.index(content)} has a content that the index does not know"
        if books.hashes[block] != content:
            return f"the index leads to block {block} for a content that it does not have"
    if books.num_cached_hashes != len(contents):
        return f"the index knows {books.num_cached_hashes} contents; the blocks have {len(contents)}"
    return None


def _reads_were_written(scene: Scene) -> str | None:
    return scene.mirror.bad_reads[0] if scene.mirror.bad_reads and scene.hits_are_written else None


# ---------------------------------------------------------------- requests and steps


def _requests_conserved(scene: Scene) -> str | None:
    places = Counter(r.request_id for r in [*scene.core.scheduler.running, *scene.waiting])
    for request_id, entry in scene.ledger.entries.items():
        count = places.pop(request_id, 0)
        if count != (entry.end is None):
            state = "is unfinished" if entry.end is None else "has ended"
            return f"{request_id} {state} and stands {count} times among the waiting and the running"
    return f"{next(iter(places))} was never received" if places else None


def _within_limits(scene: Scene) -> str | None:
    limits, running = scene.config.scheduler, len(scene.core.scheduler.running)
    if running > limits.max_num_seqs:
        return f"{running} requests run on {limits.max_num_seqs} seats"
    if scene.frame is None:
        return None
    counts = scene.frame.plan.num_scheduled_tokens
    if sum(counts.values()) != scene.frame.plan.total_num_scheduled_tokens:
        return f"the rows {counts} do not add up to {scene.frame.plan.total_num_scheduled_tokens}"
    if sum(counts.values()) > limits.token_budget:
        return f"a step of {sum(counts.values())} tokens; the budget is {limits.token_budget}"
    empty = [r for r, count in counts.items() if count < 1]
    return f"a row of {counts[empty[0]]} tokens for {empty[0]}" if empty else None


def _causal(scene: Scene) -> str | None:
    ledger = scene.ledger
    for request_id in scene.frame.plan.num_scheduled_tokens if scene.frame else []:
        entry = ledger.entries[request_id]
        if entry.received_ns > scene.now:
            return f"{request_id} is scheduled before it is received"
        if entry.end is not None:
            return f"{request_id} is scheduled after its end ({entry.end})"
    if ledger.given_after_end:
        request_id = ledger.given_after_end[0]
        return f"{request_id} is given tokens after its end ({ledger.entries[request_id].end})"
    return None


def _time_runs_forward(scene: Scene) -> str | None:
    frame = scene.frame
    if frame is None:
        return None
    if frame.start_ns != scene.now:
        return f"step {frame.step} says it began at {frame.start_ns} ns; it is {scene.now} ns"
    if scene.twin_frame is not None and frame.step != scene.twin_frame.step:
        return f"step {frame.step} should be number {scene.twin_frame.step}"
    return None


def _progress(scene: Scene) -> str | None:
    ledger = scene.ledger
    if ledger.idle_steps >= 2:
        running = _ids({r.request_id for r in scene.core.scheduler.running})
        waiting = _ids({r.request_id for r in scene.waiting})
        return (
            f"{ledger.idle_steps} successive steps scheduled nothing; waiting: {waiting}; running: {running}"
        )
    unfinished = [e.request for e in ledger.entries.values() if e.end is None]
    bound = (len(unfinished) + 1) * sum(r.num_tokens for r in unfinished)
    if ledger.tokens_since_sign > bound and unfinished:
        names = ", ".join(r.request_id for r in unfinished)
        return f"{ledger.tokens_since_sign} tokens computed without an output (bound {bound}); unfinished: {names}"
    return None


def _order_of_service(scene: Scene) -> str | None:
    """FCFS: first admissions in order of receipt. A key: nobody who waits has a smaller one than who came in."""
    if scene.frame is None:
        return None
    policy = scene.engine.witness.policy
    fifo = isinstance(policy, FCFS) and type(policy).order_key is FCFS.order_key
    keys = scene.engine.witness.keys
    for admission in scene.frame.record.admitted:
        admitted = scene.ledger.entries[admission.request_id]
        for other in (scene.ledger.entries[r.request_id] for r in scene.waiting):
            if fifo:
                passed_over = other.received < admitted.received and other.first_admitted_ns is None
                how = f"received as number {other.received} and {admitted.received}"
            elif getattr(policy, "dynamic_order", False):
                return None
            else:
                key, mine = keys[other.request.request_id], keys[admission.request_id]
                passed_over, how = key < mine, f"keys {key} and {mine}"
            if passed_over:
                return f"{admission.request_id} came in before {other.request.request_id} ({how})"
    return None


def _nobody_starves(scene: Scene) -> str | None:
    for request_id in scene.ledger.unfinished:
        entry = scene.ledger.entries[request_id]
        in_seats = scene.config.scheduler.max_num_seqs * entry.longest_overtaking_tokens
        bound = SERVICE_WEIGHT * (entry.earlier_tokens + in_seats)
        if entry.overtaking_tokens > bound:
            waited = (scene.now - entry.served_ns) // NS_PER_S
            return (
                f"{request_id} has got nothing for {waited} s; later requests of no more urgency, let in since it lost "
                f"patience, got {entry.overtaking_tokens} tokens (bound {bound})"
            )
    return None


# ---------------------------------------------------------------- what the worker is told, what comes out


def _ends_are_told_once(scene: Scene) -> str | None:
    if scene.frame is None:
        return None
    told, to_tell = scene.frame.plan.finished_req_ids, scene.ledger.to_tell
    if told == to_tell:
        return None
    return f"step {scene.frame.step} reports {_ids(told)} as finished; since the step before, {_ids(to_tell)} ended"


def _plans_replay(scene: Scene) -> str | None:
    """The worker's tables, progress and tokens, and the scheduler's."""
    if scene.frame is None:
        return None
    if scene.mirror.complaints:
        return scene.mirror.complaints[0]
    mirror, kv = scene.mirror, scene.core.scheduler.kv
    for request in scene.core.scheduler.running:
        request_id = request.request_id
        if request_id not in mirror.tables:
            return f"{request_id} runs, and the worker does not know it"
        known = len(mirror.tokens[request_id]) - scene.in_flight_samples(request_id)
        pairs = {
            "block table": (mirror.tables[request_id], kv.block_ids(request)),
            "number of computed tokens": (mirror.computed[request_id], request.num_computed_tokens),
            "known tokens": (mirror.tokens[request_id][:known], request.all_token_ids()),
        }
        for what, (worker, scheduler) in pairs.items():
            if worker != scheduler:
                return f"{what} of {request_id}: the worker has {worker}, the scheduler {scheduler}"
    return None


def _computed_once(scene: Scene) -> str | None:
    """Of each request that ended just now and was never preempted."""
    for request_id in scene.outputs.finished if scene.outputs else []:
        entry = scene.ledger.entries[request_id]
        if entry.preemptions:
            continue
        computed = entry.scheduled_tokens - scene.in_flight_tokens(request_id)
        needed = entry.arrival.prompt_tokens + len(entry.output_token_ids) - 1
        if computed + entry.hit_tokens != needed:
            return f"{request_id} computed {computed} tokens and hit {entry.hit_tokens}; it needed {needed}"
    return None


def _answers_are_whole(scene: Scene) -> str | None:
    """Of each request that was given something, or ended, just now."""
    if scene.outputs is None:
        return None
    for request_id in scene.outputs.new_token_ids:
        entry = scene.ledger.entries[request_id]
        given = entry.output_token_ids
        answer = [entry.arrival.answer_token(request_id, i) for i in range(len(given))]
        if given != answer:
            return f"{request_id} was given {given}; the model answered {answer}"
    for request_id in scene.outputs.finished:
        entry = scene.ledger.entries[request_id]
        ended = (len(entry.output_token_ids), entry.end)
        natural = _natural_end(entry, scene.config.model.max_model_len)
        if ended != natural:
            return f"{request_id} ended with {ended[0]} tokens ({ended[1]}); its end is at {natural[0]} ({natural[1]})"
    return None


def _natural_end(entry: Entry, max_model_len: int) -> tuple[int, str]:
    """Number of output tokens and finish reason. An end-of-sequence token on the last place is a stop."""
    arrival = entry.arrival
    length = min(arrival.max_tokens, max_model_len - arrival.prompt_tokens)
    stops = arrival.answer_token(entry.request.request_id, length - 1) == EOS_TOKEN_ID
    return (arrival.eos_after or length, "stop") if stops else (length, "length")


def _drained_is_empty(scene: Scene) -> str | None:
    if not scene.drained:
        return None
    usable = scene.config.cache.usable_blocks
    if scene.ledger.unfinished:
        return f"nothing is left to do; unfinished: {', '.join(scene.ledger.unfinished)}"
    if len(scene.books.free_queue) != usable:
        return f"{len(scene.books.free_queue)} of {usable} blocks are free"
    if scene.core.in_flight or scene.mirror.tables:
        return f"still known to the worker: {_ids(set(scene.mirror.tables))}"
    return None


def _engine_books(scene: Scene) -> str | None:
    if not scene.drained and not (scene.outputs and scene.outputs.finished):
        return None
    try:
        for lane in (scene.engine, scene.twin):
            lane.core.scheduler.check_integrity()
    except AssertionError as error:
        return str(error)
    return None


def _ids(ids: set[str]) -> str:
    return ", ".join(sorted(ids)) or "nothing"


CONTRACT = Invariant(
    1,
    "policy contract",
    "order_key gives tuples that can be compared, choose_victim a running request, may_admit a bool; "
    "no hook raises or changes a request",
    _noted_elsewhere,
)
NO_EXCEPTION = Invariant(2, "no exception", "the engine raises nothing", _noted_elsewhere)
DETERMINISM = Invariant(
    3,
    "determinism",
    "a second engine with its own policy, given the same story, asks and decides the same",
    _same_decisions,
)
INVARIANTS = (
    CONTRACT,
    NO_EXCEPTION,
    DETERMINISM,
    Invariant(
        4,
        "refusals change nothing",
        "an allocation that is refused leaves references, free queue, hash index and tables as they were",
        _refusals_change_nothing,
    ),
    Invariant(
        5,
        "conservation of requests",
        "every request that was received and has not ended waits or runs, once",
        _requests_conserved,
    ),
    Invariant(
        6,
        "conservation of blocks",
        "every usable block is free once or in a table, never both, and block 0 is neither",
        _blocks_conserved,
    ),
    Invariant(
        7,
        "references",
        "a block has as many references as tables it stands in, and only running requests have tables",
        _references_are_tables,
    ),
    Invariant(
        8,
        "hash index",
        "the index leads to blocks with that content, and to every content that a block has",
        _index_agrees,
    ),
    Invariant(
        9,
        "hits are written",
        "a step reads no slot that was not written for that very sequence",
        _reads_were_written,
    ),
    Invariant(
        10,
        "limits",
        "a step has at most the budget's tokens, each row at least one, and no more run than there are seats",
        _within_limits,
    ),
    Invariant(
        11,
        "causality",
        "nothing is scheduled before its receipt or after its end, and tokens of an ended request are dropped",
        _causal,
    ),
    Invariant(
        12,
        "time",
        "each step begins at the present instant and has the next number",
        _time_runs_forward,
    ),
    Invariant(
        13,
        "progress or refusal",
        "while something waits or runs, no two successive steps schedule nothing (no other step being in flight), and "
        "no more than (unfinished + 1) x their known tokens are computed without an output",
        _progress,
    ),
    Invariant(
        14,
        "order of service",
        "first come, first served admits in order of receipt; a policy with keys admits the smallest key that waits",
        _order_of_service,
    ),
    Invariant(
        15,
        "no starvation",
        f"while a request gets nothing for more than {PATIENCE_NS // NS_PER_S} s, later ones of no more urgency are "
        "let in and given at most 2 x (tokens computed before or for earlier ones + seats x tokens of the longest)",
        _nobody_starves,
    ),
    Invariant(
        16,
        "ends are told once",
        "the step after an end tells the worker, and no other step does",
        _ends_are_told_once,
    ),
    Invariant(
        17,
        "plans replay",
        "a worker that reads only the plans has the scheduler's block tables, computed tokens and known tokens",
        _plans_replay,
    ),
    Invariant(
        18,
        "computed once",
        "a request of p prompt tokens that ends with k outputs and was never preempted has computed p + k - 1 tokens, "
        "prefix hits included",
        _computed_once,
    ),
    Invariant(
        19,
        "whole answers",
        "every token that the model answered is given out once and in order, up to the natural end",
        _answers_are_whole,
    ),
    Invariant(
        20,
        "an empty end",
        "when nothing is left to do all requests have ended, all blocks are free and the worker knows nobody",
        _drained_is_empty,
    ),
    Invariant(
        21,
        "the engine's books",
        "the engine's own check of its queues, tables and counts passes",
        _engine_books,
    ),
)
"""In the order in which they are asked."""


def first_broken(scene: Scene) -> tuple[Invariant, str] | None:
    """The first invariant that does not hold, and what it found."""
    for invariant in INVARIANTS:
        found = invariant.check(scene)
        if found is not None:
            return invariant, found
    return None
