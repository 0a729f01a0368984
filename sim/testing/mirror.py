"""A worker that knows nothing but the plans and its own samples: what a real one would hold, block by block.

Each slot of its cache holds the whole sequence up to its token, as K/V does, so a read of a slot that was never
written, or written for another sequence, shows.
"""

from __future__ import annotations

from servetwin.sim.contract import ModelRunnerOutput, SchedulerOutput
from servetwin.sim.testing.arrival import Arrival


class Mirror:
    """State of the worker after the last plan it was given.

    `complaints` are plans that make no sense to it, in words; `bad_reads` are slots that a step of the latest plan
    reads although something else, or nothing, was written there.
    """

    def __init__(self, block_size: int) -> None:
        self.tables: dict[str, list[int]] = {}
        self.tokens: dict[str, list[int]] = {}
        """Known tokens: the prompt and every token sampled so far, delivered or not."""
        self.computed: dict[str, int] = {}
        self.complaints: list[str] = []
        self.bad_reads: list[str] = []
        self._block_size = block_size
        self._slots: dict[int, int] = {}
        self._prompt_tokens: dict[str, int] = {}

    def run(self, plan: SchedulerOutput, arrivals: dict[str, Arrival]) -> ModelRunnerOutput:
        """Takes in the plan's deltas, writes its slots, reads what attention reads, samples where a row ends."""
        self.complaints, self.bad_reads = [], []
        self._forget(plan.finished_req_ids)
        self._take_in(plan)
        ids = [r for r in plan.num_scheduled_tokens if self._can_compute(r, plan.num_scheduled_tokens[r])]
        for request_id in ids:
            self._write(request_id, plan.num_scheduled_tokens[request_id])
        for request_id in ids:
            self._read(request_id)
        rows = list(plan.num_scheduled_tokens)
        sampled = [self._sample(r, arrivals) if r in ids else [] for r in rows]
        return ModelRunnerOutput(rows, {r: i for i, r in enumerate(rows)}, sampled)

    # ------------------------------------------------------------ deltas

    def _forget(self, request_ids: set[str]) -> None:
        for request_id in request_ids:
            for known in (self.tables, self.tokens, self.computed, self._prompt_tokens):
                known.pop(request_id, None)

    def _take_in(self, plan: SchedulerOutput) -> None:
        for new in plan.scheduled_new_reqs:
            self.tables[new.req_id] = list(new.block_ids[0])
            self.tokens[new.req_id] = list(new.prompt_token_ids or [])
            self.computed[new.req_id] = new.num_computed_tokens
            self._prompt_tokens[new.req_id] = len(self.tokens[new.req_id])
        cached = plan.scheduled_cached_reqs
        for request_id, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if request_id not in self.tables:
                self.complaints.append(f"{request_id} is planned as known, and the worker does not know it")
                continue
            resumed = request_id in cached.resumed_req_ids
            if not resumed and computed != self.computed[request_id]:
                self.complaints.append(
                    f"{request_id} is said to have {computed} computed tokens; "
                    f"the worker has computed {self.computed[request_id]}"
                )
            kept = [] if resumed else self.tables[request_id]
            self.tables[request_id] = kept + ([] if blocks is None else list(blocks[0]))
            self.computed[request_id] = computed
            self.tokens[request_id] = list(cached.all_token_ids.get(request_id, self.tokens[request_id]))

    def _can_compute(self, request_id: str, num_tokens: int) -> bool:
        if request_id not in self.tables:
            self.complaints.append(f"{request_id} is scheduled, and the worker does not know it")
            return False
        stop = self.computed[request_id] + num_tokens
        known = len(self.tokens[request_id])
        room = len(self.tables[request_id]) * self._block_size
        if stop > known or stop > room:
            self.complaints.append(
                f"{request_id} is to compute up to token {stop}, of {known} known ones, with room for {room}"
            )
            return False
        return True

    # ------------------------------------------------------------ execution

    def _write(self, request_id: str, num_tokens: int) -> None:
        start = self.computed[request_id]
        content = self._contents(request_id, start + num_tokens)
        for position in range(start, start + num_tokens):
            self._slots[self._slot(request_id, position)] = content[position]
        self.computed[request_id] = start + num_tokens

    def _read(self, request_id: str) -> None:
        for position, content in enumerate(self._contents(request_id, self.computed[request_id])):
            slot = self._slot(request_id, position)
            if self._slots.get(slot) != content:
                held = "another sequence" if slot in self._slots else "nothing"
                self.bad_reads.append(
                    f"{request_id} reads token {position} in block {slot // self._block_size}, which holds {held}"
                )
                return

    def _sample(self, request_id: str, arrivals: dict[str, Arrival]) -> list[int]:
        tokens = self.tokens[request_id]
        if self.computed[request_id] < len(tokens):
            return []
        index = len(tokens) - self._prompt_tokens[request_id]
        tokens.append(arrivals[request_id].answer_token(request_id, index))
        return tokens[-1:]

    def _slot(self, request_id: str, position: int) -> int:
        block, offset = divmod(position, self._block_size)
        return self.tables[request_id][block] * self._block_size + offset

    def _contents(self, request_id: str, stop: int) -> list[int]:
        contents, content = [], 0
        for token in self.tokens[request_id][:stop]:
            content = hash((content, token))
            contents.append(content)
        return contents
