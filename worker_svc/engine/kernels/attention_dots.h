// Scores and outputs with `vdpbf16ps`. Even and odd pairs of keys have separate sums, which keeps the multipliers busy with
// few queries.
#pragma once
#include "attention_pairs.h"

#if QUIRE_HAS_DOTS
namespace {

struct Dots {
  // Number of 32-bit words of a query vector.
  static int64_t key_pairs(int64_t dim) { return (dim + 1) / 2; }

  static INLINE v16 multiply(v16 sum, __m512i a, uint32_t b) {
    return (v16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)_mm512_set1_epi32(int32_t(b)));
  }

  // Scores of R query vectors and V groups of keys. Prefetches the keys of `ahead`.
  template <int R, int V, bool kAhead>
  static INLINE void score_block(const uint32_t* q, int64_t half, const PairedTile& tile, const PairedTile& ahead,
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
        for (int v = 0; v < V; v++) acc[r][v] = multiply(acc[r][v], key[v], q[r * half + d]);
    }
    for (int r = 0; r < R; r++)
      for (int v = 0; v < V; v++) store16(scores + r * kKeyTile + (first + v) * kLanes, acc[r][v]);
  }

  template <int R, int V, bool kAhead>
  static void score_rows(const uint32_t* q, int64_t half, const PairedTile& tile, const PairedTile& ahead,
                         float* scores) {
    int v = 0;
    for (; v + V <= tile.groups(); v += V) score_block<R, V, kAhead>(q, half, tile, ahead, v, scores);
    for (; v < tile.groups(); v++) score_block<R, 1, kAhead>(q, half, tile, ahead, v, scores);
  }

  // acc[r][first ..] += probs[r] . values for R query vectors and 16 * V dimensions.
  template <int R, int V, bool kAhead>
  static INLINE void value_block(const uint32_t* probs, const PairedTile& tile, const PairedTile& ahead, int64_t first,
                                 int64_t dim, float* out) {
    v16 acc[2][R][V];
    for (int r = 0; r < R; r++)
      for (int v = 0; v < V; v++) acc[0][r][v] = load16(out + r * dim + first + v * kLanes), acc[1][r][v] = v16{};
    // The parity is a constant in each call: sums with a computed index would not stay in registers.
    auto add = [&](auto parity, int group, int p) __attribute__((always_inline)) {
      const uint32_t* values = tile.values[group] + p * tile.value_stride + first;
      const uint32_t* next = ahead.values[group] + p * ahead.value_stride + first;
      for (int v = 0; v < V; v++) {
        if (kAhead) _mm_prefetch((const char*)(next + v * kLanes), _MM_HINT_T1);
        const __m512i x = _mm512_loadu_si512(values + v * kLanes);
        for (int r = 0; r < R; r++)
          acc[parity][r][v] = multiply(acc[parity][r][v], x, probs[r * kPairs + group * kGroupPairs + p]);
      }
    };
    for (int group = 0; group < tile.groups(); group++)
      for (int p = 0; p < kGroupPairs; p += 2) {
        add(std::integral_constant<int, 0>(), group, p);
        add(std::integral_constant<int, 1>(), group, p + 1);
      }
    for (int r = 0; r < R; r++)
      for (int v = 0; v < V; v++) store16(out + r * dim + first + v * kLanes, acc[0][r][v] + acc[1][r][v]);
  }

  template <int R, bool kAhead>
  static void value_rows(const uint32_t* probs, const PairedTile& tile, const PairedTile& ahead, int64_t dim,
                         float* out) {
    constexpr int V = R >= 8 ? 1 : R >= 4 ? 2 : 4;
    int64_t d = 0;
    for (; d + V * kLanes <= dim; d += V * kLanes) value_block<R, V, kAhead>(probs, tile, ahead, d, dim, out);
    if (V > 2 && d + 2 * kLanes <= dim) {
      value_block<R, 2, kAhead>(probs, tile, ahead, d, dim, out);
      d += 2 * kLanes;
    }
    for (; d < dim; d += kLanes) value_block<R, 1, kAhead>(probs, tile, ahead, d, dim, out);
  }

  template <int R, bool kAhead>
  static INLINE void attend_rows(PairedScratch& s, int first, const PairedTile& tile, const PairedTile& ahead,
                                 const Sight* sights, const Scores& scores) {
    constexpr int V = R >= 8 ? 2 : 4;
    score_rows<R, V, kAhead>(s.q.data() + first * s.key_pairs, s.key_pairs, tile, ahead,
                             s.scores.data() + first * kKeyTile);
    for (int r = 0; r < R; r++) softmax_pairs(s, first + r, sights[r], tile.groups(), scores);
    value_rows<R, kAhead>(s.probs.data() + first * kPairs, tile, ahead, s.padded_dim,
                          s.acc.data() + first * s.padded_dim);
  }

  static void attend(PairedScratch& s, int first, int count, const PairedTile& tile, const PairedTile& ahead,
                     const Sight* sights, const Scores& scores) {
    int r = 0;
    auto run = [&](auto rows) {
      constexpr int R = decltype(rows)::value;
      for (; r + R <= count; r += R) {
        if (r == 0)
          attend_rows<R, true>(s, first + r, tile, ahead, sights + r, scores);
        else
          attend_rows<R, false>(s, first + r, tile, ahead, sights + r, scores);
      }
    };
    run(std::integral_constant<int, 8>());
    run(std::integral_constant<int, 4>());
    run(std::integral_constant<int, 2>());
    run(std::integral_constant<int, 1>());
  }
};

}  // namespace
#endif
