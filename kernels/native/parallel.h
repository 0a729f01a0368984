// When to use more than one thread.
#pragma once

#include <cstdint>

namespace servetwin {

// Elements below which waking the other threads costs more than they save.
constexpr int64_t PARALLEL_ELEMENTS = 1 << 14;

}  // namespace servetwin
