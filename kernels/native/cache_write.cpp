// The paged cache write, plain and behind the rotary embedding: see `servetwin.kernels.cpu_native`.

#include "parallel.h"
#include "strides.h"
#include "vector.h"

namespace servetwin {
namespace {

enum Fault { NONE = 0, SLOT = 1 };

// The arguments of a write; `CacheWriteArguments` in cpu_native.py has the same fields in the same order.
template <typename T>
struct CacheWrite {
    const T* keys;  // [tokens, kv_heads, dim], like values
    const T* values;
    T* key_cache;  // [blocks, block_size, kv_heads, dim], like value_cache
    T* value_cache;
    const int64_t* slot_mapping;  // [tokens]
    TokenStrides key_strides, value_strides;
    CacheStrides key_cache_strides, value_cache_strides;
    int64_t tokens, blocks, block_size, kv_heads, dim;

    T* key_slot(int64_t slot, int64_t head) const { return key_cache + offset(key_cache_strides, slot, head); }
    T* value_slot(int64_t slot, int64_t head) const { return value_cache + offset(value_cache_strides, slot, head); }

   private:
    int64_t offset(CacheStrides strides, int64_t slot, int64_t head) const {
        return slot / block_size * strides.block + slot % block_size * strides.slot + head * strides.head;
    }
};

// As `CacheWrite`, with a rotation of keys and queries; `RotaryArguments` in cpu_native.py.
template <typename T>
struct Rotary {
    CacheWrite<T> write;
    const T* queries;  // [tokens, heads, dim]
    const T* cos;      // [tokens, rotary_dim], contiguous, like sin
    const T* sin;
    T* output;  // [tokens, heads, dim], contiguous
    TokenStrides query_strides;
    int64_t heads, rotary_dim;
};

template <typename T>
Fault check(const CacheWrite<T>& w) {
    for (int64_t token = 0; token < w.tokens; ++token)
        if (w.slot_mapping[token] >= w.blocks * w.block_size) return SLOT;
    return NONE;
}

template <typename T>
void write_values(const CacheWrite<T>& w, int64_t token, int64_t slot) {
    for (int64_t head = 0; head < w.kv_heads; ++head)
        std::memcpy(w.value_slot(slot, head), w.values + token * w.value_strides.token + head * w.value_strides.head,
                    w.dim * sizeof(T));
}

template <typename T>
void write_keys(const CacheWrite<T>& w, int64_t token, int64_t slot) {
    for (int64_t head = 0; head < w.kv_heads; ++head)
        std::memcpy(w.key_slot(slot, head), w.keys + token * w.key_strides.token + head * w.key_strides.head,
                    w.dim * sizeof(T));
}

// One head: dimensions i and i + rotary_dim / 2 are a pair. Products and sums are rounded to T, as transformers does.
template <typename T>
void rotate(const T* from, const T* cos, const T* sin, int64_t rotary_dim, int64_t dim, T* to) {
    int64_t half = rotary_dim / 2;
    for (int64_t i = 0; i < half; i += LANES) {
        int64_t count = half - i;
        auto product = [&](const T* x, const T* y) {
            return rounded_to(x, load_part(x + i, count) * load_part(y + i, count));
        };
        Vec first = product(from, cos) - product(from + half, sin);
        Vec second = product(from + half, cos + half) + product(from, sin + half);
        store_part(to + i, first, count);
        store_part(to + half + i, second, count);
    }
    std::memcpy(to + rotary_dim, from + rotary_dim, (dim - rotary_dim) * sizeof(T));
}

template <typename T>
void rotate_token(const Rotary<T>& r, int64_t token) {
    const CacheWrite<T>& w = r.write;
    const T *cos = r.cos + token * r.rotary_dim, *sin = r.sin + token * r.rotary_dim;
    for (int64_t head = 0; head < r.heads; ++head)
        rotate(r.queries + token * r.query_strides.token + head * r.query_strides.head, cos, sin, r.rotary_dim, w.dim,
               r.output + (token * r.heads + head) * w.dim);
    int64_t slot = w.slot_mapping[token];
    if (slot < 0) return;
    for (int64_t head = 0; head < w.kv_heads; ++head)
        rotate(w.keys + token * w.key_strides.token + head * w.key_strides.head, cos, sin, r.rotary_dim, w.dim,
               w.key_slot(slot, head));
    write_values(w, token, slot);
}

template <typename T>
int64_t write(const CacheWrite<T>& w, int threads) {
    if (Fault fault = check(w)) return fault;
#pragma omp parallel for num_threads(threads) if (w.tokens * w.kv_heads * w.dim >= PARALLEL_ELEMENTS)
    for (int64_t token = 0; token < w.tokens; ++token)
        if (int64_t slot = w.slot_mapping[token]; slot >= 0) {
            write_keys(w, token, slot);
            write_values(w, token, slot);
        }
    return NONE;
}

template <typename T>
int64_t rotate_and_write(const Rotary<T>& r, int threads) {
    const CacheWrite<T>& w = r.write;
    if (Fault fault = check(w)) return fault;
#pragma omp parallel for num_threads(threads) if (w.tokens * r.heads * w.dim >= PARALLEL_ELEMENTS)
    for (int64_t token = 0; token < w.tokens; ++token) rotate_token(r, token);
    return NONE;
}

}  // namespace
}  // namespace servetwin

extern "C" {

int64_t reshape_and_cache_float32(const servetwin::CacheWrite<float>* call, int64_t threads) {
    return servetwin::write(*call, static_cast<int>(threads));
}

int64_t reshape_and_cache_bfloat16(const servetwin::CacheWrite<servetwin::bfloat16>* call, int64_t threads) {
    return servetwin::write(*call, static_cast<int>(threads));
}

int64_t rotary_and_cache_float32(const servetwin::Rotary<float>* call, int64_t threads) {
    return servetwin::rotate_and_write(*call, static_cast<int>(threads));
}

int64_t rotary_and_cache_bfloat16(const servetwin::Rotary<servetwin::bfloat16>* call, int64_t threads) {
    return servetwin::rotate_and_write(*call, static_cast<int>(threads));
}

}  // extern "C"
