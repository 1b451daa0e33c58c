// Linear layers with the matrix instructions of ARM: a product of two rows and two outputs over two groups of inputs
// (BFMMLA for bfloat16, SMMLA for int8). A row that is alone uses dot products of single groups (BFDOT, SDOT).
//
// bfloat16: an output is one chain over its groups, strictly in order. A group adds sum + (even product + odd product).
// Products and both sums are rounded to odd (a result that is not exact is truncated and its last bit set), and denormals
// are 0 as operands and as results. Arm specifies this for both instructions, whatever FPCR says, except with FPCR.EBF = 1,
// which no process has unless it asks for it; BFMMLA is two of these steps. So both give the same bits, and the rows
// beside one do not matter. `quire_verify_matrices` compares the processor with the specification.
// int8: exact.
//
// Packed rows: [tile][step of two groups][pair of rows][row of the pair][two groups]. The second row of a pair that has one
// row holds anything; its sums are not stored.
#pragma once
#include "linear.h"

#if QUIRE_HAS_MATRICES
namespace {

constexpr int kGroupStride = kPanel * kGroupBytes;  // between the groups of a panel
constexpr int kPanelVectors = kPanel / kWidth;

struct MatrixBfloat16 {
  typedef float32x4_t Sum;
  static constexpr int kGroup = 2;
  static INLINE int32x4_t load(const char* w) { return vld1q_s32((const int32_t*)w); }
  static INLINE Sum multiply(Sum sum, int32x4_t w, int32x4_t x) {
    return vbfmmlaq_f32(sum, (bfloat16x8_t)w, (bfloat16x8_t)x);
  }
  template <int kLane> static INLINE Sum dot(Sum sum, int32x4_t w, int32x4_t x) {
    return vbfdotq_laneq_f32(sum, (bfloat16x8_t)w, (bfloat16x8_t)x, kLane);
  }
  // Calls store(first input, address of 16 inputs).
  template <typename Store> static RowScale pack(const uint16_t* x, int64_t in, const Store& store) {
    int64_t i = 0;
    for (; i + kLanes <= in; i += kLanes) store(i, x + i);
    if (i == in) return {1.f, 0};
    uint16_t rest[kLanes] = {};
    memcpy(rest, x + i, (in - i) * sizeof(uint16_t));
    store(i, rest);
    return {1.f, 0};
  }
  static INLINE v16 finish(const int32_t* sums, RowScale scale, const float* scales) {
    return Bfloat16::finish(sums, scale, scales);
  }
};

struct MatrixInt8 {
  typedef int32x4_t Sum;
  static constexpr int kGroup = 4;
  static INLINE int32x4_t load(const char* w) { return (int32x4_t)Int8::load(w); }
  static INLINE Sum multiply(Sum sum, int32x4_t w, int32x4_t x) {
    return vmmlaq_s32(sum, (int8x16_t)w, (int8x16_t)x);
  }
  template <int kLane> static INLINE Sum dot(Sum sum, int32x4_t w, int32x4_t x) {
    return vdotq_laneq_s32(sum, (int8x16_t)w, (int8x16_t)x, kLane);
  }
  template <typename T, typename Store> static RowScale pack(const T* x, int64_t in, const Store& store) {
    return Int8::quantize_row(x, in, store);
  }
  static INLINE v16 finish(const int32_t* sums, RowScale scale, const float* scales) {
    return Int8::finish(sums, scale, scales);
  }
};

// K: one of the two above.
template <typename K> struct OnMatrices : K {
  static constexpr int kTileRows = 10;  // with 8 outputs: 20 sums, which leaves registers for weights and rows
  static constexpr int64_t kBlockBytes = 512 << 10;                               // half of an L2 cache
  static constexpr int64_t kStreamedBytes = std::numeric_limits<int64_t>::max();  // multiplying takes longer
  struct Scope {};
  static void configure(Scope&, int64_t, bool&) {}

  static int64_t steps(int64_t in) { return ceil_div(in, 2 * K::kGroup); }
  static int64_t words_per_row(int64_t in, int64_t) { return 2 * steps(in); }
  // Each tile has room for one more row, so that pairs are whole.
  static int64_t packed_rows(const RowTiles& tiles) { return tiles.n + tiles.count; }
  static int64_t offset_of(const RowTiles& tiles, int64_t tile, int64_t in) {
    return (tiles.start(tile) + tile) * words_per_row(in, 0);
  }

  template <typename T>
  static RowScale pack_row(const T* x, int64_t in, int64_t, const RowTiles& tiles, int64_t tile, int row,
                           int32_t* packed) {
    constexpr int kStepInputs = 2 * K::kGroup;
    const int64_t stride = (tiles.rows(tile) + 1) / 2 * 4;  // words of a step
    int32_t* first = packed + offset_of(tiles, tile, in) + row / 2 * 4 + row % 2 * 2;
    return K::pack(x, in, [&](int64_t i, const auto* inputs) {
      const int64_t step = i / kStepInputs, count = std::min<int64_t>(kLanes / kStepInputs, steps(in) - step);
      for (int64_t s = 0; s < count; s++) memcpy(first + (step + s) * stride, inputs + s * kStepInputs, 8);
    });
  }
};

// P pairs of rows times V vectors of outputs of a panel.
template <typename K, int P, int V> void multiply_pairs(const char* w, const int32_t* x, int64_t steps, int32_t* sums) {
  typename K::Sum sum[P][2 * V];  // [output, output + 1][row, row + 1]
  for (int p = 0; p < P; p++)
    for (int v = 0; v < 2 * V; v++) sum[p][v] = typename K::Sum{};
  for (int64_t s = 0; s < steps; s++, w += 2 * kGroupStride, x += 4 * P) {
    int32x4_t weights[2 * V];
    for (int v = 0; v < V; v++) {
      const int32x4_t first = K::load(w + v * 16), second = K::load(w + kGroupStride + v * 16);
      weights[2 * v] = vzip1q_s32(first, second);
      weights[2 * v + 1] = vzip2q_s32(first, second);
    }
    for (int p = 0; p < P; p++) {
      const int32x4_t rows = vld1q_s32(x + 4 * p);
      for (int v = 0; v < 2 * V; v++) sum[p][v] = K::multiply(sum[p][v], weights[v], rows);
    }
  }
  for (int p = 0; p < P; p++)
    for (int v = 0; v < V; v++) {
      const int32x4_t low = (int32x4_t)sum[p][2 * v], high = (int32x4_t)sum[p][2 * v + 1];
      vst1q_s32(sums + 2 * p * kPanel + v * kWidth, vuzp1q_s32(low, high));
      vst1q_s32(sums + (2 * p + 1) * kPanel + v * kWidth, vuzp2q_s32(low, high));
    }
}

// One row times a panel. The row is packed as one of a pair.
template <typename K> void multiply_row(const char* w, const int32_t* x, int64_t steps, int32_t* sums) {
  typename K::Sum sum[kPanelVectors] = {};
  for (int64_t s = 0; s < steps; s++, w += 2 * kGroupStride, x += 4) {
    const int32x4_t row = vcombine_s32(vld1_s32(x), vdup_n_s32(0));
    for (int v = 0; v < kPanelVectors; v++)
      sum[v] = K::template dot<1>(K::template dot<0>(sum[v], K::load(w + v * 16), row),
                                  K::load(w + kGroupStride + v * 16), row);
  }
  for (int v = 0; v < kPanelVectors; v++) vst1q_s32(sums + v * kWidth, (int32x4_t)sum[v]);
}

template <typename K, int P = OnMatrices<K>::kTileRows / 2>
void multiply_pairs_of(int pairs, const char* w, const int32_t* x, int64_t steps, int32_t* sums) {
  constexpr int V = P > 2 ? 2 : 4;  // sums and weights fit 32 registers
  if (pairs == P) {
    for (int v = 0; v < kPanelVectors; v += V)
      multiply_pairs<K, P, V>(w + v * 16, x, steps, sums + v * kWidth);
    return;
  }
  if constexpr (P > 1) multiply_pairs_of<K, P - 1>(pairs, w, x, steps, sums);
}

// Rows of [first_tile, last_tile) times one panel.
template <typename K, typename T>
void multiply_panel(OnMatrices<K>, const Call<T>& c, const Packed& packed, int64_t first_tile, int64_t last_tile,
                    Panels panels, const Target<T>& target) {
  typedef OnMatrices<K> Kind;
  const int64_t steps = Kind::steps(c.in);
  const char* w = c.weight + panels.panel * steps * 2 * kGroupStride;
  int32_t sums[Kind::kTileRows * kPanel];
  for (int64_t t = first_tile; t < last_tile; t++) {
    const int rows = packed.tiles.rows(t);
    const int32_t* x = packed.x + Kind::offset_of(packed.tiles, t, c.in);
    if (rows == 1)
      multiply_row<K>(w, x, steps, sums);
    else
      multiply_pairs_of<K>((rows + 1) / 2, w, x, steps, sums);
    store_tile<K>(c, target, sums, packed.scales, packed.tiles.start(t), rows, panels.panel * kPanel);
  }
}

}  // namespace
#endif
