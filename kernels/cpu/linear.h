// y = x @ weight^T + bias over packed panels, for any number of rows, with the next op attached.
//
// Rows are taken in blocks that stay in L2 while all panels pass by; a thread takes two panels at
// a time. The attached op sees 32 outputs of one row in float32, before anything is written.
#pragma once
#include "multiply.h"
#include "team.h"

constexpr int64_t ROWS_PER_BLOCK = 8 * TILE_ROWS;
constexpr int64_t PANELS_PER_ITEM = 2;

// finish(to, bias, sums) gets a row's 32 sums of a panel, their biases or null, and where in out
// its `width` results go. x is [rows][in_p], readable 32 rows past its end; out is
// [rows][panels][width].
template <int width, class Finish>
static void linear(Team& team, const Linear& weight, const bf16* x, int64_t rows, bf16* out,
                   Finish finish) {
    alignas(64) float c[TILE_ROWS * PANEL * 2];
    const int64_t panel_stride = weight.in_p * PANEL;
    const int64_t num_panels = weight.out_p / PANEL;
    const int64_t items_per_block = (num_panels + PANELS_PER_ITEM - 1) / PANELS_PER_ITEM;
    const int64_t num_blocks = (rows + ROWS_PER_BLOCK - 1) / ROWS_PER_BLOCK;
    for (int64_t item = team.take(); item < items_per_block * num_blocks; item = team.take()) {
        const int64_t block_row = item / items_per_block * ROWS_PER_BLOCK;
        const int64_t block_end = smaller(block_row + ROWS_PER_BLOCK, rows);
        const int64_t first_panel = item % items_per_block * PANELS_PER_ITEM;
        const int64_t end_panel = smaller(first_panel + PANELS_PER_ITEM, num_panels);
        const int tile_rows = rows_per_tile(block_end - block_row);
        const int step = tile_rows <= TWO_PANEL_ROWS ? 2 : 1;
        // Each tile fetches its part of what comes next.
        const int64_t num_tiles = (block_end - block_row + tile_rows - 1) / tile_rows;
        const int64_t ahead_step = 2 * PANEL / num_tiles;
        for (int64_t panel = first_panel; panel < end_panel; panel += step) {
            const int panels = panel + step <= end_panel ? step : 1;
            const bf16* here = weight.panels + panel * panel_stride;
            // Where this thread will probably read next. Past the end is nowhere, and harmless.
            const bf16* ahead = panel + panels < end_panel
                ? here + panel_stride
                : here + (panels + PANELS_PER_ITEM * (team.size() - 1)) * panel_stride;
            for (int64_t row = block_row; row < block_end; row += tile_rows) {
                const int count = (int)smaller((int64_t)tile_rows, block_end - row);
                bf16* to = out + (row * num_panels + panel) * width;
                for (int r = 0; r < count; r++) __builtin_prefetch(to + r * num_panels * width, 1);
                multiply({.a = x + row * weight.in_p, .lda = weight.in_p, .panels = here,
                          .panel_stride = panel_stride, .num_pairs = weight.in_p / 2, .c = c,
                          .ldc = PANEL * panels, .add = false, .ahead = ahead,
                          .ahead_step = ahead_step}, count, panels);
                ahead += ahead_step * weight.in_p / 2;
                for (int i = 0; i < panels; i++) {
                    const bf16* bias = weight.bias ? weight.bias + (panel + i) * PANEL : nullptr;
                    for (int r = 0; r < count; r++) {
                        finish(to + (r * num_panels + i) * width, bias,
                               c + (r * panels + i) * PANEL);
                    }
                }
            }
        }
    }
}

// Sums i onwards plus their biases; rounded once, where the attached op is done with them.
INLINE Vec biased(const bf16* bias, const float* sums, int i) {
    Vec y = load(sums + i);
    return bias == nullptr ? y : y + load(bias + i);
}

// out = y
static void linear_store(Team& team, const Linear& weight, const bf16* x, int64_t rows, bf16* out) {
    linear<PANEL>(team, weight, x, rows, out, [](bf16* to, const bf16* bias, const float* sums) {
        for (int i = 0; i < PANEL; i += LANES) store(to + i, biased(bias, sums, i));
    });
}

// out += y
static void linear_add(Team& team, const Linear& weight, const bf16* x, int64_t rows, bf16* out) {
    linear<PANEL>(team, weight, x, rows, out, [](bf16* to, const bf16* bias, const float* sums) {
        for (int i = 0; i < PANEL; i += LANES) store(to + i, load(to + i) + biased(bias, sums, i));
    });
}

// out = silu(gate) * up, silu(x) = x / (1 + exp(-x)), of panels that hold 16 of each.
static void linear_silu_mul(Team& team, const Linear& weight, const bf16* x, int64_t rows,
                            bf16* out) {
    constexpr int HALF = PANEL / 2;
    linear<HALF>(team, weight, x, rows, out, [](bf16* to, const bf16* bias, const float* sums) {
        for (int i = 0; i < HALF; i += LANES) {
            Vec gate = biased(bias, sums, i), up = biased(bias, sums, HALF + i);
            Vec silu = gate * inverse_of(1.0f + exp2_of(gate * -1.44269504f));
            store(to + i, silu * up);
        }
    });
}
