// K and V of 32 keys, gathered from wherever the block table put them, as panels for multiply.
//
//     keys:    one panel, [head_dim_p / 2][32 keys][2]           scores = q times it
//     values:  head_dim_p / 32 panels, [16 key pairs][32 dims][2]   out = weights times them
//
// For each line that is packed, one that will be is prefetched into L2: in a burst, prefetches
// fill the few buffers that a core has for them, and it stands still instead of packing.
#pragma once
#include "vec.h"

INLINE void prefetch_line(const bf16* line) { __builtin_prefetch(line, 0, 2); }

// Keys of one head that are all there: key i is at head + slots[i].
struct FullKeys {
    const bf16* head;
    const int64_t* slots;
    const bf16* operator[](int64_t i) const { return head + slots[i]; }
    // slots go on for KEYS_AHEAD more entries.
    const bf16* ahead(int64_t i) const { return head + slots[i + KEYS_AHEAD]; }
};

// The last keys of a context: count of them, then zeros.
struct LastKeys {
    const bf16* head;
    const int64_t* slots;
    int64_t count;
    const bf16* zeros;
    const bf16* operator[](int64_t i) const { return i < count ? head + slots[i] : zeros; }
    const bf16* ahead(int64_t) const { return zeros; }
};

#if defined(__AVX512BF16__)

// 16 dwords of 16 keys become 16 rows of what were columns, out_stride apart.
template <class Keys>
INLINE void transpose_16(const Keys& keys, int key, int64_t first, __mmask16 mask, bf16* out,
                         int64_t out_stride) {
    __m512i x[16], y[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
        x[i] = _mm512_maskz_loadu_epi32(mask, keys[key + i] + first);
        prefetch_line(keys.ahead(key + i) + first);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        y[2 * i] = _mm512_unpacklo_epi32(x[2 * i], x[2 * i + 1]);
        y[2 * i + 1] = _mm512_unpackhi_epi32(x[2 * i], x[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        x[4 * i] = _mm512_unpacklo_epi64(y[4 * i], y[4 * i + 2]);
        x[4 * i + 1] = _mm512_unpackhi_epi64(y[4 * i], y[4 * i + 2]);
        x[4 * i + 2] = _mm512_unpacklo_epi64(y[4 * i + 1], y[4 * i + 3]);
        x[4 * i + 3] = _mm512_unpackhi_epi64(y[4 * i + 1], y[4 * i + 3]);
    }
    // x[4 g + c] has columns c, c + 4, c + 8, c + 12 of rows 4 g to 4 g + 3, one per 128 bits.
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        __m512i low01 = _mm512_shuffle_i32x4(x[c], x[4 + c], 0x88);
        __m512i low23 = _mm512_shuffle_i32x4(x[8 + c], x[12 + c], 0x88);
        __m512i high01 = _mm512_shuffle_i32x4(x[c], x[4 + c], 0xdd);
        __m512i high23 = _mm512_shuffle_i32x4(x[8 + c], x[12 + c], 0xdd);
        bf16* to = out + c * out_stride;
        _mm512_storeu_si512(to, _mm512_shuffle_i32x4(low01, low23, 0x88));
        _mm512_storeu_si512(to + 4 * out_stride, _mm512_shuffle_i32x4(high01, high23, 0x88));
        _mm512_storeu_si512(to + 8 * out_stride, _mm512_shuffle_i32x4(low01, low23, 0xdd));
        _mm512_storeu_si512(to + 12 * out_stride, _mm512_shuffle_i32x4(high01, high23, 0xdd));
    }
}

template <class Keys>
static void pack_keys(const Keys& keys, int64_t head_dim, int64_t head_dim_p, bf16* out) {
    for (int64_t first = 0; first < head_dim_p; first += 32) {
        const int64_t pairs = (head_dim - first) / 2;
        const __mmask16 mask = pairs >= 16 ? 0xffff : (__mmask16)((1u << pairs) - 1);
        for (int half = 0; half < 2; half++) {
            transpose_16(keys, 16 * half, first, mask, out + first * PANEL + 32 * half, 2 * PANEL);
        }
    }
}

template <class Keys>
static void pack_values(const Keys& keys, int64_t head_dim, int64_t head_dim_p, bf16* out,
                        int64_t panel_stride) {
    // Element 0 of both, element 1 of both, and so on: which interleaves two vectors.
    alignas(64) static const uint16_t low[32] = {
        0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39,
        8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __m512i low_order = _mm512_load_si512(low);
    const __m512i high_order = _mm512_add_epi16(low_order, _mm512_set1_epi16(16));
    for (int64_t first = 0; first < head_dim_p; first += 32) {
        const int64_t count = head_dim - first;
        const __mmask32 mask = count >= 32 ? 0xffffffffu : (1u << count) - 1;
        bf16* panel = out + first / 32 * panel_stride;
#pragma GCC unroll 4
        for (int pair = 0; pair < 16; pair++) {
            __m512i even = _mm512_maskz_loadu_epi16(mask, keys[2 * pair] + first);
            __m512i odd = _mm512_maskz_loadu_epi16(mask, keys[2 * pair + 1] + first);
            prefetch_line(keys.ahead(2 * pair) + first);
            prefetch_line(keys.ahead(2 * pair + 1) + first);
            bf16* to = panel + pair * 2 * PANEL;
            _mm512_storeu_si512(to, _mm512_permutex2var_epi16(even, low_order, odd));
            _mm512_storeu_si512(to + PANEL, _mm512_permutex2var_epi16(even, high_order, odd));
        }
    }
}

#else

template <class Keys>
static void pack_keys(const Keys& keys, int64_t head_dim, int64_t head_dim_p, bf16* out) {
    for (int key = 0; key < PANEL; key++) prefetch_line(keys.ahead(key));
    for (int64_t pair = 0; pair < head_dim_p / 2; pair++) {
        for (int key = 0; key < PANEL; key++) {
            bf16* to = out + pair * 2 * PANEL + 2 * key;
            const bool is_real = 2 * pair < head_dim;
            to[0] = is_real ? keys[key][2 * pair] : 0;
            to[1] = is_real ? keys[key][2 * pair + 1] : 0;
        }
    }
}

template <class Keys>
static void pack_values(const Keys& keys, int64_t head_dim, int64_t head_dim_p, bf16* out,
                        int64_t panel_stride) {
    for (int key = 0; key < PANEL; key++) prefetch_line(keys.ahead(key));
    for (int64_t dim = 0; dim < head_dim_p; dim++) {
        bf16* to = out + dim / PANEL * panel_stride + dim % PANEL * 2;
        for (int key = 0; key < PANEL; key++) {
            to[key / 2 * 2 * PANEL + key % 2] = dim < head_dim ? keys[key][dim] : 0;
        }
    }
}

#endif
