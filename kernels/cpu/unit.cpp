// All ops for one instruction set, behind a table. build.py compiles this once per set, with
// UNIT=its name; nothing here may be inline and visible, or the linker would hand one set's code
// to another.
#include <string.h>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#include "api.h"
#include "team.h"

namespace CONCAT(disagg_, UNIT) {

#include "decoder.h"

// Denormals as zero, for the products and for what they may leave in the caller's arithmetic.
struct FlushDenormals {
#if defined(__x86_64__)
    unsigned before = __builtin_ia32_stmxcsr();
    FlushDenormals() { __builtin_ia32_ldmxcsr(before | 0x8040); }
    ~FlushDenormals() { __builtin_ia32_ldmxcsr(before); }
#endif
};

struct Multiplying {
    FlushDenormals flush;
    Multiplying() { begin_multiplying(); }
    ~Multiplying() { end_multiplying(); }
};

static void run_decoder_step(Team& team, int thread, const Model& model, const Step& step,
                             const Workspace& w) {
    Multiplying guard;
    decoder_step(team, thread, model, step, w);
}

static void run_linear(Team& team, int, const Linear& weight, int kind, const bf16* x,
                       int64_t rows, bf16* out) {
    Multiplying guard;
    if (kind == STORE) linear_store(team, weight, x, rows, out);
    if (kind == ADD) linear_add(team, weight, x, rows, out);
    if (kind == SILU_MUL) linear_silu_mul(team, weight, x, rows, out);
}

static void run_attention(Team& team, int thread, const AttentionCall& call,
                          const AttentionRow* rows, int64_t num_rows, int64_t longest_context) {
    Multiplying guard;
    attention(team, thread, call, rows, num_rows, longest_context);
}

}  // namespace CONCAT(disagg_, UNIT)

using namespace CONCAT(disagg_, UNIT);

extern "C" __attribute__((visibility("hidden"))) const Ops CONCAT(disagg_ops_, UNIT) = {
    run_decoder_step, run_linear, run_attention, rms_norm, rotate, argmax,
};
