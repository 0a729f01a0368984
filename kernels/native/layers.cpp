// Normalisation and gated activation: see `servetwin.kernels.cpu_native`.

#include <cmath>

#include "parallel.h"
#include "vector.h"

namespace servetwin {
namespace {

// The arguments of a norm; `NormArguments` in cpu_native.py has the same fields in the same order.
template <typename T>
struct Norm {
    const T* x;         // [outer, inner, hidden], like residual
    const T* residual;  // null: none
    const T* weight;    // [hidden]
    T* output;          // [outer, inner, hidden], contiguous, like total
    T* total;           // x + residual
    int64_t x_outer, x_inner, residual_outer, residual_inner;  // strides, in elements; the last dimension is contiguous
    int64_t outer, inner, hidden;
    float eps, weight_offset;
};

// The arguments of an activation; `GateArguments` in cpu_native.py.
template <typename T>
struct Gate {
    const T* gate_up;  // [tokens, 2 * columns]
    T* output;         // [tokens, columns], contiguous
    int64_t token_stride, tokens, columns;
};

// total = x + residual, which is returned.
template <typename T>
const T* add(const T* x, const T* residual, int64_t hidden, T* total) {
    for (int64_t i = 0; i < hidden; i += LANES)
        store_part(total + i, load_part(x + i, hidden - i) + load_part(residual + i, hidden - i), hidden - i);
    return total;
}

template <typename T>
void norm_row(const Norm<T>& n, int64_t row) {
    int64_t outer = row / n.inner, inner = row % n.inner, hidden = n.hidden;
    const T* x = n.x + outer * n.x_outer + inner * n.x_inner;
    if (n.residual)
        x = add(x, n.residual + outer * n.residual_outer + inner * n.residual_inner, hidden, n.total + row * hidden);
    Vec squares{};
    for (int64_t i = 0; i < hidden; i += LANES) {
        Vec part = load_part(x + i, hidden - i);
        squares += part * part;
    }
    float factor = 1 / std::sqrt(sum_of_lanes(squares)[0] / hidden + n.eps);
    T* to = n.output + row * hidden;
    for (int64_t i = 0; i < hidden; i += LANES) {
        Vec normalised = load_part(x + i, hidden - i) * factor;
        // Llama rounds before the weight, Gemma (offset 1) only after it.
        if (n.weight_offset == 0) normalised = rounded_to(x, normalised);
        store_part(to + i, normalised * (load_part(n.weight + i, hidden - i) + n.weight_offset), hidden - i);
    }
}

template <typename T>
void gate_row(const Gate<T>& g, int64_t token) {
    const T *gate = g.gate_up + token * g.token_stride, *up = gate + g.columns;
    T* to = g.output + token * g.columns;
    for (int64_t i = 0; i < g.columns; i += LANES) {
        int64_t count = g.columns - i;
        Vec x = load_part(gate + i, count);
        Vec activated = rounded_to(gate, x / (1.0f + exp(-x)));
        store_part(to + i, activated * load_part(up + i, count), count);
    }
}

template <typename T>
int64_t norm(const Norm<T>& n, int threads) {
    int64_t rows = n.outer * n.inner;
#pragma omp parallel for num_threads(threads) if (rows * n.hidden >= PARALLEL_ELEMENTS)
    for (int64_t row = 0; row < rows; ++row) norm_row(n, row);
    return 0;
}

template <typename T>
int64_t gate(const Gate<T>& g, int threads) {
#pragma omp parallel for num_threads(threads) if (g.tokens * g.columns >= PARALLEL_ELEMENTS)
    for (int64_t token = 0; token < g.tokens; ++token) gate_row(g, token);
    return 0;
}

}  // namespace
}  // namespace servetwin

// Return 0: nothing here can fail.
extern "C" {

int64_t rms_norm_float32(const servetwin::Norm<float>* call, int64_t threads) {
    return servetwin::norm(*call, static_cast<int>(threads));
}

int64_t rms_norm_bfloat16(const servetwin::Norm<servetwin::bfloat16>* call, int64_t threads) {
    return servetwin::norm(*call, static_cast<int>(threads));
}

int64_t silu_and_mul_float32(const servetwin::Gate<float>* call, int64_t threads) {
    return servetwin::gate(*call, static_cast<int>(threads));
}

int64_t silu_and_mul_bfloat16(const servetwin::Gate<servetwin::bfloat16>* call, int64_t threads) {
    return servetwin::gate(*call, static_cast<int>(threads));
}

}  // extern "C"
