// Products of a few query rows with rows that stay where they lie in a cache.
//
// For many queries it pays to unpack a tile of rows first (attention.cpp); for few, as in decoding, copying costs more
// than it saves: every element is read once and used at once.
#pragma once

#include <algorithm>

#include "vector.h"

namespace servetwin {

// Rows of `dim` elements, each at its own offset from `base`.
template <typename T>
struct Rows {
    const T* base;
    const int64_t* offsets;
    int64_t count, dim;

    const T* operator[](int64_t i) const { return base + offsets[i]; }
    int64_t whole_dim() const { return dim / LANES * LANES; }
};

constexpr int64_t LINE_BYTES = 64;

constexpr int64_t lines(int64_t bytes) { return (bytes + LINE_BYTES - 1) / LINE_BYTES; }

// Asks for the rows of several heads, a few lines at a time, all heads of a row in turn as they lie in memory:
// processors do not foresee the jumps between blocks, and can wait for only so many lines at once.
template <typename T>
class Fetcher {
   public:
    Fetcher(const Rows<T>& first_head, int64_t heads, int64_t head_stride)
        : rows(first_head), heads(heads), head_stride(head_stride), row_bytes(first_head.dim * sizeof(T)) {}

    void fetch(int64_t count) {
        for (; count > 0 && row < rows.count; --count) {
            __builtin_prefetch(reinterpret_cast<const char*>(rows[row] + head * head_stride) + byte);
            if ((byte += LINE_BYTES) < row_bytes) continue;
            byte = 0;
            if (++head == heads) head = 0, ++row;
        }
    }

   private:
    Rows<T> rows;
    int64_t heads, head_stride, row_bytes;
    int64_t row = 0, head = 0, byte = 0;
};

// sums [QUERIES, COUNT] of vectors: query [QUERIES, dim] times COUNT rows from i on, not yet added up across lanes.
template <int QUERIES, int COUNT, typename T>
inline void multiply_rows(const float* query, int64_t ldq, const Rows<T>& rows, int64_t i, Vec (*sums)[LANES],
                          Fetcher<T>& fetcher) {
    fetcher.fetch(COUNT * lines(rows.dim * sizeof(T)));
    Vec part[COUNT][QUERIES] = {};
    const T* row[COUNT];
#pragma GCC unroll 4
    for (int r = 0; r < COUNT; ++r) row[r] = rows[i + r];
    auto add = [&](int64_t d, const Vec* x) {
#pragma GCC unroll 8
        for (int q = 0; q < QUERIES; ++q) {
            Vec factor = load(query + q * ldq + d);
#pragma GCC unroll 4
            for (int r = 0; r < COUNT; ++r) part[r][q] += factor * x[r];
        }
    };
    int64_t d = 0;
    Vec x[COUNT];
    for (; d < rows.whole_dim(); d += LANES) {
#pragma GCC unroll 4
        for (int r = 0; r < COUNT; ++r) x[r] = load(row[r] + d);
        add(d, x);
    }
    if (d < rows.dim) {
        for (int r = 0; r < COUNT; ++r) x[r] = load_part(row[r] + d, rows.dim - d);
        add(d, x);
    }
#pragma GCC unroll 4
    for (int r = 0; r < COUNT; ++r)
#pragma GCC unroll 8
        for (int q = 0; q < QUERIES; ++q) sums[q][i % LANES + r] = part[r][q];
}

// products [QUERIES, count of rows] = query [QUERIES, dim] rows^T; 0 up to the next multiple of LANES.
template <int QUERIES, typename T>
void multiply_by_rows(const float* query, int64_t ldq, const Rows<T>& rows, int64_t first, float* products, int64_t ldp,
                      Fetcher<T>& fetcher) {
    constexpr int TOGETHER = QUERIES <= 4 ? 2 : 1;  // what 16 registers leave room for
    Vec sums[QUERIES][LANES] = {};
    int64_t i = first, end = std::min<int64_t>(first + LANES, rows.count);
    for (; i + TOGETHER <= end; i += TOGETHER) multiply_rows<QUERIES, TOGETHER>(query, ldq, rows, i, sums, fetcher);
    for (; i < end; ++i) multiply_rows<QUERIES, 1>(query, ldq, rows, i, sums, fetcher);
    for (int q = 0; q < QUERIES; ++q) store(products + q * ldp + first, sums_of_rows(sums[q]));
}

// sums [QUERIES, VECTORS * LANES] += weights [QUERIES, rows] times the elements from d on of the rows.
template <int QUERIES, int VECTORS, bool WHOLE, typename T>
inline void add_strip(const float* weights, int64_t ldw, const Rows<T>& rows, int64_t d, float* sums, int64_t lds,
                      Fetcher<T>& fetcher) {
    Vec total[QUERIES][VECTORS];
#pragma GCC unroll 8
    for (int q = 0; q < QUERIES; ++q)
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; ++j) total[q][j] = load(sums + q * lds + j * LANES);
    for (int64_t i = 0; i < rows.count; ++i) {
        fetcher.fetch(lines(VECTORS * LANES * sizeof(T)));
        const T* row = rows[i] + d;
        Vec x[VECTORS];
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; ++j) x[j] = WHOLE ? load(row + j * LANES) : load_part(row, rows.dim - d);
#pragma GCC unroll 8
        for (int q = 0; q < QUERIES; ++q)
#pragma GCC unroll 4
            for (int j = 0; j < VECTORS; ++j) total[q][j] += broadcast(weights[q * ldw + i]) * x[j];
    }
#pragma GCC unroll 8
    for (int q = 0; q < QUERIES; ++q)
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; ++j) store(sums + q * lds + j * LANES, total[q][j]);
}

// sums [QUERIES, dim] += weights [QUERIES, rows] rows
template <int QUERIES, typename T>
void add_weighted_rows(const float* weights, int64_t ldw, const Rows<T>& rows, float* sums, int64_t lds,
                      Fetcher<T>& fetcher) {
    constexpr int VECTORS = QUERIES <= 3 ? 4 : QUERIES <= 6 ? 2 : 1;
    int64_t d = 0;
    for (; d + VECTORS * LANES <= rows.dim; d += VECTORS * LANES)
        add_strip<QUERIES, VECTORS, true>(weights, ldw, rows, d, sums + d, lds, fetcher);
    for (; d < rows.whole_dim(); d += LANES) add_strip<QUERIES, 1, true>(weights, ldw, rows, d, sums + d, lds, fetcher);
    if (d < rows.dim) add_strip<QUERIES, 1, false>(weights, ldw, rows, d, sums + d, lds, fetcher);
}

}  // namespace servetwin
