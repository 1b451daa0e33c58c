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

// The keys `from` to `to` that a query vector sees, relative to a tile or from position 0.
struct Sight {
  int64_t from, to;
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
  Sight sight(int64_t row, int64_t i) const {
    const int64_t to = rows.num_keys(row, i / group());
    return {scores.window ? std::max<int64_t>(0, to - scores.window) : 0, to};
  }
  // Start of the first tile of keys that a query vector of the span sees.
  int64_t first_key(const Span& span) const { return sight(span.row, span.first).from / kKeyTile * kKeyTile; }
};

}  // namespace
