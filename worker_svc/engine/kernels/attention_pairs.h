// Attention in bfloat16 for AVX512-BF16, which multiplies pairs: scores sum over pairs of dimensions, outputs over pairs of
// keys. Even and odd pairs of keys have separate sums, which keeps the multipliers busy with few queries. Softmax weights
// are rounded to bfloat16 before they are summed and applied.
#pragma once
#include <algorithm>
#include <type_traits>
#include <vector>

#include "attention.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
namespace {

typedef AttentionArgs<uint16_t> PairedArgs;

constexpr int kPairs = kKeyTile / 2;

// A tile of keys and values in groups of 16 keys. Strides are between pairs of dimensions, or of keys, in pairs.
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

// Packs blocks that are not stored in pairs.
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

// Pads values whose dimension is not a multiple of 16.
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

// Scores of R query vectors and V groups of keys. Prefetches the keys of `ahead`.
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
  const uint32_t both = 0xffffffffu, even = 0x0000ffffu;  // the last pair may have one key only
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

// 2^x for x <= 0, more precise than bfloat16; NaN stays NaN.
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

// Turns one row of scores into pairs of weights. Keys of the tile after the first `visible` get weight 0.
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

// All query vectors of a task over one tile, whose first key is `shift` positions after the first query's token.
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
  const int64_t group = a.q_heads / a.kv_heads, dim = a.head_dim, context = a.rows.context_lens[task.row];
  const int64_t start = a.rows.query_starts[task.row];
  const bool in_place = is_paired<uint16_t>(int64_t(1) << a.block_shift) && padded_dim == dim;
  auto offset = [&](int64_t i) { return ((start + i / group) * a.q_heads + task.head * group + i % group) * dim; };
  auto gather = [&](const Task& t, int64_t key, PairedTile& tile) {
    const int count = int(std::min<int64_t>(kKeyTile, t.num_keys - key));
    gather_pairs(a, a.rows.table(t.row), t.head, key, count, padded_dim, s, tile);
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

}  // namespace
#endif
