// Linear layers on vectors. An output adds its groups strictly in order in one lane.
//
// Packed rows: [tile][group][rows of the tile][words of the group].
#pragma once
#include "linear.h"

namespace {

constexpr int kVectors = kPanel / kWidth;
constexpr int kLine = 64;

// K: a kind of products.h.
template <typename K> struct OnVectors : K {
  static constexpr int kTileRows = kWidth == 16 ? 12 : kSums == 20 ? 5 : 6;  // with two or four vectors: kSums sums
  static constexpr int64_t kBlockBytes = 512 << 10;         // half of an L2 cache
  static constexpr int64_t kStreamedBytes = std::numeric_limits<int64_t>::max();  // multiplying takes longer
  struct Scope {};
  static void configure(Scope&, int64_t, bool&) {}

  static int64_t words_per_row(int64_t in, int64_t) { return ceil_div(in, K::kGroup) * K::kWords; }
  static int64_t packed_rows(const RowTiles& tiles) { return tiles.n; }

  template <typename T>
  static RowScale pack_row(const T* x, int64_t in, int64_t unit, const RowTiles& tiles, int64_t tile, int row,
                           int32_t* packed) {
    const int64_t stride = tiles.rows(tile) * K::kWords;
    return K::pack_row(x, in, stride, packed + tiles.start(tile) * words_per_row(in, unit) + row * K::kWords);
  }
};

// Number of output vectors that are computed at once for R rows.
constexpr int vectors_at_once(int rows) {
  int vectors = 1;
  while (vectors < kVectors && rows * vectors * 2 <= kSums) vectors *= 2;
  return vectors;
}

// R rows times V vectors of a panel, into sums [R, kPanel]. kLines lines per group are fetched from `ahead`, so that the
// next panel arrives while this one is used.
template <typename K, int R, int V, int kLines>
void multiply_part(const char* w, const int32_t* x, int64_t groups, const char* ahead, int32_t* sums) {
  typename K::Sum sum[R][V];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) sum[r][v] = typename K::Sum{};
  for (int64_t g = 0; g < groups; g++) {
    typename K::Weights weights[V];
    for (int v = 0; v < V; v++) weights[v] = K::load(w + v * kWidth * kGroupBytes);
    for (int line = 0; line < kLines; line++) __builtin_prefetch(ahead + line * kLine, 0, 2);
    for (int r = 0; r < R; r++)
      for (int v = 0; v < V; v++) sum[r][v] = K::add(sum[r][v], weights[v], x + r * K::kWords);
    w += kPanel * kGroupBytes;
    x += R * K::kWords;
    ahead += kLines * kLine;
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) memcpy(sums + r * kPanel + v * kWidth, &sum[r][v], sizeof sum[r][v]);
}

// R rows, tile number `tile` of `tiles`, times a panel. The first two passes over the panel each prefetch half of
// the next panel; a single pass prefetches all of it.
template <typename K, int R>
void multiply_tile(const char* w, const int32_t* x, int64_t groups, const char* ahead, int64_t tile, int64_t tiles,
                   int32_t* sums) {
  constexpr int V = vectors_at_once(R), kParts = kVectors / V;
  for (int part = 0; part < kParts; part++) {
    const int64_t pass = tile * kParts + part;
    const char* first = w + part * V * kWidth * kGroupBytes;
    int32_t* out = sums + part * V * kWidth;
    if (kParts == 1 && tiles == 1)
      multiply_part<K, R, V, 2>(first, x, groups, ahead, out);
    else if (pass < 2)
      multiply_part<K, R, V, 1>(first, x, groups, ahead + pass * groups * kLine, out);
    else
      multiply_part<K, R, V, 0>(first, x, groups, w, out);
  }
}

template <typename K, int R = K::kTileRows>
INLINE void multiply(int rows, const char* w, const int32_t* x, int64_t groups, const char* ahead, int64_t tile,
                     int64_t tiles, int32_t* sums) {
  if (rows == R) return multiply_tile<K, R>(w, x, groups, ahead, tile, tiles, sums);
  if constexpr (R > 1) multiply<K, R - 1>(rows, w, x, groups, ahead, tile, tiles, sums);
}

// Rows of [first_tile, last_tile) times one panel.
template <typename K, typename T>
void multiply_panel(OnVectors<K>, const Call<T>& c, const Packed& packed, int64_t first_tile, int64_t last_tile,
                    Panels panels, const Target<T>& target) {
  typedef OnVectors<K> Kind;
  const int64_t groups = ceil_div(c.in, K::kGroup), bytes = groups * kPanel * kGroupBytes;
  const char* w = c.weight + panels.panel * bytes;
  const char* ahead = panels.following == kNoPanel ? w : c.weight + panels.following * bytes;
  int32_t sums[Kind::kTileRows * kPanel];
  for (int64_t t = first_tile; t < last_tile; t++) {
    const int rows = packed.tiles.rows(t);
    const int64_t row = packed.tiles.start(t);
    multiply<Kind>(rows, w, packed.x + row * groups * K::kWords, groups, ahead, t - first_tile, last_tile - first_tile,
                   sums);
    store_tile<K>(c, target, sums, packed.scales, row, rows, panels.panel * kPanel);
  }
}

}  // namespace
