"""One-line faults of the product, each with the tests that notice it.

A mutation is one exact textual change to one file. `test_mutations.py` makes it on a copy and sees that its tests fail;
`scripts/mutations` does so for all of them and reports how many were noticed.
`rule` numbers the points that implementers of this scheduler get wrong, as test_scheduler_rules.py does (0: another).
"""

from __future__ import annotations

from dataclasses import dataclass

GOLDENS = "test_golden_decisions.py::test_decisions_equal_the_recorded_ones"
RULE_TESTS = "test_scheduler_rules.py"
PROCESS = "test_engine_process.py"
RUNNER = "test_executor_runner.py"


@dataclass(frozen=True)
class Mutation:
    """One change and the tests that must notice it."""

    name: str
    rule: int
    path: str
    """Of the file, from the root of the repository."""
    old: str
    """Stands there exactly once."""
    new: str
    tests: tuple[str, ...] = ()
    """file::name in `tests`."""


SCHEDULER, ASYNC, STEP = "sim/scheduler.py", "sim/async_scheduler.py", "sim/step.py"
POOL, MANAGER, RULES = "sim/block_pool.py", "sim/kv_cache_manager.py", "sim/rules.py"
POLICY, QUEUE, CORE, REQUEST = "sim/policy.py", "sim/request_queue.py", "sim/engine_core.py", "sim/request.py"
CONFIG, HASH = "sim/config.py", "sim/block_hash.py"

SCHEDULING = (
    Mutation(
        "a preemption leaves admission open", 1, SCHEDULER,
        "        if step.record.preempted:\n",
        "        if False:\n",
    ),
    Mutation(
        "requests behind a self-preempted one go on", 2, SCHEDULER,
        "even if they hold enough blocks.\n                break\n",
        "even if they hold enough blocks.\n                continue\n",
    ),
    Mutation(
        "blocks are findable only after the step that fills them", 3, MANAGER,
        "self._hash_full_blocks(request, min(computed + num_new_tokens, request.num_tokens))",
        "self._hash_full_blocks(request, computed)",
    ),
    Mutation(
        "a hit may cover the last token", 4, MANAGER,
        "(request.num_tokens - 1) // self.block_size",
        "request.num_tokens // self.block_size",
    ),
    Mutation(
        "the full-sequence gate is gone", 5, SCHEDULER,
        "gate = self.config.scheduler.scheduler_reserve_full_isl",
        "gate = False",
    ),
    Mutation(
        "the full-sequence gate asks for the prompt alone", 5, MANAGER,
        "whole = min(request.num_tokens, self._max_model_len)",
        "whole = min(request.num_prompt_tokens, self._max_model_len)",
    ),
    Mutation(
        "free hit blocks cost nothing", 6, MANAGER,
        "return fresh + sum(self.pool.references(b) == 0 for b in hits)",
        "return fresh",
    ),
    Mutation(
        "hit blocks in use count as taken", 6, MANAGER,
        "return fresh + sum(self.pool.references(b) == 0 for b in hits)",
        "return fresh + len(hits)",
    ),
    Mutation(
        "fresh blocks are taken before the hits are held", 7, MANAGER,
        "        if hits:\n"
        "            self.pool.touch(hits, request.request_id)\n"
        "            table += hits\n"
        "            request.num_hashed_blocks = len(hits)\n"
        "        fresh = self.pool.take(cdiv(slots, self.block_size) - len(table), request.request_id)\n",
        "        fresh = self.pool.take(cdiv(slots, self.block_size) - len(table) - len(hits), request.request_id)\n"
        "        if hits:\n"
        "            self.pool.touch(hits, request.request_id)\n"
        "            table += hits\n"
        "            request.num_hashed_blocks = len(hits)\n",
    ),
    Mutation(
        "a table is freed from its beginning", 8, MANAGER,
        "back = request.block_ids[::-1]",
        "back = request.block_ids[:]",
    ),
    Mutation(
        "freed blocks without content are taken first", 8, RULES,
        "free_order: FreeOrder = FreeOrder.ALL_AT_THE_BACK",
        "free_order: FreeOrder = FreeOrder.UNHASHED_IN_FRONT",
    ),
    Mutation(
        "the newest of equal blocks is hit", 9, POOL,
        "return next(iter(found))",
        "return next(reversed(found))",
    ),
    Mutation(
        "the eviction of a duplicate hides the others", 9, POOL,
        "            if holders:\n",
        "            if False:\n",
    ),
    Mutation(
        "the null block is handed out", 10, POOL,
        "self._queue = list(range(1, num_gpu_blocks))",
        "self._queue = list(range(num_gpu_blocks))",
    ),
    Mutation(
        "FCFS victims go to the back of the queue", 11, QUEUE,
        "self._queue.appendleft(request)",
        "self._queue.append(request)",
    ),
    Mutation(
        "a victim keeps its count of computed tokens", 11, SCHEDULER,
        "        request.num_computed_tokens = 0\n        request.spec_token_ids = []\n",
        "        request.spec_token_ids = []\n",
    ),
    Mutation(
        "equal priority and arrival: the id does not decide", 12, POLICY,
        "return (request.priority, request.arrival_ns, request.request_id)",
        "return (request.priority, request.arrival_ns)",
    ),
    Mutation(
        "the last of equal victims goes", 12, POLICY,
        "return max(running, key=",
        "return max(reversed(running), key=",
    ),
    Mutation(
        "a scheduled victim gives no tokens back", 13, STEP,
        "self.budget += self.num_scheduled_tokens.pop(request_id)",
        "self.num_scheduled_tokens.pop(request_id)",
    ),
    Mutation(
        "a scheduled victim does not move the cursor", 13, SCHEDULER,
        "if unscheduled or (place < index and self.rules.keep_cursor):",
        "if place < index and self.rules.keep_cursor:",
    ),
    Mutation(
        "a scheduled victim's drafts stay in the plan", 13, STEP,
        "for given in (self.new_blocks, self.spec_tokens, self.asked):",
        "for given in (self.new_blocks, self.asked):",
    ),
    Mutation(
        "tokens given back go to the request being placed", 13, SCHEDULER,
        "            step.give(request, num_tokens, blocks)\n            step.running.append(request)\n",
        "            num_tokens = self._next_tokens(request, step.budget)\n"
        "            step.give(request, num_tokens, blocks)\n            step.running.append(request)\n",
    ),
    Mutation(
        "the threshold does not cut running prompts", 14, SCHEDULER,
        "self._clamp_long_prefill(request.num_tokens + ahead - request.num_computed_tokens)",
        "request.num_tokens + ahead - request.num_computed_tokens",
    ),
    Mutation(
        "the threshold comes after the test for whole prompts", 14, RULES,
        "threshold_before_chunk_check: bool = True",
        "threshold_before_chunk_check: bool = False",
    ),
    Mutation(
        "without chunked prefill prompts are chunked all the same", 14, SCHEDULER,
        "            if asked > budget:\n                return None\n",
        "            if asked > budget:\n                return budget\n",
    ),
    Mutation(
        "admission reserves the drafter's slots", 15, RULES,
        "lookahead_at_admission: bool = False",
        "lookahead_at_admission: bool = True",
    ),
    Mutation(
        "a running request reserves no slots for its drafter", 15, CONFIG,
        'return 0 if self.method == "ngram" else self.num_speculative_tokens',
        "return 0",
    ),
    Mutation(
        "a draft head keeps the last block of a hit", 15, CONFIG,
        'return self.method == "eagle"',
        "return False",
    ),
    Mutation(
        "drafts go beyond the context window", 16, SCHEDULER,
        "return min(num_tokens, budget, room)",
        "return min(num_tokens, budget)",
    ),
    Mutation(
        "the context window ends one token late", 16, REQUEST,
        "self.length_limit = min(self.max_total_tokens, max_model_len)",
        "self.length_limit = min(self.max_total_tokens, max_model_len + 1)",
    ),
    Mutation(
        "max_num_scheduled_tokens is ignored", 16, CONFIG,
        "return self.max_num_scheduled_tokens or self.max_num_batched_tokens",
        "return self.max_num_batched_tokens",
    ),
    Mutation(
        "length is asked before EOS", 17, RULES,
        "(StopCheck.EOS, StopCheck.STOP_TOKEN, StopCheck.LENGTH)",
        "(StopCheck.LENGTH, StopCheck.EOS, StopCheck.STOP_TOKEN)",
    ),
    Mutation(
        "min_tokens does not hold an end back", 17, SCHEDULER,
        "too_short = request.num_output_tokens < request.sampling_params.min_tokens",
        "too_short = False",
    ),
    Mutation(
        "ignore_eos is ignored", 17, REQUEST,
        "self.eos_token_id = None if sampling_params.ignore_eos else eos_token_id",
        "self.eos_token_id = eos_token_id",
    ),
    Mutation(
        "what comes after a stop in the same step is kept", 17, SCHEDULER,
        "                    return tokens[:count]\n",
        "                    return tokens\n",
    ),
    Mutation(
        "the worker does not hear of requests that never ran", 18, SCHEDULER,
        "        self.finished_req_ids.add(request.request_id)\n",
        "        if request.output_token_ids:\n            self.finished_req_ids.add(request.request_id)\n",
    ),
    Mutation(
        "no step tells the worker of the last end", 18, CORE,
        "return self.scheduler.has_unfinished_requests() or self.scheduler.has_finished_requests()",
        "return self.scheduler.has_unfinished_requests()",
    ),
    Mutation(
        "an end is told in every later step", 18, SCHEDULER,
        "        self._prev_step_ids = frozenset(scheduled)\n        self.finished_req_ids = set()\n",
        "        self._prev_step_ids = frozenset(scheduled)\n",
    ),
    Mutation(
        "rejected drafts stay computed", 19, SCHEDULER,
        "request.num_computed_tokens -= num_rejected",
        "request.num_computed_tokens -= 0",
    ),
    Mutation(
        "drafts that do not fit wait for the next step", 19, SCHEDULER,
        "            step.spec_tokens[request.request_id] = request.spec_token_ids[:num_drafts]\n",
        "            step.spec_tokens[request.request_id] = request.spec_token_ids[:]\n",
    ),
    Mutation(
        "an unfinished prompt keeps its drafts", 19, SCHEDULER,
        "request.spec_token_ids = [] if request.is_prefill_chunk else list(token_ids)",
        "request.spec_token_ids = list(token_ids)",
    ),
    Mutation(
        "a running request carries its whole table", 20, SCHEDULER,
        "            step.give(request, num_tokens, blocks)\n            step.running.append(request)\n",
        "            step.give(request, num_tokens, self.kv.block_ids(request))\n"
        "            step.running.append(request)\n",
    ),
    Mutation(
        "only resumed requests carry their tokens", 20, SCHEDULER,
        "        self._prev_step_ids = frozenset(scheduled)\n",
        "        self._prev_step_ids = frozenset(r.request_id for r in self.running)\n",
    ),
    Mutation(
        "a refused look-up is not counted", 20, RULES,
        "count_refused_lookups: bool = True",
        "count_refused_lookups: bool = False",
    ),
    Mutation(
        "look-ups of preempted requests are counted as new ones", 20, SCHEDULER,
        "        if request.num_preemptions:\n",
        "        if False:\n",
    ),
    Mutation(
        "the second model runner gets resumed requests as running ones", 20, STEP,
        "        if self.v2_model_runner:\n",
        "        if False:\n",
    ),
    # ------------------------------------------------------------ asynchronous scheduling
    Mutation(
        "a request is scheduled beyond its max_tokens", 0, ASYNC,
        "        if placeholders > 0 and last:\n",
        "        if False:\n",
    ),
    Mutation(
        "rejected drafts stay expected", 0, ASYNC,
        "            request.num_output_placeholders -= num_rejected\n",
        "            pass\n",
    ),
    Mutation(
        "blocks of tokens that came in are not findable", 0, ASYNC,
        "                self.kv.cache_blocks(request, known)\n",
        "                pass\n",
    ),
    Mutation(
        "a request that ends while preempted stays in the queue", 0, SCHEDULER,
        "        if request.status != RequestStatus.RUNNING:\n            self.waiting.remove(request)\n",
        "",
    ),
    Mutation(
        "one step in flight is enough", 0, CORE,
        "self.batch_queue_size = 2 if asynchronous else 1",
        "self.batch_queue_size = 1",
    ),
    # ------------------------------------------------------------ the shortcut for plain decodes
    Mutation(
        "a plain decode does not notice the end of its block", 0, MANAGER,
        "quiet = len(request.block_ids) * self.block_size\n",
        "quiet = len(request.block_ids) * self.block_size + 1\n",
    ),
    Mutation(
        "a plain decode does not fill its block", 0, MANAGER,
        "            self._hash_full_blocks(request, min(filled, request.num_tokens))\n",
        "            pass\n",
    ),
    Mutation(
        "a prompt in chunks counts as a plain decode", 0, MANAGER,
        "        if computed + num_new_tokens < request.num_tokens:\n",
        "        if False:\n",
    ),
    Mutation(
        "a salt is no part of a block's identity", 0, HASH,
        "self._parent = _NO_PARENT if cache_salt is None else _salted_root(cache_salt)",
        "self._parent = _NO_PARENT",
    ),
    # ------------------------------------------------------------ corrections
    Mutation(
        "the correction of uncomputed hits does nothing", 0, SCHEDULER,
        "        if unscheduled and self.rules.forget_uncomputed_blocks:\n",
        "        if False:\n",
    ),
    Mutation(
        "the correction of the cursor does nothing", 0, SCHEDULER,
        "if unscheduled or (place < index and self.rules.keep_cursor):",
        "if unscheduled:",
    ),
    Mutation(
        "the correction of min_tokens does nothing", 0, SCHEDULER,
        "        if too_short and not self.rules.length_outranks_min_tokens:\n",
        "        if too_short:\n",
    ),
    Mutation(
        "the correction of the pool's size does nothing", 0, CONFIG,
        "corrected = self.rules.null_block_is_no_room",
        "corrected = False",
    ),
)  # fmt: skip

OTHERS = (
    # ------------------------------------------------------------ time and the log
    Mutation(
        "host time does not move the clock",
        0,
        "sim/engine_process.py",
        "delay = max(times.device_end_ns - self.now, 0) + times.update_ns",
        "delay = max(times.device_end_ns - self.now, 0)",
        (
            f"{PROCESS}::test_the_synchronous_period_is_the_sum_of_its_parts",
            f"{PROCESS}::test_host_time_counts_rows_and_new_requests",
        ),
    ),
    Mutation(
        "aborts come after the update",
        0,
        "sim/engine_process.py",
        "        self._abort_due()\n        outputs = self.core.complete(frame, result.output)\n",
        "        outputs = self.core.complete(frame, result.output)\n",
        (
            f"{PROCESS}::test_at_one_instant_aborts_come_before_the_update",
            f"{PROCESS}::test_the_whole_order_at_one_instant",
        ),
    ),
    Mutation(
        "the first token has an inter-token latency",
        0,
        "sim/events.py",
        "            if before := request.output_ns:\n                gap_ns = end_ns - before[-1]\n",
        "            before = request.output_ns\n"
        "            if request.queued_ns != NEVER:\n"
        "                gap_ns = end_ns - (before[-1] if before else request.queued_ns)\n",
        ("test_events.py::test_a_preempted_request_keeps_its_first_times",),
    ),
    Mutation(
        "a head without a seat has no reason to wait",
        0,
        "sim/scheduler.py",
        "return self._note_wait(step, WaitReason.SEATS, now)",
        "return None",
        ("test_reports_scheduler.py::test_10_a_more_urgent_arrival_waits_for_a_seat",),
    ),
    Mutation(
        "a head without blocks has no reason to wait",
        0,
        "sim/scheduler.py",
        "return WaitReason.GATE if fits else WaitReason.BLOCKS",
        "return WaitReason.GATE",
        ("test_reports_blocks.py::test_11_hit_blocks_in_the_free_queue_count_as_taken",),
    ),
    Mutation(
        "a new reason does not end the old wait",
        0,
        "sim/waits.py",
        "if wait.reason is not reason:",
        "if False:",
        ("test_events.py::test_waits_have_one_interval_per_reason",),
    ),
    # ------------------------------------------------------------ execution
    Mutation(
        "attention reads before K/V is written",
        0,
        "executor/attention.py",
        "    written = write_kv(_packed(key), _packed(value), layer_index)\n"
        "    output = attend(_packed(query), written, layer_index, scaling, sliding_window, softcap)\n",
        "    written = query.new_empty(0)\n"
        "    output = attend(_packed(query), written, layer_index, scaling, sliding_window, softcap)\n"
        "    write_kv(_packed(key), _packed(value), layer_index)\n",
        (
            f"{RUNNER}::test_a_prompt_in_chunks_and_decode_steps_equal_one_forward[llama]",
            f"{RUNNER}::test_a_hit_on_blocks_computed_in_the_same_step[llama]",
        ),
    ),
    Mutation(
        "one request reads before the next has written",
        0,
        "executor/attention.py",
        "    written = write_kv(_packed(key), _packed(value), layer_index)\n"
        "    output = attend(_packed(query), written, layer_index, scaling, sliding_window, softcap)\n",
        "    context = get_forward_context()\n"
        "    metadata, cache = context.attention_metadata, context.kv_caches[layer_index]\n"
        "    starts, parts = metadata.query_start_loc.tolist(), []\n"
        "    for rows in (slice(*bounds) for bounds in zip(starts, starts[1:])):\n"
        "        new = _packed(key)[rows], _packed(value)[rows]\n"
        "        ops.reshape_and_cache(*new, cache.key, cache.value, metadata.slot_mapping[rows])\n"
        "        written = query.new_empty(0)\n"
        "        all_rows = attend(_packed(query), written, layer_index, scaling, sliding_window, softcap)\n"
        "        parts.append(all_rows[rows])\n"
        "    output = torch.cat(parts)\n",
        (f"{RUNNER}::test_a_hit_whatever_the_order_of_rows_in_the_step",),
    ),
    Mutation(
        "a compiler may reorder write and attention",
        0,
        "executor/attention.py",
        "output = attend(_packed(query), written, layer_index,",
        "output = attend(_packed(query), query.new_empty(0), layer_index,",
        ("test_executor_attention.py::test_a_compiler_cannot_read_before_it_writes",),
    ),
    Mutation(
        "slot -1 is written",
        0,
        "kernels/cpu_torch.py",
        "written = slot_mapping >= 0",
        "written = slot_mapping >= -1",
        (
            "test_kernels_cache.py::test_padding_slots_write_nothing",
            "test_executor_input_batch.py::test_the_warm_up_batch_writes_nothing",
        ),
    ),
    Mutation(
        "a chunk that ends early is sampled",
        0,
        "executor/input_batch.py",
        "logits_rows = np.flatnonzero(layout.seq_lens == num_tokens)",
        "logits_rows = np.arange(num_reqs)",
        (
            f"{RUNNER}::test_unscheduled_and_partial_rows_have_no_sampled_token",
            f"{RUNNER}::test_a_seed_does_not_depend_on_chunking",
        ),
    ),
    Mutation(
        "the sampler does not know min_tokens",
        0,
        "executor/sampler.py",
        "if row.num_output_tokens < row.params.min_tokens",
        "if False",
        ("test_executor_sampler.py::test_min_tokens_holds_back_every_token_that_could_end_the_request",),
    ),
)

MUTATIONS = SCHEDULING + OTHERS
