// What Python calls, and the choice of an instruction set.
//
// A runner is a team of threads with its buffers and one unit's ops; calls on one runner must not
// overlap. Functions return 0, or what workspace.h says is wrong with the arguments.
#include <string.h>

#include "api.h"
#include "team.h"
#include "workspace.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define EXPORT extern "C" __attribute__((visibility("default")))

extern "C" const Ops disagg_ops_plain;
#if defined(__x86_64__)
extern "C" const Ops disagg_ops_avx2, disagg_ops_avx512, disagg_ops_amx;

static bool has_amx() {
    unsigned eax, ebx, ecx, edx;
    constexpr unsigned amx_bf16 = 1u << 22, amx_tile = 1u << 24;
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
    if (!(edx & amx_bf16) || !(edx & amx_tile)) return false;
    // Tiles are 8 KiB more to save in a switch: Linux gives them to a process that asks.
    constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

static bool has_avx512() {
    return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#endif

static const Ops* ops_of(const char* isa) {
#if defined(__x86_64__)
    if (strcmp(isa, "amx") == 0) return has_avx512() && has_amx() ? &disagg_ops_amx : nullptr;
    if (strcmp(isa, "avx512") == 0) return has_avx512() ? &disagg_ops_avx512 : nullptr;
    if (strcmp(isa, "avx2") == 0) {
        const bool has = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
        return has ? &disagg_ops_avx2 : nullptr;
    }
#endif
    return strcmp(isa, "plain") == 0 ? &disagg_ops_plain : nullptr;
}

struct Runner {
    const Ops* ops;
    Team team;
    Workspaces workspaces;
};

EXPORT int disagg_supports(const char* isa) { return ops_of(isa) != nullptr; }

// Null if this CPU cannot run isa.
EXPORT Runner* disagg_runner_new(const char* isa, int num_threads) {
    const Ops* ops = ops_of(isa);
    if (ops == nullptr) return nullptr;
    return new Runner{ops, Team(num_threads), Workspaces(num_threads)};
}

EXPORT void disagg_runner_free(Runner* runner) { delete runner; }

template <class Work>
static void run(Runner* runner, Work work) {
    runner->team.run([](void* argument, int thread) { (*static_cast<Work*>(argument))(thread); },
                     &work);
}

EXPORT int disagg_decoder_step(Runner* runner, const Model* model, const Step* step) {
    Workspace w;
    if (int error = runner->workspaces.prepare(*model, *step, &w)) return error;
    run(runner, [&](int thread) {
        runner->ops->decoder_step(runner->team, thread, *model, *step, w);
    });
    return 0;
}

// Each op alone, for tests and measurements. x is readable MAX_TILE_ROWS rows past its end.
EXPORT void disagg_linear(Runner* runner, const Linear* weight, int kind, const bf16* x,
                          int64_t rows, bf16* out) {
    run(runner, [&](int thread) {
        runner->ops->linear(runner->team, thread, *weight, kind, x, rows, out);
    });
}

// q is [kv heads][tokens + MAX_TILE_ROWS][group][head_dim_p]; out is [tokens][heads][head_dim_p].
EXPORT int disagg_attention(Runner* runner, const Pool* pool, int64_t layer, const Row* rows,
                            int64_t num_rows, const int32_t* tables, const bf16* q,
                            int64_t q_tokens, int64_t group, const AttentionOptions* options,
                            bf16* out) {
    Workspace w;
    int error = runner->workspaces.prepare_rows(rows, num_rows, tables, *pool, &w);
    if (error) return error;
    const int64_t head_dim_p = padded_to(pool->head_dim, PANEL);
    runner->workspaces.prepare_attention(head_dim_p, pool->num_kv_heads, w.longest_context, &w);
    const int64_t head_stride = pool->block_size * pool->head_dim;
    const AttentionCall call = {
        .q = q,
        .q_tokens = q_tokens,
        .out = out,
        .keys = pool->data + layer * 2 * pool->num_kv_heads * head_stride,
        .value_offset = pool->num_kv_heads * head_stride,
        .head_stride = head_stride,
        .num_kv_heads = pool->num_kv_heads,
        .group = group,
        .head_dim = pool->head_dim,
        .head_dim_p = head_dim_p,
        .options = *options,
        .packed = w.packed,
        .scratch = w.scratch,
    };
    run(runner, [&](int thread) {
        runner->ops->attention(runner->team, thread, call, w.rows, num_rows, w.longest_context);
    });
    return 0;
}

EXPORT void disagg_rms_norm(Runner* runner, const bf16* x, const bf16* weight, bf16* out,
                            int64_t rows, int64_t size, int64_t size_p, float eps) {
    for (int64_t row = 0; row < rows; row++) {
        runner->ops->rms_norm(x + row * size_p, weight, out + row * size_p, size, size_p, eps);
    }
}

EXPORT void disagg_rotate(Runner* runner, const bf16* x, const bf16* cos, const bf16* sin,
                          bf16* out, int64_t half) {
    runner->ops->rotate(x, cos, sin, out, half);
}

EXPORT int32_t disagg_argmax(Runner* runner, const bf16* logits, int64_t count) {
    return runner->ops->argmax(logits, count);
}
