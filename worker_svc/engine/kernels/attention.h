// Shared by all implementations of attention.
#pragma once
#include <algorithm>

#include "kernels.h"
#include "rows.h"
#include "vec.h"

namespace {

constexpr int kKeyTile = 128;   // keys per online-softmax step
constexpr int kQueryTile = QUIRE_HAS_TILES ? 64 : 32;  // query vectors (tokens x heads of one KV head) per span
constexpr int kSharingQueries = 16;  // query vectors of spans that share keys

// The keys `from` to `to` that a query vector sees, relative to a tile or from position 0, and their biases; null: none.
struct Sight {
  int64_t from, to;
  const float* bias = nullptr;

  // The same, relative to the tile that begins with `key`.
  Sight in_tile(int64_t key) const { return {from - key, to - key, bias ? bias + key : nullptr}; }
};

typedef AttentionSpan Span;
typedef AttentionTask Task;

template <typename T> struct AttentionArgs {
  const T *q, *k_cache, *v_cache;
  T* out;
  AttentionRows rows;
  int64_t q_heads, kv_heads, head_dim, block_shift;
  Scores scores;

  int64_t group() const { return q_heads / kv_heads; }
  int64_t block_size() const { return int64_t(1) << block_shift; }
  // The numbers of a KV head in the block that holds `position`, as an offset into the caches.
  int64_t plane(const int32_t* table, int64_t position, int64_t head) const {
    return (table[position >> block_shift] * kv_heads + head) * head_dim << block_shift;
  }
  // Query vector `i` of a row and KV head, as an offset into q and out.
  int64_t query(int64_t row, int64_t head, int64_t i) const {
    return ((rows.query_starts[row] + i / group()) * q_heads + head * group() + i % group()) * head_dim;
  }
  Sight sight(int64_t row, int64_t head, int64_t i) const {
    const int64_t token = i / group(), position = rows.context_lens[row] + token, to = rows.num_keys(row, token);
    Sight seen{0, to};
    if (scores.window && rows.is_full) {
      const int64_t reach = scores.window / 2;
      seen = {std::clamp<int64_t>(position - reach, 0, to), std::min(position + reach + 1, to)};
    } else if (scores.window) {
      seen.from = std::max<int64_t>(0, to - scores.window);
    }
    if (scores.chunk) seen.from = std::max(seen.from, position / scores.chunk * scores.chunk);
    const PositionBias& bias = scores.bias;
    if (bias.values) seen.bias = bias.values + (head * group() + i % group()) * bias.stride + bias.zero - position;
    return seen;
  }
  // What the softmax of a query vector begins with.
  float sink(int64_t head, int64_t i) const {
    return scores.sinks ? scores.sinks[head * group() + i % group()] : kNegInf;
  }
  // Start of the first tile of keys that a query vector of the span sees.
  int64_t first_key(const Span& span) const { return sight(span.row, 0, span.first).from / kKeyTile * kKeyTile; }
  // One past the last key that a query vector of the span sees.
  int64_t end_key(const Span& span) const { return sight(span.row, 0, span.first + span.queries - 1).to; }
  // Windows begin at other keys in each row, and biases depend on the position of the query.
  bool can_share_keys() const { return !scores.window && !scores.chunk && !scores.bias.values; }
};

}  // namespace
