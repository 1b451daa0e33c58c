// A decoder from token ids to logits in one call. The operations are those of the other files, in the order of model.py; what is
// saved is the way back to Python between them, which costs a small model more than the operations do.
#include <algorithm>
#include <cstring>

#include "kernels.h"

namespace {

struct Linear {
  int64_t kind;
  const void* packed;
  const float* scales;
  const void* bias;
  int64_t in, out;
};

struct Layer {
  const void *input_norm, *post_norm;
  const void *q_norm, *k_norm;  // null: none
  Linear qkv, o, gate_up, down;
  void *k_cache, *v_cache;
};

struct Model {
  const Layer* layers;
  const void *embedding, *final_norm;
  Linear head;
  const float *cos, *sin;
  int64_t num_layers, hidden, inner, q_heads, kv_heads, head_dim, block_size, activation;
  int64_t is_bf16, threads;
  float eps, scale;
};

struct Batch {
  const int64_t* token_ids;
  const int32_t* positions;
  const int64_t* slots;
  const int32_t *tables, *rows, *query_starts, *context_lens;
  const int64_t* heads;  // tokens that are read after the last layer, ascending
  int64_t num_tokens, num_rows, num_heads, table_stride;
};

// The workspace of a step: one part after the other, each of num_tokens rows.
struct Parts {
  char *x, *residual, *normed, *qkv, *q, *attended, *gate_up, *activated;

  Parts(const Model& m, const Batch& b, char* workspace) {
    const int64_t row = b.num_tokens * (m.is_bf16 ? 2 : 4), q_size = m.q_heads * m.head_dim;
    auto take = [&](int64_t width) {
      char* part = workspace;
      workspace += row * width;
      return part;
    };
    x = take(m.hidden);
    residual = take(m.hidden);
    normed = take(m.hidden);
    qkv = take(q_size + 2 * m.kv_heads * m.head_dim);
    q = take(q_size);
    attended = take(q_size);
    gate_up = take(2 * m.inner);
    activated = take(m.inner);
  }
};

void apply(const Model& m, const Linear& w, const void* x, void* y, int64_t n) {
  quire_linear(int(w.kind), int(m.is_bf16), x, w.packed, w.scales, w.bias, y, n, w.in, w.out, int(m.threads));
}

void embed(const Model& m, const Batch& b, const Parts& p) {
  const int64_t bytes = m.hidden * (m.is_bf16 ? 2 : 4);
  for (int64_t t = 0; t < b.num_tokens; t++)
    memcpy(p.x + t * bytes, (const char*)m.embedding + b.token_ids[t] * bytes, bytes);
}

void attend(const Model& m, const Batch& b, const Layer& layer, const Parts& p, const void* residual) {
  const int is_bf16 = int(m.is_bf16), threads = int(m.threads);
  quire_add_rms_norm(is_bf16, p.x, residual, layer.input_norm, p.normed, b.num_tokens, m.hidden, m.eps, threads);
  apply(m, layer.qkv, p.normed, p.qkv, b.num_tokens);
  quire_qk_norm_rope_store(is_bf16, p.qkv, layer.q_norm, layer.k_norm, m.cos, m.sin, b.positions, b.slots,
                           layer.k_cache, layer.v_cache, p.q, b.num_tokens, m.q_heads, m.kv_heads, m.head_dim,
                           m.block_size, m.eps, threads);
  quire_paged_attention(is_bf16, p.q, layer.k_cache, layer.v_cache, p.attended, b.tables, b.table_stride, b.rows,
                        b.query_starts, b.context_lens, b.num_rows, m.q_heads, m.kv_heads, m.head_dim, m.block_size,
                        m.scale, threads);
}

void feed_forward(const Model& m, const Layer& layer, const Parts& p, int64_t n) {
  const int is_bf16 = int(m.is_bf16), threads = int(m.threads);
  apply(m, layer.o, p.attended, p.residual, n);
  quire_add_rms_norm(is_bf16, p.x, p.residual, layer.post_norm, p.normed, n, m.hidden, m.eps, threads);
  apply(m, layer.gate_up, p.normed, p.gate_up, n);
  quire_gated_activation(is_bf16, p.gate_up, p.activated, n, m.inner, int(m.activation), threads);
  apply(m, layer.down, p.activated, p.residual, n);
}

// Moves the rows of the head tokens to the front.
void keep_heads(const Batch& b, char* rows, int64_t row_bytes) {
  for (int64_t i = 0; i < b.num_heads; i++) memmove(rows + i * row_bytes, rows + b.heads[i] * row_bytes, row_bytes);
}

}  // namespace

extern "C" {

// Bytes of workspace per token.
int64_t quire_forward_workspace(const void* model) {
  const Model& m = *(const Model*)model;
  const int64_t q_size = m.q_heads * m.head_dim;
  return (3 * m.hidden + 3 * q_size + 2 * m.kv_heads * m.head_dim + 3 * m.inner) * (m.is_bf16 ? 2 : 4);
}

// Stores keys and values of all tokens; writes logits [num_heads, vocab].
void quire_forward(const void* model, const void* batch, void* logits, void* workspace) {
  const Model& m = *(const Model*)model;
  const Batch& b = *(const Batch*)batch;
  const Parts parts(m, b, (char*)workspace);
  const int64_t element = m.is_bf16 ? 2 : 4;
  embed(m, b, parts);
  for (int64_t i = 0; i < m.num_layers; i++) {
    const bool is_last = i == m.num_layers - 1;
    attend(m, b, m.layers[i], parts, i ? parts.residual : nullptr);
    if (is_last) {
      keep_heads(b, parts.x, m.hidden * element);
      keep_heads(b, parts.attended, m.q_heads * m.head_dim * element);
    }
    const int64_t n = is_last ? b.num_heads : b.num_tokens;
    if (n) feed_forward(m, m.layers[i], parts, n);
  }
  if (!b.num_heads) return;
  quire_add_rms_norm(int(m.is_bf16), parts.x, parts.residual, m.final_norm, parts.normed, b.num_heads, m.hidden, m.eps,
                     int(m.threads));
  apply(m, m.head, parts.normed, logits, b.num_heads);
}
}
