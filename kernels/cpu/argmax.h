// The lowest id of the highest logit, in two passes that a compiler makes vectors of.
#pragma once
#include "vec.h"

// bf16 as an integer of the same order; both zeros are 0.
INLINE int16_t order_of(bf16 x) {
    const int16_t magnitude = x & 0x7fff;
    return x & 0x8000 ? -magnitude : magnitude;
}

// -1 if there is a NaN, or if the highest is infinite.
static int32_t argmax(const bf16* logits, int64_t count) {
    constexpr int16_t infinity = 0x7f80;
    int16_t highest = -infinity, largest_magnitude = 0;
    for (int64_t i = 0; i < count; i++) {
        const int16_t value = order_of(logits[i]), magnitude = logits[i] & 0x7fff;
        highest = value > highest ? value : highest;
        largest_magnitude = magnitude > largest_magnitude ? magnitude : largest_magnitude;
    }
    if (largest_magnitude > infinity || highest == infinity || highest == -infinity) return -1;
    // Blocks first: a loop that stops at a hit is not made a vector of.
    constexpr int64_t BLOCK = 512;
    for (int64_t start = 0; start < count; start += BLOCK) {
        const int64_t end = start + BLOCK < count ? start + BLOCK : count;
        int16_t in_block = -infinity;
        for (int64_t i = start; i < end; i++) {
            const int16_t value = order_of(logits[i]);
            in_block = value > in_block ? value : in_block;
        }
        if (in_block != highest) continue;
        for (int64_t i = start; i < end; i++) {
            if (order_of(logits[i]) == highest) return (int32_t)i;
        }
    }
    return -1;
}
