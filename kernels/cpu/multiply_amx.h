// multiply on AMX: tiles of 16 rows x 16 outputs x 32 inputs, straight from packed panels.
//
// A tile always has 16 rows: with fewer, what follows in a (padding, or other rows) is multiplied
// too and lands in rows of c that nobody reads. One row costs as much as 16 do, which is still
// faster than a panel comes out of memory, and it keeps the order of the sum the same for all.
//
// Even and odd inputs of 32 are summed apart and then added: not the order of vdpbf16ps. So it is
// AMX for every row count, or for none.
#pragma once

constexpr int TILE_ROWS = 32;
constexpr int TWO_PANEL_ROWS = 16;

constexpr int64_t TILE_INPUTS = 32;
constexpr int64_t TILE_ELEMENTS = TILE_INPUTS * PANEL;  // of a panel, per step of k

// Tiles: 0 to 3 are c, 4 and 5 are a, 6 and 7 are a panel's halves.
INLINE void load_panel(const bf16* panel) {
    _tile_loadd(6, panel, 4 * PANEL);
    _tile_loadd(7, panel + PANEL, 4 * PANEL);
}

INLINE void prefetch(const bf16* from, int64_t size) {
    for (int64_t i = 0; i < size; i += 32) __builtin_prefetch(from + i, 0, 2);
}

static void multiply_16_rows_1_panel(const Product& p) {
    const int64_t lda = 2 * p.lda, ldc = 4 * p.ldc;
    if (p.add) {
        _tile_loadd(0, p.c, ldc);
        _tile_loadd(1, p.c + 16, ldc);
    } else {
        _tile_zero(0);
        _tile_zero(1);
    }
    const bf16* a = p.a;
    const bf16* panel = p.panels;
    const bf16* ahead = p.ahead;
    const int64_t ahead_step = p.ahead_step * (TILE_INPUTS / 2);
    for (int64_t pair = 0; pair < p.num_pairs; pair += TILE_INPUTS / 2) {
        _tile_loadd(4, a, lda);
        load_panel(panel);
        prefetch(ahead, ahead_step);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        a += TILE_INPUTS;
        panel += TILE_ELEMENTS;
        ahead += ahead_step;
    }
    _tile_stored(0, p.c, ldc);
    _tile_stored(1, p.c + 16, ldc);
}

static void multiply_16_rows_2_panels(const Product& p) {
    const int64_t lda = 2 * p.lda, ldc = 4 * p.ldc;
    if (p.add) {
        _tile_loadd(0, p.c, ldc);
        _tile_loadd(1, p.c + 16, ldc);
        _tile_loadd(2, p.c + 32, ldc);
        _tile_loadd(3, p.c + 48, ldc);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    const bf16* a = p.a;
    const bf16* panel = p.panels;
    const bf16* ahead = p.ahead;
    const int64_t ahead_step = p.ahead_step * (TILE_INPUTS / 2);
    for (int64_t pair = 0; pair < p.num_pairs; pair += TILE_INPUTS / 2) {
        _tile_loadd(4, a, lda);
        load_panel(panel);
        prefetch(ahead, ahead_step);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        load_panel(panel + p.panel_stride);
        prefetch(ahead + p.panel_stride, ahead_step);
        _tile_dpbf16ps(2, 4, 6);
        _tile_dpbf16ps(3, 4, 7);
        a += TILE_INPUTS;
        panel += TILE_ELEMENTS;
        ahead += ahead_step;
    }
    _tile_stored(0, p.c, ldc);
    _tile_stored(1, p.c + 16, ldc);
    _tile_stored(2, p.c + 32, ldc);
    _tile_stored(3, p.c + 48, ldc);
}

static void multiply_32_rows(const Product& p) {
    const int64_t lda = 2 * p.lda, ldc = 4 * p.ldc;
    float* c_low = p.c + 16 * p.ldc;
    if (p.add) {
        _tile_loadd(0, p.c, ldc);
        _tile_loadd(1, p.c + 16, ldc);
        _tile_loadd(2, c_low, ldc);
        _tile_loadd(3, c_low + 16, ldc);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    const bf16* a = p.a;
    const bf16* a_low = p.a + 16 * p.lda;
    const bf16* panel = p.panels;
    const bf16* ahead = p.ahead;
    const int64_t ahead_step = p.ahead_step * (TILE_INPUTS / 2);
    for (int64_t pair = 0; pair < p.num_pairs; pair += TILE_INPUTS / 2) {
        _tile_loadd(4, a, lda);
        load_panel(panel);
        _tile_loadd(5, a_low, lda);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        prefetch(ahead, ahead_step);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
        a += TILE_INPUTS;
        a_low += TILE_INPUTS;
        panel += TILE_ELEMENTS;
        ahead += ahead_step;
    }
    _tile_stored(0, p.c, ldc);
    _tile_stored(1, p.c + 16, ldc);
    _tile_stored(2, c_low, ldc);
    _tile_stored(3, c_low + 16, ldc);
}

// rows is at most TILE_ROWS; panels is 1, or 2 where rows is at most TWO_PANEL_ROWS.
static void multiply(const Product& p, int rows, int panels) {
    if (rows > 16) return multiply_32_rows(p);
    if (panels == 2) return multiply_16_rows_2_panels(p);
    multiply_16_rows_1_panel(p);
}

// The shape of the tiles is a thread's state; released, it is nothing to save in a switch.
static void begin_multiplying() {
    alignas(64) uint8_t config[64] = {};
    config[0] = 1;
    for (int t = 0; t < 8; t++) {
        config[16 + 2 * t] = 64;  // bytes per row
        config[48 + t] = 16;      // rows
    }
    _tile_loadconfig(config);
}

static void end_multiplying() { _tile_release(); }
