// Strides of tensors whose last dimension is contiguous, in elements.
#pragma once

#include <cstdint>

namespace servetwin {

// [tokens, heads, dim]
struct TokenStrides {
    int64_t token, head;
};

// [blocks, block_size, kv_heads, dim]
struct CacheStrides {
    int64_t block, slot, head;
};

}  // namespace servetwin
