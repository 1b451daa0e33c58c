// Shared by both ways to multiply, linear_vectors.h and linear_tiles.h.
#pragma once
#include <algorithm>

#include "kernels.h"
#include "products.h"
#include "rows.h"

namespace {

constexpr int kPanel = 32;          // outputs that are packed together
constexpr int64_t kBlockTiles = 16; // limit of row tiles per block, so that threads finish together

template <typename T> struct Call {
  const T* x;       // rows without a norm, or
  const Norm* norm; // rows to be normed first
  const char* weight;
  const float* scales;  // [out rounded up to kPanel]
  const T* bias;        // [out] or null
  T* y;
  int64_t n, in, out;
};

// Destination of a panel's outputs.
template <typename T> struct Target {
  T* y;            // first row
  int64_t stride;  // from row to row
  int64_t count;   // number of outputs, at most kPanel
  const T* gates;  // [rows, kPanel]: y is multiplied by their activation; null: no gates
  Activation activation;
};

// Rows of x cut into tiles of at most `height` rows, and of nearly equal heights.
struct RowTiles {
  int64_t n, count;
  RowTiles(int64_t rows, int64_t height) : n(rows), count(ceil_div(rows, height)) {}
  int64_t start(int64_t tile) const { return tile * (n / count) + std::min(tile, n % count); }
  int rows(int64_t tile) const { return int(start(tile + 1) - start(tile)); }
};

// Packed rows.
struct Packed {
  RowTiles tiles;
  const int32_t* x;
  const RowScale* scales;
};

// The next panel is fetched while one is multiplied: `panel` and `following` are numbers of panels.
struct Panels {
  int64_t panel, following;
};

template <typename T> INLINE void store_outputs(T* out, v16 y, int64_t count) {
  if (count >= kLanes) return store16(out, y);
  T part[kLanes];
  store16(part, y);
  memcpy(out, part, count * sizeof(T));
}

// Converts the sums [rows, kPanel] of one row tile, of which `row` is the first row, to outputs.
template <typename K, typename T>
INLINE void store_tile(const Call<T>& c, const Target<T>& target, const int32_t* sums, const RowScale* scales,
                       int64_t row, int rows, int64_t first) {
  const int halves = target.count > kLanes ? 2 : 1;
  v16 bias[2] = {};
  if (c.bias) {
    T values[kPanel] = {};
    memcpy(values, c.bias + first, target.count * sizeof(T));
    for (int half = 0; half < 2; half++) bias[half] = load16(values + half * kLanes);
  }
  for (int r = 0; r < rows; r++)
    for (int half = 0; half < halves; half++) {
      const int64_t o = half * kLanes;
      v16 y = K::finish(sums + r * kPanel + o, scales[row + r], c.scales + first + o);
      if (c.bias) y += bias[half];
      if (target.gates)
        y = activate16(load16(target.gates + (row + r) * kPanel + o), target.activation) * round16<T>(y);
      store_outputs(target.y + (row + r) * target.stride + o, y, target.count - o);
    }
}

}  // namespace
