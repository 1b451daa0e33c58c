// Shared by both implementations of attention, attention_lanes.h and attention_pairs.h.
#pragma once
#include "kernels.h"
#include "vec.h"

namespace {

constexpr int kKeyTile = 128;   // keys per online-softmax step
constexpr int kQueryTile = 32;  // query vectors (tokens x heads of one KV head) per task

template <typename T> struct AttentionArgs {
  const T *q, *k_cache, *v_cache;
  T* out;
  AttentionRows rows;
  int64_t q_heads, kv_heads, head_dim, block_shift;
  float scale;
};

typedef AttentionTask Task;

}  // namespace
