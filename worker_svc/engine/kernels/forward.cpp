// A decoder from token ids to logits in one call and one pass of the team. The operations are those of the other files, in
// the order of decoder/forward.py. One call avoids a return to Python after each operation, which takes a small model longer than
// the operations, and avoids waking the helpers for each of them.
#include <algorithm>
#include <cstring>

#include "kernels.h"
#include "rows.h"

namespace {

// The structs are those of cpu/fused.py.
struct Layer {
  NormWeights input_layernorm, post_attention_layernorm, pre_feedforward_layernorm, post_feedforward_layernorm;
  const void *q_norm, *k_norm;   // null: none
  int64_t q_width, k_width;      // numbers that one of these norms spans
  Linear qkv, o, gate_up, down;  // gate_up: `up` alone if there is no gate
  Experts experts;               // count 0: gate_up and down
  Rotary rotary;
  int64_t window;  // 0: none
  void *k_cache, *v_cache;
};

struct Model {
  const Layer* layers;
  const void *embedding, *position_embedding;  // positions are learned, or null
  NormWeights final_norm;
  Linear head;
  int64_t num_layers, hidden;
  int64_t inner;    // the widest feed-forward part; with experts at least `hidden`
  int64_t experts;  // the most experts of a layer
  int64_t q_heads, kv_heads, head_dim, block_size, norm_kind, activation;
  int64_t is_gated, is_bf16, threads;
  float eps, scale, embedding_scale, attention_cap, logit_cap;  // caps 0: none

  Norm norm(void* x, const void* residual, const NormWeights& weights) const {
    return {x, residual, weights, NormKind(norm_kind), eps};
  }
};

// The layers that an adapter may change, of each layer of the model.
enum Site { kSiteQkv = 0, kSiteO = 1, kSiteGateUp = 2, kSiteDown = 3, kNumSites = 4 };

// An adapter that a batch uses, and its rows.
struct Adapter {
  const LowRank* sites;                 // [num_layers, kNumSites]
  const int32_t *tokens, *heads;        // which tokens, and which of the head tokens
  int64_t num_tokens, num_heads;
};

struct Batch {
  const int64_t* token_ids;
  const int32_t* positions;
  const int64_t* slots;
  const int32_t *tables, *rows, *query_starts, *context_lens;
  const int64_t* heads;            // tokens that need logits, ascending
  const int64_t* embedded_tokens;  // tokens whose embeddings are given
  const void* embedded;            // [num_embedded, hidden]
  const Adapter* adapters;
  const float *cos, *sin;      // in place of those of the layers; null: none. `positions` are rows of them
  const int64_t* deep_tokens;  // tokens to which `deep` is added after each of the first layers
  const void* deep;            // [num_deep_layers, num_deep_tokens, hidden]
  int64_t num_tokens, num_rows, num_heads, num_embedded, table_stride, num_adapters, num_deep_tokens, num_deep_layers;
};

// The workspace of a step: contiguous parts, each with num_tokens rows.
struct Parts {
  char *x, *residual, *qkv, *q, *attended, *activated, *router_logits;

  Parts(const Model& m, int64_t num_tokens, char* workspace) {
    const int64_t row = num_tokens * (m.is_bf16 ? 2 : 4), q_size = m.q_heads * m.head_dim;
    auto take = [&](int64_t width) {
      char* part = workspace;
      workspace += row * width;
      return part;
    };
    x = take(m.hidden);
    residual = take(m.hidden);
    qkv = take(q_size + 2 * m.kv_heads * m.head_dim);
    q = take(q_size);
    attended = take(q_size);
    activated = take(m.inner);
    router_logits = take(m.experts);
  }
};

void head(Pass& pass, const Model& m, void* x, const void* residual, void* logits, int64_t n) {
  linear_of_norm(pass, int(m.is_bf16), m.head, m.norm(x, residual, m.final_norm), logits, n);
  if (m.logit_cap != 0.f) soft_cap(pass, int(m.is_bf16), logits, n, m.head.out, m.logit_cap);
}

// Rows before a linear layer that adapters change, and [gate | up] rows after it. Memory of a thread, kept between steps.
struct AdaptedRows {
  std::vector<char> normed, gate_up;

  static char* at_least(std::vector<char>& memory, int64_t bytes) {
    if (int64_t(memory.size()) < bytes) memory.resize(bytes);
    return memory.data();
  }
};
thread_local AdaptedRows adapted_rows;

// One forward pass.
struct Forward {
  const Model& m;
  const Batch& b;
  const Parts p;
  const QkvShape shape;
  const AttentionRows rows;
  const AttentionPlan all, heads;  // attention of all tokens, and of those that need logits
  Pass pass;

  Forward(const Model& m, const Batch& b, char* workspace)
      : m(m),
        b(b),
        p(m, b.num_tokens, workspace),
        shape{m.q_heads, m.kv_heads, m.head_dim, m.block_size},
        rows{b.tables, b.table_stride, b.rows, b.query_starts, b.context_lens, b.num_rows},
        all(plan_attention(rows, shape, int(m.threads))),
        heads(needs_all() ? all : plan_attention(rows, shape, int(m.threads), b.heads, b.num_heads)),
        pass(int(m.threads)) {}

  bool needs_all() const { return b.num_heads == b.num_tokens; }

  void embed() {
    const int64_t bytes = m.hidden * (m.is_bf16 ? 2 : 4);
    for (int64_t t = 0; t < b.num_tokens; t++)
      memcpy(p.x + t * bytes, (const char*)m.embedding + b.token_ids[t] * bytes, bytes);
    if (m.embedding_scale != 1.f) scale_rows(pass, int(m.is_bf16), p.x, b.num_tokens, m.hidden, m.embedding_scale);
    for (int64_t i = 0; i < b.num_embedded; i++)
      memcpy(p.x + b.embedded_tokens[i] * bytes, (const char*)b.embedded + i * bytes, bytes);
    if (m.position_embedding)
      add_positions(pass, int(m.is_bf16), p.x, m.position_embedding, b.positions, b.num_tokens, m.hidden);
  }

  // The adapters that change a site of layer `index`, with their rows of the batch or, if `of_heads`, of the head tokens.
  std::vector<LowRankRows> adapters_of(int64_t index, Site site, bool of_heads) const {
    std::vector<LowRankRows> found;
    for (int64_t i = 0; i < b.num_adapters; i++) {
      const Adapter& a = b.adapters[i];
      const LowRank* low_rank = a.sites + index * kNumSites + site;
      const int64_t n = of_heads ? a.num_heads : a.num_tokens;
      if (low_rank->shrink.out && n) found.push_back({low_rank, of_heads ? a.heads : a.tokens, n});
    }
    return found;
  }

  // The rows of a norm, for a linear layer and its adapters.
  char* normed_rows(const Norm& norm, int64_t n) {
    char* normed = AdaptedRows::at_least(adapted_rows.normed, n * m.hidden * (m.is_bf16 ? 2 : 4));
    add_norm(pass, int(m.is_bf16), norm, normed, n, m.hidden);
    return normed;
  }

  void adapted_linear(const Linear& layer, const std::vector<LowRankRows>& adapters, const void* x, void* y, int64_t n) {
    linear(pass, int(m.is_bf16), layer, x, y, n);
    add_adapters(pass, int(m.is_bf16), adapters, x, y, layer.out);
  }

  void adapted_linear_of_norm(const Linear& layer, const std::vector<LowRankRows>& adapters, const Norm& norm, void* y,
                              int64_t n) {
    if (adapters.empty()) return linear_of_norm(pass, int(m.is_bf16), layer, norm, y, n);
    adapted_linear(layer, adapters, normed_rows(norm, n), y, n);
  }

  void adapted_gated_linear_of_norm(const Linear& layer, const std::vector<LowRankRows>& adapters, const Norm& norm,
                                    void* y, int64_t n) {
    const int is_bf16 = int(m.is_bf16);
    if (adapters.empty()) return gated_linear_of_norm(pass, is_bf16, layer, norm, Activation(m.activation), y, n);
    char* gate_up = AdaptedRows::at_least(adapted_rows.gate_up, n * layer.out * (is_bf16 ? 2 : 4));
    adapted_linear(layer, adapters, normed_rows(norm, n), gate_up, n);
    gated_activation(pass, is_bf16, gate_up, y, n, layer.out / 2, Activation(m.activation));
  }

  // `added`: the residual of the previous layer, to be added to x; null: none.
  void attend(int64_t index, const void* added, const AttentionPlan& plan) {
    const int is_bf16 = int(m.is_bf16);
    const Layer& layer = m.layers[index];
    adapted_linear_of_norm(layer.qkv, adapters_of(index, kSiteQkv, false), m.norm(p.x, added, layer.input_layernorm), p.qkv,
                           b.num_tokens);
    const Rotary rotary = b.cos ? Rotary{b.cos, b.sin, layer.rotary.dims} : layer.rotary;
    qk_norm_rope_store(pass, is_bf16, p.qkv, {layer.q_norm, layer.k_norm, layer.q_width, layer.k_width, NormKind(m.norm_kind), m.eps}, rotary,
                       b.positions, b.slots, layer.k_cache, layer.v_cache, p.q, b.num_tokens, shape);
    paged_attention(pass, is_bf16, plan, rows, shape, p.q, layer.k_cache, layer.v_cache, p.attended,
                    {m.scale, m.attention_cap, layer.window});
  }

  // `of_heads`: the rows are those of the head tokens.
  void feed_forward(int64_t index, int64_t n, bool of_heads) {
    const int is_bf16 = int(m.is_bf16);
    const Layer& layer = m.layers[index];
    const Norm norm = m.norm(p.x, p.residual, layer.pre_feedforward_layernorm);
    adapted_linear(layer.o, adapters_of(index, kSiteO, of_heads), p.attended, p.residual, n);
    norm_output(layer.post_attention_layernorm, n);
    if (layer.experts.count) return route(layer, norm, n);
    const std::vector<LowRankRows> adapters = adapters_of(index, kSiteGateUp, of_heads);
    if (m.is_gated) {
      adapted_gated_linear_of_norm(layer.gate_up, adapters, norm, p.activated, n);
    } else {
      adapted_linear_of_norm(layer.gate_up, adapters, norm, p.activated, n);
      activate(pass, is_bf16, p.activated, n, layer.gate_up.out, Activation(m.activation));
    }
    adapted_linear(layer.down, adapters_of(index, kSiteDown, of_heads), p.activated, p.residual, n);
    norm_output(layer.post_feedforward_layernorm, n);
  }

  void route(const Layer& layer, const Norm& norm, int64_t n) {
    const int is_bf16 = int(m.is_bf16);
    add_norm(pass, is_bf16, norm, p.activated, n, m.hidden);
    linear(pass, is_bf16, layer.experts.router, p.activated, p.router_logits, n);
    experts(pass, is_bf16, layer.experts, p.activated, p.router_logits, Activation(m.activation), p.residual, n);
    norm_output(layer.post_feedforward_layernorm, n);
  }

  void norm_output(const NormWeights& weights, int64_t n) {
    if (weights.weight) add_norm(pass, int(m.is_bf16), m.norm(p.residual, nullptr, weights), p.residual, n, m.hidden);
  }

  void run(void* logits) {
    const int64_t element = m.is_bf16 ? 2 : 4;
    embed();
    for (int64_t i = 0; i < m.num_layers; i++) {
      const bool is_last = i == m.num_layers - 1;
      attend(i, i ? p.residual : nullptr, is_last ? heads : all);
      if (is_last) {
        keep_heads(p.x, m.hidden * element);
        keep_heads(p.attended, m.q_heads * m.head_dim * element);
      }
      const int64_t n = is_last ? b.num_heads : b.num_tokens;
      if (n) feed_forward(i, n, is_last);
      if (i < b.num_deep_layers) m.is_bf16 ? add_deep<uint16_t>(i) : add_deep<float>(i);
    }
    if (b.num_heads && logits) head(pass, m, p.x, p.residual, logits, b.num_heads);
  }

  // Adds the residual and the rows of layer `index` of `deep` to their tokens, whose residual is 0 then. After the last
  // layer only the rows of head tokens are left.
  template <typename T> void add_deep(int64_t index) {
    for (int64_t i = 0; i < b.num_deep_tokens; i++) {
      int64_t row = b.deep_tokens[i];
      if (index == m.num_layers - 1) {
        const int64_t* head = std::lower_bound(b.heads, b.heads + b.num_heads, row);
        if (head == b.heads + b.num_heads || *head != row) continue;
        row = head - b.heads;
      }
      T* x = (T*)p.x + row * m.hidden;
      T* residual = (T*)p.residual + row * m.hidden;
      add_row(x, residual, m.hidden);
      add_row(x, (const T*)b.deep + (index * b.num_deep_tokens + i) * m.hidden, m.hidden);
      std::fill_n(residual, m.hidden, T(0));
    }
  }

  // Moves the rows of the head tokens to the front.
  void keep_heads(char* rows, int64_t row_bytes) {
    for (int64_t i = 0; i < b.num_heads; i++) memmove(rows + i * row_bytes, rows + b.heads[i] * row_bytes, row_bytes);
  }
};

}  // namespace

extern "C" {

// Bytes of workspace per token.
int64_t quire_forward_workspace(const void* model) {
  const Model& m = *(const Model*)model;
  const int64_t q_size = m.q_heads * m.head_dim;
  return (2 * m.hidden + 3 * q_size + 2 * m.kv_heads * m.head_dim + m.inner + m.experts) * (m.is_bf16 ? 2 : 4);
}

// Stores keys and values of all tokens; writes logits [num_heads, vocab]. Null: none, and quire_forward_logits follows.
void quire_forward(const void* model, const void* batch, void* logits, void* workspace) {
  Forward(*(const Model*)model, *(const Batch*)batch, (char*)workspace).run(logits);
}

// Writes logits [count, vocab] of head tokens `first` to first + count - 1 of the last quire_forward with null logits,
// which had `num_tokens` tokens. At most once for each head token: it changes their row of the workspace.
void quire_forward_logits(const void* model, int64_t num_tokens, int64_t first, int64_t count, void* logits,
                          void* workspace) {
  const Model& m = *(const Model*)model;
  const Parts p(m, num_tokens, (char*)workspace);
  const int64_t offset = first * m.hidden * (m.is_bf16 ? 2 : 4);
  Pass pass(int(m.threads));
  head(pass, m, p.x + offset, p.residual + offset, logits, count);
}

// As quire_forward_logits, but writes the states [count, hidden] after the final norm, as float.
void quire_forward_hidden(const void* model, int64_t num_tokens, int64_t first, int64_t count, float* out,
                          void* workspace) {
  const Model& m = *(const Model*)model;
  const Parts p(m, num_tokens, (char*)workspace);
  const int64_t offset = first * m.hidden * (m.is_bf16 ? 2 : 4);
  Pass pass(int(m.threads));
  add_norm(pass, int(m.is_bf16), m.norm(p.x + offset, p.residual + offset, m.final_norm), p.x + offset, count, m.hidden);
  widen(pass, int(m.is_bf16), p.x + offset, count, m.hidden, out);
}
}
