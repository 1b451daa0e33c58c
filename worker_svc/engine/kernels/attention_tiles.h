// Scores and outputs with AMX tiles. The rows of a tile do not affect each other, so rows without a query may hold
// anything. A product of weights and values covers 16 keys: the next 16 may be in another block.
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

// Products for up to 16 query vectors: tiles 0 to 3 are sums, 4 has query vectors, 5 keys, 6 weights and 7 values, so that
// the tiles are configured once.
struct FewQueries {
  static constexpr int kRowTiles = 1, kColumnTiles = 4, kLoadedColumns = 1;
  static constexpr int kQuery = 4, kKey = 5, kWeight = 6, kValue = 7;
  static constexpr tiles::Config kScores =
      tiles::kWhole.with(6, tiles::kRows, kGroupPairs * 4).with(7, kGroupPairs, tiles::kRowBytes);
  static constexpr const tiles::Config& kValues = kScores;
};

// Products for 32 query vectors at a time: tiles 0 to 3 are sums, 4 and 5 have query vectors or weights, 6 and 7 keys or
// values. Each loaded tile is used twice.
struct ManyQueries {
  static constexpr int kRowTiles = 2, kColumnTiles = 2, kLoadedColumns = 2;
  static constexpr int kQuery = 4, kKey = 6, kWeight = 4, kValue = 6;
  static constexpr const tiles::Config& kScores = tiles::kWhole;
  static constexpr tiles::Config kValues = tiles::kWhole.with(4, tiles::kRows, kGroupPairs * 4)
                                               .with(5, tiles::kRows, kGroupPairs * 4)
                                               .with(6, kGroupPairs, tiles::kRowBytes)
                                               .with(7, kGroupPairs, tiles::kRowBytes);
};

// Up to this dimension, a tile of keys and values stays in the first-level cache. Then 16 queries at a time are faster:
// the processor overlaps the softmax of some queries with the products of the next ones.
constexpr int kSmallDim = 64;

class TileProducts {
 public:
  // Number of 32-bit words of a query vector: whole products, filled up with zeros.
  static int64_t key_pairs(int64_t dim) { return ((dim + 1) / 2 + tiles::kGroups - 1) / tiles::kGroups * tiles::kGroups; }

  void attend(PairedScratch& s, int first, int count, const PairedTile& tile, const PairedTile& ahead,
              const Sight* sights, const Scores& scores) {
    const int most = s.padded_dim > kSmallDim ? kQueryTile : tiles::kRows;
    for (int r = 0; r < count; r += most) {
      const int n = std::min(most, count - r);
      const PairedTile* next = r ? nullptr : &ahead;
      if (n > tiles::kRows)
        attend_with<ManyQueries>(s, first + r, n, tile, next, sights + r, scores);
      else
        attend_with<FewQueries>(s, first + r, n, tile, next, sights + r, scores);
    }
  }

 private:
  tiles::Scope scope_{FewQueries::kScores};
  const tiles::Config* config_ = &FewQueries::kScores;

  void use(const tiles::Config& config) {
    if (config_ == &config) return;
    scope_.change(config);
    config_ = &config;
  }

  // Columns (keys of a tile, or dimensions) are the outer loop: what is loaded for them stays in the first-level cache
  // while all rows use it.
  template <typename Shape>
  void attend_with(PairedScratch& s, int first, int count, const PairedTile& tile, const PairedTile* ahead,
                   const Sight* sights, const Scores& scores) {
    use(Shape::kScores);
    over_blocks<Shape>(count, tile.groups(), [&](auto rows, auto columns, int r, int group) INLINE_LAMBDA {
      score_block<Shape, rows, columns>(s, first + r, tile, group, r ? nullptr : ahead);
    });
    for (int i = 0; i < count; i++) softmax_pairs(s, first + i, sights[i], tile.groups(), scores);
    use(Shape::kValues);
    over_blocks<Shape>(count, int(s.padded_dim / kLanes), [&](auto rows, auto columns, int r, int d) INLINE_LAMBDA {
      value_block<Shape, rows, columns>(s, first + r, tile, d * kLanes, r ? nullptr : ahead);
    });
  }

  // Calls run(row tiles, column tiles, first row, first column) for blocks of 16 * row tiles rows.
  template <typename Shape, typename Run> static INLINE void over_blocks(int count, int columns, const Run& run) {
    constexpr int R = Shape::kRowTiles, C = Shape::kColumnTiles;
    auto over_rows = [&](auto width, int c) INLINE_LAMBDA {
      int r = 0;
      for (; r + (R - 1) * tiles::kRows < count; r += R * tiles::kRows) run(constant<R>(), width, r, c);
      if (R > 1 && r < count) run(constant<1>(), width, r, c);
    };
    int c = 0;
    for (; c + C <= columns; c += C) over_rows(constant<C>(), c);
    if (C > 2 && c + 2 <= columns) over_rows(constant<2>(), c), c += 2;
    for (; c < columns; c++) over_rows(constant<1>(), c);
  }

  template <int N> using constant = std::integral_constant<int, N>;

  static INLINE void fetch(const uint32_t* from, int64_t stride, int count) {
    for (int i = 0; i < count; i++) __builtin_prefetch(from + i * stride, 0, 2);
  }

  // Scores of 16 * R query vectors and C groups of keys. Prefetches the keys of `ahead`.
  template <typename Shape, int R, int C>
  static INLINE void score_block(PairedScratch& s, int row, const PairedTile& tile, int group, const PairedTile* ahead) {
    each<R * C>([](auto i) INLINE_LAMBDA { tiles::zero<i>(); });
    for (int64_t d = 0; d < s.key_pairs; d += tiles::kGroups) {
      const uint32_t* q = s.q.data() + row * s.key_pairs + d;
      each<R>([&](auto r) INLINE_LAMBDA {
        tiles::load<Shape::kQuery + r>(q + r * tiles::kRows * s.key_pairs, s.key_pairs * 4);
      });
      each<C>([&](auto c) INLINE_LAMBDA {
        constexpr int kColumn = c, kKey = Shape::kKey + kColumn % Shape::kLoadedColumns;
        tiles::load<kKey>(tile.keys[group + c] + d * tile.key_stride, tile.key_stride * 4);
        if (ahead) fetch(ahead->keys[group + c] + d * ahead->key_stride, ahead->key_stride, tiles::kGroups);
        each<R>([](auto r) INLINE_LAMBDA { tiles::multiply_bf16<r * C + kColumn, Shape::kQuery + r, kKey>(); });
      });
    }
    float* scores = s.scores.data() + row * kKeyTile + group * kLanes;
    each<R * C>([&](auto i) INLINE_LAMBDA {
      tiles::store<i>(scores + i / C * tiles::kRows * kKeyTile + i % C * kLanes, kKeyTile * 4);
    });
  }

  // Adds the values of a tile to 16 * C dimensions of 16 * R outputs. Prefetches the values of `ahead`.
  template <typename Shape, int R, int C>
  static INLINE void value_block(PairedScratch& s, int row, const PairedTile& tile, int64_t d, const PairedTile* ahead) {
    float* acc = s.acc.data() + row * s.padded_dim + d;
    auto sum = [&](auto i) INLINE_LAMBDA { return acc + i / C * tiles::kRows * s.padded_dim + i % C * kLanes; };
    each<R * C>([&](auto i) INLINE_LAMBDA { tiles::load<i>(sum(i), s.padded_dim * 4); });
    for (int group = 0; group < tile.groups(); group++) {
      const uint32_t* weights = s.probs.data() + row * kPairs + group * kGroupPairs;
      each<R>([&](auto r) INLINE_LAMBDA {
        tiles::load<Shape::kWeight + r>(weights + r * tiles::kRows * kPairs, kPairs * 4);
      });
      each<C>([&](auto c) INLINE_LAMBDA {
        constexpr int kColumn = c, kValue = Shape::kValue + kColumn % Shape::kLoadedColumns;
        tiles::load<kValue>(tile.values[group] + d + c * kLanes, tile.value_stride * 4);
        if (ahead) fetch(ahead->values[group] + d + c * kLanes, ahead->value_stride, kGroupPairs);
        each<R>([](auto r) INLINE_LAMBDA { tiles::multiply_bf16<r * C + kColumn, Shape::kWeight + r, kValue>(); });
      });
    }
    each<R * C>([&](auto i) INLINE_LAMBDA { tiles::store<i>(sum(i), s.padded_dim * 4); });
  }
};

}  // namespace
#endif
