// Attention over latents (decoder/latents.py) in float32 arithmetic, for any processor. A latent is one row of numbers that
// is the key of all heads, and whose first numbers are their value: it is read once, in place, for both. A vector holds 16
// numbers of a row. The score of a key is the fixed tree of 16 sums, so neither blocks nor batch mates change it.
#pragma once
#include <limits>

#include "attention_lanes.h"

namespace {

constexpr int64_t kTurnKeys = 8 * kKeyTile;  // of 1 MiB: what threads that read the same latents read before they wait
constexpr int64_t kEveryKey = std::numeric_limits<int64_t>::max();
constexpr int kMostLatentQueries = 128;  // query vectors of a span: all heads of a decoding token read a tile once

template <typename T> struct LatentArgs {
  const T *q, *cache;  // [tokens, heads, width], [num_blocks, block_size, width]
  T* out;              // [tokens, heads, rank]
  AttentionRows rows;
  int64_t heads, rank, width, block_shift;
  float scale;

  const T* latent(const int32_t* table, int64_t position) const {
    const int64_t offset = position & ((int64_t(1) << block_shift) - 1);
    return cache + ((int64_t(table[position >> block_shift]) << block_shift) + offset) * width;
  }
  int64_t padded_rank() const { return (rank + kLanes - 1) / kLanes * kLanes; }
  // Query vector `i` of a row.
  int64_t vector(int64_t row, int64_t i) const { return rows.query_starts[row] * heads + i; }
};

template <typename T> struct LatentScratch {
  std::vector<float> q, scores, acc;  // [queries, width], [queries, kKeyTile], [queries, padded rank]
  std::vector<T> packed;              // [kKeyTile, width]
  float row_max[kMostLatentQueries], row_sum[kMostLatentQueries];
  LatentScratch(int64_t width, int64_t padded_rank)
      : q(kMostLatentQueries * width),
        scores(kMostLatentQueries * kKeyTile),
        acc(kMostLatentQueries * padded_rank),
        packed(kKeyTile * width) {}
};

// The tile of `count` latents that begins with key `start`: in place if blocks hold whole groups of 16, else packed.
template <typename T>
KeyTile<T> gather_latents(const LatentArgs<T>& a, const int32_t* table, int64_t start, int count, T* packed) {
  const bool in_place = a.block_shift >= 4;
  for (int j = 0; !in_place && j < count; j++)
    memcpy(packed + j * a.width, a.latent(table, start + j), a.width * sizeof(T));
  KeyTile<T> tile;
  tile.value_stride = a.width;
  const int last = (count - 1) / kLanes;
  for (int v = 0; v < kKeyTile / kLanes; v++) {
    const int group = std::min(v, last) * kLanes;
    tile.values[v] = in_place ? a.latent(table, start + group) : packed + group * a.width;
  }
  return tile;
}

// Scores of R query vectors and the J latents from `first` on, all in one group of 16. `ahead`: fetched if there is one.
template <typename T, int R, int J>
INLINE void dot_block(const float* q, int64_t width, const KeyTile<T>& tile, const KeyTile<T>* ahead, int first,
                      float* scores) {
  v16 sum[R][J];
  for (int r = 0; r < R; r++)
    for (int j = 0; j < J; j++) sum[r][j] = v16{};
  const T* key = tile.values[first / kLanes] + first % kLanes * width;
  const T* next = ahead ? ahead->values[first / kLanes] + first % kLanes * width : nullptr;
  for (int64_t d = 0; d < width; d += kLanes) {
    v16 x[J];
    for (int j = 0; j < J; j++) {
      x[j] = load16(key + j * width + d);
      if (next) __builtin_prefetch(next + j * width + d, 0, 2);
    }
    for (int r = 0; r < R; r++) {
      const v16 y = load16(q + r * width + d);
      for (int j = 0; j < J; j++) sum[r][j] = fma16(y, x[j], sum[r][j]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int j = 0; j < J; j++) scores[r * kKeyTile + first + j] = sum_lanes(sum[r][j]);
}

// Scores of all query vectors and the `count` latents of a tile, and of those that fill up its last group.
template <typename T>
void dot_tile(const float* q, int queries, int64_t width, const KeyTile<T>& tile, const KeyTile<T>* ahead, int count,
              float* scores) {
  constexpr int kMostRows = std::min(kMostSums / 2, 4);
  over_queries<kMostRows>(queries, [&](auto rows, int r) {
    constexpr int R = decltype(rows)::value, J = R * 4 <= kMostSums ? 4 : 2;
    for (int j = 0; j < count; j += J)
      dot_block<T, R, J>(q + r * width, width, tile, r ? nullptr : ahead, j, scores + r * kKeyTile);
  });
}

// A query vector sees the keys up to its token.
template <typename T> int64_t end_of(const LatentArgs<T>& a, const Span& span, int64_t i) {
  return a.rows.num_keys(span.row, (span.first + i) / a.heads);
}

// Query vectors, and the softmax of no keys.
template <typename T> void begin_latents(const LatentArgs<T>& a, const Span& span, LatentScratch<T>& s) {
  const T* from = a.q + a.vector(span.row, span.first) * a.width;
  for (int64_t i = 0; i < span.queries * a.width; i++) s.q[i] = to_float(from[i]) * a.scale;
  std::fill_n(s.row_max, span.queries, kNegInf);
  std::fill_n(s.row_sum, span.queries, 0.f);
  std::fill_n(s.acc.data(), span.queries * a.padded_rank(), 0.f);
}

template <typename T> void finish_latents(const LatentArgs<T>& a, const Span& span, const LatentScratch<T>& s) {
  for (int r = 0; r < span.queries; r++) {
    T* out = a.out + a.vector(span.row, span.first + r) * a.rank;
    const float scale = 1.f / s.row_sum[r];
    for (int64_t d = 0; d < a.rank; d++) out[d] = from_float<T>(s.acc[r * a.padded_rank() + d] * scale);
  }
}

// Keys from `first`, a multiple of kKeyTile, to `last`, or to the last one that the span sees. A span's keys come in order.
template <typename T>
void attend_latents(const LatentArgs<T>& a, const Span& span, int64_t first, int64_t last, LatentScratch<T>& s) {
  if (first == 0) begin_latents(a, span, s);
  const int32_t* table = a.rows.table(span.row);
  const int queries = span.queries;
  float *scores = s.scores.data(), *acc = s.acc.data();
  const int64_t end = end_of(a, span, queries - 1), padded_rank = a.padded_rank();
  const bool is_ahead = a.block_shift >= 4;
  auto gather = [&](int64_t key) {
    return gather_latents(a, table, key, int(std::min<int64_t>(kKeyTile, end - key)), s.packed.data());
  };
  for (int64_t key = first; key < std::min(last, end); key += kKeyTile) {
    const int count = int(std::min<int64_t>(kKeyTile, end - key)), groups = (count + kLanes - 1) / kLanes;
    const KeyTile<T> tile = gather(key);
    KeyTile<T> next;
    const bool has_next = is_ahead && key + kKeyTile < end;
    if (has_next) next = gather(key + kKeyTile);
    dot_tile(s.q.data(), queries, a.width, tile, has_next ? &next : nullptr, count, scores);
    for (int r = 0; r < queries; r++)
      softmax_lanes(scores + r * kKeyTile, {0, end_of(a, span, r) - key}, 0.f, groups, s.row_max[r], s.row_sum[r],
                    acc + r * padded_rank, padded_rank);
    value_tile<T>(scores, queries, tile, nullptr, {0, count}, padded_rank, acc);
  }
  if (first < end && end <= last) finish_latents(a, span, s);
}

}  // namespace
