// Causal attention straight over the block pool, grouped queries; decode rows and prompt chunks.
//
//     out_t = softmax(q_t . K^T * scale) V,  K and V of the token's own row at positions <= its own
//
// A tile is up to TILE_ROWS query rows (tokens times the query heads of one kv head) against all
// keys that its last row sees, in three passes: scores, softmax with the true maximum, weights
// times V. Scores are float32, weights bf16, and their sum is of the rounded weights.
//
//     one token     its keys are packed 32 at a time into L1 just before they are multiplied
//     more          the row's keys are packed once, then tiles of all threads read them
//
// Both go through the same products in the same order, so a token's result does not depend on
// which of the two it was; keys that a tile sees and a row does not get the weight 0, which adds
// nothing to a sum. Slots past the context are never read: another request may have left NaN there.
#pragma once
#include "multiply.h"
#include "pack_kv.h"
#include "team.h"

constexpr int64_t KEYS = PANEL;

// What a thread needs beside the shared packed keys.
struct Scratch {
    float* scores;  // [TILE_ROWS][stride]
    bf16* weights;  // [TILE_ROWS][stride]
    int64_t stride;
    float* sums;    // [TILE_ROWS][head_dim_p], of weights times V
    float* totals;  // [TILE_ROWS], of weights
    bf16* panel;    // 32 keys or values, packed
    bf16* zeros;    // a key that is not there
};

static Scratch scratch_in(uint8_t* memory, int64_t context_len, int64_t head_dim_p) {
    Scratch s;
    // Not a power of two, or all rows of a tile would share a few sets of the cache.
    s.stride = score_stride(context_len);
    s.scores = (float*)memory;
    s.sums = s.scores + TILE_ROWS * s.stride;
    s.totals = s.sums + TILE_ROWS * head_dim_p;
    s.weights = (bf16*)(s.totals + padded_to(TILE_ROWS, 16));
    s.panel = s.weights + TILE_ROWS * s.stride;
    s.zeros = s.panel + KEYS * head_dim_p;
    memset(s.zeros, 0, head_dim_p * sizeof(bf16));
    return s;
}

// work(keys) on keys first to first + 31 of a head, or as many of them as the context has.
template <class Work>
INLINE void with_keys(const bf16* head, const AttentionRow& row, int64_t first, const bf16* zeros,
                      Work work) {
    const int64_t left = row.context_len - first;
    if (left >= KEYS) {
        work(FullKeys{head, row.slots + first});
    } else {
        work(LastKeys{head, row.slots + first, left, zeros});
    }
}

// Scores of one row become weights, and their sum is returned. The row sees keys low to high - 1;
// what first to last (multiples of 32) has beyond gets weight 0.
static float softmax(float* scores, bf16* weights, int64_t first, int64_t low, int64_t high,
                     int64_t last, const AttentionOptions& options, int64_t head) {
    const float hidden = -__builtin_inff();
    for (int64_t k = first; k < low; k++) scores[k] = hidden;
    for (int64_t k = high; k < last; k++) scores[k] = hidden;
    float scale = options.scale;
    if (options.soft_cap > 0) {
        // cap * tanh(x) = cap - 2 cap / (exp(2 x) + 1)
        const Vec cap = all(options.soft_cap);
        const Vec to_exponent = all(scale / options.soft_cap * 2 * 1.44269504f);
        for (int64_t k = first; k < last; k += LANES) {
            Vec capped = cap - 2 * cap / (exp2_of(load(scores + k) * to_exponent) + 1);
            store(scores + k, capped);
        }
        scale = 1;
        for (int64_t k = first; k < low; k++) scores[k] = hidden;
        for (int64_t k = high; k < last; k++) scores[k] = hidden;
    }
    Vec highest = all(hidden);
    for (int64_t k = first; k < last; k += LANES) highest = larger(highest, load(scores + k));
    float maximum = largest_of(highest);
    const float sink = options.sinks == nullptr ? hidden : options.sinks[head] / scale;
    if (sink > maximum) maximum = sink;
    const Vec offset = all(maximum), to_exponent = all(scale * 1.44269504f);
    Vec total = {};
    for (int64_t k = first; k < last; k += LANES) {
        Half half = narrow(exp2_of((load(scores + k) - offset) * to_exponent));
        memcpy(weights + k, &half, sizeof half);
        total += widen(half);
    }
    const float sum = sum_of(total);
    if (options.sinks == nullptr) return sum;
    return sum + exp2_of((all(sink) - offset) * to_exponent)[0];
}

// A tile: rows first_row to first_row + count - 1 of (token, query head of the kv head).
struct AttentionTile {
    const AttentionCall& call;
    const AttentionRow& row;
    int64_t kv_head, first_row, count;

    int64_t seen_by(int64_t r) const {  // keys before this are visible
        return row.context_len - row.num_tokens + (first_row + r) / call.group + 1;
    }
    int64_t hidden_to(int64_t r) const {  // keys before this are out of the window
        const int64_t start = seen_by(r) - call.options.window;
        return call.options.window > 0 && start > 0 ? start : 0;
    }
    int64_t first_key() const { return hidden_to(0) / KEYS * KEYS; }
    int64_t last_key() const { return padded_to(seen_by(count - 1), KEYS); }
    const bf16* queries() const {
        const int64_t token = kv_head * call.q_tokens + row.first_query;
        return call.q + (token * call.group + first_row) * call.head_dim_p;
    }
};

static void weigh(const AttentionTile& tile, Scratch& s) {
    for (int64_t r = 0; r < tile.count; r++) {
        const int64_t group = tile.call.group;
        const int64_t head = tile.kv_head * group + (tile.first_row + r) % group;
        s.totals[r] = softmax(s.scores + r * s.stride, s.weights + r * s.stride, tile.first_key(),
                              tile.hidden_to(r), tile.seen_by(r), tile.last_key(),
                              tile.call.options, head);
    }
}

static void finish(const AttentionTile& tile, const Scratch& s) {
    const AttentionCall& call = tile.call;
    for (int64_t r = 0; r < tile.count; r++) {
        const int64_t token = tile.row.first_out + (tile.first_row + r) / call.group;
        const int64_t head = tile.kv_head * call.group + (tile.first_row + r) % call.group;
        bf16* out = call.out + (token * call.num_kv_heads * call.group + head) * call.head_dim_p;
        const Vec total = all(s.totals[r]);
        for (int64_t d = 0; d < call.head_dim_p; d += LANES) {
            store(out + d, load(s.sums + r * call.head_dim_p + d) / total);
        }
    }
}

// Rows of a tile times 32 or more outputs; two panels at a time where multiply can.
INLINE void multiply_panels(Product product, int rows, int64_t num_panels) {
    const bf16* panels = product.panels;
    float* c = product.c;
    const int step = rows <= TWO_PANEL_ROWS ? 2 : 1;
    for (int64_t panel = 0; panel < num_panels; panel += step) {
        product.panels = product.ahead = panels + panel * product.panel_stride;
        product.c = c + panel * PANEL;
        multiply(product, rows, panel + step <= num_panels ? step : 1);
    }
}

static void attend_one_token(const AttentionTile& tile, Scratch& s) {
    const AttentionCall& call = tile.call;
    const bf16* keys = call.keys + tile.kv_head * call.head_stride;
    const int64_t size = call.head_dim_p;
    const int64_t first = tile.first_key(), last = tile.last_key();
    for (int64_t k = first; k < last; k += KEYS) {
        with_keys(keys, tile.row, k, s.zeros,
                  [&](auto rows) { pack_keys(rows, call.head_dim, size, s.panel); });
        multiply_panels({.a = tile.queries(), .lda = size, .panels = s.panel, .panel_stride = 0,
                         .num_pairs = size / 2, .c = s.scores + k, .ldc = s.stride, .add = false,
                         .ahead = nullptr, .ahead_step = 0}, (int)tile.count, 1);
    }
    weigh(tile, s);
    const bf16* values = keys + call.value_offset;
    for (int64_t k = first; k < last; k += KEYS) {
        with_keys(values, tile.row, k, s.zeros, [&](auto rows) {
            pack_values(rows, call.head_dim, size, s.panel, KEYS * PANEL);
        });
        multiply_panels({.a = s.weights + k, .lda = s.stride, .panels = s.panel,
                         .panel_stride = KEYS * PANEL, .num_pairs = KEYS / 2, .c = s.sums,
                         .ldc = size, .add = k > first, .ahead = nullptr, .ahead_step = 0},
                        (int)tile.count, size / PANEL);
    }
    finish(tile, s);
}

// Where pack_chunk puts a kv head's keys, and behind them its values.
INLINE bf16* packed_head(const AttentionCall& call, int64_t kv_head, int64_t context_p) {
    return call.packed + kv_head * 2 * context_p * call.head_dim_p;
}

static void pack_chunk(Team& team, const AttentionCall& call, const AttentionRow& row,
                       const bf16* zeros) {
    const int64_t context_p = padded_to(row.context_len, KEYS), size = call.head_dim_p;
    const int64_t panels = context_p / KEYS;
    for (int64_t item = team.take(); item < panels * call.num_kv_heads; item = team.take()) {
        const int64_t kv_head = item / panels, k = item % panels * KEYS;
        const bf16* head = call.keys + kv_head * call.head_stride;
        bf16* packed = packed_head(call, kv_head, context_p);
        with_keys(head, row, k, zeros,
                  [&](auto rows) { pack_keys(rows, call.head_dim, size, packed + k * size); });
        with_keys(head + call.value_offset, row, k, zeros, [&](auto rows) {
            pack_values(rows, call.head_dim, size, packed + context_p * size + k * PANEL,
                        context_p * PANEL);
        });
    }
    team.barrier();
}

static void attend_packed(const AttentionTile& tile, Scratch& s) {
    const AttentionCall& call = tile.call;
    const int64_t context_p = padded_to(tile.row.context_len, KEYS), size = call.head_dim_p;
    const bf16* keys = packed_head(call, tile.kv_head, context_p);
    const int64_t first = tile.first_key(), last = tile.last_key();
    multiply_panels({.a = tile.queries(), .lda = size, .panels = keys + first * size,
                     .panel_stride = KEYS * size, .num_pairs = size / 2, .c = s.scores + first,
                     .ldc = s.stride, .add = false, .ahead = nullptr, .ahead_step = 0},
                    (int)tile.count, (last - first) / KEYS);
    weigh(tile, s);
    multiply_panels({.a = s.weights + first, .lda = s.stride,
                     .panels = keys + context_p * size + first * PANEL,
                     .panel_stride = context_p * PANEL, .num_pairs = (last - first) / 2,
                     .c = s.sums, .ldc = size, .add = false, .ahead = nullptr, .ahead_step = 0},
                    (int)tile.count, size / PANEL);
    finish(tile, s);
}

// All rows, on all threads; ends with a barrier.
static void attention(Team& team, int thread, const AttentionCall& call, const AttentionRow* rows,
                      int64_t num_rows, int64_t longest_context) {
    Scratch s = scratch_in(call.scratch[thread], longest_context, call.head_dim_p);
    // Tiles of the query heads of a kv head, for rows of one token.
    const int64_t tiles = (call.group + TILE_ROWS - 1) / TILE_ROWS;
    const int64_t items_per_row = call.num_kv_heads * tiles;
    for (int64_t item = team.take(); item < num_rows * items_per_row; item = team.take()) {
        const AttentionRow& row = rows[item / items_per_row];
        if (row.num_tokens != 1) continue;
        const int64_t kv_head = item % items_per_row / tiles, first = item % tiles * TILE_ROWS;
        const int64_t left = call.group - first;
        attend_one_token({call, row, kv_head, first, left < TILE_ROWS ? left : TILE_ROWS}, s);
    }
    team.barrier();
    for (int64_t i = 0; i < num_rows; i++) {
        const AttentionRow& row = rows[i];
        if (row.num_tokens == 1) continue;
        pack_chunk(team, call, row, s.zeros);
        const int64_t query_rows = row.num_tokens * call.group;
        const int64_t tile_rows = rows_per_tile(query_rows);
        const int64_t tiles_per_head = (query_rows + tile_rows - 1) / tile_rows;
        const int64_t num_tiles = tiles_per_head * call.num_kv_heads;
        for (int64_t item = team.take(); item < num_tiles; item = team.take()) {
            // The last tiles see most keys: first, so that no thread is left alone with one.
            const int64_t first = (tiles_per_head - 1 - item % tiles_per_head) * tile_rows;
            const int64_t left = query_rows - first;
            attend_packed({call, row, item / tiles_per_head, first,
                           left < tile_rows ? left : tile_rows}, s);
        }
        team.barrier();
    }
}
