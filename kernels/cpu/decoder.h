// A whole step of the model, on all threads of a team: embedding, layers, norm, head, argmax.
//
//     x -> layers x [ norm -> qkv -> (q, k norm) -> rope, KV into the pool -> attention
//         -> o, added to x -> norm -> gate, up -> silu * -> down, added to x ] -> logits
//
// One native call per step, because each call has to win Python's lock back afterwards. Every
// thread runs this function; work is shared by take() or cut evenly, and barriers end each phase.
// Outside attention, rows go through in passes whose activations stay in L2 between two ops.
#pragma once
#include "argmax.h"
#include "attention.h"
#include "linear.h"
#include "rms_norm.h"
#include "rope.h"

struct Rows {
    int64_t begin, end;
    int64_t count() const { return end - begin; }
    // A thread's even part of them.
    Rows part(const Team& team, int thread) const {
        return {begin + count() * thread / team.size(),
                begin + count() * (thread + 1) / team.size()};
    }
    Rows pass(int64_t first) const {
        return {first, first + ROWS_PER_PASS < end ? first + ROWS_PER_PASS : end};
    }
};

static void embed(const Model& model, const Step& step, bf16* x, Rows tokens) {
    for (int64_t t = tokens.begin; t < tokens.end; t++) {
        const bf16* from = model.embedding + step.token_ids[t] * model.hidden;
        bf16* to = x + t * model.hidden_p;
        memcpy(to, from, model.hidden * sizeof(bf16));
        // Not only at the start: a row that became NaN has left NaN in its padding.
        memset(to + model.hidden, 0, (model.hidden_p - model.hidden) * sizeof(bf16));
    }
}

static void norm_rows(const Model& model, const bf16* x, const bf16* weight, bf16* out,
                      Rows rows) {
    const int64_t size = model.hidden_p;
    for (int64_t t = rows.begin; t < rows.end; t++) {
        rms_norm(x + t * size, weight, out, model.hidden, size, model.eps);
        out += size;
    }
}

// heads are one token's Q, K and V; its Q goes into w.q, K and V into the pool.
static void rope_and_cache_write(const Model& model, const Layer& layer, const Step& step,
                                 const Workspace& w, bf16* heads, int64_t token, int64_t position,
                                 bf16* keys) {
    const int64_t size = model.head_dim_p, half = model.head_dim / 2;
    const int64_t group = model.num_q_heads / model.num_kv_heads;
    const int64_t num_heads = model.num_q_heads + 2 * model.num_kv_heads;
    const int64_t head_stride = step.pool.block_size * model.head_dim;
    const bf16* cos = step.cos + position * half;
    const bf16* sin = step.sin + position * half;
    for (int64_t head = 0; head < num_heads - model.num_kv_heads; head++) {
        bf16* x = heads + head * size;
        if (layer.qk_norm != nullptr) {
            rms_norm(x, layer.qk_norm + head * size, x, model.head_dim, size, model.eps);
        }
        const int64_t kv_head = head - model.num_q_heads;
        const int64_t q_row = (head / group * step.num_tokens + token) * group + head % group;
        bf16* out = kv_head >= 0 ? keys + kv_head * head_stride : w.q + q_row * size;
        rotate(x, cos, sin, out, half);
    }
    bf16* values = keys + model.num_kv_heads * head_stride;
    for (int64_t kv_head = 0; kv_head < model.num_kv_heads; kv_head++) {
        const bf16* v = heads + (num_heads - model.num_kv_heads + kv_head) * size;
        memcpy(values + kv_head * head_stride, v, model.head_dim * sizeof(bf16));
    }
}

// qkv is of tokens first_token onwards.
static void write_kv(const Model& model, const Layer& layer, const Step& step, const Workspace& w,
                     int64_t first_token, Rows tokens, bf16* layer_keys) {
    for (int64_t r = 0, first = 0; r < step.num_rows; first += w.rows[r].num_tokens, r++) {
        const AttentionRow& row = w.rows[r];
        const int64_t start = row.context_len - row.num_tokens - first;
        const int64_t row_end = first + row.num_tokens;
        const int64_t end = row_end < tokens.end ? row_end : tokens.end;
        for (int64_t t = first > tokens.begin ? first : tokens.begin; t < end; t++) {
            rope_and_cache_write(model, layer, step, w,
                                 w.qkv + (t - first_token) * layer.qkv.out_p, t, start + t,
                                 layer_keys + row.slots[start + t]);
        }
    }
}

static void project(Team& team, int thread, const Model& model, const Layer& layer,
                    const Step& step, const Workspace& w, const bf16* x, bf16* layer_keys) {
    const Rows tokens{0, step.num_tokens};
    for (int64_t first = 0; first < tokens.end; first += ROWS_PER_PASS) {
        const Rows pass = tokens.pass(first);
        const Rows part = pass.part(team, thread);
        norm_rows(model, x, layer.input_norm,
                  w.normed + (part.begin - first) * model.hidden_p, part);
        team.barrier();
        linear_store(team, layer.qkv, w.normed, pass.count(), w.qkv);
        team.barrier();
        write_kv(model, layer, step, w, first, part, layer_keys);
        team.barrier();
    }
}

static void attend(Team& team, int thread, const Model& model, const Step& step, const Workspace& w,
                   int64_t window, const bf16* layer_keys, const AttentionRow* rows,
                   int64_t num_rows) {
    const int64_t head_stride = step.pool.block_size * model.head_dim;
    attention(team, thread,
              {.q = w.q,
               .q_tokens = step.num_tokens,
               .out = w.attended,
               .keys = layer_keys,
               .value_offset = model.num_kv_heads * head_stride,
               .head_stride = head_stride,
               .num_kv_heads = model.num_kv_heads,
               .group = model.num_q_heads / model.num_kv_heads,
               .head_dim = model.head_dim,
               .head_dim_p = model.head_dim_p,
               .options = {.scale = model.attention_scale, .window = window},
               .packed = w.packed,
               .scratch = w.scratch},
              rows, num_rows, w.longest_context);
}

static void add_mlp(Team& team, int thread, const Model& model, const Layer& layer,
                    const Workspace& w, Rows rows, bf16* x) {
    for (int64_t first = rows.begin; first < rows.end; first += ROWS_PER_PASS) {
        const Rows pass = rows.pass(first);
        const Rows part = pass.part(team, thread);
        bf16* pass_x = x + first * model.hidden_p;
        linear_add(team, layer.o, w.attended + first * layer.o.in_p, pass.count(), pass_x);
        team.barrier();
        norm_rows(model, x, layer.mlp_norm, w.normed + (part.begin - first) * model.hidden_p,
                  part);
        team.barrier();
        linear_silu_mul(team, layer.gate_up, w.normed, pass.count(), w.gated);
        team.barrier();
        linear_add(team, layer.down, w.gated, pass.count(), pass_x);
        team.barrier();
    }
}

static void draw(Team& team, int thread, const Model& model, const Step& step, const Workspace& w,
                 const bf16* x) {
    const Rows part = Rows{0, step.num_draws}.part(team, thread);
    norm_rows(model, x, model.norm, w.normed + part.begin * model.hidden_p, part);
    team.barrier();
    linear_store(team, model.head, w.normed, step.num_draws, step.logits);
    team.barrier();
    for (int64_t b = part.begin; b < part.end; b++) {
        step.best[b] = argmax(step.logits + b * model.vocab_p, model.vocab);
    }
}

static void decoder_step(Team& team, int thread, const Model& model, const Step& step,
                         const Workspace& w) {
    const Rows tokens{0, step.num_tokens}, draws{0, step.num_draws};
    const int64_t layer_size =
        2 * step.pool.num_kv_heads * step.pool.block_size * step.pool.head_dim;
    embed(model, step, w.x, tokens.part(team, thread));
    team.barrier();
    for (int64_t l = 0; l < model.num_layers; l++) {
        const Layer& layer = model.layers[l];
        bf16* layer_keys = step.pool.data + l * layer_size;
        project(team, thread, model, layer, step, w, w.x, layer_keys);
        if (l < model.num_layers - 1) {
            attend(team, thread, model, step, w, layer.window, layer_keys, w.rows, step.num_rows);
            add_mlp(team, thread, model, layer, w, tokens, w.x);
            continue;
        }
        // Past the last layer's KV, tokens that draw nothing are of no use to anybody.
        if (step.num_draws == 0) return;
        attend(team, thread, model, step, w, layer.window, layer_keys, w.draw_rows, step.num_draws);
        const Rows part = draws.part(team, thread);
        for (int64_t b = part.begin; b < part.end; b++) {
            memcpy(w.drawn + b * model.hidden_p,
                   w.x + w.draw_rows[b].first_query * model.hidden_p,
                   model.hidden_p * sizeof(bf16));
        }
        team.barrier();
        add_mlp(team, thread, model, layer, w, draws, w.drawn);
        draw(team, thread, model, step, w, w.drawn);
    }
}
