"""One-line faults of the kernels: see mutations.py."""

from __future__ import annotations

from mutation import Mutation

BUGS = "test_kernel_bug_list.py"
LAYERS = "test_kernels_layers.py"
NATIVE = "kernels/native/attention.cpp"
TILES, SPLIT_KV = "kernels/triton_attention_tiles.py", "kernels/triton_split_kv.py"

KERNELS = (
    Mutation(
        "a block's place in the cache is computed in 32 bits",
        0,
        TILES,
        "mask=live, other=0).to(tl.int64)",
        "mask=live, other=0)",
        (
            f"{BUGS}::test_bug_01_report_47_blocks_beyond_32_bits[triton]",
            f"{BUGS}::test_bug_02_report_47_decode_beyond_32_bits[triton]",
        ),
    ),
    Mutation(
        "values of slots that nobody sees are loaded",
        0,
        TILES,
        "v = load_tile(value_ptr, value_strides, block, slot, live, HEAD_DIM, BLOCK_D, MASKED)",
        "v = load_tile(value_ptr, value_strides, block, slot, live, HEAD_DIM, BLOCK_D, False)",
        (
            f"{BUGS}::test_bug_20_rest_of_the_last_block[triton-mixed]",
            f"{BUGS}::test_bug_20_rest_of_the_last_block[triton-split]",
        ),
    ),
    Mutation(
        "a token does not see itself",
        0,
        TILES,
        "(position[None, :] <= row_position[:, None])",
        "(position[None, :] < row_position[:, None])",
        (
            f"{BUGS}::test_bug_07_window_of_chunks[triton-3]",
            f"{BUGS}::test_bug_13_blocks_smaller_than_a_tile[triton-4]",
        ),
    ),
    Mutation(
        "the window of a chunk is one longer",
        0,
        TILES,
        "(position[None, :] > row_position[:, None] - SLIDING_WINDOW)",
        "(position[None, :] >= row_position[:, None] - SLIDING_WINDOW)",
        (f"{BUGS}::test_bug_07_window_of_chunks[triton-3]",),
    ),
    Mutation(
        "the window of a decode row is one shorter",
        0,
        TILES,
        "start = tl.maximum(context_len + first_query - SLIDING_WINDOW + 1, 0)",
        "start = tl.maximum(context_len + first_query - SLIDING_WINDOW + 2, 0)",
        (
            f"{BUGS}::test_bug_06_window_of_decode_rows[triton-4]",
            f"{BUGS}::test_bug_06_window_of_decode_rows_over_splits[triton]",
        ),
    ),
    Mutation(
        "a tile that only some rows see whole is not masked",
        0,
        TILES,
        "masked_start = start + tl.maximum(all_see_end - start, 0) // TILE * TILE",
        "masked_start = start + tl.cdiv(tl.maximum(all_see_end - start, 0), TILE) * TILE",
        (
            f"{BUGS}::test_bug_20_rest_of_the_last_block[triton-mixed]",
            f"{BUGS}::test_bug_20_rest_of_the_last_block[triton-split]",
        ),
    ),
    Mutation(
        "minus infinity is subtracted from minus infinity",
        0,
        TILES,
        'return tl.where(x == float("-inf"), 0.0, x)',
        "return x",
        (
            f"{BUGS}::test_bug_34_report_50_merging_empty_splits",
            f"{BUGS}::test_bug_34_report_50_rows_that_see_nothing_of_a_split[triton-requests0-17]",
        ),
    ),
    Mutation(
        "the scale of float8 values is lost where splits are merged",
        0,
        SPLIT_KV,
        "        out *= tl.load(value_scale_ptr)\n",
        "        pass\n",
        (f"{BUGS}::test_bug_29_fp8_scales_on_every_path[triton-None-split]",),
    ),
    Mutation(
        "the weights of earlier splits are not scaled down",
        0,
        SPLIT_KV,
        "weight_sum = weight_sum * correction + tl.sum(weight * split_sum, axis=0)",
        "weight_sum = weight_sum + tl.sum(weight * split_sum, axis=0)",
        (f"{BUGS}::test_bug_08_merge_of_many_splits",),
    ),
    Mutation(
        "the merge reads splits that nobody wrote",
        0,
        SPLIT_KV,
        "live = split < num_live",
        "live = split < num_splits",
        (f"{BUGS}::test_bug_34_report_50_short_rows_under_many_splits[triton]",),
    ),
    Mutation(
        "splitting is decided by the query heads",
        0,
        SPLIT_KV,
        "and q_blocks * kv_heads < ENOUGH_PROGRAMS",
        "and q_blocks * heads < ENOUGH_PROGRAMS",
        (f"{BUGS}::test_bug_37_the_rule_counts_the_kv_heads_of_the_call",),
    ),
    Mutation(
        "padding is written to slot 0",
        0,
        "kernels/triton_reshape_and_cache.py",
        "slot = tl.load(slot_mapping_ptr + token).to(tl.int64)",
        "slot = tl.maximum(tl.load(slot_mapping_ptr + token).to(tl.int64), 0)",
        (f"{BUGS}::test_bug_21_padding_writes_nothing[triton-reshape_and_cache]",),
    ),
    Mutation(
        "the interpreter multiplies bfloat16",
        0,
        "kernels/triton_attention_plan.py",
        '"UPCAST": INTERPRETED and self.query.dtype == torch.bfloat16',
        '"UPCAST": False',
        (f"{BUGS}::test_bug_38_bfloat16_products[triton-mixed]",),
    ),
    Mutation(
        "a length beyond the block table is not cut",
        0,
        TILES,
        "end = tl.minimum(context_len + tl.minimum(first_query + BLOCK_Q, query_len), max_seq_len)",
        "end = tl.minimum(context_len + tl.minimum(first_query + BLOCK_Q, query_len), max_seq_len + 4)",
        (
            f"{BUGS}::test_bug_17_lengths_beyond_the_table[decode]",
            f"{BUGS}::test_bug_17_lengths_beyond_the_table[split]",
        ),
    ),
    Mutation(
        "the norm leaves out eps",
        0,
        "kernels/triton_rms_norm.py",
        "tl.rsqrt(mean_square + eps)",
        "tl.rsqrt(mean_square)",
        (f"{LAYERS}::test_rms_norm_neither_overflows_nor_leaks[triton]",),
    ),
    Mutation(
        "neighbours are rotated instead of halves",
        0,
        "kernels/triton_rotary_and_cache.py",
        "b = tl.load(x_ptr + offset + half, mask=mask, other=0.0)",
        "b = tl.load(x_ptr + offset + 1, mask=mask, other=0.0)",
        (f"{LAYERS}::test_rotary_takes_any_strides[triton]",),
    ),
    Mutation(
        "the activation is that of the wrong half",
        0,
        "kernels/triton_silu_and_mul.py",
        "    gate_ptr = gate_up_ptr + token * gate_up_strides[0]\n"
        "    up_ptr = gate_ptr + N * gate_up_strides[1]\n",
        "    up_ptr = gate_up_ptr + token * gate_up_strides[0]\n"
        "    gate_ptr = up_ptr + N * gate_up_strides[1]\n",
        (f"{LAYERS}::test_silu_and_mul_of_views[triton]",),
    ),
    # The C++ ones need a compiler where the mutations run: without one their tests are skipped.
    Mutation(
        "C++ computes a block's place in the cache in 32 bits",
        0,
        NATIVE,
        "tile.keys[t] = table[block] * a.key_strides.block + slot * a.key_strides.slot;",
        "tile.keys[t] = static_cast<int32_t>(table[block] * a.key_strides.block) + slot * a.key_strides.slot;",
        (f"{BUGS}::test_bug_02_report_47_decode_beyond_32_bits[native]",),
    ),
    Mutation(
        "C++ merges parts as if their maxima were equal",
        0,
        NATIVE,
        "total.sum += part.sum * weight;",
        "total.sum += part.sum;",
        (f"{BUGS}::test_bug_35_any_number_of_threads[native-1]",),
    ),
    Mutation(
        "C++ has a window of one more",
        0,
        NATIVE,
        "std::max<int64_t>(0, position - window + 1)",
        "std::max<int64_t>(0, position - window)",
        (f"{BUGS}::test_bug_06_window_of_decode_rows[native-4]",),
    ),
    Mutation(
        "C++ has an exponential of minus infinity minus itself",
        0,
        NATIVE,
        "Vec reference = highest == -INFINITE ? Vec{} : highest;",
        "Vec reference = highest;",
        (f"{BUGS}::test_bug_34_report_50_rows_that_see_nothing_of_a_split[native-requests1-1]",),
    ),
)
