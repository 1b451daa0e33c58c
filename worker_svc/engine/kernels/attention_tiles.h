// Scores and outputs with AMX tiles, for 16 query vectors at a time. Rows of a tile do not affect each other, so rows
// without a query may hold anything. A product of weights and values covers 16 keys: the next 16 may be in another block.
#pragma once
#include <utility>

#include "attention_pairs.h"
#include "tiles.h"

#if QUIRE_HAS_TILES
namespace {

// Calls f(0), .. f(N - 1) with constants.
template <typename F, int... I> INLINE void each_of(const F& f, std::integer_sequence<int, I...>) {
  (f(std::integral_constant<int, I>()), ...);
}
template <int N, typename F> INLINE void each(const F& f) { each_of(f, std::make_integer_sequence<int, N>()); }

#define INLINE_LAMBDA __attribute__((always_inline))

// Tiles 0 to 3 are sums, 4 has query vectors, 5 keys, 6 weights of 16 keys, and 7 the values of these keys.
class TileProducts {
 public:
  // Number of 32-bit words of a query vector: whole products, filled up with zeros.
  static int64_t key_pairs(int64_t dim) { return (dim / 2 + tiles::kGroups - 1) / tiles::kGroups * tiles::kGroups; }

  static void attend(PairedScratch& s, int first, int count, const PairedTile& tile, const PairedTile& ahead,
                     const int64_t* visible, float scale) {
    for (int r = 0; r < count; r += tiles::kRows) {
      r ? score<false>(s, first + r, tile, ahead) : score<true>(s, first + r, tile, ahead);
      for (int i = r; i < std::min(r + tiles::kRows, count); i++)
        softmax_pairs(s, first + i, visible[i], tile.groups(), scale);
      r ? add_values<false>(s, first + r, tile, ahead) : add_values<true>(s, first + r, tile, ahead);
    }
  }

 private:
  static constexpr tiles::Config kConfig =
      tiles::kWhole.with(6, tiles::kRows, kGroupPairs * 4).with(7, kGroupPairs, tiles::kRowBytes);
  const tiles::Scope scope_{kConfig};

  template <int kRows> static INLINE void fetch(const uint32_t* from, int64_t stride) {
    for (int i = 0; i < kRows; i++) __builtin_prefetch(from + i * stride, 0, 2);
  }

  // Scores of 16 query vectors and V groups of keys. Prefetches the keys of `ahead`.
  template <int V, bool kAhead>
  static INLINE void score_groups(PairedScratch& s, int r, const PairedTile& tile, const PairedTile& ahead, int first) {
    each<V>([](auto v) INLINE_LAMBDA { tiles::zero<v>(); });
    for (int64_t d = 0; d < s.key_pairs; d += tiles::kGroups) {
      tiles::load<4>(s.q.data() + r * s.key_pairs + d, s.key_pairs * 4);
      each<V>([&](auto v) INLINE_LAMBDA {
        tiles::load<5>(tile.keys[first + v] + d * tile.key_stride, tile.key_stride * 4);
        if (kAhead) fetch<tiles::kGroups>(ahead.keys[first + v] + d * ahead.key_stride, ahead.key_stride);
        tiles::multiply_bf16<v, 4, 5>();
      });
    }
    float* scores = s.scores.data() + r * kKeyTile + first * kLanes;
    each<V>([&](auto v) INLINE_LAMBDA { tiles::store<v>(scores + v * kLanes, kKeyTile * 4); });
  }

  template <bool kAhead>
  static void score(PairedScratch& s, int r, const PairedTile& tile, const PairedTile& ahead) {
    int v = 0;
    for (; v + 4 <= tile.groups(); v += 4) score_groups<4, kAhead>(s, r, tile, ahead, v);
    for (; v < tile.groups(); v++) score_groups<1, kAhead>(s, r, tile, ahead, v);
  }

  // Adds to 16 * V dimensions of 16 outputs.
  template <int V, bool kAhead>
  static INLINE void add_dims(PairedScratch& s, int r, const PairedTile& tile, const PairedTile& ahead, int64_t first) {
    float* acc = s.acc.data() + r * s.padded_dim + first;
    each<V>([&](auto v) INLINE_LAMBDA { tiles::load<v>(acc + v * kLanes, s.padded_dim * 4); });
    for (int group = 0; group < tile.groups(); group++) {
      tiles::load<6>(s.probs.data() + r * kPairs + group * kGroupPairs, kPairs * 4);
      each<V>([&](auto v) INLINE_LAMBDA {
        tiles::load<7>(tile.values[group] + first + v * kLanes, tile.value_stride * 4);
        if (kAhead) fetch<kGroupPairs>(ahead.values[group] + first + v * kLanes, ahead.value_stride);
        tiles::multiply_bf16<v, 6, 7>();
      });
    }
    each<V>([&](auto v) INLINE_LAMBDA { tiles::store<v>(acc + v * kLanes, s.padded_dim * 4); });
  }

  template <bool kAhead>
  static void add_values(PairedScratch& s, int r, const PairedTile& tile, const PairedTile& ahead) {
    int64_t d = 0;
    for (; d + 4 * kLanes <= s.padded_dim; d += 4 * kLanes) add_dims<4, kAhead>(s, r, tile, ahead, d);
    if (d + 2 * kLanes <= s.padded_dim) {
      add_dims<2, kAhead>(s, r, tile, ahead, d);
      d += 2 * kLanes;
    }
    if (d < s.padded_dim) add_dims<1, kAhead>(s, r, tile, ahead, d);
  }
};

}  // namespace
#endif
