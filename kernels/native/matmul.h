// c += a b for small matrices that lie in the cache of a core, with the sums in registers.
#pragma once

#include <algorithm>

#include "vector.h"

namespace servetwin {

// Rows of c that are held at once, two vectors each: what 16 registers (32 with AVX-512) leave room for.
constexpr int MAX_STRIP_ROWS = LANES == 16 ? 12 : 6;

// c [ROWS, VECTORS * LANES] = a [ROWS, depth] b [depth, same], added to c where `ADD`; each with its row stride.
template <bool ADD, int ROWS, int VECTORS>
inline void multiply_strip(const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc,
                           int64_t depth) {
    Vec sums[ROWS][VECTORS];
#pragma GCC unroll 12
    for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; ++j) sums[i][j] = ADD ? load(c + i * ldc + j * LANES) : Vec{};
    for (int64_t k = 0; k < depth; ++k) {
        Vec row[VECTORS];
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; ++j) row[j] = load(b + k * ldb + j * LANES);
#pragma GCC unroll 12
        for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
            for (int j = 0; j < VECTORS; ++j) sums[i][j] += broadcast(a[i * lda + k]) * row[j];
    }
#pragma GCC unroll 12
    for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; ++j) store(c + i * ldc + j * LANES, sums[i][j]);
}

// As `multiply_strip` for any number of columns that is a multiple of LANES.
template <bool ADD, int ROWS>
void multiply_rows(const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc, int64_t columns,
                   int64_t depth) {
    constexpr int VECTORS = ROWS <= 3 ? 4 : 2;
    int64_t column = 0;
    for (; column + VECTORS * LANES <= columns; column += VECTORS * LANES)
        multiply_strip<ADD, ROWS, VECTORS>(a, lda, b + column, ldb, c + column, ldc, depth);
    for (; column < columns; column += LANES)
        multiply_strip<ADD, ROWS, 1>(a, lda, b + column, ldb, c + column, ldc, depth);
}

// Chooses the instance for `rows`, 1 to ROWS.
template <bool ADD, int ROWS = MAX_STRIP_ROWS>
void multiply_up_to(int64_t rows, const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc,
                    int64_t columns, int64_t depth) {
    if (rows == ROWS) return multiply_rows<ADD, ROWS>(a, lda, b, ldb, c, ldc, columns, depth);
    if constexpr (ROWS > 1) multiply_up_to<ADD, ROWS - 1>(rows, a, lda, b, ldb, c, ldc, columns, depth);
}

// c [rows, columns] = a [rows, depth] b [depth, columns], added to c where `ADD`; columns: a multiple of LANES.
template <bool ADD>
void multiply(const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc, int64_t rows,
              int64_t columns, int64_t depth) {
    // Strips alike in height: eight rows as 4 + 4 rather than 6 + 2.
    int64_t strips = (rows + MAX_STRIP_ROWS - 1) / MAX_STRIP_ROWS;
    for (int64_t strip = 0, row = 0; strip < strips; ++strip) {
        int64_t height = (rows - row + strips - strip - 1) / (strips - strip);
        multiply_up_to<ADD>(height, a + row * lda, lda, b, ldb, c + row * ldc, ldc, columns, depth);
        row += height;
    }
}

}  // namespace servetwin
