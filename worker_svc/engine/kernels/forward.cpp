// A decoder from token ids to logits in one call and one pass of the team: the operations that cpu/fused.py has recorded
// from decoder/forward.py, which decides their order. One call avoids a return to Python after each operation, which takes a
// small model longer than the operations, and avoids waking the helpers for each of them.
#include <algorithm>
#include <array>
#include <cstring>
#include <map>

#include "kernels.h"
#include "rows.h"

namespace {

// The structs are those of cpu/fused.py.
struct Layer {
  const void *q_norm, *k_norm, *v_norm;  // null: none
  int64_t q_width, k_width;     // numbers that one of these norms spans
  Rotary rotary;
  int64_t window, chunk;  // 0: none
  const float* sinks;     // null: none
  void *k_cache, *v_cache;
  int64_t q_heads, kv_heads, head_dim;
  int64_t stores_kv;             // 0: keys and values are those of another layer, and qkv is q alone
  const Recurrence* recurrence;  // null: the layer attends
  int64_t mixed_width;           // of the outputs of attention or recurrence, the later one
  int64_t has_gate;              // qkv is [q | k | v | gate]: attention outputs are multiplied by its sigmoid
  int64_t group;                 // the cache group whose slots and tables it uses; 0: the first one
};

// The linear layers that an adapter may change, of each layer of the model; then those of a recurrence beside attention,
// and those of the input of a layer.
enum Site {
  kSiteQkv = 0, kSiteO = 1, kSiteGateUp = 2, kSiteDown = 3, kNumSites = 4, kSiteBesideQkv = 4, kSiteBesideO = 5, kSiteInput = 6
};

// Operations of StepOperations (decoder/forward.py).
enum OpKind {
  kEmbed, kLinear, kLinearOfNorm, kAttend, kRecur, kKeepHeads, kExperts, kOutput, kEndLayer, kAttendLatents, kExpandLatents,
  kAdd, kLayerInputs, kGateInput, kSum
};

struct Op {
  int64_t kind, layer, site;
  int64_t adds_residual;  // to x, before the norm
  int64_t adds_output;    // to the output of the operation before it
  NormWeights norm;
  Linear linear;  // [gate | up] with its activation at kSiteGateUp, or `up` alone if there is no gate
  Experts experts;
  Latents latents;
  NormWeights router_norm;  // of x; without weights: the router reads what the experts read
  int64_t is_beside;        // the output of experts beside a dense part
  float scale;              // of the sum of x and residual
};

struct Model {
  const Layer* layers;
  const Op* ops;
  const void *embedding, *position_embedding;  // positions are learned, or null
  const void* layer_embedding;                 // [layer_vocab, num_layers * layer_width]; tokens above have row 0
  int64_t layer_vocab, layer_width;            // width 0: layers have no inputs
  NormWeights final_norm;
  Linear head;
  int64_t num_layers, num_ops, hidden;
  int64_t inner;    // the widest feed-forward part; with experts at least `hidden`
  int64_t qkv, q;   // the widest projection before attention or recurrence, and the widest queries
  int64_t mixed;    // the widest output of attention or recurrence
  int64_t beside;   // `hidden` if experts are beside a dense part, else 0
  int64_t queries;  // the widest queries before their heads absorb, or values of latent attention; 0: none
  int64_t block_size, norm_kind, activation;
  int64_t is_gated, is_bf16, threads;
  float eps, scale, embedding_scale, residual_scale, logit_scale, attention_cap, logit_cap;  // caps 0: none

  Norm norm(void* x, const void* residual, const NormWeights& weights) const {
    return {x, residual, weights, NormKind(norm_kind), eps};
  }
};

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
  const int32_t *snapshot_starts, *snapshot_ends, *snapshot_slots;  // of a model with recurrent layers
  const int64_t* group_slots;   // [groups, num_tokens] as `slots`, in the groups after the first one
  const int32_t* group_tables;  // [groups, group_stride] as `tables`
  const int64_t* captures;      // layers whose outputs are kept; none is the last one
  void* captured;               // [num_captures, num_tokens, hidden]
  int64_t num_tokens, num_rows, num_heads, num_embedded, table_stride, num_adapters, num_deep_tokens, num_deep_layers;
  int64_t group_stride, num_captures;

  const int64_t* slots_of(const Layer& layer) const {
    return layer.group ? group_slots + (layer.group - 1) * num_tokens : slots;
  }

  AttentionRows rows_of(const Layer& layer) const {
    const int32_t* own = layer.group ? group_tables + (layer.group - 1) * group_stride : tables;
    return {own, table_stride, rows, query_starts, context_lens, num_rows};
  }
};

// The workspace of a step: contiguous parts, each with num_tokens rows.
struct Parts {
  char *x, *residual, *qkv, *q, *attended, *queries, *activated, *beside, *inputs;

  Parts(const Model& m, int64_t num_tokens, char* workspace) {
    const int64_t row = num_tokens * (m.is_bf16 ? 2 : 4);
    auto take = [&](int64_t width) {
      char* part = workspace;
      workspace += row * width;
      return part;
    };
    x = take(m.hidden);
    residual = take(m.hidden);
    qkv = take(m.qkv);
    q = take(m.q);
    attended = take(m.mixed);
    queries = take(m.queries);
    activated = take(m.inner);
    beside = take(m.beside);
    inputs = take(m.num_layers * m.layer_width);
  }
};

void head(Pass& pass, const Model& m, void* x, const void* residual, void* logits, int64_t n) {
  linear_of_norm(pass, int(m.is_bf16), m.head, m.norm(x, residual, m.final_norm), logits, n);
  if (m.logit_scale != 1.f) scale_rows(pass, int(m.is_bf16), logits, n, m.head.out, m.logit_scale);
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
  Parts p;
  Pass pass;
  std::map<std::array<int64_t, 4>, AttentionPlan> plans;
  int64_t n;              // rows of x: all tokens, then the head tokens
  bool of_heads = false;  // the rows are those of the head tokens

  Forward(const Model& m, const Batch& b, char* workspace)
      : m(m),
        b(b),
        p(m, b.num_tokens, workspace),
        pass(int(m.threads)),
        n(b.num_tokens) {}

  // Attention of a layer, of all tokens or in the last layer of those that need logits. Layers of a cache group with as
  // many heads have the same plan. `make` is plan_attention or plan_latents.
  template <typename Heads, typename Make>
  const AttentionPlan& plan(int64_t layer, int64_t q_heads, int64_t kv_heads, const Heads& heads, const Make& make) {
    const bool has_all = !is_last(layer) || b.num_heads == b.num_tokens;
    const AttentionRows rows = b.rows_of(m.layers[layer]);
    const auto [found, is_new] = plans.try_emplace({q_heads, kv_heads, has_all, m.layers[layer].group});
    if (is_new) found->second = make(rows, heads, int(m.threads), has_all ? nullptr : b.heads, b.num_heads);
    return found->second;
  }

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

  // The inputs of all layers, of input embeddings and token ids.
  void layer_inputs(const Op& op) {
    linear_op(op, p.x, p.inputs);
    scale_rows(pass, int(m.is_bf16), p.inputs, n, op.linear.out, op.scale);
    add_norm(pass, int(m.is_bf16), m.norm(p.inputs, nullptr, op.norm), p.inputs, n * m.num_layers, m.layer_width);
    m.is_bf16 ? add_layer_embeddings<uint16_t>() : add_layer_embeddings<float>();
  }

  template <typename T> void add_layer_embeddings() {
    const int64_t width = m.num_layers * m.layer_width;
    const float scale = round_to<T>(std::sqrt(float(m.layer_width)));
    pass.run(n, 4, [&](int64_t first, int64_t last) {
      for (int64_t t = first; t < last; t++) {
        const int64_t id = b.token_ids[t] < m.layer_vocab ? b.token_ids[t] : 0;
        const T* row = (const T*)m.layer_embedding + id * width;
        T* input = (T*)p.inputs + t * width;
        for (int64_t d = 0; d < width; d++) {
          const float sum = round_to<T>(to_float(input[d]) + round_to<T>(to_float(row[d]) * scale));
          input[d] = from_float<T>(sum * 0.70710678118654752f);
        }
      }
    });
  }

  // The gate of a layer's input for x, times the input.
  template <typename T> void gate_input(const Op& op) {
    linear_op(op, p.x, p.activated);
    activate(pass, int(m.is_bf16), p.activated, n, m.layer_width, Activation(m.activation));
    pass.run(n, 4, [&](int64_t first, int64_t last) {
      for (int64_t t = first; t < last; t++) {
        const T* input = (const T*)p.inputs + (t * m.num_layers + op.layer) * m.layer_width;
        T* gate = (T*)p.activated + t * m.layer_width;
        for (int64_t d = 0; d < m.layer_width; d++) gate[d] = from_float<T>(to_float(gate[d]) * to_float(input[d]));
      }
    });
  }

  // x = (x + residual) * scale; the residual is 0 then.
  template <typename T> void sum(float scale) {
    add<T>(p.x, p.residual);
    memset(p.residual, 0, n * m.hidden * sizeof(T));
    if (scale != 1.f) scale_rows(pass, int(m.is_bf16), p.x, n, m.hidden, scale);
  }

  template <typename T> void add(char* x, const char* other) {
    pass.run(n, 4, [&](int64_t first, int64_t last) {
      add_row((T*)x + first * m.hidden, (const T*)other + first * m.hidden, (last - first) * m.hidden);
    });
  }

  // The adapters that change a site of a layer, with their rows of x.
  std::vector<LowRankRows> adapters_of(const Op& op) const {
    std::vector<LowRankRows> found;
    if (op.site >= kNumSites) return found;
    for (int64_t i = 0; i < b.num_adapters; i++) {
      const Adapter& a = b.adapters[i];
      const LowRank* low_rank = a.sites + op.layer * kNumSites + op.site;
      const int64_t rows = of_heads ? a.num_heads : a.num_tokens;
      if (low_rank->shrink.out && rows) found.push_back({low_rank, of_heads ? a.heads : a.tokens, rows});
    }
    return found;
  }

  // Writes the norm of x, with the residual if the operation adds it, for a linear layer and its adapters.
  char* normed_rows(const Norm& norm) {
    char* normed = AdaptedRows::at_least(adapted_rows.normed, n * m.hidden * (m.is_bf16 ? 2 : 4));
    add_norm(pass, int(m.is_bf16), norm, normed, n, m.hidden);
    return normed;
  }

  void linear_op(const Op& op, const void* x, void* y) {
    grouped_linear(pass, int(m.is_bf16), {LinearRows{&op.linear, x, nullptr, y, n, 0, 0, nullptr, op.adds_output != 0}});
    add_adapters(pass, int(m.is_bf16), adapters_of(op), x, y, op.linear.out);
  }

  void linear_of_norm_op(const Op& op, const Norm& norm) {
    const int is_bf16 = int(m.is_bf16);
    const bool is_fed = op.site == kSiteGateUp, is_adapted = !adapters_of(op).empty();
    void* y = is_fed ? p.activated : p.qkv;
    if (is_fed && m.is_gated && is_adapted) {
      char* gate_up = AdaptedRows::at_least(adapted_rows.gate_up, n * op.linear.out * (is_bf16 ? 2 : 4));
      linear_op(op, normed_rows(norm), gate_up);
      return gated_activation(pass, is_bf16, gate_up, y, n, op.linear.out / 2, Activation(m.activation));
    }
    if (is_fed && m.is_gated)
      return gated_linear_of_norm(pass, is_bf16, op.linear, norm, Activation(m.activation), y, n);
    is_adapted ? linear_op(op, normed_rows(norm), y) : linear_of_norm(pass, is_bf16, op.linear, norm, y, n);
    if (is_fed) activate(pass, is_bf16, y, n, op.linear.out, Activation(m.activation));
  }

  void attend(int64_t index) {
    const int is_bf16 = int(m.is_bf16);
    const Layer& layer = m.layers[index];
    const QkvShape shape{layer.q_heads, layer.kv_heads, layer.head_dim, m.block_size};
    const Rotary rotary = b.cos ? layer.rotary.with(b.cos, b.sin) : layer.rotary;
    const QkNorms norms{layer.q_norm, layer.k_norm, layer.q_width, layer.k_width, NormKind(m.norm_kind), m.eps, layer.v_norm};
    const int64_t q_size = shape.q_heads * shape.head_dim, gate = q_size + 2 * shape.kv_heads * shape.head_dim;
    QkvShape of_qkv = shape;
    if (layer.has_gate) of_qkv.stride = gate + q_size;
    if (!layer.stores_kv) of_qkv.kv_heads = 0;
    qk_norm_rope_store(pass, is_bf16, p.qkv, norms, rotary, b.positions, b.slots_of(layer), layer.k_cache, layer.v_cache, p.q,
                       b.num_tokens, of_qkv);
    const AttentionPlan& all = plan(index, shape.q_heads, shape.kv_heads, shape, plan_attention);
    paged_attention(pass, is_bf16, all, b.rows_of(layer), shape, p.q, layer.k_cache, layer.v_cache,
                    p.attended, {m.scale, m.attention_cap, layer.window, {}, layer.chunk, layer.sinks});
    if (layer.has_gate)
      gate_outputs(pass, is_bf16, p.attended, p.qkv + gate * (is_bf16 ? 2 : 4), b.num_tokens, q_size, of_qkv.stride);
  }

  void recur(int64_t index) {
    const StateRows states{b.rows, b.query_starts, b.context_lens, b.snapshot_starts, b.snapshot_ends, b.snapshot_slots,
                           b.num_rows};
    recurrent(pass, int(m.is_bf16), *m.layers[index].recurrence, states, p.qkv, p.attended, b.num_tokens);
  }

  void attend_latents(const Op& op) {
    const int is_bf16 = int(m.is_bf16), bytes = is_bf16 ? 2 : 4;
    const Latents& a = op.latents;
    const LatentShape& s = a.shape;
    const Layer& layer = m.layers[op.layer];
    const int64_t head_size = s.key_dim + s.rope_dim, q_size = s.heads * head_size;
    const int64_t joined = (a.query.in ? a.query.in : q_size) + s.rank + s.rope_dim;
    latent_queries(pass, is_bf16, a, p.qkv, joined, p.queries, n);
    const HeadRows queries{a.query.in ? p.queries : p.qkv, a.query.in ? q_size : joined, head_size};
    const LatentTokens tokens{queries.data, p.qkv + (joined - s.rank - s.rope_dim) * bytes, queries.stride, joined, n};
    latent_rope_store(pass, is_bf16, tokens, a.norm, a.eps, layer.rotary, b.positions, b.slots_of(layer), layer.k_cache, p.q,
                      s);
    head_linears(pass, is_bf16, a.absorb, s.heads, queries, {p.q, s.heads * s.width, s.width}, n);
    const AttentionPlan& all = plan(op.layer, s.heads, 0, s.heads, plan_latents);
    latent_attention(pass, is_bf16, all, b.rows_of(layer), m.block_size, p.q, layer.k_cache, p.attended, s, m.scale);
  }

  void expand_latents(const Latents& a) {
    const LatentShape& s = a.shape;
    head_linears(pass, int(m.is_bf16), a.expand, s.heads, {p.attended, s.heads * s.rank, s.rank},
             {p.queries, s.heads * s.value_dim, s.value_dim}, n);
    std::swap(p.attended, p.queries);
  }

  void experts_op(const Op& op, const Norm& norm) {
    const int is_bf16 = int(m.is_bf16);
    add_norm(pass, is_bf16, norm, p.activated, n, m.hidden);
    const void* routed = op.router_norm.weight ? normed_rows(m.norm(p.x, nullptr, op.router_norm)) : p.activated;
    experts(pass, is_bf16, op.experts, p.activated, routed, Activation(m.activation), output_of(op), n);
  }

  char* output_of(const Op& op) const { return op.is_beside ? p.beside : p.residual; }

  void output_op(const Op& op) {
    char* x = output_of(op);
    if (op.norm.weight) add_norm(pass, int(m.is_bf16), m.norm(x, nullptr, op.norm), x, n, m.hidden);
    if (m.residual_scale != 1.f) scale_rows(pass, int(m.is_bf16), x, n, m.hidden, m.residual_scale);
  }

  bool is_last(int64_t index) const { return index == m.num_layers - 1; }

  void run_op(const Op& op) {
    const Norm norm = m.norm(p.x, op.adds_residual ? p.residual : nullptr, op.norm);
    switch (op.kind) {
      case kEmbed: return embed();
      case kLinear:
        return linear_op(op, op.site == kSiteDown || op.site == kSiteInput ? p.activated : p.attended, p.residual);
      case kLinearOfNorm: return linear_of_norm_op(op, norm);
      case kAttend: return attend(op.layer);
      case kRecur: return recur(op.layer);
      case kKeepHeads: return keep_heads();
      case kExperts: return experts_op(op, norm);
      case kOutput: return output_op(op);
      case kEndLayer:
        if (op.layer < b.num_deep_layers) m.is_bf16 ? add_deep<uint16_t>(op.layer) : add_deep<float>(op.layer);
        return m.is_bf16 ? capture<uint16_t>(op.layer) : capture<float>(op.layer);
      case kAttendLatents: return attend_latents(op);
      case kExpandLatents: return expand_latents(op.latents);
      case kAdd: return m.is_bf16 ? add<uint16_t>(p.residual, p.beside) : add<float>(p.residual, p.beside);
      case kLayerInputs: return layer_inputs(op);
      case kGateInput: return m.is_bf16 ? gate_input<uint16_t>(op) : gate_input<float>(op);
      case kSum: return m.is_bf16 ? sum<uint16_t>(op.scale) : sum<float>(op.scale);
    }
  }

  void run(void* logits) {
    for (int64_t i = 0; i < m.num_ops && n; i++) run_op(m.ops[i]);
    if (b.num_heads && logits) head(pass, m, p.x, p.residual, logits, b.num_heads);
  }

  // Adds the residual and the rows of layer `index` of `deep` to their tokens, whose residual is 0 then. After the last
  // layer only the rows of head tokens are left.
  template <typename T> void add_deep(int64_t index) {
    for (int64_t i = 0; i < b.num_deep_tokens; i++) {
      int64_t row = b.deep_tokens[i];
      if (is_last(index)) {
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

  // Keeps the output of layer `index`, if it is asked for.
  template <typename T> void capture(int64_t index) {
    for (int64_t i = 0; i < b.num_captures; i++) {
      if (b.captures[i] != index) continue;
      T* out = (T*)b.captured + i * n * m.hidden;
      memcpy(out, p.x, n * m.hidden * sizeof(T));
      for (int64_t row = 0; row < n; row++) add_row(out + row * m.hidden, (const T*)p.residual + row * m.hidden, m.hidden);
    }
  }

  // Moves the rows of the head tokens to the front.
  void keep_heads() {
    const int64_t element = m.is_bf16 ? 2 : 4;
    const int64_t mixed = m.layers[m.num_layers - 1].mixed_width, inputs = m.num_layers * m.layer_width;
    for (auto [rows, width] : {std::pair(p.x, m.hidden), std::pair(p.residual, m.hidden), std::pair(p.attended, mixed),
                               std::pair(p.inputs, inputs)})
      for (int64_t i = 0; i < b.num_heads; i++)
        memmove(rows + i * width * element, rows + b.heads[i] * width * element, width * element);
    n = b.num_heads, of_heads = true;
  }
};

}  // namespace

extern "C" {

// Bytes of workspace per token.
int64_t quire_forward_workspace(const void* model) {
  const Model& m = *(const Model*)model;
  const int64_t inputs = m.num_layers * m.layer_width;
  return (2 * m.hidden + m.qkv + m.q + m.mixed + m.queries + m.inner + m.beside + inputs) * (m.is_bf16 ? 2 : 4);
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

// Writes the states [count, hidden] after the final norm, as float. Logits of the same tokens may follow: their rows of the
// workspace have the sum of both terms then, and no residual.
void quire_forward_hidden(const void* model, int64_t num_tokens, int64_t first, int64_t count, float* out,
                          void* workspace) {
  const Model& m = *(const Model*)model;
  const Parts p(m, num_tokens, (char*)workspace);
  const int64_t row = m.hidden * (m.is_bf16 ? 2 : 4), offset = first * row;
  Pass pass(int(m.threads));
  char* normed = AdaptedRows::at_least(adapted_rows.normed, count * row);
  add_norm(pass, int(m.is_bf16), m.norm(p.x + offset, p.residual + offset, m.final_norm), normed, count, m.hidden);
  widen(pass, int(m.is_bf16), normed, count, m.hidden, out);
  memset(p.residual + offset, 0, count * row);
}
}
