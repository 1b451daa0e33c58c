// Attention in float32 arithmetic, for any processor. A vector holds one dimension of 16 keys, or 16 dimensions of a value.
#pragma once
#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "attention.h"

namespace {

template <typename T> struct Scratch {
  std::vector<float> q, scores, acc;  // [kQueryTile, head_dim], [kQueryTile, kKeyTile], [kQueryTile, padded_dim]
  std::vector<T> k_pack, v_pack;      // [head_dim, kKeyTile], [kKeyTile, padded_dim]
  float row_max[kQueryTile], row_sum[kQueryTile];
  Scratch(int64_t head_dim, int64_t padded_dim)
      : q(kQueryTile * head_dim),
        scores(kQueryTile * kKeyTile),
        acc(kQueryTile * padded_dim),
        k_pack(head_dim * kKeyTile),
        v_pack(kKeyTile * padded_dim) {}
};

// A tile of keys and values in groups of 16: read in place if the pool's layout allows it, else packed.
template <typename T> struct KeyTile {
  const T *keys[kKeyTile / kLanes], *values[kKeyTile / kLanes];
  int64_t key_stride;    // from one dimension to the next
  int64_t value_stride;  // from one key to the next
};

template <typename T>
void pack_keys(const AttentionArgs<T>& a, const int32_t* table, int64_t head, int64_t start, int count, T* pack) {
  const int64_t bs = int64_t(1) << a.block_shift, plane = a.head_dim * bs;
  for (int j = 0; j < count; j++) {
    const int64_t position = start + j;
    const T* key = a.k_cache + (table[position >> a.block_shift] * a.kv_heads + head) * plane + (position & (bs - 1));
    for (int64_t d = 0; d < a.head_dim; d++) pack[d * kKeyTile + j] = key[d * bs];
  }
}

template <typename T>
void pack_values(const AttentionArgs<T>& a, const int32_t* table, int64_t head, int64_t start, int count,
                 int64_t padded_dim, T* pack) {
  const int64_t bs = int64_t(1) << a.block_shift, dim = a.head_dim;
  for (int j = 0; j < count; j++) {
    const int64_t position = start + j;
    const int64_t plane = (table[position >> a.block_shift] * a.kv_heads + head) * bs;
    memcpy(pack + j * padded_dim, a.v_cache + (plane + (position & (bs - 1))) * dim, dim * sizeof(T));
  }
}

template <typename T> bool are_keys_in_place(const AttentionArgs<T>& a) { return a.block_size() % kLanes == 0; }
template <typename T> bool are_tiles_in_place(const AttentionArgs<T>& a, int64_t padded_dim) {
  return are_keys_in_place(a) && padded_dim == a.head_dim;
}

// The tile of `count` keys that begins with key `start`. Groups after the last one are those of the last one.
template <typename T>
KeyTile<T> gather_tile(const AttentionArgs<T>& a, const int32_t* table, int64_t head, int64_t start, int count,
                       int64_t padded_dim, Scratch<T>& scratch) {
  const int64_t bs = a.block_size(), dim = a.head_dim;
  const bool keys_in_place = are_keys_in_place(a), values_in_place = are_tiles_in_place(a, padded_dim);
  T *k_pack = scratch.k_pack.data(), *v_pack = scratch.v_pack.data();
  if (!keys_in_place) pack_keys(a, table, head, start, count, k_pack);
  if (!values_in_place) pack_values(a, table, head, start, count, padded_dim, v_pack);
  KeyTile<T> tile;
  tile.key_stride = keys_in_place ? bs : kKeyTile;
  tile.value_stride = padded_dim;
  const int last = (count - 1) / kLanes;
  for (int v = 0; v < kKeyTile / kLanes; v++) {
    const int group = std::min(v, last);
    const int64_t position = start + group * kLanes, offset = position & (bs - 1);
    const int64_t base = a.plane(table, position, head);
    tile.keys[v] = keys_in_place ? a.k_cache + base + offset : k_pack + group * kLanes;
    tile.values[v] = values_in_place ? a.v_cache + base + offset * dim : v_pack + group * kLanes * padded_dim;
  }
  return tile;
}

// Sums of 16 lanes that are computed at once: as many as the registers hold beside the other operands.
constexpr int kMostSums = std::min(kSums / kRegisters, 16);
// Query vectors that are computed at once, if there are as many, and groups of keys or dimensions for R of them.
constexpr int kMostQueries = std::min(kMostSums, 8);
constexpr int groups_at_once(int queries) { return std::max(kMostSums / queries, 1); }

// Calls run(R, first) for blocks of R query vectors, R a constant of at most `R`, the largest first.
template <int R = kMostQueries, typename Run> INLINE void over_queries(int queries, const Run& run, int first = 0) {
  for (; first + R <= queries; first += R) run(std::integral_constant<int, R>(), first);
  if constexpr (R > 1) over_queries<(R > 4 ? 4 : R > 2 ? 2 : 1)>(queries, run, first);
}

// scores[r][16 * v ..] = q[r] . key, for R query vectors and V groups of keys, dimensions strictly in order. The keys of
// `ahead` are fetched, if there is one.
template <typename T, int R, int V>
INLINE void score_block(const float* q, int64_t dim, const KeyTile<T>& tile, const KeyTile<T>* ahead, int first,
                        float* scores) {
  v16 acc[R][V];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) acc[r][v] = v16{};
  for (int64_t d = 0; d < dim; d++) {
    v16 key[V];
    for (int v = 0; v < V; v++) {
      key[v] = load16(tile.keys[first + v] + d * tile.key_stride);
      if (ahead) __builtin_prefetch(ahead->keys[first + v] + d * ahead->key_stride, 0, 2);
    }
    for (int r = 0; r < R; r++) {
      const v16 x = splat(q[r * dim + d]);
      for (int v = 0; v < V; v++) acc[r][v] = fma16(x, key[v], acc[r][v]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) store16(scores + r * kKeyTile + (first + v) * kLanes, acc[r][v]);
}

template <typename T, int R>
void score_rows(const float* q, int64_t dim, const KeyTile<T>& tile, const KeyTile<T>* ahead, int groups,
                float* scores) {
  constexpr int V = groups_at_once(R);
  int v = 0;
  for (; v + V <= groups; v += V) score_block<T, R, V>(q, dim, tile, ahead, v, scores);
  for (; v < groups; v++) score_block<T, R, 1>(q, dim, tile, ahead, v, scores);
}

template <typename T>
void score_tile(const float* q, int queries, int64_t dim, const KeyTile<T>& tile, const KeyTile<T>* ahead, int groups,
                float* scores) {
  over_queries(queries, [&](auto rows, int r) {
    score_rows<T, decltype(rows)::value>(q + r * dim, dim, tile, r ? nullptr : ahead, groups, scores + r * kKeyTile);
  });
}

// The keys of a tile whose values are read. Values before and after them may be NaN, which a weight of 0 would not remove.
struct ValueRange {
  int from, to;
};

// acc[r][first ..] += probs[r][j] * value[j], for R query vectors and 16 * V dimensions, keys strictly in order. The values
// of `ahead` are fetched, if there is one.
template <typename T, int R, int V>
INLINE void value_block(const float* probs, const KeyTile<T>& tile, const KeyTile<T>* ahead, ValueRange range,
                        int64_t first, int64_t stride, float* out) {
  v16 acc[R][V];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) acc[r][v] = load16(out + r * stride + first + v * kLanes);
  for (int start = range.from / kLanes * kLanes; start < range.to; start += kLanes) {
    const int skipped = std::max(0, range.from - start), end = std::min(kLanes, range.to - start);
    const T* value = tile.values[start / kLanes] + first + skipped * tile.value_stride;
    const T* next = ahead ? ahead->values[start / kLanes] + first : nullptr;
    for (int j = skipped; j < end; j++, value += tile.value_stride) {
      v16 x[V];
      for (int v = 0; v < V; v++) x[v] = load16(value + v * kLanes);
      if (next)
        for (int v = 0; v < V; v++) __builtin_prefetch(next + j * ahead->value_stride + v * kLanes, 0, 2);
      for (int r = 0; r < R; r++) {
        const v16 p = splat(probs[r * kKeyTile + start + j]);
        for (int v = 0; v < V; v++) acc[r][v] = fma16(p, x[v], acc[r][v]);
      }
    }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) store16(out + r * stride + first + v * kLanes, acc[r][v]);
}

template <typename T, int R>
void value_rows(const float* probs, const KeyTile<T>& tile, const KeyTile<T>* ahead, ValueRange range, int64_t dim,
                float* out) {
  constexpr int V = std::min(groups_at_once(R), 4);
  int64_t d = 0;
  for (; d + V * kLanes <= dim; d += V * kLanes) value_block<T, R, V>(probs, tile, ahead, range, d, dim, out);
  if (V > 2 && d + 2 * kLanes <= dim) {
    value_block<T, R, 2>(probs, tile, ahead, range, d, dim, out);
    d += 2 * kLanes;
  }
  for (; d < dim; d += kLanes) value_block<T, R, 1>(probs, tile, ahead, range, d, dim, out);
}

template <typename T>
void value_tile(const float* probs, int queries, const KeyTile<T>& tile, const KeyTile<T>* ahead, ValueRange range,
                int64_t dim, float* out) {
  over_queries(queries, [&](auto rows, int r) {
    value_rows<T, decltype(rows)::value>(probs + r * kKeyTile, tile, r ? nullptr : ahead, range, dim, out + r * dim);
  });
}

// Turns one row of scores into weights. Keys of the tile outside `sight` get weight 0.
INLINE void softmax_lanes(float* scores, Sight sight, float cap, int groups, float& row_max, float& row_sum, float* acc,
                          int64_t dim) {
  const int from = int(std::max<int64_t>(sight.from, 0)), to = int(std::min<int64_t>(sight.to, groups * kLanes));
  if (from >= to) {
    for (int v = 0; v < groups; v++) store16(scores + v * kLanes, v16{});
    return;
  }
  const i16 lane = lane_numbers();
  v16 top = splat(row_max);
  for (int v = 0; v < groups; v++) {
    v16 s = load16(scores + v * kLanes);
    if (cap != 0.f) s = soft_cap16(s, cap);
    if (sight.bias) s = s + load16(sight.bias + v * kLanes);
    s = select((lane >= from - v * kLanes) & (lane < to - v * kLanes), s, splat(kNegInf));
    store16(scores + v * kLanes, s);
    top = vmax(s, top);
  }
  const float new_max = max_lanes(top);
  v16 sum{};
  for (int v = 0; v < groups; v++) {
    const v16 p = exp16(load16(scores + v * kLanes) - new_max);
    store16(scores + v * kLanes, p);
    sum += p;
  }
  const float shrink = exp16(splat(row_max - new_max))[0];
  row_sum = fma1(row_sum, shrink, sum_lanes(sum));
  row_max = new_max;
  if (shrink == 1.f) return;
  for (int64_t d = 0; d < dim; d += kLanes) store16(acc + d, load16(acc + d) * shrink);
}

template <typename T>
void attend_span(const AttentionArgs<T>& a, const Span& span, int64_t head, int64_t padded_dim, Scratch<T>& scratch) {
  const int64_t dim = a.head_dim, first = span.first;
  const int queries = span.queries;
  const int32_t* table = a.rows.table(span.row);
  float *q = scratch.q.data(), *scores = scratch.scores.data(), *acc = scratch.acc.data();
  for (int r = 0; r < queries; r++) {
    const T* x = a.q + a.query(span.row, head, first + r);
    for (int64_t d = 0; d < dim; d++) q[r * dim + d] = to_float(x[d]) * a.scores.scale;
    scratch.row_max[r] = a.sink(head, first + r);
    scratch.row_sum[r] = a.scores.sinks ? 1.f : 0.f;
  }
  std::fill(acc, acc + queries * padded_dim, 0.f);
  const int64_t end = a.end_key(span);
  // With many queries the multiplications take longer than the memory.
  const bool is_ahead = queries <= kMostQueries && are_tiles_in_place(a, padded_dim);
  auto gather = [&](int64_t key) {
    return gather_tile(a, table, head, key, int(std::min<int64_t>(kKeyTile, end - key)), padded_dim, scratch);
  };
  for (int64_t key = a.first_key(span); key < end; key += kKeyTile) {
    const int count = int(std::min<int64_t>(kKeyTile, end - key));
    const int groups = (count + kLanes - 1) / kLanes;
    const KeyTile<T> tile = gather(key);
    KeyTile<T> next;
    const bool has_next = is_ahead && key + kKeyTile < end;
    if (has_next) next = gather(key + kKeyTile);
    const KeyTile<T>* ahead = has_next ? &next : nullptr;
    score_tile(q, queries, dim, tile, ahead, groups, scores);
    for (int r = 0; r < queries; r++) {
      const Sight sight = a.sight(span.row, head, first + r).in_tile(key);
      softmax_lanes(scores + r * kKeyTile, sight, a.scores.cap, groups, scratch.row_max[r], scratch.row_sum[r],
                    acc + r * padded_dim, padded_dim);
    }
    const int unseen = int(std::max<int64_t>(0, a.sight(span.row, head, first).from - key));
    value_tile(scores, queries, tile, ahead, {unseen, count}, padded_dim, acc);
  }
  for (int r = 0; r < queries; r++) {
    T* out = a.out + a.query(span.row, head, first + r);
    const float scale = 1.f / scratch.row_sum[r];
    for (int64_t d = 0; d < dim; d++) out[d] = from_float<T>(acc[r * padded_dim + d] * scale);
  }
}

}  // namespace
