"""One-line faults of the product, each with the tests that notice it.

A mutation is one exact textual change to one file. `test_mutations.py` makes it on a copy and sees that its tests fail;
`scripts/mutations` does so for all of them and reports how many were noticed.
`rule` numbers the points that implementers of this scheduler get wrong, as test_scheduler_rules.py does (0: another).
"""

from __future__ import annotations

from cluster_mutations import CLUSTERS
from dashboard_mutations import DASHBOARD
from export_mutations import EXPORTS
from kernel_mutations import KERNELS
from mutation import Mutation
from planning_mutations import PLANNING
from report_mutations import REPORT
from sweep_mutations import SWEEPS

GOLDENS = "test_golden_decisions.py::test_decisions_equal_the_recorded_ones"
RULE_TESTS = "test_scheduler_rules.py"
PROCESS = "test_engine_process.py"
RUNNER = "test_executor_runner.py"
SPECULATION = "test_executor_speculation.py"

SCHEDULER, ASYNC, STEP = "sim/scheduler.py", "sim/async_scheduler.py", "sim/step.py"
POOL, MANAGER, RULES = "sim/block_pool.py", "sim/kv_cache_manager.py", "sim/rules.py"
POLICY, QUEUE, CORE, REQUEST = "sim/policy.py", "sim/request_queue.py", "sim/engine_core.py", "sim/request.py"
CONFIG, HASH = "sim/config.py", "sim/block_hash.py"

SCHEDULING = (
    Mutation(
        "a preemption leaves admission open",
        1,
        SCHEDULER,
        "        if step.record.preempted:\n",
        "        if False:\n",
        (
            "test_scheduler_rules.py::test_01_a_preemption_closes_admission_for_the_step",
            "test_scheduler_rules.py::test_13_the_number_of_tokens_is_not_taken_anew_after_a_refund",
            f"{GOLDENS}[s06_prefix_preempt]",
        ),
    ),
    Mutation(
        "requests behind a self-preempted one go on",
        2,
        SCHEDULER,
        "even if they hold enough blocks.\n                break\n",
        "even if they hold enough blocks.\n                continue\n",
        (
            "test_scheduler_rules.py::test_02_requests_behind_a_self_preempted_one_idle",
            "test_scheduler_rules.py::test_20_a_running_request_that_sat_out_a_step_carries_all_its_tokens",
            f"{GOLDENS}[s07_priority_preempt]",
        ),
    ),
    Mutation(
        "blocks are findable only after the step that fills them",
        3,
        MANAGER,
        "self._hash_full_blocks(request, min(filled, request.num_tokens))",
        "self._hash_full_blocks(request, computed)",
        (
            "test_scheduler_rules.py::test_03_a_block_is_found_in_the_step_that_fills_it",
            "test_scheduler_rules.py::test_04_the_last_token_is_never_hit",
        ),
    ),
    Mutation(
        "a hit may cover the last token",
        4,
        MANAGER,
        "(request.num_tokens - 1) // self.block_size",
        "request.num_tokens // self.block_size",
        (
            "test_scheduler_rules.py::test_04_the_last_token_is_never_hit",
            "test_scheduler_rules.py::test_15_a_draft_head_gives_up_the_last_block_of_a_hit",
        ),
    ),
    Mutation(
        "the full-sequence gate is gone",
        5,
        SCHEDULER,
        "if self._gate and kv.blocks_for_all(",
        "if False and kv.blocks_for_all(",
        (
            "test_scheduler_rules.py::test_05_the_gate_asks_for_the_whole_prompt",
            "test_scheduler_rules.py::test_05_the_gate_counts_the_outputs_of_a_resumed_request",
            f"{GOLDENS}[s06_prefix_preempt]",
        ),
    ),
    Mutation(
        "the full-sequence gate asks for the prompt alone",
        5,
        MANAGER,
        "min(request.num_tokens, self._max_model_len), hits)",
        "min(request.num_prompt_tokens, self._max_model_len), hits)",
        (
            "test_scheduler_rules.py::test_05_the_gate_counts_the_outputs_of_a_resumed_request",
            f"{GOLDENS}[s07_priority_preempt]",
        ),
    ),
    Mutation(
        "free hit blocks cost nothing",
        6,
        MANAGER,
        "return fresh + len(self.pool.free_of(hits))",
        "return fresh",
        (
            "test_scheduler_rules.py::test_06_hit_blocks_that_nobody_uses_count_as_taken",
            "test_scheduler_rules.py::test_11_with_caching_a_victim_finds_its_own_blocks_again",
        ),
    ),
    Mutation(
        "hit blocks in use count as taken",
        6,
        MANAGER,
        "return fresh + len(self.pool.free_of(hits))",
        "return fresh + len(hits)",
        (
            "test_scheduler_rules.py::test_06_hit_blocks_in_use_cost_nothing",
            f"{GOLDENS}[s06_prefix_preempt]",
        ),
    ),
    Mutation(
        "fresh blocks are taken before the hits are held",
        7,
        MANAGER,
        "        if hits:\n"
        "            self.pool.touch(hits, request.request_id)\n"
        "            table += hits\n"
        "            request.num_hashed_blocks = len(hits)\n"
        "        fresh = self.pool.take(num_fresh, request.request_id)\n",
        "        fresh = self.pool.take(num_fresh, request.request_id)\n"
        "        if hits:\n"
        "            self.pool.touch(hits, request.request_id)\n"
        "            table += hits\n"
        "            request.num_hashed_blocks = len(hits)\n",
        (
            "test_scheduler_rules.py::test_07_a_request_does_not_evict_its_own_hits",
            "test_reports_blocks.py::test_19_only_new_blocks_are_new",
            f"{GOLDENS}[s06_prefix_preempt]",
        ),
    ),
    Mutation(
        "a table is freed from its beginning",
        8,
        MANAGER,
        "back = table[::-1]",
        "back = table[:]",
        (
            "test_scheduler_rules.py::test_08_a_table_is_freed_from_its_end",
            "test_scheduler_rules.py::test_08_requests_that_end_together_are_freed_in_scheduling_order",
        ),
    ),
    Mutation(
        "freed blocks without content are taken first",
        8,
        RULES,
        "free_order: FreeOrder = FreeOrder.ALL_AT_THE_BACK",
        "free_order: FreeOrder = FreeOrder.UNHASHED_IN_FRONT",
        (
            "test_scheduler_rules.py::test_08_requests_that_end_together_are_freed_in_scheduling_order",
            "test_reports_blocks.py::test_22_the_free_queue_takes_a_table_back_from_its_end",
            f"{GOLDENS}[s01_fcfs_plain]",
        ),
    ),
    Mutation(
        "the newest of equal blocks is hit",
        9,
        POOL,
        "return next(iter(found))",
        "return next(reversed(found))",
        (
            "test_scheduler_rules.py::test_09_equal_blocks_are_kept_side_by_side",
            "test_block_pool.py::test_the_oldest_duplicate_is_found[1-2]",
            f"{GOLDENS}[s05_prefix_shared]",
        ),
    ),
    Mutation(
        "the eviction of a duplicate hides the others",
        9,
        POOL,
        "        if holders:\n",
        "        if False:\n",
        (
            "test_scheduler_rules.py::test_09_the_eviction_of_a_duplicate_exposes_the_next",
            "test_block_pool.py::test_the_oldest_duplicate_is_found[1-2]",
            f"{GOLDENS}[s06_prefix_preempt]",
        ),
    ),
    Mutation(
        "the null block is handed out",
        10,
        POOL,
        "self._queue = list(range(1, num_gpu_blocks))",
        "self._queue = list(range(num_gpu_blocks))",
        (
            "test_scheduler_rules.py::test_11_with_caching_a_victim_finds_its_own_blocks_again",
            "test_scheduler_rules.py::test_07_a_request_does_not_evict_its_own_hits",
        ),
    ),
    Mutation(
        "FCFS victims go to the back of the queue",
        11,
        QUEUE,
        "self.appendleft(request)",
        "self.append(request)",
        (
            "test_scheduler_rules.py::test_11_victims_of_one_step_keep_their_order_and_their_outputs",
            "test_scheduler_rules.py::test_01_a_preemption_closes_admission_for_the_step",
            f"{GOLDENS}[s04_tiny_kv]",
        ),
    ),
    Mutation(
        "a victim keeps its count of computed tokens",
        11,
        SCHEDULER,
        "        request.num_computed_tokens = 0\n        request.spec_token_ids = []\n",
        "        request.spec_token_ids = []\n",
        (
            "test_scheduler_rules.py::test_11_victims_of_one_step_keep_their_order_and_their_outputs",
            "test_scheduler_rules.py::test_20_a_resumed_request_carries_its_whole_table_and_all_its_tokens",
            f"{GOLDENS}[s04_tiny_kv]",
        ),
    ),
    Mutation(
        "equal priority and arrival: the id does not decide",
        12,
        POLICY,
        "return (request.priority, request.arrival_ns, request.request_id)",
        "return (request.priority, request.arrival_ns)",
        (
            "test_scheduler_rules.py::test_12_ties_in_the_queue_are_broken_by_arrival_then_by_the_id_as_text",
            f"{GOLDENS}[s07_priority_preempt]",
        ),
    ),
    Mutation(
        "the last of equal victims goes",
        12,
        POLICY,
        "return max(running, key=",
        "return max(reversed(running), key=",
        (
            "test_scheduler_rules.py::test_12_the_first_of_equal_victims_goes",
            f"{GOLDENS}[s07_priority_preempt]",
        ),
    ),
    Mutation(
        "a scheduled victim gives no tokens back",
        13,
        STEP,
        "self.budget += self.num_scheduled_tokens.pop(request_id)",
        "self.num_scheduled_tokens.pop(request_id)",
        (
            "test_scheduler_rules.py::test_13_tokens_given_back_go_to_those_behind",
            f"{GOLDENS}[s18_priority_refund]",
        ),
    ),
    Mutation(
        "a scheduled victim does not move the cursor",
        13,
        SCHEDULER,
        "if unscheduled or (place < index and self.rules.keep_cursor):",
        "if place < index and self.rules.keep_cursor:",
        (
            "test_scheduler_rules.py::test_13_a_scheduled_victim_gives_its_tokens_back",
            "test_scheduler_rules.py::test_13_tokens_given_back_go_to_those_behind",
            f"{GOLDENS}[s07_priority_preempt]",
        ),
    ),
    Mutation(
        "a scheduled victim's drafts stay in the plan",
        13,
        STEP,
        "for given in (self.new_blocks, self.spec_tokens, self.asked):",
        "for given in (self.new_blocks, self.asked):",
        ("test_scheduler_rules.py::test_13_a_scheduled_victim_takes_its_drafts_along",),
    ),
    Mutation(
        "tokens given back go to the request being placed",
        13,
        SCHEDULER,
        "            step.give(request, num_tokens, blocks)\n            step.running.append(request)\n",
        "            num_tokens = self._next_tokens(request, step.budget)\n"
        "            step.give(request, num_tokens, blocks)\n            step.running.append(request)\n",
        (
            "test_scheduler_rules.py::test_13_the_number_of_tokens_is_not_taken_anew_after_a_refund",
            f"{GOLDENS}[s18_priority_refund]",
        ),
    ),
    Mutation(
        "the threshold does not cut running prompts",
        14,
        SCHEDULER,
        "self._clamp_long_prefill(request.num_tokens + ahead - request.num_computed_tokens)",
        "request.num_tokens + ahead - request.num_computed_tokens",
        (
            "test_scheduler_rules.py::test_14_the_threshold_cuts_prompts_in_both_passes",
            "test_scheduler_rules.py::test_13_tokens_given_back_go_to_those_behind",
            f"{GOLDENS}[s08_long_prefill_threshold]",
        ),
    ),
    Mutation(
        "the threshold comes after the test for whole prompts",
        14,
        RULES,
        "threshold_before_chunk_check: bool = True",
        "threshold_before_chunk_check: bool = False",
        ("test_scheduler_rules.py::test_14_the_threshold_comes_before_the_test_for_whole_prompts",),
    ),
    Mutation(
        "without chunked prefill prompts are chunked all the same",
        14,
        SCHEDULER,
        "            if asked > budget:\n                return None\n",
        "            if asked > budget:\n                return budget\n",
        (
            "test_scheduler_rules.py::test_14_without_chunked_prefill_a_long_prompt_blocks_those_behind_it",
            "test_rules.py::test_the_threshold_comes_before_the_question_whether_a_prompt_fits[False-expected1]",
            f"{GOLDENS}[s03_chunked_off]",
        ),
    ),
    Mutation(
        "admission reserves the drafter's slots",
        15,
        RULES,
        "lookahead_at_admission: bool = False",
        "lookahead_at_admission: bool = True",
        (
            "test_scheduler_rules.py::test_15_admission_takes_blocks_for_its_tokens_only",
            f"{GOLDENS}[s19_spec_eagle]",
        ),
    ),
    Mutation(
        "a running request reserves no slots for its drafter",
        15,
        CONFIG,
        'return 0 if self.method == "ngram" else self.num_speculative_tokens',
        "return 0",
        (
            "test_scheduler_rules.py::test_15_drafters_without_kv_need_no_slots_ahead[eagle-3]",
            "test_scheduler_rules.py::test_15_drafters_without_kv_need_no_slots_ahead[draft_model-3]",
            f"{GOLDENS}[s19_spec_eagle]",
        ),
    ),
    Mutation(
        "a draft head keeps the last block of a hit",
        15,
        CONFIG,
        'return self.method == "eagle"',
        "return False",
        (
            "test_scheduler_rules.py::test_15_admission_takes_blocks_for_its_tokens_only",
            "test_scheduler_rules.py::test_15_a_draft_head_gives_up_the_last_block_of_a_hit",
            f"{GOLDENS}[s19_spec_eagle]",
        ),
    ),
    Mutation(
        "drafts go beyond the context window",
        16,
        SCHEDULER,
        "return min(num_tokens, budget, room)",
        "return min(num_tokens, budget)",
        (
            "test_scheduler_rules.py::test_16_drafts_are_cut_at_the_end_of_the_window",
            "test_scheduler_rules.py::test_16_admission_knows_no_such_clamp",
        ),
    ),
    Mutation(
        "the context window ends one token late",
        16,
        REQUEST,
        "self.length_limit = min(self.max_total_tokens, max_model_len)",
        "self.length_limit = min(self.max_total_tokens, max_model_len + 1)",
        (
            "test_scheduler_rules.py::test_16_the_window_ends_a_request_before_its_max_tokens",
            "test_reports_stop.py::test_43_a_prompt_just_below_the_window_gets_one_token",
        ),
    ),
    Mutation(
        "max_num_scheduled_tokens is ignored",
        16,
        CONFIG,
        "return self.max_num_scheduled_tokens or self.max_num_batched_tokens",
        "return self.max_num_batched_tokens",
        (
            "test_scheduler_rules.py::test_16_a_smaller_budget_than_max_num_batched_tokens_counts",
            f"{GOLDENS}[s22_scheduled_token_cap]",
        ),
    ),
    Mutation(
        "length is asked before EOS",
        17,
        RULES,
        "(StopCheck.EOS, StopCheck.STOP_TOKEN, StopCheck.LENGTH)",
        "(StopCheck.LENGTH, StopCheck.EOS, StopCheck.STOP_TOKEN)",
        (
            "test_scheduler_rules.py::test_17_the_order_of_the_stop_rules[sampling6-answer6-4-stop-None]",
            "test_scheduler_rules.py::test_17_the_order_of_the_stop_rules[sampling7-answer7-4-stop-5]",
            f"{GOLDENS}[s12_clock_mix]",
        ),
    ),
    Mutation(
        "min_tokens does not hold an end back",
        17,
        SCHEDULER,
        "too_short = request.num_output_tokens < request.sampling_params.min_tokens",
        "too_short = False",
        (
            "test_scheduler_rules.py::test_17_the_order_of_the_stop_rules[sampling1-answer1-4-length-None]",
            "test_scheduler_rules.py::test_17_the_order_of_the_stop_rules[sampling2-answer2-3-stop-None]",
            f"{GOLDENS}[s09_max_num_seqs_stops]",
        ),
    ),
    Mutation(
        "ignore_eos is ignored",
        17,
        REQUEST,
        "self.eos_token_id = None if sampling_params.ignore_eos else eos_token_id",
        "self.eos_token_id = eos_token_id",
        (
            "test_scheduler_rules.py::test_17_the_order_of_the_stop_rules[sampling3-answer3-4-length-None]",
            "test_scheduler_rules.py::test_17_the_order_of_the_stop_rules[sampling4-answer4-2-stop-5]",
            f"{GOLDENS}[s04_tiny_kv]",
        ),
    ),
    Mutation(
        "what comes after a stop in the same step is kept",
        17,
        SCHEDULER,
        "                    return tokens[:count]\n",
        "                    return tokens\n",
        (
            "test_reports_stop.py::test_42_what_comes_after_a_stop_in_the_same_step_is_dropped",
            f"{GOLDENS}[s14_spec_ngram]",
        ),
    ),
    Mutation(
        "the worker does not hear of requests that never ran",
        18,
        SCHEDULER,
        "        self.finished_req_ids.add(request.request_id)\n",
        "        if request.output_token_ids:\n            self.finished_req_ids.add(request.request_id)\n",
        (
            "test_scheduler_rules.py::test_18_the_worker_hears_of_an_end_one_step_later",
            "test_reports_blocks.py::test_20_aborts_of_what_holds_nothing",
            f"{GOLDENS}[s11_aborts]",
        ),
    ),
    Mutation(
        "no step tells the worker of the last end",
        18,
        CORE,
        "return self.scheduler.has_unfinished_requests() or self.scheduler.has_finished_requests()",
        "return self.scheduler.has_unfinished_requests()",
        (
            "test_scheduler_rules.py::test_18_the_worker_hears_of_an_end_one_step_later",
            "test_reports_blocks.py::test_18_cached_but_unreferenced_blocks_are_free",
            f"{GOLDENS}[s01_fcfs_plain]",
        ),
    ),
    Mutation(
        "an end is told in every later step",
        18,
        SCHEDULER,
        "        self._prev_step_ids = frozenset(scheduled)\n        self.finished_req_ids = set()\n",
        "        self._prev_step_ids = frozenset(scheduled)\n",
        (
            "test_scheduler_rules.py::test_11_victims_of_one_step_keep_their_order_and_their_outputs",
            "test_scheduler_rules.py::test_11_with_caching_a_victim_finds_its_own_blocks_again",
        ),
    ),
    Mutation(
        "rejected drafts stay computed",
        19,
        SCHEDULER,
        "request.num_computed_tokens -= num_rejected",
        "request.num_computed_tokens -= 0",
        ("test_scheduler_rules.py::test_19_rejected_drafts_are_rolled_back_and_their_blocks_stay",),
    ),
    Mutation(
        "drafts that do not fit wait for the next step",
        19,
        SCHEDULER,
        "            step.spec_tokens[request.request_id] = request.spec_token_ids[:num_drafts]\n",
        "            step.spec_tokens[request.request_id] = request.spec_token_ids[:]\n",
        (
            "test_scheduler_rules.py::test_19_drafts_that_do_not_fit_the_step_are_dropped",
            "test_scheduler_rules.py::test_16_drafts_are_cut_at_the_end_of_the_window",
            f"{GOLDENS}[s20_spec_draft_model_pressure]",
        ),
    ),
    Mutation(
        "an unfinished prompt keeps its drafts",
        19,
        SCHEDULER,
        "request.spec_token_ids = [] if request.is_prefill_chunk else list(token_ids)",
        "request.spec_token_ids = list(token_ids)",
        (
            "test_scheduler_rules.py::test_19_drafts_of_an_unfinished_prompt_and_of_the_dead_are_ignored",
            f"{GOLDENS}[s14_spec_ngram]",
        ),
    ),
    Mutation(
        "a running request carries its whole table",
        20,
        SCHEDULER,
        "            step.give(request, num_tokens, blocks)\n            step.running.append(request)\n",
        "            step.give(request, num_tokens, self.kv.block_ids(request))\n"
        "            step.running.append(request)\n",
        (
            "test_scheduler_rules.py::test_19_rejected_drafts_are_rolled_back_and_their_blocks_stay",
            "test_rules.py::test_forget_uncomputed_blocks_takes_them_out_of_the_cache",
            f"{GOLDENS}[s02_chunked_on]",
        ),
    ),
    Mutation(
        "only resumed requests carry their tokens",
        20,
        SCHEDULER,
        "        self._prev_step_ids = frozenset(scheduled)\n",
        "        self._prev_step_ids = frozenset(r.request_id for r in self.running)\n",
        (
            "test_scheduler_rules.py::test_20_a_running_request_that_sat_out_a_step_carries_all_its_tokens",
            f"{GOLDENS}[s07_priority_preempt]",
        ),
    ),
    Mutation(
        "a refused look-up is not counted",
        20,
        RULES,
        "count_refused_lookups: bool = True",
        "count_refused_lookups: bool = False",
        (
            "test_scheduler_rules.py::test_20_lookups_are_counted_at_every_try",
            "test_scheduler_rules.py::test_20_lookups_of_a_preempted_request_are_counted_apart",
            f"{GOLDENS}[s03_chunked_off]",
        ),
    ),
    Mutation(
        "look-ups of preempted requests are counted as new ones",
        20,
        SCHEDULER,
        "        if request.num_preemptions:\n",
        "        if False:\n",
        (
            "test_scheduler_rules.py::test_20_lookups_of_a_preempted_request_are_counted_apart",
            f"{GOLDENS}[s06_prefix_preempt]",
        ),
    ),
    Mutation(
        "the second model runner gets resumed requests as running ones",
        20,
        STEP,
        "        if self.v2_model_runner:\n",
        "        if False:\n",
        (
            "test_scheduler_rules.py::test_20_the_second_model_runner_gets_resumed_requests_as_new_ones",
            f"{GOLDENS}[x03_v2_runner]",
        ),
    ),
    # ------------------------------------------------------------ asynchronous scheduling
    Mutation(
        "a request is scheduled beyond its max_tokens",
        0,
        ASYNC,
        "        if placeholders > 0 and last:\n",
        "        if False:\n",
        (
            "test_reports_scheduler.py::test_03_the_cursor_is_not_corrected_for_an_unscheduled_victim",
            f"{GOLDENS}[x01_async_basic]",
        ),
    ),
    Mutation(
        "rejected drafts stay expected",
        0,
        ASYNC,
        "            request.num_output_placeholders -= num_rejected\n",
        "            pass\n",
        (f"{GOLDENS}[x04_async_eagle]",),
    ),
    Mutation(
        "blocks of tokens that came in are not findable",
        0,
        ASYNC,
        "                self.kv.cache_blocks(request, known)\n",
        "                pass\n",
        (f"{GOLDENS}[x01_async_basic]",),
    ),
    Mutation(
        "a request that ends while preempted stays in the queue",
        0,
        SCHEDULER,
        "        if request.status != RequestStatus.RUNNING:\n            self.waiting.remove(request)\n",
        "",
        ("test_reports_blocks.py::test_20_aborts_of_what_holds_nothing",),
    ),
    Mutation(
        "one step in flight is enough",
        0,
        CORE,
        "self.batch_queue_size = 2 if config.scheduler.async_scheduling else 1",
        "self.batch_queue_size = 1",
        (
            "test_reports_scheduler.py::test_03_a_victim_before_the_cursor_costs_nobody_a_turn",
            "test_reports_scheduler.py::test_03_the_cursor_is_not_corrected_for_an_unscheduled_victim",
            f"{GOLDENS}[x01_async_basic]",
        ),
    ),
    # ------------------------------------------------------------ the shortcut for plain decodes
    Mutation(
        "a plain decode does not notice the end of its block",
        0,
        MANAGER,
        "quiet = len(request.block_ids) * self.block_size\n",
        "quiet = len(request.block_ids) * self.block_size + 1\n",
        (
            "test_scheduler_rules.py::test_01_a_preemption_closes_admission_for_the_step",
            "test_scheduler_rules.py::test_02_requests_behind_a_self_preempted_one_idle",
        ),
    ),
    Mutation(
        "a plain decode does not fill its block",
        0,
        MANAGER,
        "            if min(filled, num_tokens) >= (place + 1) * self.block_size:\n",
        "            if False:\n",
        (
            "test_scheduler_rules.py::test_11_with_caching_a_victim_finds_its_own_blocks_again",
            "test_scheduler_rules.py::test_09_equal_blocks_are_kept_side_by_side",
            f"{GOLDENS}[s03_chunked_off]",
        ),
    ),
    Mutation(
        "a prompt in chunks counts as a plain decode",
        0,
        MANAGER,
        "        if filled < request.num_tokens:\n",
        "        if False:\n",
        (f"{GOLDENS}[x01_async_basic]",),
    ),
    Mutation(
        "a salt is no part of a block's identity",
        0,
        HASH,
        "= _NO_PARENT if cache_salt is None else _salted_root(cache_salt)",
        "= _NO_PARENT",
        (
            "test_reports_blocks.py::test_15_prompts_share_blocks_within_one_salt_only",
            "test_reports_blocks.py::test_15_a_salt_is_no_prefix_of_tokens",
        ),
    ),
    # ------------------------------------------------------------ corrections
    Mutation(
        "the correction of uncomputed hits does nothing",
        0,
        SCHEDULER,
        "        if unscheduled and self.rules.forget_uncomputed_blocks:\n",
        "        if False:\n",
        ("test_rules.py::test_forget_uncomputed_blocks_takes_them_out_of_the_cache",),
    ),
    Mutation(
        "the correction of the cursor does nothing",
        0,
        SCHEDULER,
        "if unscheduled or (place < index and self.rules.keep_cursor):",
        "if unscheduled:",
        ("test_reports_scheduler.py::test_03_a_victim_before_the_cursor_costs_nobody_a_turn",),
    ),
    Mutation(
        "the correction of min_tokens does nothing",
        0,
        SCHEDULER,
        "        if too_short and not self.rules.length_outranks_min_tokens:\n",
        "        if too_short:\n",
        ("test_reports_scheduler.py::test_06_the_window_outranks_min_tokens",),
    ),
    Mutation(
        "the correction of the pool's size does nothing",
        0,
        CONFIG,
        "corrected = self.rules.null_block_is_no_room",
        "corrected = False",
        ("test_reports_scheduler.py::test_01_the_null_block_is_counted_as_room_unless_corrected",),
    ),
)

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
        "        self._abort_due()\n        outputs = self._engine.complete(frame, result.output)\n",
        "        outputs = self._engine.complete(frame, result.output)\n",
        (
            f"{PROCESS}::test_at_one_instant_aborts_come_before_the_update",
            f"{PROCESS}::test_the_whole_order_at_one_instant",
        ),
    ),
    Mutation(
        "the first token has an inter-token latency",
        0,
        "sim/events.py",
        "                request.first_token_ns = end_ns\n                request.since_step = step\n",
        "                request.first_token_ns = end_ns\n                request.since_step = step\n"
        "                regular += 1\n",
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
        ("test_kernel_bug_list.py::test_bug_21_padding_writes_nothing[torch-reshape_and_cache]",),
    ),
    Mutation(
        "a chunk that ends early is sampled",
        0,
        "executor/input_batch.py",
        "sampling = (packed.num_left == 0).nonzero()[0]",
        "sampling = np.arange(len(packed.num_left))",
        (
            f"{RUNNER}::test_unscheduled_and_partial_rows_have_no_sampled_token",
            "test_reports_packing.py::test_29_a_seed_does_not_depend_on_chunking",
        ),
    ),
    Mutation(
        "a token behind a wrong draft is kept",
        0,
        "executor/verification.py",
        "kept: npt.NDArray[np.bool_] = wrong_before == wrong_before[first_of_request]",
        "kept: npt.NDArray[np.bool_] = wrong_before <= wrong_before[first_of_request] + 1",
        (
            "test_ngram_proposer.py::test_drafts_are_kept_up_to_the_first_wrong_one",
            f"{SPECULATION}::test_right_drafts_save_steps_and_wrong_ones_cost_nothing",
        ),
    ),
    Mutation(
        "drafts become known tokens before they are verified",
        0,
        "executor/request_state.py",
        "            self.num_draft_tokens[row] = len(token_ids)\n",
        "            self.num_draft_tokens[row] = len(token_ids)\n            self.num_tokens[row] = end\n",
        (f"{SPECULATION}::test_a_batch_of_drafts_decodes_and_chunks",),
    ),
    Mutation(
        "the drafts before a place do not count as outputs there",
        0,
        "executor/request_state.py",
        "state.num_prompt_tokens, self.num_tokens[row] + num_drafts",
        "state.num_prompt_tokens, self.num_tokens[row]",
        (f"{SPECULATION}::test_right_drafts_save_steps_and_wrong_ones_cost_nothing",),
    ),
    Mutation(
        "the latest match is drafted from",
        0,
        "executor/ngram_proposer.py",
        "return int(ends[0]) if",
        "return int(ends[-1]) if",
        ("test_ngram_proposer.py::test_what_stood_behind_the_earliest_longest_match_is_proposed",),
    ),
    Mutation(
        "blocks that are to be cleared are not",
        0,
        "executor/model_runner.py",
        "if batch.block_ids_to_zero is not None:",
        "if False:",
        ("test_reports_packing.py::test_19_only_new_blocks_are_cleared_and_each_once",),
    ),
    Mutation(
        "a row moves without its number of known tokens",
        0,
        "executor/request_state.py",
        "        self.num_tokens[target] = end\n",
        "",
        (
            "test_reports_packing.py::test_26_rows_that_move_keep_their_requests_apart",
            "test_reports_packing.py::test_28_every_buffer_travels_with_its_request",
        ),
    ),
    Mutation(
        "rows are taken for those of the last plan whatever their order",
        0,
        "executor/request_state.py",
        "            and cached.req_ids == self._plan_ids\n"
        "            and list(plan.num_scheduled_tokens) == self._plan_ids\n",
        "            and len(cached.req_ids) == len(self._plan_ids)\n",
        ("test_reports_packing.py::test_27_rows_and_plan_in_different_orders_with_unequal_counts",),
    ),
    Mutation(
        "the sampler does not know min_tokens",
        0,
        "executor/constraints.py",
        "if row.num_output_tokens < row.params.min_tokens\n",
        "if False\n",
        ("test_reports_sampler.py::test_40_min_tokens_hold_back_every_token_that_could_end_the_request",),
    ),
    Mutation(
        "aborts that came while a step ran are taken in after it",
        0,
        "executor/core_loop.py",
        "        self.abort_requests(take_aborts())\n",
        "        take_aborts()\n",
        ("test_core_loop.py::test_an_abort_between_schedule_and_update_leaves_no_output",),
    ),
    Mutation(
        "the busy loop waits for every step before it schedules the next",
        0,
        "executor/core_loop.py",
        "            if frame.plan.num_scheduled_tokens and self._core.has_room:\n",
        "            if False:\n",
        ("test_core_loop.py::test_with_asynchronous_scheduling_the_next_step_is_scheduled_while_one_runs",),
    ),
    Mutation(
        "an abort overtakes the request it is for",
        0,
        "executor/inbox.py",
        "                aborted += [i for i in message.request_ids if i not in added]\n",
        "                aborted += message.request_ids\n",
        ("test_core_loop.py::test_aborts_are_seen_ahead_of_their_turn_but_not_ahead_of_their_request",),
    ),
    Mutation(
        "stop strings are looked for below min_tokens",
        0,
        "executor/detokenizer.py",
        "        if self._num_tokens <= self._min_tokens:\n",
        "        if False:\n",
        ("test_reports_text.py::test_45_stop_string_before_min_tokens",),
    ),
    Mutation(
        "nothing is held back that may become a stop string",
        0,
        "executor/detokenizer.py",
        "        if finished or not self._num_held_chars:\n",
        "        if True:\n",
        ("test_detokenizer.py::test_text_once_shown_is_never_taken_back",),
    ),
    Mutation(
        "outputs of an aborted request go to the next one of its name",
        0,
        "executor/output_processor.py",
        "or not state.accepts(output):\n",
        "or not (state.accepts(output) or True):\n",
        (
            "test_output_processor.py::test_what_was_on_its_way_when_an_id_came_back_belongs_to_the_request_before",
        ),
    ),
    Mutation(
        "a request that ended by a stop string goes on in the engine",
        0,
        "executor/output_processor.py",
        "                if output.finish_reason is None:\n",
        "                if False:\n",
        ("test_output_processor.py::test_a_stop_string_ends_the_request_here_and_in_the_engine",),
    ),
    Mutation(
        "rope angles follow the longest request of the batch",
        0,
        "executor/rope.py",
        '            module.rope_type = "default"\n',
        "            pass\n",
        ("test_executor_rope.py::test_longrope_does_not_leak_between_requests",),
    ),
    Mutation(
        "blocks that a prefix hit shares are cleared",
        0,
        "sim/step.py",
        "            for block in blocks[hit_blocks.get(request_id, 0) :]\n",
        "            for block in blocks\n",
        ("test_reports_packing.py::test_19_only_new_blocks_are_cleared_and_each_once",),
    ),
    Mutation(
        "every draw of a request has the same noise",
        0,
        "executor/noise.py",
        'index.to_bytes(8, "little")',
        '(0).to_bytes(8, "little")',
        ("test_executor_sampler.py::test_one_draw_says_nothing_about_the_next",),
    ),
)

SAME_LOG = ("test_leaping.py::test_a_run_is_the_same_with_leaps",)
SHORT_WAY = ("test_leaping.py::test_a_run_is_the_same_on_the_short_way",)
CALENDAR, LEAPING, TIMES = "sim/decode_calendar.py", "sim/leaping_scheduler.py", "sim/leap_times.py"
PLAIN, STEPS, NEWCOMERS = "sim/plain_scheduler.py", "sim/plain_steps.py", "sim/plain_newcomers.py"
OVERLAPPED, OVERLAPPED_WAY = (
    "sim/plain_overlapped.py",
    ("test_leaping.py::test_a_run_is_the_same_on_the_short_way_of_overlapping_steps",),
)
LEAPS = (
    Mutation(
        "an output of a turn is known twice",
        0,
        PLAIN,
        "            self._catch_up(request, self.number)\n",
        "            self._catch_up(request, self.number)\n            request.output_token_ids.append(0)\n",
        ("test_leaping.py::test_a_turn_of_a_session_knows_each_output_once",),
    ),
    Mutation(
        "a leap of overlapping steps runs past an arrival",
        0,
        OVERLAPPED,
        "steps = times.steps_until(left_ns, steps - 1) + 1",
        "steps = times.steps_until(left_ns + 1, steps - 1) + 1",
        OVERLAPPED_WAY,
    ),
    Mutation(
        "who ends with the step in front leaves a leap of overlapping steps",
        0,
        OVERLAPPED,
        "single = begun is None or bool(leaving)",
        "single = begun is None",
        OVERLAPPED_WAY,
    ),
    Mutation(
        "a step is handed over as the first of its leap",
        0,
        OVERLAPPED,
        "said = last_of(begun.row)",
        "said = last_of(first_of(begun.row, 1) if begun.num_steps > 1 else begun.row)",
        OVERLAPPED_WAY,
    ),
    Mutation(
        "who comes in with a step that is handed over has had a token before",
        0,
        OVERLAPPED,
        "shape, sleeping = newcomers.shape, newcomers.sleeping",
        "shape, sleeping = newcomers.shape, rows",
        OVERLAPPED_WAY,
    ),
    Mutation(
        "who comes in with overlapping steps sleeps from the same step on",
        0,
        PLAIN,
        "request.joined_step, request.since_step = number + 1, number",
        "request.joined_step, request.since_step = number, number",
        OVERLAPPED_WAY,
    ),
    Mutation(
        "a step is scheduled when the device is free",
        0,
        "sim/step_rows.py",
        'values[:, places["overlaps"]] = device_start_ns > values[:, places["start_s"]]',
        'values[:, places["overlaps"]] = 0',
        OVERLAPPED_WAY,
    ),
    Mutation(
        "one whose only token is in flight sleeps",
        0,
        PLAIN,
        "            and request.num_tokens + 1 < request.length_limit\n",
        "",
        OVERLAPPED_WAY,
    ),
    Mutation(
        "the blocks that rows take first are there for the head of the queue",
        0,
        LEAPING,
        "free = kv.pool.num_free - due",
        "free = kv.pool.num_free",
        SHORT_WAY,
    ),
    Mutation(
        "hits that the rows take first are found all the same",
        0,
        POOL,
        "            if block in taken:",
        "            if False:",
        ("test_block_pool.py::test_what_is_left_of_a_hit_when_blocks_are_taken",),
    ),
    Mutation(
        "a prompt that comes in in part has its first token",
        0,
        STEPS,
        "            if not request.is_prefill_chunk:\n                self._came_in",
        "            if True:\n                self._came_in",
        SHORT_WAY,
    ),
    Mutation(
        "a request with one token to get sleeps",
        0,
        STEPS,
        "if request.num_tokens + 1 < request.length_limit:",
        "if True:",
        SHORT_WAY,
    ),
    Mutation(
        "a refused head is not looked up on the short way",
        0,
        PLAIN,
        "return self._counts_refused_lookups or isinstance(verdict, int)",
        "return isinstance(verdict, int)",
        SHORT_WAY,
    ),
    Mutation(
        "what a resumed request computes again is new on the short way",
        0,
        NEWCOMERS,
        "        recomputed += again\n",
        "",
        SHORT_WAY,
    ),
    Mutation(
        "an older private content outlives the newer one's place",
        0,
        POOL,
        "if found is None or hash_of[found] is not chain:",
        "if found is None:",
        SHORT_WAY,
    ),
    Mutation(
        "a named run has the same hash whatever stands in front",
        0,
        HASH,
        "\n            parent = hashes[-1]",
        "",
        ("test_block_hash.py::test_named_runs_are_hashed_once",),
    ),
    Mutation(
        "a sleeper ends a step early",
        0,
        LEAPING,
        "request.last_step = request.length_limit - 2 - request.base\n                if",
        "request.last_step = request.length_limit - 3 - request.base\n                if",
        SAME_LOG,
    ),
    Mutation(
        "a sleeper that came in whole ends a step early",
        0,
        PLAIN,
        "request.last_step = request.length_limit - 2 - request.base\n        request.joined_step = request",
        "request.last_step = request.length_limit - 3 - request.base\n        request.joined_step = request",
        SAME_LOG,
    ),
    Mutation(
        "a step without a special case does not wait for who arrives as it starts",
        0,
        "sim/plain_steps.py",
        "if due_ns is not None and due_ns <= now:",
        "if due_ns is not None and due_ns < now:",
        SAME_LOG,
    ),
    Mutation(
        "prompts are let in whole where blocks are short",
        0,
        PLAIN,
        "if tokens < 0 or blocks < 0 or not",
        "if tokens < 0 or not",
        SHORT_WAY,
    ),
    Mutation(
        "the first in running order gives way to sleepers",
        0,
        LEAPING,
        "victim = self.running.pop()",
        "victim = self.running.pop(0)",
        SAME_LOG,
    ),
    Mutation(
        "blocks that a stuck head has found are taken in a leap",
        0,
        LEAPING,
        "spare = min(spare, self.kv.pool.num_before(self._stuck_hits, most))",
        "pass",
        SHORT_WAY,
    ),
    Mutation(
        "a look-up of a stuck head counts once for a leap",
        0,
        "sim/plain_steps.py",
        "(scheduler.stuck_lookup if num_waiting else NO_LOOKUP)",
        "NO_LOOKUP",
        SAME_LOG,
    ),
    Mutation(
        "a preempted request does not find its private contents",
        0,
        "sim/block_pool.py",
        "if found is None and self._chains and",
        "if False and",
        ("test_block_pool.py::test_private_contents_are_found_by_their_request_alone",),
    ),
    Mutation(
        "sleepers of a step take their blocks in the order of falling asleep",
        0,
        CALENDAR,
        "if not rows or rows[-1].place < request.place:",
        "if True:",
        SAME_LOG,
    ),
    Mutation(
        "a sleeper's block is findable a step late",
        0,
        CALENDAR,
        "rows = self.phases[(step + 1) % self._block_size]",
        "rows = self.phases[step % self._block_size]",
        SAME_LOG,
    ),
    Mutation(
        "a leap runs past an arrival on a boundary",
        0,
        TIMES,
        "while steps < most and even_duration_ns(first_ns, growth_ns, steps) < time_ns:",
        "while steps < most and even_duration_ns(first_ns, growth_ns, steps) <= time_ns:",
        ("test_leaping.py::test_the_steps_until_an_instant_are_counted_exactly",),
    ),
    Mutation(
        "a leap with a list of times runs past an arrival on a boundary",
        0,
        TIMES,
        "                if ns >= time_ns:\n",
        "                if ns > time_ns:\n",
        ("test_leaping.py::test_the_steps_until_an_instant_are_counted_exactly",),
    ),
    Mutation(
        "a leap of even steps runs past an arrival on a boundary",
        0,
        TIMES,
        "steps = min(-(-time_ns // first_ns), most)",
        "steps = min(time_ns // first_ns + 1, most)",
        SAME_LOG,
    ),
    Mutation(
        "the context of sleepers is a step behind",
        0,
        CALENDAR,
        "return self._base_sum + self.num_rows * (step + 1), step + 1 - negative_base",
        "return self._base_sum + self.num_rows * step, step + 1 - negative_base",
        SAME_LOG,
    ),
    Mutation(
        "the longest row is one that has gone",
        0,
        CALENDAR,
        "if request.counted and request.base == -negative_base:",
        "if True:",
        SAME_LOG,
    ),
    Mutation(
        "steps of a leap grow as if one row decoded",
        0,
        "sim/steptime/modelled.py",
        "return LeapCosts(first, most, self._context_ns * shape.rows)",
        "return LeapCosts(first, most, self._context_ns)",
        SAME_LOG,
    ),
    Mutation(
        "a leap takes the token that an abort forbids",
        0,
        "sim/leaping_process.py",
        "steps = times.steps_until(abort_ns - now, steps) - 1",
        "steps = times.steps_until(abort_ns - now, steps)",
        SAME_LOG,
    ),
    Mutation(
        "who comes while the head is stuck has no reason to wait",
        0,
        "sim/leaping_process.py",
        "            self.log.queued_behind()\n",
        "            pass\n",
        ("test_leaping.py::test_who_comes_while_the_head_is_stuck_waits_behind_it",),
    ),
    Mutation(
        "a leap with steps in flight takes the token that an abort forbids",
        0,
        "sim/overlap.py",
        "if abort_ns is not None and end >= abort_ns:",
        "if abort_ns is not None and end > abort_ns:",
        SAME_LOG,
    ),
    Mutation(
        "a head once stuck stays so when another comes",
        0,
        LEAPING,
        "if not (self._is_fifo and self.waiting):",
        "if False:",
        SAME_LOG,
    ),
    Mutation(
        "a head that may find more with every block is leapt over",
        0,
        LEAPING,
        "if kv.enable_caching and calendar.num_filling:",
        "if False:",
        SAME_LOG,
    ),
    Mutation(
        "rows that wait for their last token stay in the batch",
        0,
        LEAPING,
        "        self.calendar.leave_batch(number)\n",
        "",
        SAME_LOG,
    ),
    Mutation(
        "the last block of a sleeper is not findable",
        0,
        LEAPING,
        "            request.num_output_placeholders = 1\n            self._tokens_arrived(request, 1)\n",
        "            request.num_output_placeholders = 0\n",
        SAME_LOG,
    ),
    Mutation(
        "a leap begins before the worker is ready",
        0,
        "sim/leaping_process.py",
        "if timeline.prepare_start(now + schedule_ns) != now + between_ns:",
        "if False:",
        ("test_leaping.py::test_a_leap_waits_for_a_worker_that_turns_around",),
    ),
    Mutation(
        "an eviction in a leap is counted in its first step",
        0,
        LEAPING,
        "leap.evictions_at += [i] * (pool.num_evictions - evictions)",
        "leap.evictions += pool.num_evictions - evictions",
        SAME_LOG,
    ),
)

MUTATIONS = (
    SCHEDULING + OTHERS + LEAPS + KERNELS + SWEEPS + EXPORTS + PLANNING + DASHBOARD + CLUSTERS + REPORT
)
