// Paged attention over mixed batches. A task is up to kQueryTile query vectors of one row and one KV head; query
// vector i of a row is token i / group, head i % group. Softmax is online over tiles of keys at absolute positions, so
// chunk borders and batch mates change nothing.
#include <algorithm>
#include <cmath>
#include <memory>
#include <type_traits>
#include <vector>

#include "kernels.h"
#include "vec.h"

namespace {

constexpr int kKeyTile = 128;   // keys per online-softmax step
constexpr int kQueryTile = 32;  // query vectors (tokens x heads of one KV head) per task

template <typename T> struct AttentionArgs {
  const T *q, *k_cache, *v_cache;
  T* out;
  const int32_t* tables;  // [rows, table_stride]
  int64_t table_stride;
  const int32_t *rows, *query_starts, *context_lens;  // [B], [B + 1], [B]
  int64_t q_heads, kv_heads, head_dim, block_shift;
  float scale;
};

typedef AttentionTask Task;

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

// A tile of keys and values in groups of 16: read in place where the pool's layout allows it, else packed.
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

template <typename T>
void gather_tile(const AttentionArgs<T>& a, const int32_t* table, int64_t head, int64_t start, int count,
                 int64_t padded_dim, Scratch<T>& scratch, KeyTile<T>& tile) {
  const int64_t bs = int64_t(1) << a.block_shift, dim = a.head_dim, plane = dim * bs;
  const bool keys_in_place = bs % kLanes == 0;
  const bool values_in_place = keys_in_place && padded_dim == dim;
  T *k_pack = scratch.k_pack.data(), *v_pack = scratch.v_pack.data();
  if (!keys_in_place) pack_keys(a, table, head, start, count, k_pack);
  if (!values_in_place) pack_values(a, table, head, start, count, padded_dim, v_pack);
  tile.key_stride = keys_in_place ? bs : kKeyTile;
  tile.value_stride = padded_dim;
  for (int v = 0; v * kLanes < count; v++) {
    const int64_t position = start + v * kLanes, offset = position & (bs - 1);
    const int64_t base = (table[position >> a.block_shift] * a.kv_heads + head) * plane;
    tile.keys[v] = keys_in_place ? a.k_cache + base + offset : k_pack + v * kLanes;
    tile.values[v] = values_in_place ? a.v_cache + base + offset * dim : v_pack + v * kLanes * padded_dim;
  }
}

// scores[r][16 * v ..] = q[r] . key, for R query vectors and V groups of keys, dimensions strictly in order.
template <typename T, int R, int V>
INLINE void score_block(const float* q, int64_t dim, const KeyTile<T>& tile, int first, float* scores) {
  v16 acc[R][V];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) acc[r][v] = v16{};
  for (int64_t d = 0; d < dim; d++) {
    v16 key[V];
    for (int v = 0; v < V; v++) key[v] = load16(tile.keys[first + v] + d * tile.key_stride);
    for (int r = 0; r < R; r++) {
      const v16 x = splat(q[r * dim + d]);
      for (int v = 0; v < V; v++) acc[r][v] = fma16(x, key[v], acc[r][v]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) store16(scores + r * kKeyTile + (first + v) * kLanes, acc[r][v]);
}

template <typename T, int R, int V>
void score_rows(const float* q, int64_t dim, const KeyTile<T>& tile, int groups, float* scores) {
  int v = 0;
  for (; v + V <= groups; v += V) score_block<T, R, V>(q, dim, tile, v, scores);
  for (; v < groups; v++) score_block<T, R, 1>(q, dim, tile, v, scores);
}

template <typename T>
void score_tile(const float* q, int queries, int64_t dim, const KeyTile<T>& tile, int groups, float* scores) {
  int r = 0;
  for (; r + 8 <= queries; r += 8) score_rows<T, 8, 2>(q + r * dim, dim, tile, groups, scores + r * kKeyTile);
  for (; r + 4 <= queries; r += 4) score_rows<T, 4, 4>(q + r * dim, dim, tile, groups, scores + r * kKeyTile);
  for (; r + 2 <= queries; r += 2) score_rows<T, 2, 4>(q + r * dim, dim, tile, groups, scores + r * kKeyTile);
  for (; r < queries; r++) score_rows<T, 1, 8>(q + r * dim, dim, tile, groups, scores + r * kKeyTile);
}

// acc[r][first ..] += probs[r][j] * value[j], for R query vectors and 16 * V dimensions, keys strictly in order.
template <typename T, int R, int V>
INLINE void value_block(const float* probs, const KeyTile<T>& tile, int count, int64_t first, int64_t stride,
                        float* out) {
  v16 acc[R][V];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) acc[r][v] = load16(out + r * stride + first + v * kLanes);
  for (int start = 0; start < count; start += kLanes) {
    const T* value = tile.values[start / kLanes] + first;
    const int in_group = std::min(kLanes, count - start);
    for (int j = 0; j < in_group; j++, value += tile.value_stride) {
      v16 x[V];
      for (int v = 0; v < V; v++) x[v] = load16(value + v * kLanes);
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
void value_rows(const float* probs, const KeyTile<T>& tile, int count, int64_t dim, float* out) {
  constexpr int V = R >= 8 ? 2 : 4;
  int64_t d = 0;
  for (; d + V * kLanes <= dim; d += V * kLanes) value_block<T, R, V>(probs, tile, count, d, dim, out);
  for (; d + 2 * kLanes <= dim; d += 2 * kLanes) value_block<T, R, 2>(probs, tile, count, d, dim, out);
  for (; d < dim; d += kLanes) value_block<T, R, 1>(probs, tile, count, d, dim, out);
}

template <typename T>
void value_tile(const float* probs, int queries, const KeyTile<T>& tile, int count, int64_t dim, float* out) {
  int r = 0;
  for (; r + 8 <= queries; r += 8) value_rows<T, 8>(probs + r * kKeyTile, tile, count, dim, out + r * dim);
  for (; r + 4 <= queries; r += 4) value_rows<T, 4>(probs + r * kKeyTile, tile, count, dim, out + r * dim);
  for (; r + 2 <= queries; r += 2) value_rows<T, 2>(probs + r * kKeyTile, tile, count, dim, out + r * dim);
  for (; r < queries; r++) value_rows<T, 1>(probs + r * kKeyTile, tile, count, dim, out + r * dim);
}

// Turns one row of scores into weights: the first `visible` keys of the tile count, the rest weigh 0.
INLINE void softmax_row(float* scores, int64_t visible, int groups, float& row_max, float& row_sum, float* acc,
                        int64_t dim) {
  if (visible <= 0) {
    for (int v = 0; v < groups; v++) store16(scores + v * kLanes, v16{});
    return;
  }
  const i16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const int limit = int(std::min<int64_t>(visible, kKeyTile));
  v16 top = splat(row_max);
  for (int v = 0; v < groups; v++) {
    v16 s = load16(scores + v * kLanes);
    s = lane < limit - v * kLanes ? s : splat(kNegInf);
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
void attention_task(const AttentionArgs<T>& a, const Task& task, int64_t padded_dim, Scratch<T>& scratch) {
  const int64_t group = a.q_heads / a.kv_heads, dim = a.head_dim, context = a.context_lens[task.row];
  const int64_t head = task.head, first = task.first, start = a.query_starts[task.row];
  const int queries = task.queries;
  const int32_t* table = a.tables + a.rows[task.row] * a.table_stride;
  float *q = scratch.q.data(), *scores = scratch.scores.data(), *acc = scratch.acc.data();
  auto offset = [&](int64_t i) { return ((start + i / group) * a.q_heads + head * group + i % group) * dim; };
  for (int r = 0; r < queries; r++) {
    const T* x = a.q + offset(first + r);
    for (int64_t d = 0; d < dim; d++) q[r * dim + d] = to_float(x[d]) * a.scale;
    scratch.row_max[r] = kNegInf;
    scratch.row_sum[r] = 0.f;
  }
  std::fill(acc, acc + queries * padded_dim, 0.f);
  KeyTile<T> tile;
  for (int64_t key = 0; key < task.num_keys; key += kKeyTile) {
    const int count = int(std::min<int64_t>(kKeyTile, task.num_keys - key));
    const int groups = (count + kLanes - 1) / kLanes;
    gather_tile(a, table, head, key, count, padded_dim, scratch, tile);
    score_tile(q, queries, dim, tile, groups, scores);
    for (int r = 0; r < queries; r++)
      softmax_row(scores + r * kKeyTile, context + (first + r) / group + 1 - key, groups, scratch.row_max[r],
                  scratch.row_sum[r], acc + r * padded_dim, padded_dim);
    value_tile(scores, queries, tile, count, padded_dim, acc);
  }
  for (int r = 0; r < queries; r++) {
    T* out = a.out + offset(first + r);
    const float scale = 1.f / scratch.row_sum[r];
    for (int64_t d = 0; d < dim; d++) out[d] = from_float<T>(acc[r * padded_dim + d] * scale);
  }
}

// ---------------------------------------------------------------------------------------------------------------
// The same for bfloat16 where one instruction multiplies pairs: scores sum over pairs of dimensions, outputs over pairs
// of keys (even pairs and odd pairs apart, so that few queries still keep the multipliers busy). Weights are rounded to
// bfloat16 before they are summed and applied.

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
typedef AttentionArgs<uint16_t> PairedArgs;

constexpr int kPairs = kKeyTile / 2;

// A tile of keys and values in groups of 16 keys; strides are in pairs, from one pair of dimensions, or of keys, on.
struct PairedTile {
  const uint32_t *keys[kKeyTile / kLanes], *values[kKeyTile / kLanes];
  int64_t key_stride, value_stride;
};

struct PairedScratch {
  std::vector<uint32_t> q, probs;  // [kQueryTile, head_dim / 2], [kQueryTile, kPairs]
  std::vector<float> scores, acc;  // [kQueryTile, kKeyTile], [kQueryTile, padded_dim]
  std::vector<uint16_t> k_pack, v_pack;  // [head_dim / 2, kKeyTile, 2], [kPairs, padded_dim, 2]
  float row_max[kQueryTile], row_sum[kQueryTile];
  PairedScratch(int64_t head_dim, int64_t padded_dim)
      : q(kQueryTile * head_dim / 2),
        probs(kQueryTile * kPairs),
        scores(kQueryTile * kKeyTile),
        acc(kQueryTile * padded_dim),
        k_pack(head_dim * kKeyTile),
        v_pack(kKeyTile * padded_dim) {}
};

INLINE v16 multiply_pairs(v16 sum, __m512i a, uint32_t b) {
  return (v16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)_mm512_set1_epi32(int32_t(b)));
}

// Blocks that are not laid out in pairs become so.
void pack_pairs(const PairedArgs& a, const int32_t* table, int64_t head, int64_t start, int count, int64_t padded_dim,
                PairedScratch& scratch) {
  const int64_t bs = int64_t(1) << a.block_shift, dim = a.head_dim;
  for (int j = 0; j < count; j++) {
    const int64_t position = start + j, offset = position & (bs - 1);
    const int64_t plane = (table[position >> a.block_shift] * a.kv_heads + head) * dim * bs;
    const uint16_t *key = a.k_cache + plane + offset, *value = a.v_cache + plane + offset * dim;
    for (int64_t d = 0; d < dim; d++) {
      scratch.k_pack[(d / 2 * kKeyTile + j) * 2 + d % 2] = key[d * bs];
      scratch.v_pack[(j / 2 * padded_dim + d) * 2 + j % 2] = value[d];
    }
  }
}

// Values whose dimension is no multiple of 16.
void pad_pairs(const PairedArgs& a, const int32_t* table, int64_t head, int64_t start, int count, int64_t padded_dim,
               PairedScratch& scratch) {
  const int64_t bs = int64_t(1) << a.block_shift, dim = a.head_dim;
  for (int j = 0; j < count; j += 2) {
    const int64_t position = start + j, offset = position & (bs - 1);
    const int64_t plane = (table[position >> a.block_shift] * a.kv_heads + head) * dim * bs;
    memcpy(scratch.v_pack.data() + j * padded_dim, a.v_cache + plane + offset * dim, 2 * dim * sizeof(uint16_t));
  }
}

void gather_pairs(const PairedArgs& a, const int32_t* table, int64_t head, int64_t start, int count,
                  int64_t padded_dim, PairedScratch& scratch, PairedTile& tile) {
  const int64_t bs = int64_t(1) << a.block_shift, dim = a.head_dim, plane = dim * bs;
  const bool keys_in_place = is_paired<uint16_t>(bs), values_in_place = keys_in_place && padded_dim == dim;
  if (!keys_in_place)
    pack_pairs(a, table, head, start, count, padded_dim, scratch);
  else if (!values_in_place)
    pad_pairs(a, table, head, start, count, padded_dim, scratch);
  tile.key_stride = keys_in_place ? bs : kKeyTile;
  tile.value_stride = padded_dim;
  for (int v = 0; v * kLanes < count; v++) {
    const int64_t position = start + v * kLanes, offset = position & (bs - 1);
    const int64_t base = (table[position >> a.block_shift] * a.kv_heads + head) * plane;
    const uint16_t* key = keys_in_place ? a.k_cache + base + 2 * offset : scratch.k_pack.data() + 2 * v * kLanes;
    const uint16_t* value =
        values_in_place ? a.v_cache + base + offset * dim : scratch.v_pack.data() + v * kLanes * padded_dim;
    tile.keys[v] = (const uint32_t*)key;
    tile.values[v] = (const uint32_t*)value;
  }
}

// Scores of R query vectors and V groups of keys. The lines that `ahead` names are fetched on the way.
template <int R, int V, bool kAhead>
INLINE void score_pairs_block(const uint32_t* q, int64_t half, const PairedTile& tile, const PairedTile& ahead,
                              int first, float* scores) {
  v16 acc[R][V];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) acc[r][v] = v16{};
  for (int64_t d = 0; d < half; d++) {
    __m512i key[V];
    for (int v = 0; v < V; v++) {
      key[v] = _mm512_loadu_si512(tile.keys[first + v] + d * tile.key_stride);
      if (kAhead) _mm_prefetch((const char*)(ahead.keys[first + v] + d * ahead.key_stride), _MM_HINT_T1);
    }
    for (int r = 0; r < R; r++)
      for (int v = 0; v < V; v++) acc[r][v] = multiply_pairs(acc[r][v], key[v], q[r * half + d]);
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) store16(scores + r * kKeyTile + (first + v) * kLanes, acc[r][v]);
}

template <int R, int V, bool kAhead>
void score_pairs_rows(const uint32_t* q, int64_t half, const PairedTile& tile, const PairedTile& ahead, int groups,
                      float* scores) {
  int v = 0;
  for (; v + V <= groups; v += V) score_pairs_block<R, V, kAhead>(q, half, tile, ahead, v, scores);
  for (; v < groups; v++) score_pairs_block<R, 1, kAhead>(q, half, tile, ahead, v, scores);
}

// acc[r][first ..] += probs[r] . values for R query vectors and 16 * V dimensions.
template <int R, int V, bool kAhead>
INLINE void value_pairs_block(const uint32_t* probs, const PairedTile& tile, const PairedTile& ahead, int count,
                              int64_t first, int64_t dim, float* out) {
  v16 acc[2][R][V];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) acc[0][r][v] = load16(out + r * dim + first + v * kLanes), acc[1][r][v] = v16{};
  auto add = [&](int pair, int parity, uint32_t mask) __attribute__((always_inline)) {
    const int64_t offset = pair % (kLanes / 2) * tile.value_stride + first;
    const uint32_t* value = tile.values[pair / (kLanes / 2)] + offset;
    if (kAhead) {
      const uint32_t* next = ahead.values[pair / (kLanes / 2)] + pair % (kLanes / 2) * ahead.value_stride + first;
      for (int v = 0; v < V; v++) _mm_prefetch((const char*)(next + v * kLanes), _MM_HINT_T1);
    }
    for (int v = 0; v < V; v++) {
      const __m512i x =
          _mm512_and_si512(_mm512_loadu_si512(value + v * kLanes), _mm512_set1_epi32(int32_t(mask)));
      for (int r = 0; r < R; r++) acc[parity][r][v] = multiply_pairs(acc[parity][r][v], x, probs[r * kPairs + pair]);
    }
  };
  const uint32_t both = 0xffffffffu, even = 0x0000ffffu;  // the second key of the last pair may not be there
  const int whole = count / 2;
  int pair = 0;
  for (; pair + 2 <= whole; pair += 2) {
    add(pair, 0, both);
    add(pair + 1, 1, both);
  }
  if (pair < whole) {
    add(pair, 0, both);
    pair++;
  }
  if (count % 2 && pair % 2)
    add(pair, 1, even);
  else if (count % 2)
    add(pair, 0, even);
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) store16(out + r * dim + first + v * kLanes, acc[0][r][v] + acc[1][r][v]);
}

template <int R, bool kAhead>
void value_pairs_rows(const uint32_t* probs, const PairedTile& tile, const PairedTile& ahead, int count, int64_t dim,
                      float* out) {
  constexpr int V = R >= 8 ? 1 : R >= 4 ? 2 : 4;
  int64_t d = 0;
  for (; d + V * kLanes <= dim; d += V * kLanes)
    value_pairs_block<R, V, kAhead>(probs, tile, ahead, count, d, dim, out);
  if (V > 2 && d + 2 * kLanes <= dim) {
    value_pairs_block<R, 2, kAhead>(probs, tile, ahead, count, d, dim, out);
    d += 2 * kLanes;
  }
  for (; d < dim; d += kLanes) value_pairs_block<R, 1, kAhead>(probs, tile, ahead, count, d, dim, out);
}

// 2^x for x <= 0, to the precision of bfloat16 and beyond; NaN stays NaN.
INLINE v16 exp2_below(v16 x) {
  const __m512 clamped = _mm512_max_ps(_mm512_set1_ps(-150.f), (__m512)x);
  const __m512 n = _mm512_roundscale_ps(clamped, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const v16 r = (v16)_mm512_sub_ps(clamped, n);
  v16 p = splat(9.6181291e-3f);
  p = fma16(p, r, splat(5.5504109e-2f));
  p = fma16(p, r, splat(2.4022651e-1f));
  p = fma16(p, r, splat(6.9314718e-1f));
  p = fma16(p, r, splat(1.f));
  return (v16)_mm512_scalef_ps((__m512)p, n);
}

// Turns one row of scores into pairs of weights: the first `visible` keys of the tile count, the rest weigh 0.
INLINE void softmax_pairs(const float* scores, int64_t visible, int groups, float scale, uint32_t* probs,
                          float& row_max, float& row_sum, float* acc, int64_t dim) {
  if (visible <= 0) {
    std::fill(probs, probs + groups * kLanes / 2, 0u);
    return;
  }
  const i16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const int limit = int(std::min<int64_t>(visible, kKeyTile));
  v16 masked[kKeyTile / kLanes];
  v16 top = splat(row_max);
  for (int v = 0; v < kKeyTile / kLanes; v++) masked[v] = splat(kNegInf);
  for (int v = 0; v < groups; v++) {
    const v16 s = load16(scores + v * kLanes);
    masked[v] = lane < limit - v * kLanes ? s : splat(kNegInf);
    top = vmax(masked[v], top);
  }
  const float new_max = max_lanes(top), shift = -new_max * scale;
  const __m512bh ones = (__m512bh)_mm512_set1_epi32(0x3f803f80);
  __m512 sum = _mm512_setzero_ps();
  for (int v = 0; v < groups; v += 2) {
    const v16 low = exp2_below(fma16(masked[v], splat(scale), splat(shift)));
    const v16 high = exp2_below(fma16(masked[v + 1], splat(scale), splat(shift)));
    const __m512bh rounded = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
    sum = _mm512_dpbf16_ps(sum, rounded, ones);
    _mm512_storeu_si512(probs + v * kLanes / 2, (__m512i)rounded);
  }
  const float shrink = exp2_below(splat(fma1(row_max, scale, shift)))[0];
  row_sum = fma1(row_sum, shrink, sum_lanes((v16)sum));
  row_max = new_max;
  if (shrink == 1.f) return;
  for (int64_t d = 0; d < dim; d += kLanes) store16(acc + d, load16(acc + d) * shrink);
}

template <int R, bool kAhead>
INLINE void attend_rows(PairedScratch& s, int first, int64_t dim, int64_t padded_dim, const PairedTile& tile,
                        const PairedTile& ahead, int count, const int64_t* visible, float scale) {
  const int groups = (count + kLanes - 1) / kLanes;
  constexpr int V = R >= 8 ? 2 : 4;
  float* scores = s.scores.data() + first * kKeyTile;
  uint32_t* probs = s.probs.data() + first * kPairs;
  float* acc = s.acc.data() + first * padded_dim;
  score_pairs_rows<R, V, kAhead>(s.q.data() + first * dim / 2, dim / 2, tile, ahead, groups, scores);
  for (int r = 0; r < R; r++)
    softmax_pairs(scores + r * kKeyTile, visible[r], groups, scale, probs + r * kPairs, s.row_max[first + r],
                  s.row_sum[first + r], acc + r * padded_dim, padded_dim);
  value_pairs_rows<R, kAhead>(probs, tile, ahead, count, padded_dim, acc);
}

// All query vectors of a task over one tile, whose first key lies `shift` behind the first query's token.
void attend_tile(const PairedArgs& a, const Task& task, int64_t shift, int64_t padded_dim, const PairedTile& tile,
                 const PairedTile& ahead, int count, PairedScratch& s) {
  const int64_t group = a.q_heads / a.kv_heads, dim = a.head_dim;
  const float scale = a.scale * 1.44269504088896341f;  // exp(x) = 2^(x log2 e)
  int64_t visible[kQueryTile];
  for (int r = 0; r < task.queries; r++) visible[r] = (task.first + r) / group + 1 - shift;
  int r = 0;
  auto run = [&](auto rows) {
    constexpr int R = decltype(rows)::value;
    for (; r + R <= task.queries; r += R) {
      if (r == 0)
        attend_rows<R, true>(s, r, dim, padded_dim, tile, ahead, count, visible + r, scale);
      else
        attend_rows<R, false>(s, r, dim, padded_dim, tile, ahead, count, visible + r, scale);
    }
  };
  run(std::integral_constant<int, 8>());
  run(std::integral_constant<int, 4>());
  run(std::integral_constant<int, 2>());
  run(std::integral_constant<int, 1>());
}

void paired_task(const PairedArgs& a, const Task& task, const Task& following, int64_t padded_dim, PairedScratch& s) {
  const int64_t group = a.q_heads / a.kv_heads, dim = a.head_dim, context = a.context_lens[task.row];
  const int64_t start = a.query_starts[task.row];
  const bool in_place = is_paired<uint16_t>(int64_t(1) << a.block_shift) && padded_dim == dim;
  auto table_of = [&](const Task& t) { return a.tables + a.rows[t.row] * a.table_stride; };
  auto offset = [&](int64_t i) { return ((start + i / group) * a.q_heads + task.head * group + i % group) * dim; };
  auto gather = [&](const Task& t, int64_t key, PairedTile& tile) {
    const int count = int(std::min<int64_t>(kKeyTile, t.num_keys - key));
    gather_pairs(a, table_of(t), t.head, key, count, padded_dim, s, tile);
    return count;
  };
  for (int r = 0; r < task.queries; r++) {
    memcpy(s.q.data() + r * dim / 2, a.q + offset(task.first + r), dim * sizeof(uint16_t));
    s.row_max[r] = kNegInf;
    s.row_sum[r] = 0.f;
  }
  std::fill(s.acc.begin(), s.acc.begin() + task.queries * padded_dim, 0.f);
  PairedTile tile, ahead;
  int count = gather(task, 0, tile), next_count = 0;
  for (int64_t key = 0; key < task.num_keys; key += kKeyTile) {
    ahead = tile;
    const bool is_last = key + kKeyTile >= task.num_keys;
    if (in_place) next_count = is_last ? gather(following, 0, ahead) : gather(task, key + kKeyTile, ahead);
    attend_tile(a, task, key - context, padded_dim, tile, ahead, count, s);
    if (is_last) break;
    if (in_place)
      tile = ahead, count = next_count;
    else
      count = gather(task, key + kKeyTile, tile);
  }
  for (int r = 0; r < task.queries; r++) {
    uint16_t* out = a.out + offset(task.first + r);
    const float scale = 1.f / s.row_sum[r];
    for (int64_t d = 0; d < dim; d++) out[d] = from_float<uint16_t>(s.acc[r * padded_dim + d] * scale);
  }
}
#endif

// ---------------------------------------------------------------------------------------------------------------

// A thread's scratch, kept from call to call: to allocate is to fault in fresh pages.
template <typename Scratch> Scratch& scratch_of_thread(int64_t head_dim, int64_t padded_dim) {
  thread_local std::unique_ptr<Scratch> scratch;
  thread_local int64_t dim = 0;
  if (dim != head_dim) scratch = std::make_unique<Scratch>(head_dim, padded_dim), dim = head_dim;
  return *scratch;
}

template <typename T> void attend(Pass& pass, const AttentionArgs<T>& a, const std::vector<Task>& tasks) {
  const int64_t padded_dim = (a.head_dim + kLanes - 1) / kLanes * kLanes, count = tasks.size();
  const int64_t grain = std::clamp<int64_t>(count / (16 * pass.threads), 1, 8);
  pass.run(count, grain, [&](int64_t first, int64_t last) {
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
    if constexpr (sizeof(T) == sizeof(uint16_t)) {
      PairedScratch& scratch = scratch_of_thread<PairedScratch>(a.head_dim, padded_dim);
      for (int64_t i = first; i < last; i++)
        paired_task(a, tasks[i], tasks[std::min(i + 1, count - 1)], padded_dim, scratch);
      return;
    }
#endif
    Scratch<T>& scratch = scratch_of_thread<Scratch<T>>(a.head_dim, padded_dim);
    for (int64_t i = first; i < last; i++) attention_task(a, tasks[i], padded_dim, scratch);
  });
}

}  // namespace

std::vector<AttentionTask> attention_tasks(const int32_t* query_starts, const int32_t* context_lens, int64_t num_rows,
                                           int64_t q_heads, int64_t kv_heads) {
  const int64_t group = q_heads / kv_heads;
  std::vector<AttentionTask> tasks;
  for (int32_t b = 0; b < num_rows; b++) {
    const int64_t queries = (query_starts[b + 1] - query_starts[b]) * group;
    for (int64_t first = 0; first < queries; first += kQueryTile) {
      const int64_t count = std::min<int64_t>(kQueryTile, queries - first);
      const int64_t num_keys = context_lens[b] + (first + count - 1) / group + 1;
      for (int32_t h = 0; h < kv_heads; h++) tasks.push_back({b, h, int32_t(first), int32_t(count), num_keys});
    }
  }
  return tasks;
}

void paged_attention(Pass& pass, int is_bf16, const std::vector<AttentionTask>& tasks, const void* q,
                     const void* k_cache, const void* v_cache, void* out, const int32_t* tables, int64_t table_stride,
                     const int32_t* rows, const int32_t* query_starts, const int32_t* context_lens,
                     const QkvShape& shape, float scale) {
  auto run = [&](auto type) {
    typedef decltype(type) T;
    const AttentionArgs<T> args{(const T*)q,    (const T*)k_cache, (const T*)v_cache, (T*)out,
                                tables,         table_stride,      rows,              query_starts,
                                context_lens,   shape.q_heads,     shape.kv_heads,    shape.head_dim,
                                __builtin_ctzll(uint64_t(shape.block_size)), scale};
    attend(pass, args, tasks);
  };
  is_bf16 ? run(uint16_t()) : run(float());
}

extern "C" {

// Whether blocks of this storage type and size are laid out in pairs; see qk_norm_rope_store.
int quire_kv_is_paired(int is_bf16, int64_t block_size) {
  return is_bf16 ? is_paired<uint16_t>(block_size) : is_paired<float>(block_size);
}

void quire_paged_attention(int is_bf16, const void* q, const void* k_cache, const void* v_cache, void* out,
                           const int32_t* tables, int64_t table_stride, const int32_t* rows,
                           const int32_t* query_starts, const int32_t* context_lens, int64_t num_rows, int64_t q_heads,
                           int64_t kv_heads, int64_t head_dim, int64_t block_size, float scale, int threads) {
  Pass pass(threads);
  paged_attention(pass, is_bf16, attention_tasks(query_starts, context_lens, num_rows, q_heads, kv_heads), q, k_cache,
                  v_cache, out, tables, table_stride, rows, query_starts, context_lens,
                  {q_heads, kv_heads, head_dim, block_size}, scale);
}
}
