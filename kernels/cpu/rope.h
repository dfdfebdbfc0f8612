// One head turned by its position's angles; every product is rounded, as the torch op does.
//
//     [a, b] the halves of a head:  rotated([a, b]) = [a * cos - b * sin, b * cos + a * sin]
#pragma once
#include "vec.h"

// out may be x. cos and sin have half values.
static void rotate(const bf16* x, const bf16* cos, const bf16* sin, bf16* out, int64_t half) {
    for (int64_t i = 0; i < half; i += LANES) {
        const int64_t count = half - i;
        Vec a = load_part(x + i, count), b = load_part(x + half + i, count);
        Vec c = load_part(cos + i, count), s = load_part(sin + i, count);
        store_part(out + i, rounded(a * c) - rounded(b * s), count);
        store_part(out + half + i, rounded(b * c) + rounded(a * s), count);
    }
}
