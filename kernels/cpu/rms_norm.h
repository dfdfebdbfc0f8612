// out = weight * (x / sqrt(mean(x^2) + eps)), of one row; rounded before the weight is applied.
#pragma once
#include "vec.h"

// size is real, size_p what is read and written; the padding of x and weight is zero.
static void rms_norm(const bf16* x, const bf16* weight, bf16* out, int64_t size, int64_t size_p,
                     float eps) {
    Vec squares = {};
    for (int64_t i = 0; i < size_p; i += LANES) {
        Vec value = load(x + i);
        squares += value * value;
    }
    Vec scale = all(1.0f / __builtin_sqrtf(sum_of(squares) / size + eps));
    for (int64_t i = 0; i < size_p; i += LANES) {
        store(out + i, load(weight + i) * rounded(load(x + i) * scale));
    }
}
