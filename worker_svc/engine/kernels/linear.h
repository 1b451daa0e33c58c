// Shared by the ways to multiply: linear_vectors.h, linear_tiles.h and linear_matrices.h.
#pragma once
#include <algorithm>

#include "kernels.h"
#include "products.h"
#include "rows.h"

namespace {

constexpr int kPanel = 32;          // outputs that are packed together
constexpr int64_t kBlockTiles = 32; // limit of row tiles per block, which all panels reuse; threads finish together

template <typename T> struct Call {
  const T* x;       // rows without a norm, or
  const Norm* norm; // rows to be normed first
  const int32_t* rows;  // [n] which rows of x; null: the first n
  const char* weight;
  const float* scales;  // [out rounded up to kPanel]
  const T* bias;        // [out] or null
  T* y;
  int64_t n, in, out;
  int64_t x_stride, y_stride;  // from row to row
  const int32_t* y_rows;       // [n] which rows of y; null: the first n
  bool adds;                   // to y, instead of replacing it
  int64_t unit;                // as in Linear
  const int32_t* order;
};

// Destination of a panel's outputs.
template <typename T> struct Target {
  T* y;            // first row
  int64_t stride;  // from row to row
  int64_t count;   // number of outputs, at most kPanel
  const T* gates;  // [rows, kPanel]: y is multiplied by their activation; null: no gates
  Activation activation;
  bool is_streamed;
  const int32_t* rows = nullptr;  // as `y_rows` of Call
  bool adds = false;

  T* row(int64_t r) const { return y + (rows ? rows[r] : r) * stride; }
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
  int64_t offset;  // of x, in the memory of all calls
  const int32_t* x;
  const RowScale* scales;
};

// The next panel is fetched while one is multiplied: `panel` and `following` (kNoPanel: none) are numbers of panels.
constexpr int64_t kNoPanel = -1;
struct Panels {
  int64_t panel, following;
};

template <typename T> INLINE void add_outputs(const T* out, v16* y, int64_t count) {
  if (count == kPanel) {
    y[0] += load16(out), y[1] += load16(out + kLanes);
    return;
  }
  T part[kPanel] = {};
  memcpy(part, out, count * sizeof(T));
  for (int half = 0; half < 2; half++) y[half] += load16(part + half * kLanes);
}

template <typename T> INLINE void store_outputs(T* out, v16 low, v16 high, int64_t count, bool is_streamed) {
  if (count == kPanel) return store32(out, low, high, is_streamed);
  T part[kPanel];
  store32(part, low, high, false);
  memcpy(out, part, count * sizeof(T));
}

// Converts the sums [rows, kPanel] of one row tile, of which `row` is the first row, to outputs. Arguments are copies,
// because the compiler would read them again after every store.
template <typename K, typename T>
INLINE void store_tile(const Call<T> c, const Target<T> target, const int32_t* sums, const RowScale* scales, int64_t row,
                       int rows, int64_t first) {
  T values[kPanel] = {};
  if (c.bias) memcpy(values, c.bias + first, target.count * sizeof(T));
  const v16 bias[2] = {load16(values), load16(values + kLanes)};
  const float* column_scales = c.scales + first;
  for (int64_t r = row; r < row + rows; r++, sums += kPanel) {
    v16 y[2];
    for (int half = 0; half < 2; half++) {
      y[half] = K::finish(sums + half * kLanes, scales[r], column_scales + half * kLanes);
      if (c.bias) y[half] += bias[half];
      if (target.gates) {
        const v16 gate = load16(target.gates + r * kPanel + half * kLanes);
        y[half] = gated16(gate, round16<T>(y[half]), target.activation);
      }
    }
    if (target.adds) add_outputs(target.row(r), y, target.count);
    store_outputs(target.row(r), y[0], y[1], target.count, target.is_streamed);
  }
}

}  // namespace
