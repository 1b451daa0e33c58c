// Linear layers, y = x W^T + b, for processors that multiply 16 floats, pairs of bfloat16 or quads of int8 in one
// instruction.
//
// W is packed once into panels of kPanel outputs: [out / kPanel][in / group][kPanel][group], where a group is the
// inputs that one lane multiplies at once, always 4 bytes. A call packs x into tiles of up to kTileRows rows:
// [in / group][rows][group]. An output adds its groups strictly in order in one lane, whatever tile its row is in:
// rows do not depend on each other, and int8 sums are exact anyway.
//
// Rows that come in may be normed on the way, outputs that are gates and values may leave as one.
//
// int8: W has one scale per output and is stored as w + 128 (the instruction wants one unsigned side), x gets one scale
// per row. What the 128 added, 128 * sum(x), is taken off at the end.
#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "kernels.h"
#include "rows.h"
#include "vec.h"

namespace {

constexpr int kPanel = 32;
constexpr int kTileRows = 12;  // with kPanel: 24 sums, 2 weights and 1 input fit the 32 registers
constexpr int kGroupBytes = 4;
constexpr int kLine = 64;
constexpr int64_t kBlockBytes = 512 << 10;  // of packed x that is used over and over: half a second-level cache
constexpr int64_t kBlockTiles = 16;         // and no more, so that threads end together
constexpr int64_t kSerialWork = 1 << 20;    // multiply-adds below which waking other threads costs more than they save
constexpr float kInt8Max = 127.f;

enum Kind { kBfloat16 = 0, kInt8 = 1, kFloat32 = 2 };

INLINE int group_of(int64_t kind) { return kind == kInt8 ? 4 : kind == kBfloat16 ? 2 : 1; }
INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
INLINE int64_t panel_bytes(int64_t kind, int64_t in) { return ceil_div(in, group_of(kind)) * kPanel * kGroupBytes; }

// ---------------------------------------------------------------------------------------------------------------
// Packing W.

// Quantizes one output's weights and returns their scale. `q` is padded with zeros (that is 128) to whole groups.
template <typename T> float quantize_weight(const T* weight, int64_t in, uint8_t* q) {
  float top = 0.f;
  for (int64_t i = 0; i < in; i++) top = std::max(top, fabsf(to_float(weight[i])));
  const float inverse = top > 0.f ? kInt8Max / top : 0.f;
  for (int64_t i = 0; i < in; i++) q[i] = uint8_t(int(nearbyintf(to_float(weight[i]) * inverse)) + 128);
  return top / kInt8Max;
}

// One panel from `outs` rows of W; the outputs that are missing to a whole panel stay 0.
template <typename T>
void pack_panel(int kind, const T* weight, int64_t outs, int64_t in, float* scales, char* panel) {
  const int64_t groups = ceil_div(in, group_of(kind));
  std::vector<char> row(groups * kGroupBytes, kind == kInt8 ? char(128) : char(0));
  memset(panel, 0, groups * kPanel * kGroupBytes);
  for (int64_t o = 0; o < outs; o++) {
    if (kind == kInt8)
      scales[o] = quantize_weight(weight + o * in, in, (uint8_t*)row.data());
    else
      memcpy(row.data(), weight + o * in, in * sizeof(T));
    for (int64_t g = 0; g < groups; g++)
      memcpy(panel + (g * kPanel + o) * kGroupBytes, row.data() + g * kGroupBytes, kGroupBytes);
  }
}

template <typename T>
void pack_weight(int kind, const T* weight, int64_t out, int64_t in, float* scales, char* packed, int threads) {
  Pass(threads).run(ceil_div(out, kPanel), 1, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; p++) {
      const int64_t first = p * kPanel, outs = std::min<int64_t>(kPanel, out - first);
      pack_panel(kind, weight + first * in, outs, in, scales + first, packed + p * panel_bytes(kind, in));
    }
  });
}

#if defined(__AVX512F__) && defined(__AVX512BW__)

// ---------------------------------------------------------------------------------------------------------------
// Packing x, and what one instruction does with a group of it.

// What a row of x needs at the end.
struct RowScale {
  float scale;
  int32_t offset;  // what 128 in every weight has added
};

struct Float32 {
  typedef v16 Sum;
  static constexpr int kGroup = 1;
  static INLINE Sum multiply_add(Sum sum, __m512i w, int32_t x) {
    return (Sum)_mm512_fmadd_ps((__m512)w, (__m512)_mm512_set1_epi32(x), (__m512)sum);
  }
  static RowScale pack_row(const float* x, int64_t in, int rows, int32_t* packed) {
    for (int64_t i = 0; i < in; i++) memcpy(packed + i * rows, x + i, 4);
    return {1.f, 0};
  }
  static INLINE v16 finish(Sum sum, RowScale, const float*) { return sum; }
};

#if defined(__AVX512BF16__)
struct Bfloat16 {
  typedef v16 Sum;
  static constexpr int kGroup = 2;
  static INLINE Sum multiply_add(Sum sum, __m512i w, int32_t x) {
    return (Sum)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)_mm512_set1_epi32(x));
  }
  static RowScale pack_row(const uint16_t* x, int64_t in, int rows, int32_t* packed) {
    for (int64_t g = 0; g < in / 2; g++) memcpy(packed + g * rows, x + 2 * g, 4);
    if (in % 2) packed[in / 2 * rows] = x[in - 1];
    return {1.f, 0};
  }
  static INLINE v16 finish(Sum sum, RowScale, const float*) { return sum; }
};
#endif

#if defined(__AVX512VNNI__)
struct Int8 {
  typedef i16 Sum;
  static constexpr int kGroup = 4;
  static INLINE Sum multiply_add(Sum sum, __m512i w, int32_t x) {
    return (Sum)_mm512_dpbusd_epi32((__m512i)sum, w, _mm512_set1_epi32(x));
  }
  template <typename T> static RowScale pack_row(const T* x, int64_t in, int rows, int32_t* packed) {
    v16 tops{};
    i16 is_nan = {};
    int64_t i = 0;
    for (; i + kLanes <= in; i += kLanes) {
      const v16 v = load16(x + i);
      is_nan |= v != v;
      tops = vmax(vmax(v, -v), tops);
    }
    float top = max_lanes(tops), rest[kLanes] = {};
    for (int64_t j = i; j < in; j++) rest[j - i] = to_float(x[j]);
    const v16 tail = load16(rest);
    is_nan |= tail != tail;
    top = std::max(top, max_lanes(vmax(tail, -tail)));
    if (_mm512_test_epi32_mask((__m512i)is_nan, (__m512i)is_nan)) top = std::numeric_limits<float>::quiet_NaN();
    const float inverse = top > 0.f ? kInt8Max / top : 0.f;
    __m512i sum = _mm512_setzero_si512();
    for (i = 0; i < in; i += kLanes) {
      const v16 v = (i + kLanes <= in ? load16(x + i) : tail) * inverse;
      const __m512i q = _mm512_cvtps_epi32((__m512)v);
      sum = _mm512_add_epi32(sum, q);
      int32_t quads[4];
      _mm_storeu_si128((__m128i*)quads, _mm512_cvtsepi32_epi8(q));
      const int64_t groups = std::min<int64_t>(4, ceil_div(in - i, 4));
      for (int64_t g = 0; g < groups; g++) packed[(i / 4 + g) * rows] = quads[g];
    }
    return {top / kInt8Max, 128 * _mm512_reduce_add_epi32(sum)};
  }
  static INLINE v16 finish(Sum sum, RowScale row, const float* scales) {
    return __builtin_convertvector(sum - row.offset, v16) * (row.scale * load16(scales));
  }
};
#endif

// ---------------------------------------------------------------------------------------------------------------
// Multiplying.

// kLines lines per group are fetched ahead from `ahead`, so that the next panel arrives while this one is used.
template <typename K, int R, int kLines>
void multiply_tile(const char* w, const int32_t* x, int64_t groups, const char* ahead, typename K::Sum* sums) {
  typename K::Sum sum[R][2];
  for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = typename K::Sum{};
  for (int64_t g = 0; g < groups; g++) {
    const __m512i w0 = _mm512_loadu_si512(w), w1 = _mm512_loadu_si512(w + kLine);
    for (int line = 0; line < kLines; line++) _mm_prefetch(ahead + line * kLine, _MM_HINT_T1);
    for (int r = 0; r < R; r++) {
      sum[r][0] = K::multiply_add(sum[r][0], w0, x[r]);
      sum[r][1] = K::multiply_add(sum[r][1], w1, x[r]);
    }
    w += 2 * kLine;
    x += R;
    ahead += kLines * kLine;
  }
  for (int r = 0; r < R; r++) sums[2 * r] = sum[r][0], sums[2 * r + 1] = sum[r][1];
}

template <typename K, int kLines, int R = kTileRows>
INLINE void multiply(int rows, const char* w, const int32_t* x, int64_t groups, const char* ahead,
                     typename K::Sum* sums) {
  if (rows == R) return multiply_tile<K, R, kLines>(w, x, groups, ahead, sums);
  if constexpr (R > 1) multiply<K, kLines, R - 1>(rows, w, x, groups, ahead, sums);
}

template <typename T> INLINE void store_part(T* out, v16 y, int64_t count) {
  T part[kLanes];
  store16(part, y);
  memcpy(out, part, count * sizeof(T));
}

template <typename T> struct Call {
  const T* x;       // rows that are read as they are, or
  const Norm* norm; // rows that are normed first
  const char* weight;
  const float* scales;  // [out rounded up to kPanel]
  const T* bias;        // [out] or null
  T* y;
  int64_t n, in, out;
};

// Where a panel's outputs go.
template <typename T> struct Target {
  T* y;            // of row 0
  int64_t stride;  // from row to row
  int64_t count;   // outputs that there are, at most kPanel
  const T* gates;  // [rows, kPanel], what multiplies y once it is activated; null: nothing
  Activation activation;
};

// Rows of x cut into tiles of nearly equal height.
struct Tiles {
  int64_t n, count;
  explicit Tiles(int64_t rows) : n(rows), count(ceil_div(rows, kTileRows)) {}
  int64_t start(int64_t tile) const { return tile * (n / count) + std::min(tile, n % count); }
  int rows(int64_t tile) const { return int(start(tile + 1) - start(tile)); }
};

template <typename K, typename T>
INLINE void store_tile(const Call<T>& c, const Target<T>& target, const typename K::Sum* sums, const RowScale* scales,
                       int64_t row, int rows, int64_t first) {
  for (int half = 0; half < 2; half++) {
    const int64_t o = half * kLanes, count = std::min<int64_t>(kLanes, target.count - o);
    if (count <= 0) return;
    T bias[kLanes] = {};
    if (c.bias) memcpy(bias, c.bias + first + o, count * sizeof(T));
    const v16 added = load16(bias);
    for (int r = 0; r < rows; r++) {
      v16 y = K::finish(sums[2 * r + half], scales[row + r], c.scales + first + o);
      if (c.bias) y += added;
      if (target.gates)
        y = activate16(load16(target.gates + (row + r) * kPanel + o), target.activation) * round16<T>(y);
      T* out = target.y + (row + r) * target.stride + o;
      if (count == kLanes)
        store16(out, y);
      else
        store_part(out, y, count);
    }
  }
}

// Rows [first_tile, last_tile) times one panel, while the panel at `ahead` is fetched.
template <typename K, typename T>
void multiply_panel(const Call<T>& c, const Tiles& tiles, int64_t first_tile, int64_t last_tile, int64_t panel,
                    int64_t following, const int32_t* x, const RowScale* scales, const Target<T>& target) {
  const int64_t groups = ceil_div(c.in, K::kGroup), bytes = groups * 2 * kLine;
  const char *w = c.weight + panel * bytes, *ahead = c.weight + following * bytes;
  typename K::Sum sums[2 * kTileRows];
  for (int64_t t = first_tile; t < last_tile; t++) {
    const int rows = tiles.rows(t);
    const int64_t row = tiles.start(t), nth = t - first_tile;
    const int32_t* tile = x + row * groups;
    if (last_tile - first_tile == 1)
      multiply<K, 2>(rows, w, tile, groups, ahead, sums);
    else if (nth < 2)
      multiply<K, 1>(rows, w, tile, groups, ahead + nth * (bytes / 2), sums);
    else
      multiply<K, 0>(rows, w, tile, groups, w, sums);
    store_tile<K>(c, target, sums, scales, row, rows, panel * kPanel);
  }
}

// A thread's memory that lasts from call to call: to allocate is to fault in fresh pages.
template <typename T> T* buffer_of_thread(int64_t count) {
  thread_local std::vector<T> buffer;
  if (int64_t(buffer.size()) < count) buffer.resize(count);
  return buffer.data();
}

template <typename T> const T* row_of(const Call<T>& c, int64_t row) {
  if (!c.norm) return c.x + row * c.in;
  const Norm& norm = *c.norm;
  T* normed = buffer_of_thread<T>(c.in);
  const T* residual = norm.residual ? (const T*)norm.residual + row * c.in : nullptr;
  add_rms_norm_row((T*)norm.x + row * c.in, residual, (const T*)norm.weight, normed, c.in, norm.eps);
  return normed;
}

// Packed rows, and how they are cut.
struct Packed {
  Tiles tiles;
  int64_t groups;
  std::unique_ptr<int32_t[]> x;
  std::unique_ptr<RowScale[]> scales;
};

template <typename K, typename T> Packed pack_rows(Pass& pass, const Call<T>& c) {
  const int64_t groups = ceil_div(c.in, K::kGroup);
  Packed packed{Tiles(c.n), groups, std::unique_ptr<int32_t[]>(new int32_t[c.n * groups]),
                std::unique_ptr<RowScale[]>(new RowScale[c.n])};
  pass.run(packed.tiles.count, 1, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; t++) {
      const int64_t start = packed.tiles.start(t), rows = packed.tiles.rows(t);
      for (int64_t r = 0; r < rows; r++)
        packed.scales[start + r] =
            K::pack_row(row_of(c, start + r), c.in, int(rows), packed.x.get() + start * groups + r);
    }
  });
  return packed;
}

// run(first_tile, last_tile, panel) for all panels over one block of rows after the other.
template <typename Run> void over_panels(Pass& pass, const Packed& packed, int64_t panels, const Run& run) {
  const int64_t fitting = kBlockBytes / (packed.groups * kGroupBytes * kTileRows);
  const int64_t block = std::clamp<int64_t>(fitting, 1, kBlockTiles), blocks = ceil_div(packed.tiles.count, block);
  const int64_t grain = std::max<int64_t>(1, panels / (8 * pass.threads));
  const int64_t parts = ceil_div(panels, grain);
  pass.run(blocks * parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const int64_t first = i / parts * block, last = std::min(first + block, packed.tiles.count);
      const int64_t start = i % parts * grain;
      for (int64_t panel = start; panel < std::min(start + grain, panels); panel++) run(first, last, panel);
    }
  });
}

template <typename K, typename T> void multiply_all(Pass& pass, const Call<T>& c) {
  const Packed packed = pack_rows<K>(pass, c);
  over_panels(pass, packed, ceil_div(c.out, kPanel), [&](int64_t first, int64_t last, int64_t panel) {
    const Target<T> target{c.y + panel * kPanel, c.out, std::min<int64_t>(kPanel, c.out - panel * kPanel), nullptr, kSilu};
    multiply_panel<K>(c, packed.tiles, first, last, panel, panel + 1, packed.x.get(), packed.scales.get(), target);
  });
}

// Outputs [gate | up] become activation(gate) * up.
template <typename K, typename T> void multiply_gated(Pass& pass, const Call<T>& c, Activation activation) {
  const Packed packed = pack_rows<K>(pass, c);
  const int64_t inner = c.out / 2, panels = inner / kPanel;
  over_panels(pass, packed, panels, [&](int64_t first, int64_t last, int64_t panel) {
    const Tiles& tiles = packed.tiles;
    const int64_t start = tiles.start(first), rows = tiles.start(last) - start;
    T* gates = buffer_of_thread<T>(rows * kPanel) - start * kPanel;
    const Target<T> to_gates{gates, kPanel, kPanel, nullptr, activation};
    const Target<T> to_y{c.y + panel * kPanel, inner, kPanel, gates, activation};
    const int32_t* x = packed.x.get();
    multiply_panel<K>(c, tiles, first, last, panel, panels + panel, x, packed.scales.get(), to_gates);
    multiply_panel<K>(c, tiles, first, last, panels + panel, panel + 1, x, packed.scales.get(), to_y);
  });
}

// run(kind, type) with the kind and the storage type that the numbers stand for.
template <typename Run> void with_kind(int64_t kind, int is_bf16, const Run& run) {
  if (kind == kFloat32) return run(Float32(), float());
#if defined(__AVX512BF16__)
  if (kind == kBfloat16) return run(Bfloat16(), uint16_t());
#endif
#if defined(__AVX512VNNI__)
  if (kind == kInt8 && is_bf16) return run(Int8(), uint16_t());
  if (kind == kInt8) return run(Int8(), float());
#endif
}

template <typename T>
Call<T> make_call(const Linear& layer, const void* x, const Norm* norm, void* y, int64_t n) {
  return {(const T*)x, norm, (const char*)layer.packed, layer.scales, (const T*)layer.bias, (T*)y, n, layer.in, layer.out};
}

#else

template <typename Run> void with_kind(int64_t, int, const Run&) {}

#endif

}  // namespace

// ---------------------------------------------------------------------------------------------------------------
// What forward.cpp calls.

void linear(Pass& pass, int is_bf16, const Linear& layer, const void* x, void* y, int64_t n) {
  with_kind(layer.kind, is_bf16, [&](auto kind, auto type) {
    multiply_all<decltype(kind)>(pass, make_call<decltype(type)>(layer, x, nullptr, y, n));
  });
}

void linear_of_norm(Pass& pass, int is_bf16, const Linear& layer, const Norm& norm, void* y, int64_t n) {
  with_kind(layer.kind, is_bf16, [&](auto kind, auto type) {
    multiply_all<decltype(kind)>(pass, make_call<decltype(type)>(layer, nullptr, &norm, y, n));
  });
}

void gated_linear_of_norm(Pass& pass, int is_bf16, const Linear& layer, const Norm& norm, Activation activation, void* y,
                          int64_t n) {
  with_kind(layer.kind, is_bf16, [&](auto kind, auto type) {
    multiply_gated<decltype(kind)>(pass, make_call<decltype(type)>(layer, nullptr, &norm, y, n), activation);
  });
}

// ---------------------------------------------------------------------------------------------------------------
// The C ABI. `kind`: 0 bfloat16, 1 int8, 2 float32. `is_bf16` chooses the storage type of weight, x, bias and y.

extern "C" {

// Whether this processor, as this file was compiled for it, multiplies that kind.
int quire_linear_supports(int kind) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  if (kind == kFloat32) return 1;
#endif
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
  if (kind == kBfloat16) return 1;
#endif
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
  if (kind == kInt8) return 1;
#endif
  return 0;
}

int64_t quire_linear_packed_bytes(int kind, int64_t out, int64_t in) {
  return ceil_div(out, kPanel) * panel_bytes(kind, in);
}

// `scales` [out rounded up to 32] is written for int8 only.
void quire_linear_pack(int kind, int is_bf16, const void* weight, int64_t out, int64_t in, float* scales, void* packed,
                       int threads) {
  if (is_bf16)
    pack_weight(kind, (const uint16_t*)weight, out, in, scales, (char*)packed, threads);
  else
    pack_weight(kind, (const float*)weight, out, in, scales, (char*)packed, threads);
}

void quire_linear(int kind, int is_bf16, const void* x, const void* packed, const float* scales, const void* bias,
                  void* y, int64_t n, int64_t in, int64_t out, int threads) {
  Pass pass(n * in * out > kSerialWork ? threads : 1);
  linear(pass, is_bf16, {kind, packed, scales, bias, in, out}, x, y, n);
}
}
