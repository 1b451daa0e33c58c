// Shared by all implementations of attention.
#pragma once
#include "kernels.h"
#include "vec.h"

namespace {

constexpr int kKeyTile = 128;   // keys per online-softmax step
constexpr int kQueryTile = QUIRE_HAS_TILES ? 64 : 32;  // query vectors (tokens x heads of one KV head) per span
constexpr int kSharingQueries = 16;  // query vectors of spans that share keys

template <typename T> struct AttentionArgs {
  const T *q, *k_cache, *v_cache;
  T* out;
  AttentionRows rows;
  int64_t q_heads, kv_heads, head_dim, block_shift;
  float scale;

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
  // Number of keys that it sees, from position 0.
  int64_t visible(int64_t row, int64_t i) const { return rows.context_lens[row] + i / group() + 1; }
};

typedef AttentionSpan Span;
typedef AttentionTask Task;

}  // namespace
