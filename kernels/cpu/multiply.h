// The one matrix product that everything is made of: a few rows times one or two packed panels.
//
//     c[r, o] = (add ? c[r, o] : 0) + sum over k of a[r, k] * panel[k, o]
//
// The sum over k runs in one order, pair by pair, whatever the number of rows, and may be cut
// anywhere with add: that is why a row's logits are the same bits alone, at batch 16 and inside a
// chunk. Panels are read once, in order; meanwhile what is read next is prefetched, evenly, because
// memory that waits for a tile to be computed is memory that is idle.
#pragma once
#include "vec.h"

struct Product {
    const bf16* a;  // [rows][lda]
    int64_t lda;
    const bf16* panels;
    int64_t panel_stride;
    int64_t num_pairs;  // a multiple of 16
    float* c;  // [rows][ldc], panels side by side; room for TILE_ROWS rows, all of them scratch
    int64_t ldc;
    bool add;
    const bf16* ahead;   // prefetched: ahead_step elements (at most 64) per pair and panel
    int64_t ahead_step;
};

#if defined(__AMX_BF16__)
#include "multiply_amx.h"
#else

// What fits the registers: accumulators, the panel's row and one broadcast.
#if defined(__AVX512BF16__)
constexpr int TILE_ROWS = 12;
#elif defined(__AVX2__)
constexpr int TILE_ROWS = 3;
#else
constexpr int TILE_ROWS = 1;
#endif
// Up to so many rows, two panels at a time: one panel's accumulators are too few to hide the
// latency of the dot product.
constexpr int TWO_PANEL_ROWS = TILE_ROWS / 2;

template <int ROWS, int PANELS>
static void tile(const Product& p) {
    constexpr int VECS = PANEL / LANES * PANELS;
    float* const c = p.c;
    const int64_t ldc = p.ldc, lda = p.lda, num_pairs = p.num_pairs, ahead_step = p.ahead_step;
    const int64_t panel_stride = p.panel_stride;
    Vec acc[ROWS][VECS];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
#pragma GCC unroll 16
        for (int v = 0; v < VECS; v++) {
            acc[r][v] = p.add ? load(c + r * ldc + v * LANES) : Vec{};
        }
    }
    // Three rows a pointer, which x86 can address with two index registers; 12 would spill.
    const bf16* a[(ROWS + 2) / 3];
#pragma GCC unroll 4
    for (int i = 0; i < (ROWS + 2) / 3; i++) a[i] = p.a + 3 * i * lda;
    const bf16* panel = p.panels;
    const bf16* ahead = p.ahead;
    for (int64_t pair = 0; pair < num_pairs; pair++) {
        Pairs b[VECS];
#pragma GCC unroll 16
        for (int v = 0; v < VECS; v++) {
            int offset = v * LANES % PANEL * 2;
            b[v] = load_pairs(panel + (v * LANES / PANEL) * panel_stride + offset);
        }
#pragma GCC unroll 2
        for (int i = 0; i < PANELS; i++) {
            __builtin_prefetch(ahead + i * panel_stride, 0, 2);
            __builtin_prefetch(ahead + i * panel_stride + ahead_step / 2, 0, 2);
        }
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) {
            Pairs x = all_pairs(a[r / 3] + r % 3 * lda + 2 * pair);
#pragma GCC unroll 16
            for (int v = 0; v < VECS; v++) acc[r][v] = dot(acc[r][v], x, b[v]);
        }
        panel += 2 * PANEL;
        ahead += ahead_step;
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
#pragma GCC unroll 16
        for (int v = 0; v < VECS; v++) store(c + r * ldc + v * LANES, acc[r][v]);
    }
}

template <int ROWS>
static void multiply_rows(const Product& p, int rows, int panels) {
    if constexpr (ROWS > 0) {
        if (rows != ROWS) return multiply_rows<ROWS - 1>(p, rows, panels);
        if constexpr (ROWS <= TWO_PANEL_ROWS) {
            if (panels == 2) return tile<ROWS, 2>(p);
        }
        tile<ROWS, 1>(p);
    }
}

// rows is at most TILE_ROWS; panels is 1, or 2 where rows is at most TWO_PANEL_ROWS.
static void multiply(const Product& p, int rows, int panels) {
    multiply_rows<TILE_ROWS>(p, rows, panels);
}

// Around everything that multiplies, on every thread.
INLINE void begin_multiplying() {}
INLINE void end_multiplying() {}

#endif

// How to cut rows into tiles of about equal size: 16 rows are 8 and 8, not 12 and 4.
INLINE int rows_per_tile(int64_t rows) {
    int64_t num_tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    return num_tiles == 0 ? 1 : (int)((rows + num_tiles - 1) / num_tiles);
}
