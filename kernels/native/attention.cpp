// Paged causal attention with an online softmax: see `servetwin.kernels.cpu_native.paged_attention`.
//
// The work is cut into items: some query rows of one request, some kv heads and a range of positions. An item goes
// through its positions in tiles; keys and values of a tile are unpacked once, as float32, for all query heads of
// their kv head, or used where they lie if query rows are few. Where an item ends within the context, its unfinished
// result is kept, and all parts of a row are merged in order of position. The cuts along the positions depend on the
// request alone, so neither the number of threads nor the rest of the batch changes a result.

#include <omp.h>

#include <cmath>
#include <memory>
#include <new>
#include <vector>

#include "matmul.h"
#include "row_products.h"
#include "strides.h"

namespace servetwin {
namespace {

constexpr int64_t TILE = 64;             // positions unpacked at once, and the room between rows of scores
constexpr int64_t ITEM_QUERIES = 384;    // query rows x group of an item, which share an unpacked tile
constexpr int64_t TILE_IN_PLACE = 32;    // positions whose values are fetched while their keys are used
constexpr int64_t AHEAD = 16;            // positions asked for before they are unpacked
constexpr int64_t SPLIT = 512;           // positions of an item of a request with few rows
constexpr int64_t MAX_SPLIT_ROWS = 16;   // a request with more rows has items enough without splits
constexpr int64_t ITEM_KEYS = 1 << 15;   // floats of the unpacked keys of an item, as many of its values: 256 KiB
constexpr int MAX_IN_PLACE = 8;          // query rows x group of an item that uses keys and values where they lie
constexpr int64_t ITEMS_PER_THREAD = 2;  // with fewer the kv heads of an item are taken apart

// The arguments of a call; `AttentionArguments` in cpu_native.py has the same fields in the same order.
template <typename T>
struct Attention {
    const T* query;  // [tokens, heads, dim]
    const T* keys;   // [blocks, block_size, kv_heads, dim], like values
    const T* values;
    const int32_t* block_table;      // [requests, max_blocks]
    const int32_t* seq_lens;         // [requests]
    const int32_t* query_start_loc;  // [requests + 1]
    T* output;                       // [tokens, heads, dim], contiguous and 0
    TokenStrides query_strides;
    CacheStrides key_strides, value_strides;
    int64_t table_stride;
    int64_t requests, tokens, blocks, max_blocks, block_size, heads, kv_heads, dim;
    int64_t window;        // 0: none
    float scale, softcap;  // softcap 0: none

    int64_t group() const { return heads / kv_heads; }
    int64_t padded_dim() const { return round_up(dim, LANES); }
    int64_t query_len(int64_t request) const { return query_start_loc[request + 1] - query_start_loc[request]; }
    int64_t position(int64_t request, int64_t row) const { return seq_lens[request] - query_len(request) + row; }
    int64_t first_visible(int64_t position) const {
        return window ? std::max<int64_t>(0, position - window + 1) : 0;
    }
};

struct Item {
    int64_t request, row, rows;  // query rows, counted within the request
    int64_t head, heads;         // kv heads
    int64_t begin, end;          // positions
    int64_t partial;             // first row of its unfinished result; -1: the result is whole
};

// The unfinished result of one query head of one row, over some of its positions.
struct Partial {
    float max, sum;  // of the scores; of their exponentials relative to max
};

// ---------------------------------------------------------------- plan

enum Fault { NONE = 0, METADATA = 1, BLOCK_ID = 2, NO_MEMORY = 3 };

// Whether the metadata stays within the tensors, as far as it is used.
template <typename T>
Fault check(const Attention<T>& a) {
    for (int64_t r = 0; r < a.requests; ++r) {
        int64_t start = a.query_start_loc[r], end = a.query_start_loc[r + 1], length = a.seq_lens[r];
        if (start < 0 || end < start || end > a.tokens) return METADATA;
        if (length < 0 || length > a.max_blocks * a.block_size) return METADATA;
        if (end == start || length == 0) continue;
        int64_t first = a.first_visible(std::max<int64_t>(0, length - (end - start)));
        for (int64_t b = first / a.block_size; b * a.block_size < length; ++b) {
            int64_t id = a.block_table[r * a.table_stride + b];
            if (id < 0 || id >= a.blocks) return BLOCK_ID;
        }
    }
    return NONE;
}

// The items with all kv heads together; those of one row range lie next to each other, in order of position.
template <typename T>
std::vector<Item> cut_by_position(const Attention<T>& a) {
    std::vector<Item> items;
    int64_t tile_rows = std::max<int64_t>(1, ITEM_QUERIES / a.group());
    for (int64_t r = 0; r < a.requests; ++r) {
        int64_t rows = a.query_len(r);
        // Rows of negative position (padding) see nothing.
        for (int64_t row = std::max<int64_t>(0, -a.position(r, 0)); row < rows; row += tile_rows) {
            int64_t count = std::min(tile_rows, rows - row);
            int64_t first = a.first_visible(a.position(r, row)), end = a.position(r, row + count - 1) + 1;
            int64_t step = rows <= MAX_SPLIT_ROWS ? SPLIT : end;
            for (int64_t begin = first / step * step; begin < end; begin += step)
                items.push_back(
                    {r, row, count, 0, a.kv_heads, std::max(begin, first), std::min(begin + step, end), -1});
        }
    }
    return items;
}

inline bool same_rows(const Item& a, const Item& b) {
    return a.request == b.request && a.row == b.row && a.head == b.head;
}

// kv heads of an item: one for many queries, else as many as a core's cache holds and the threads leave together.
template <typename T>
int64_t heads_together(const Attention<T>& a, const Item& item, int64_t parts) {
    if (item.rows > MAX_SPLIT_ROWS) return 1;
    int64_t most = std::max<int64_t>(1, ITEM_KEYS / (TILE * a.padded_dim()));
    return std::min(most, (a.kv_heads + parts - 1) / parts);
}

// Takes the kv heads apart.
template <typename T>
std::vector<Item> cut_by_head(const Attention<T>& a, const std::vector<Item>& items, int64_t threads) {
    int64_t parts = std::max<int64_t>(1, threads * ITEMS_PER_THREAD / std::max<int64_t>(1, items.size()));
    std::vector<Item> cut;
    for (size_t first = 0, last; first < items.size(); first = last) {
        for (last = first; last < items.size() && same_rows(items[first], items[last]);) ++last;
        int64_t heads = heads_together(a, items[first], parts);
        for (int64_t head = 0; head < a.kv_heads; head += heads)
            for (size_t i = first; i < last; ++i) {
                cut.push_back(items[i]);
                cut.back().head = head;
                cut.back().heads = std::min(heads, a.kv_heads - head);
            }
    }
    return cut;
}

// Few enough queries that unpacking keys and values costs more than it saves.
template <typename T>
bool in_place(const Attention<T>& a, const Item& item) {
    return item.rows * a.group() <= MAX_IN_PLACE;
}

// Gives rows of the partial results to the items that share their query rows; returns how many.
template <typename T>
int64_t number_partials(const Attention<T>& a, std::vector<Item>& items) {
    int64_t count = 0;
    for (size_t i = 0; i < items.size(); ++i) {
        bool shared = (i > 0 && same_rows(items[i - 1], items[i])) ||
                      (i + 1 < items.size() && same_rows(items[i], items[i + 1]));
        if (!shared) continue;
        items[i].partial = count;
        count += items[i].heads * items[i].rows * a.group();
    }
    return count;
}

// ---------------------------------------------------------------- one item

// What one thread works in; sizes for the largest item of the call. Rows of `query`, `sums` are (head, row, member).
struct Workspace {
    float *query, *sums, *scores, *keys, *values;
    Partial* state;

    static int64_t floats(int64_t rows, int64_t item_rows, int64_t padded_dim, int64_t heads) {
        return rows * padded_dim * 2 + item_rows * TILE + heads * TILE * padded_dim * 2 + round_up(rows * 2, 16);
    }
    Workspace(float* memory, int64_t rows, int64_t item_rows, int64_t padded_dim, int64_t heads)
        : query(memory),
          sums(query + rows * padded_dim),
          scores(sums + rows * padded_dim),
          keys(scores + item_rows * TILE),
          values(keys + heads * TILE * padded_dim),
          state(reinterpret_cast<Partial*>(values + heads * TILE * padded_dim)) {}
};

template <typename T>
void load_queries(const Attention<T>& a, const Item& item, Workspace& work) {
    float* to = work.query;
    for (int64_t head = item.head; head < item.head + item.heads; ++head)
        for (int64_t row = item.row; row < item.row + item.rows; ++row)
            for (int64_t member = 0; member < a.group(); ++member, to += a.padded_dim()) {
                const T* from = a.query + (a.query_start_loc[item.request] + row) * a.query_strides.token +
                                (head * a.group() + member) * a.query_strides.head;
                for (int64_t d = 0; d < a.dim; d += LANES) store(to + d, load_part(from + d, a.dim - d) * a.scale);
            }
    int64_t rows = item.heads * item.rows * a.group();
    std::fill_n(work.sums, rows * a.padded_dim(), 0.0f);
    std::fill_n(work.state, rows, Partial{-INFINITE, 0});
}

// Where the rows of a tile, and the next few, lie in the caches: offsets of kv head 0.
struct Tile {
    int64_t begin, count, located;
    int64_t keys[TILE + AHEAD], values[TILE + AHEAD];
};

template <typename T>
Tile locate(const Attention<T>& a, const Item& item, int64_t begin) {
    const int32_t* table = a.block_table + item.request * a.table_stride;
    Tile tile;
    tile.begin = begin;
    tile.count = std::min(item.end - begin, in_place(a, item) ? TILE_IN_PLACE : TILE);
    int64_t block = begin / a.block_size, slot = begin % a.block_size;
    tile.located = std::min(item.end - begin, tile.count + AHEAD);
    for (int64_t t = 0; t < tile.located; ++t) {
        tile.keys[t] = table[block] * a.key_strides.block + slot * a.key_strides.slot;
        tile.values[t] = table[block] * a.value_strides.block + slot * a.value_strides.slot;
        if (++slot == a.block_size) ++block, slot = 0;
    }
    return tile;
}

// The rows of a tile for kv head h of an item.
template <typename T>
Rows<T> key_rows(const Attention<T>& a, const Item& item, const Tile& tile, int64_t h) {
    return {a.keys + (item.head + h) * a.key_strides.head, tile.keys, tile.count, a.dim};
}

template <typename T>
Rows<T> value_rows(const Attention<T>& a, const Item& item, const Tile& tile, int64_t h) {
    return {a.values + (item.head + h) * a.value_strides.head, tile.values, tile.count, a.dim};
}

// Asks for one head of a row: processors do not foresee the jumps between rows and blocks.
template <typename T>
inline void prefetch(const T* row, int64_t dim) {
    for (int64_t d = 0; d < dim; d += 64 / sizeof(T)) __builtin_prefetch(row + d);
}

// A square of `keys`, turned: LANES dimensions from d on of the rows t, t + 1, ...; rows beyond the tile are 0.
template <typename T>
inline void unpack_square(const T* base, const Tile& tile, int64_t t, int64_t d, int64_t dim, float* to) {
    Vec square[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; ++i)
        square[i] = t + i < tile.count ? load_part(base + tile.keys[t + i] + d, dim - d) : Vec{};
    transpose(square);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; ++i) store(to + i * TILE, square[i]);
}

// keys [heads, dim, TILE]. Columns beyond the tile are 0 as far as the last vector reaches.
// The heads of a row lie side by side as a rule: taking all of them in turn reads the memory in order.
template <typename T>
void unpack_keys(const Attention<T>& a, const Item& item, const Tile& tile, float* keys) {
    for (int64_t t = 0; t < tile.count; t += LANES)
        for (int64_t h = 0; h < item.heads; ++h) {
            const T* base = a.keys + (item.head + h) * a.key_strides.head;
            for (int64_t i = t + AHEAD; i < std::min(t + AHEAD + LANES, tile.located); ++i)
                prefetch(base + tile.keys[i], a.dim);
            for (int64_t d = 0; d < a.dim; d += LANES)
                unpack_square(base, tile, t, d, a.dim, keys + (h * a.padded_dim() + d) * TILE + t);
        }
}

// values [heads, TILE, dim]
template <typename T>
void unpack_values(const Attention<T>& a, const Item& item, const Tile& tile, float* values) {
    for (int64_t t = 0; t < tile.count; ++t)
        for (int64_t h = 0; h < item.heads; ++h) {
            const T* base = a.values + (item.head + h) * a.value_strides.head;
            if (t + AHEAD < tile.located) prefetch(base + tile.values[t + AHEAD], a.dim);
            const T* row = base + tile.values[t];
            float* to = values + (h * TILE + t) * a.padded_dim();
            for (int64_t d = 0; d < a.dim; d += LANES) store(to + d, load_part(row + d, a.dim - d));
        }
}

// Scores [TILE] of one row become exponentials relative to the highest score so far; `sums` [dim] follows suit.
// The row sees columns low .. high - 1 only.
void update_row(float* scores, int64_t columns, int64_t low, int64_t high, float softcap, Partial& state, float* sums,
                int64_t padded_dim) {
    int64_t padded = round_up(columns, LANES);
    if (softcap != 0)
        for (int64_t t = 0; t < padded; t += LANES) store(scores + t, tanh(load(scores + t) / softcap) * softcap);
    std::fill(scores, scores + std::min(low, padded), -INFINITE);
    std::fill(scores + high, scores + padded, -INFINITE);
    Vec highest = broadcast(state.max);
    for (int64_t t = 0; t < padded; t += LANES) highest = maximum(load(scores + t), highest);
    highest = max_of_lanes(highest);
    Vec reference = highest == -INFINITE ? Vec{} : highest;  // nothing visible yet: exponentials are 0, not NaN
    Vec sum{};
    for (int64_t t = 0; t < padded; t += LANES) {
        Vec x = exp(load(scores + t) - reference);
        store(scores + t, x);
        sum += x;
    }
    Vec factor = exp(state.max - reference);
    state = {highest[0], state.sum * factor[0] + sum_of_lanes(sum)[0]};
    if (factor[0] != 1)
        for (int64_t d = 0; d < padded_dim; d += LANES) store(sums + d, load(sums + d) * factor);
}

// The scores [queries, TILE] of kv head h of an item become weights, and its sums follow suit.
template <typename T>
void update_head(const Attention<T>& a, const Item& item, const Tile& tile, Workspace& work, int64_t h, float* scores) {
    int64_t queries = item.rows * a.group(), width = a.padded_dim();
    for (int64_t i = 0; i < queries; ++i) {
        int64_t position = a.position(item.request, item.row + i / a.group()), row = h * queries + i;
        int64_t low = std::max<int64_t>(0, a.first_visible(position) - tile.begin);
        int64_t high = std::min(tile.count, std::max<int64_t>(0, position + 1 - tile.begin));
        update_row(scores + i * TILE, tile.count, low, high, a.softcap, work.state[row], work.sums + row * width,
                   width);
    }
}

// For many queries: keys and values of a tile are unpacked first.
template <typename T>
void attend_tile_unpacked(const Attention<T>& a, const Item& item, const Tile& tile, Workspace& work) {
    unpack_keys(a, item, tile, work.keys);
    unpack_values(a, item, tile, work.values);
    int64_t queries = item.rows * a.group(), width = a.padded_dim(), panel = width * TILE;
    for (int64_t h = 0; h < item.heads; ++h) {
        float *query = work.query + h * queries * width, *sums = work.sums + h * queries * width;
        multiply<false>(query, width, work.keys + h * panel, TILE, work.scores, TILE, queries,
                        round_up(tile.count, LANES), a.dim);
        update_head(a, item, tile, work, h, work.scores);
        multiply<true>(work.scores, TILE, work.values + h * panel, width, sums, width, queries, width, tile.count);
    }
}

// For few queries: keys and values are used where they lie. While the keys of a tile are multiplied its values are
// fetched, and with the values the keys of the next tile; all heads of a row in turn, in the order of the memory.
template <int QUERIES, typename T>
void attend_tile_in_place(const Attention<T>& a, const Item& item, const Tile& tile, const Tile& next,
                          Workspace& work) {
    int64_t width = a.padded_dim(), panel = QUERIES * TILE;
    Fetcher<T> values_ahead(value_rows(a, item, tile, 0), item.heads, a.value_strides.head);
    Fetcher<T> keys_ahead(key_rows(a, item, next, 0), item.heads, a.key_strides.head);
    for (int64_t t = 0; t < tile.count; t += LANES)
        for (int64_t h = 0; h < item.heads; ++h)
            multiply_by_rows<QUERIES>(work.query + h * QUERIES * width, width, key_rows(a, item, tile, h), t,
                                      work.scores + h * panel, TILE, values_ahead);
    for (int64_t h = 0; h < item.heads; ++h) {
        update_head(a, item, tile, work, h, work.scores + h * panel);
        add_weighted_rows<QUERIES>(work.scores + h * panel, TILE, value_rows(a, item, tile, h),
                                   work.sums + h * QUERIES * width, width, keys_ahead);
    }
}

// Chooses the instance for `queries`, 1 to QUERIES.
template <typename T, int QUERIES = MAX_IN_PLACE>
void attend_tile_in_place(const Attention<T>& a, const Item& item, const Tile& tile, const Tile& next, Workspace& work,
                          int64_t queries) {
    if (queries == QUERIES) return attend_tile_in_place<QUERIES>(a, item, tile, next, work);
    if constexpr (QUERIES > 1) attend_tile_in_place<T, QUERIES - 1>(a, item, tile, next, work, queries);
}

template <typename T>
void store_result(const Attention<T>& a, int64_t token, int64_t head, Partial state, const float* sums) {
    T* to = a.output + (token * a.heads + head) * a.dim;
    Vec factor = broadcast(1 / state.sum);
    for (int64_t d = 0; d < a.dim; d += LANES) store_part(to + d, load(sums + d) * factor, a.dim - d);
}

// Calls visit(index within the item, token, query head) for every result row of an item.
template <typename T, typename Visit>
void for_each_row(const Attention<T>& a, const Item& item, Visit visit) {
    int64_t index = 0;
    for (int64_t head = item.head; head < item.head + item.heads; ++head)
        for (int64_t row = item.row; row < item.row + item.rows; ++row)
            for (int64_t member = 0; member < a.group(); ++member, ++index)
                visit(index, a.query_start_loc[item.request] + row, head * a.group() + member);
}

template <typename T>
void attend_item(const Attention<T>& a, const Item& item, Workspace work, Partial* partials, float* partial_sums) {
    if (item.partial >= 0) {
        work.state = partials + item.partial;
        work.sums = partial_sums + item.partial * a.padded_dim();
    }
    load_queries(a, item, work);
    int64_t queries = item.rows * a.group();
    Tile tile = locate(a, item, item.begin);
    while (tile.count > 0) {
        Tile next = locate(a, item, tile.begin + tile.count);
        if (in_place(a, item))
            attend_tile_in_place(a, item, tile, next, work, queries);
        else
            attend_tile_unpacked(a, item, tile, work);
        tile = next;
    }
    if (item.partial >= 0) return;
    for_each_row(a, item, [&](int64_t index, int64_t token, int64_t head) {
        store_result(a, token, head, work.state[index], work.sums + index * a.padded_dim());
    });
}

// Merges the `count` items from `items` on, which share their rows: each part weighs exp(its max - the highest).
template <typename T>
void merge(const Attention<T>& a, const Item* items, int64_t count, const Partial* partials, float* partial_sums) {
    int64_t width = a.padded_dim();
    for_each_row(a, items[0], [&](int64_t index, int64_t token, int64_t head) {
        Partial total{-INFINITE, 0};
        for (int64_t i = 0; i < count; ++i) total.max = std::max(total.max, partials[items[i].partial + index].max);
        float* sums = partial_sums + (items[0].partial + index) * width;
        for (int64_t i = 0; i < count; ++i) {
            const Partial& part = partials[items[i].partial + index];
            const float* from = partial_sums + (items[i].partial + index) * width;
            float weight = part.max == -INFINITE ? 0 : std::exp(part.max - total.max);
            total.sum += part.sum * weight;
            for (int64_t d = 0; d < width; d += LANES)
                store(sums + d, (i ? load(sums + d) : Vec{}) + load(from + d) * weight);
        }
        store_result(a, token, head, total, sums);
    });
}

// ---------------------------------------------------------------- one call

struct AlignedDelete {
    void operator()(float* memory) const { ::operator delete[](memory, std::align_val_t(64)); }
};
using Buffer = std::unique_ptr<float[], AlignedDelete>;

Buffer allocate(int64_t floats) {
    return Buffer(static_cast<float*>(::operator new[](floats * sizeof(float), std::align_val_t(64))));
}

template <typename T>
void attend(const Attention<T>& a, int threads) {
    std::vector<Item> items = cut_by_head(a, cut_by_position(a), threads);
    int64_t num_partials = number_partials(a, items), rows = 0, item_rows = 0, heads = 1, width = a.padded_dim();
    for (const Item& item : items) {
        rows = std::max(rows, item.heads * item.rows * a.group());
        heads = std::max(heads, item.heads);
        item_rows = std::max(item_rows, item.rows * a.group() * (in_place(a, item) ? item.heads : 1));
    }
    int64_t work_size = round_up(Workspace::floats(rows, item_rows, width, heads), 16);
    Buffer work_memory = allocate(work_size * threads), partial_sums = allocate(num_partials * width);
    std::vector<Partial> partials(num_partials);
    int64_t count = items.size();
#pragma omp parallel num_threads(threads) if (count > 1)
    {
        Workspace work(work_memory.get() + omp_get_thread_num() * work_size, rows, item_rows, width, heads);
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < count; ++i) attend_item(a, items[i], work, partials.data(), partial_sums.get());
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < count; ++i) {
            if (items[i].partial < 0 || (i > 0 && same_rows(items[i - 1], items[i]))) continue;
            int64_t parts = 1;
            while (i + parts < count && same_rows(items[i], items[i + parts])) ++parts;
            merge(a, &items[i], parts, partials.data(), partial_sums.get());
        }
    }
}

template <typename T>
int64_t run(const Attention<T>& a, int threads) {
    if (Fault fault = check(a)) return fault;
    try {
        attend(a, threads);
    } catch (const std::bad_alloc&) {
        return NO_MEMORY;
    }
    return NONE;
}

}  // namespace
}  // namespace servetwin

extern "C" {

int64_t paged_attention_float32(const servetwin::Attention<float>* call, int64_t threads) {
    return servetwin::run(*call, static_cast<int>(threads));
}

int64_t paged_attention_bfloat16(const servetwin::Attention<servetwin::bfloat16>* call, int64_t threads) {
    return servetwin::run(*call, static_cast<int>(threads));
}

}  // extern "C"
