#include "workspace.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

constexpr int64_t HUGE_PAGE = 2 << 20;

Buffer::~Buffer() { free(data_); }

void* Buffer::reserve_bytes(int64_t size) {
    if (size <= size_) return data_;
    free(data_);
#if !defined(__SANITIZE_ADDRESS__)
    // Half as much again, so that contexts that grow by a token do not allocate every few steps.
    size += size / 2;
#endif
    const bool is_large = size >= HUGE_PAGE;
    size_ = padded_to(size, is_large ? HUGE_PAGE : 64);
    data_ = aligned_alloc(is_large ? HUGE_PAGE : 64, size_);
    if (data_ == nullptr) abort();
    if (is_large) madvise(data_, size_, MADV_HUGEPAGE);
    memset(data_, 0, size_);
    return data_;
}

Workspaces::Workspaces(int num_threads)
    : num_threads_(num_threads),
      thread_scratch_(new Buffer[num_threads]),
      scratch_(new uint8_t*[num_threads]) {}

Workspaces::~Workspaces() {
    delete[] thread_scratch_;
    delete[] scratch_;
}

int Workspaces::prepare_rows(const Row* rows, int64_t num_rows, const int32_t* tables,
                             const Pool& pool, Workspace* w) {
    int64_t num_slots = 0, num_draws = 0;
    for (int64_t r = 0; r < num_rows; r++) {
        num_slots += rows[r].context_len + KEYS_AHEAD;
        num_draws += rows[r].draws != 0;
    }
    w->slots = slots_.reserve<int64_t>(num_slots);
    w->rows = rows_.reserve<AttentionRow>(num_rows);
    w->draw_rows = draw_rows_.reserve<AttentionRow>(num_draws);
    w->longest_context = 0;
    const int64_t block_stride =
        pool.num_layers * 2 * pool.num_kv_heads * pool.block_size * pool.head_dim;
    int64_t* slots = w->slots;
    int64_t first_token = 0, draw = 0;
    for (int64_t r = 0; r < num_rows; r++) {
        const Row& row = rows[r];
        const int32_t* table = tables + row.table_offset;
        for (int64_t k = 0; k < row.context_len; table++) {
            if (*table < 0 || *table >= pool.num_blocks) return -2;
            for (int64_t s = 0; s < pool.block_size && k < row.context_len; s++, k++) {
                slots[k] = *table * block_stride + s * pool.head_dim;
            }
        }
        const int64_t last = slots[row.context_len - 1];
        for (int64_t k = 0; k < KEYS_AHEAD; k++) slots[row.context_len + k] = last;
        w->rows[r] = {row.num_tokens, row.context_len, first_token, first_token, slots};
        if (row.draws) {
            const int64_t last_token = first_token + row.num_tokens - 1;
            w->draw_rows[draw] = {1, row.context_len, last_token, draw, slots};
            draw++;
        }
        if (row.context_len > w->longest_context) w->longest_context = row.context_len;
        first_token += row.num_tokens;
        slots += row.context_len + KEYS_AHEAD;
    }
    return 0;
}

void Workspaces::prepare_attention(int64_t head_dim_p, int64_t num_kv_heads,
                                   int64_t longest_context, Workspace* w) {
    const int64_t context_p = padded_to(longest_context, PANEL);
    w->packed = packed_.reserve<bf16>(2 * num_kv_heads * context_p * head_dim_p);
    for (int thread = 0; thread < num_threads_; thread++) {
        scratch_[thread] = thread_scratch_[thread].reserve<uint8_t>(
            attention_scratch_bytes(longest_context, head_dim_p));
    }
    w->scratch = scratch_;
}

int Workspaces::prepare(const Model& model, const Step& step, Workspace* w) {
    for (int64_t t = 0; t < step.num_tokens; t++) {
        if (step.token_ids[t] < 0 || step.token_ids[t] >= model.vocab) return -1;
    }
    if (int error = prepare_rows(step.rows, step.num_rows, step.tables, step.pool, w)) return error;
    const int64_t tokens = step.num_tokens + MAX_TILE_ROWS;
    const int64_t pass =
        (step.num_tokens < ROWS_PER_PASS ? step.num_tokens : ROWS_PER_PASS) + MAX_TILE_ROWS;
    const int64_t q_size = model.num_q_heads * model.head_dim_p;
    w->x = x_.reserve<bf16>(tokens * model.hidden_p);
    w->drawn = drawn_.reserve<bf16>((step.num_draws + MAX_TILE_ROWS) * model.hidden_p);
    w->normed = normed_.reserve<bf16>(tokens * model.hidden_p);
    w->qkv = qkv_.reserve<bf16>(pass * (q_size + 2 * model.num_kv_heads * model.head_dim_p));
    w->q = q_.reserve<bf16>(tokens * q_size);
    w->attended = attended_.reserve<bf16>(tokens * q_size);
    w->gated = gated_.reserve<bf16>(pass * model.inner_p);
    prepare_attention(model.head_dim_p, model.num_kv_heads, w->longest_context, w);
    return 0;
}
