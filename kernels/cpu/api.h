// What crosses the border between Python and C++: plain structs, mirrored in library.py.
//
// A matrix is packed in panels of 32 outputs, pairs of inputs side by side:
//
//     panel p:  [in / 2][32][2]   element (k, o) at  p * in * 32 + (k / 2) * 64 + o * 2 + k % 2
//
// Sizes named *_p are padded to a multiple of 32; what the padding holds is zero, in weights and
// in activations, so no kernel but those that touch the caller's own memory knows real sizes.
#pragma once
#include <stdint.h>

typedef uint16_t bf16;

constexpr int64_t PANEL = 32;

// ISA units define the same names; each in a namespace of its own, or the linker would merge them.
#define CONCAT_(a, b) a##b
#define CONCAT(a, b) CONCAT_(a, b)

struct Linear {
    const bf16* panels;
    const bf16* bias;  // out_p values, or null
    int64_t in_p;
    int64_t out_p;
};

struct Layer {
    const bf16* input_norm;  // hidden_p
    Linear qkv;              // outputs: query heads, then K heads, then V heads, head_dim_p each
    const bf16* qk_norm;     // query and K heads times head_dim_p, or null
    Linear o;                // inputs: query heads, head_dim_p each
    const bf16* mlp_norm;
    Linear gate_up;          // each panel: 16 outputs of gate, then the same 16 of up
    Linear down;
    int64_t window;  // positions that a token sees, itself included; 0: all
};

struct Model {
    int64_t num_layers, hidden, hidden_p, inner_p, num_q_heads, num_kv_heads, head_dim, head_dim_p;
    int64_t vocab, vocab_p;
    const bf16* embedding;  // [vocab, hidden], not padded
    const Layer* layers;
    const bf16* norm;
    Linear head;
    float eps;
    float attention_scale;
};

// The caller's block pool: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim].
struct Pool {
    bf16* data;
    int64_t num_blocks, num_layers, num_kv_heads, block_size, head_dim;
};

// One sequence's share of a step: num_tokens at the end of context_len positions. Its blocks are
// tables[table_offset] onwards. draws: the logits of its last token are wanted.
struct Row {
    int32_t num_tokens, context_len, table_offset, draws;
};

struct Step {
    int64_t num_tokens, num_rows, num_draws;
    const int32_t* token_ids;
    const Row* rows;
    const int32_t* tables;
    const bf16* cos;  // [positions, head_dim / 2], of every position that occurs
    const bf16* sin;
    Pool pool;
    bf16* logits;   // out: [num_draws, vocab_p]
    int32_t* best;  // out: [num_draws], lowest id of the highest logit; -1 if that is not finite
};

// How far ahead of their use K and V are prefetched: 4 blocks of 16.
constexpr int64_t KEYS_AHEAD = 64;

// num_tokens queries at the end of context_len keys. slots[k] is where key k's head 0 is, from the
// start of a layer's K; KEYS_AHEAD more entries repeat the last one.
struct AttentionRow {
    int64_t num_tokens, context_len;
    int64_t first_query;  // token in q
    int64_t first_out;    // token in out
    const int64_t* slots;
};

struct AttentionOptions {
    float scale;
    int64_t window;      // keys that a token sees at most, itself included; 0: all
    float soft_cap;      // scores become cap * tanh(score / cap); 0: none
    const float* sinks;  // [query heads] score of a key without a value, or null
};

struct AttentionCall {
    const bf16* q;  // [kv heads][q_tokens][group][head_dim_p]
    int64_t q_tokens;
    bf16* out;  // [tokens][kv heads * group * head_dim_p]
    const bf16* keys;    // this layer's K in block 0; V is value_offset further
    int64_t value_offset, head_stride;
    int64_t num_kv_heads, group, head_dim, head_dim_p;
    AttentionOptions options;
    bf16* packed;    // room for chunks: 2 * kv heads * padded context * head_dim_p
    uint8_t* const* scratch;  // attention_scratch_bytes for each thread
};

// Most rows of a tile of any unit.
constexpr int64_t MAX_TILE_ROWS = 32;

#define HELPER static inline __attribute__((always_inline))

HELPER int64_t padded_to(int64_t size, int64_t step) { return (size + step - 1) / step * step; }

// Not a power of two, or all rows of a tile would share a few sets of the cache.
HELPER int64_t score_stride(int64_t context_len) { return padded_to(context_len, PANEL) + 32; }

HELPER int64_t attention_scratch_bytes(int64_t context_len, int64_t head_dim_p) {
    const int64_t per_row = score_stride(context_len) * 6 + head_dim_p * 4 + 8;
    return MAX_TILE_ROWS * per_row + (PANEL + 1) * head_dim_p * 2;
}

// Tokens that go through the ops between two attentions together, so that what one op hands to the
// next stays in L2.
constexpr int64_t ROWS_PER_PASS = 256;

// Activations of a step, and what attention needs. Rows are followed by MAX_TILE_ROWS more, which
// a product may read. Padding inside a row is zero, unless the row is NaN.
struct Workspace {
    bf16* x;        // [tokens][hidden_p], the residual stream
    bf16* drawn;    // [draws][hidden_p], of it the tokens that draw
    bf16* normed;   // [tokens][hidden_p], or of a pass
    bf16* qkv;      // [a pass's tokens][heads][head_dim_p]
    bf16* q;        // [kv heads][tokens][group][head_dim_p], rotated
    bf16* attended; // [tokens][query heads][head_dim_p]
    bf16* gated;    // [a pass's tokens][inner_p]
    int64_t* slots; // of all rows' keys
    AttentionRow* rows;        // [rows]
    AttentionRow* draw_rows;   // [draws], their last token only
    int64_t longest_context;
    bf16* packed;
    uint8_t** scratch;
};

class Team;

// What a unit exports. Every function runs on all threads of the team, thread being the caller's.
struct Ops {
    void (*decoder_step)(Team&, int thread, const Model&, const Step&, const Workspace&);
    void (*linear)(Team&, int thread, const Linear&, int kind, const bf16* x, int64_t rows,
                   bf16* out);
    void (*attention)(Team&, int thread, const AttentionCall&, const AttentionRow*,
                      int64_t num_rows, int64_t longest_context);
    void (*rms_norm)(const bf16* x, const bf16* weight, bf16* out, int64_t size, int64_t size_p,
                     float eps);
    void (*rotate)(const bf16* x, const bf16* cos, const bf16* sin, bf16* out, int64_t half);
    int32_t (*argmax)(const bf16* logits, int64_t count);
};

// The attached op of a linear.
enum { STORE = 0, ADD = 1, SILU_MUL = 2 };
