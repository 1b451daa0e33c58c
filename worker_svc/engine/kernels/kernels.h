// Functions that kernel files call across files. Each is one or more phases of a pass; `is_bf16` selects the storage
// type of every untyped pointer.
#pragma once
#include <cstdint>
#include <vector>

#include "team.h"

enum Activation { kSilu = 0, kGelu = 1, kGeluTanh = 2, kRelu2 = 3, kClampedSwiglu = 4 };

// A packed weight; see linear.cpp.
struct Linear {
  int64_t kind;
  const void* packed;
  const float* scales;
  const void* bias;
  int64_t in, out;
  int64_t unit = 0;               // of 4 bits: inputs of a scale; see linear_4bit.h
  const int32_t* order = nullptr;  // [in] the input that each column of the weight belongs to; null: its own
};

enum NormKind { kRms = 0, kRmsOffset = 1, kLayerNorm = 2 };  // see `Norm` of backend.py

// Only LayerNorm has a bias. A null weight: no norm.
struct NormWeights {
  const void *weight, *bias;
};

// x += residual (null: no residual), then a norm of x, or x itself if there are no weights.
struct Norm {
  void* x;
  const void* residual;
  NormWeights weights;
  NormKind kind;
  float eps;
};

// Norms of queries and keys. Null: none. Each spans `width` numbers.
struct QkNorms {
  const void *q, *k;
  int64_t q_width, k_width;
  NormKind kind;
  float eps;
  const void* v = nullptr;  // of the values of each head
};

// Rotates the first `dims` dimensions of each head. cos and sin are [positions, dims / 2].
struct Rotary {
  const float *cos, *sin;
  int64_t dims;
  const float* q_scales = nullptr;  // [positions] queries are multiplied by it at the end; null: they are not
  int64_t is_interleaved = 0;       // neighbours are rotated together, not the same places of two halves
  int64_t is_first = 0;             // heads are rotated before their norms, not after them

  // The same rotation with another table.
  Rotary with(const float* other_cos, const float* other_sin) const {
    return {other_cos, other_sin, dims, nullptr, is_interleaved, is_first};
  }
};

struct QkvShape {
  int64_t q_heads, kv_heads, head_dim, block_size;
  int64_t stride = 0;  // from token to token of qkv, in numbers; 0: q, k and v only

  int64_t qkv_stride() const { return stride ? stride : (q_heads + 2 * kv_heads) * head_dim; }
};

// The rows of a batch and their blocks.
struct AttentionRows {
  const int32_t* tables;  // [.., table_stride]
  int64_t table_stride;
  const int32_t *rows, *query_starts, *context_lens;  // [count] lines of `tables`, [count + 1], [count]
  int64_t count;
  bool is_full = false;  // a token sees all tokens of its row, also those after it
  const int32_t* key_lens = nullptr;  // [count] with `is_full`: a token sees this many keys, e.g. those of an encoder

  // Keys that query token `i` of a row sees.
  int64_t num_keys(int64_t row, int64_t i) const {
    if (key_lens) return key_lens[row];
    return context_lens[row] + (is_full ? query_starts[row + 1] - query_starts[row] : i + 1);
  }
  const int32_t* table(int64_t row) const { return tables + rows[row] * table_stride; }
};

// Consecutive query vectors of one row and one KV head: vector i is token i / group, head i % group.
struct AttentionSpan {
  int32_t row, first, queries;
  int64_t num_keys;  // visible to the last of them
};

// Spans of one KV head. Their first `shared_keys` keys are in the same blocks, and visible to all of them.
struct AttentionTask {
  int32_t head;
  int64_t first_span, num_spans, shared_keys;
};

struct AttentionPlan {
  std::vector<AttentionSpan> spans;
  std::vector<AttentionTask> tasks;
};

void linear(Pass& pass, int is_bf16, const Linear& layer, const void* x, void* y, int64_t n);

void linear_of_norm(Pass& pass, int is_bf16, const Linear& layer, const Norm& norm, void* y, int64_t n);

// y = activation(gate) * up [n, out / 2] of a layer whose outputs are [gate | up]; out / 2 is a multiple of kPanel.
void gated_linear_of_norm(Pass& pass, int is_bf16, const Linear& layer, const Norm& norm, Activation activation, void* y,
                          int64_t n);

// Rows of x for one of several layers of the same kind.
struct LinearRows {
  const Linear* layer;
  const void* x;
  const int32_t* rows;  // [n] which rows of x; null: the first n
  void* y;              // [n, out]
  int64_t n;
  int64_t x_stride = 0, y_stride = 0;  // from row to row, in numbers; 0: the layer's inputs, outputs
  const int32_t* y_rows = nullptr;     // [n] which rows of y; null: the first n
  bool adds = false;                   // to y, instead of replacing it
};

// `parts`: at least one, each with at least one row.
void grouped_linear(Pass& pass, int is_bf16, const std::vector<LinearRows>& parts);
void grouped_gated_linear(Pass& pass, int is_bf16, const std::vector<LinearRows>& parts, Activation activation);

// What an adapter adds to a linear layer: expand(shrink(x)), rounded once in between and once at the end. Each part of
// `expand` takes some of the outputs of `shrink` and adds to some of the layer's outputs.
constexpr int kAdapterParts = 3;
struct LowRank {
  Linear shrink;  // out 0: the adapter does not change this layer
  int64_t num_parts;
  Linear expand[kAdapterParts];
  int64_t first_rank[kAdapterParts], first_output[kAdapterParts];
};

// Rows of x and y that one adapter changes.
struct LowRankRows {
  const LowRank* layer;
  const int32_t* rows;
  int64_t n;
};

// y [.., width] += what the adapters add for x. No row is in two parts.
void add_adapters(Pass& pass, int is_bf16, const std::vector<LowRankRows>& parts, const void* x, void* y, int64_t width);

enum SharedKind { kNoShared = 0, kWholeShared = 1, kGatedShared = 2 };

// A feed-forward part of experts; see `Routing` of backend.py.
struct Experts {
  Linear router;
  const Linear *gate_up, *down;  // of all experts, the shared one last
  const float *correction, *scales;  // of the shares; null: none
  int64_t num_experts, top_k, is_normalized, is_sigmoid, num_groups, top_groups, group_best, shared, scales_inputs;
  int64_t is_float32;  // the router has float32 inputs and outputs
  int64_t is_gated;    // else `gate_up` is up alone
  double scale;

  int64_t total() const { return num_experts + (shared != kNoShared); }
  int64_t num_used() const { return top_k + (shared != kNoShared); }
};

// out [n, hidden] = the outputs of each token's experts for x [n, hidden], times their shares, which the router finds for
// `routed` [n, hidden].
void experts(Pass& pass, int is_bf16, const Experts& e, const void* x, const void* routed, Activation activation, void* out,
             int64_t n);

// out = norm of rows x [n, dim]; `out` may be x.
void add_norm(Pass& pass, int is_bf16, const Norm& norm, void* out, int64_t n, int64_t dim);

// x *= factor, x [n, dim].
void scale_rows(Pass& pass, int is_bf16, void* x, int64_t n, int64_t dim, float factor);

// x [n, dim] += rows `positions` of table [.., dim].
void add_positions(Pass& pass, int is_bf16, void* x, const void* table, const int32_t* positions, int64_t n,
                   int64_t dim);

// out = x [n, dim] as float.
void widen(Pass& pass, int is_bf16, const void* x, int64_t n, int64_t dim, float* out);

// x = activation(x), x [n, dim].
void activate(Pass& pass, int is_bf16, void* x, int64_t n, int64_t dim, Activation activation);

// out [n, dim] = activation(gate) * up, for gate_up [n, 2 * dim].
void gated_activation(Pass& pass, int is_bf16, const void* gate_up, void* out, int64_t n, int64_t dim,
                      Activation activation);

// x = cap * tanh(x / cap), x [n, dim].
void soft_cap(Pass& pass, int is_bf16, void* x, int64_t n, int64_t dim, float cap);

void qk_norm_rope_store(Pass& pass, int is_bf16, const void* qkv, const QkNorms& norms, const Rotary& rotary,
                        const int32_t* positions, const int64_t* slots, void* k_cache, void* v_cache, void* q_out,
                        int64_t n, const QkvShape& shape);

// See LatentShape of backend.py. Queries have key_dim + rope_dim numbers per head before `absorb`, `width` after it.
struct LatentShape {
  int64_t heads, rank, rope_dim, key_dim, value_dim, width, is_interleaved;
};

// The weights of latent attention (decoder/latents.py). query.in 0: the input has the queries themselves.
struct Latents {
  Linear query;
  const void *q_norm, *norm;
  const Linear *absorb, *expand;  // [heads]
  LatentShape shape;
  float eps;
};

// Norms the first query.in numbers of each row of `joined` in place; writes their queries.
void latent_queries(Pass& pass, int is_bf16, const Latents& latents, void* joined, int64_t stride, void* queries,
                    int64_t n);

// Rows of several heads: token t of head h begins at number t * stride + h * head_stride.
struct HeadRows {
  void* data;
  int64_t stride, head_stride;
};

// The linear layer of each head, of its rows of x, into its rows of y.
void head_linears(Pass& pass, int is_bf16, const Linear* linears, int64_t heads, HeadRows x, HeadRows y, int64_t n);

// Tokens of latent attention: queries [key_dim | rope_dim] of all heads, and [latent | rotated part]. Strides are from
// token to token, in numbers.
struct LatentTokens {
  const void *q, *latents;
  int64_t q_stride, latent_stride, n;
};

// Writes the normed latents, their rotated parts and zeros to the slots of `cache`, and the rotated parts of the queries
// and zeros behind the first `rank` numbers of q_out [n, heads, width].
void latent_rope_store(Pass& pass, int is_bf16, const LatentTokens& tokens, const void* norm, float eps,
                       const Rotary& rotary, const int32_t* positions, const int64_t* slots, void* cache, void* q_out,
                       const LatentShape& shape);

// As paged_attention, of q [tokens, heads, width] over a cache [num_blocks, block_size, width], into out [tokens, heads,
// rank].
void latent_attention(Pass& pass, int is_bf16, const AttentionPlan& plan, const AttentionRows& rows, int64_t block_size,
                      const void* q, const void* cache, void* out, const LatentShape& shape, float scale);

// The tasks of all tokens (null), or of `tokens`, which are ascending.
AttentionPlan plan_attention(const AttentionRows& rows, const QkvShape& shape, int threads, const int64_t* tokens = nullptr,
                             int64_t num_tokens = 0);
AttentionPlan plan_latents(const AttentionRows& rows, int64_t heads, int threads, const int64_t* tokens = nullptr,
                           int64_t num_tokens = 0);

// Added to the scores of query head h: values[h * stride + zero + position of key - position of query]. Tiles read up to
// 127 numbers beyond the last key. Null: none.
struct PositionBias {
  const float* values;
  int64_t zero, stride;
};

// How products of queries and keys become scores, and which keys a token sees.
struct Scores {
  float scale;
  float cap;       // scores become cap * tanh(score / cap); 0: they stay
  // A token sees this many keys, its own included; with `is_full` those at most window / 2 positions away. 0: no window.
  int64_t window;
  PositionBias bias = {};
  int64_t chunk = 0;             // a token sees the keys from the last multiple of `chunk` on; 0: no chunks
  const float* sinks = nullptr;  // [q_heads] a further score of each softmax, of a key without value; null: none
};

// Writes the outputs of the tokens of `plan` only.
void paged_attention(Pass& pass, int is_bf16, const AttentionPlan& plan, const AttentionRows& rows,
                     const QkvShape& shape, const void* q, const void* k_cache, const void* v_cache, void* out,
                     const Scores& scores);

// Recurrent layers; recurrent.py describes them. Queries and keys of Mamba 2 are its C and B.
enum RecurrenceKind { kGatedDelta = 0, kMamba2 = 1, kShortConv = 2 };

struct Recurrence {
  int64_t kind, key_heads, heads, key_dim, value_dim;
  int64_t kernel, channels;  // of the convolution, over [q | k | v]
  int64_t width;             // of the projections of a token: [q | k | v | z | b | a], [q | k | v | z | a], or [b | c | x]
  int64_t norm_width, norms_first, norm_is_shared;  // the norm of outputs: before the gate; one weight for all groups
  int64_t slot_stride;                              // floats of a state of all layers
  const float *conv, *conv_bias;                    // [kernel, channels]; null: no bias
  const float *decay, *step_bias, *skip, *norm;     // [heads], [heads], [heads] or null, weights or null
  float* states;                                    // of this layer in slot 0
  float eps, min_step, max_step;
};

// The rows of a step, their slots, and the snapshots that are taken of them: after `snapshot_ends` tokens of the step.
struct StateRows {
  const int32_t *slots, *query_starts, *context_lens;  // [count], [count + 1], [count]; context 0: the state is 0
  const int32_t *snapshot_starts;                      // [count + 1]
  const int32_t *snapshot_ends, *snapshot_slots;       // ascending in each row
  int64_t count;
};

// Advances the states of all rows by their tokens; out [n, heads * value_dim].
void recurrent(Pass& pass, int is_bf16, const Recurrence& r, const StateRows& rows, const void* projected, void* out,
               int64_t n);

// out [n, width] *= sigmoid(gate), whose rows are `gate_stride` numbers apart.
void gate_outputs(Pass& pass, int is_bf16, void* out, const void* gate, int64_t n, int64_t width, int64_t gate_stride);
