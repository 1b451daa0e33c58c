// Linear layers, y = x W^T + b, in float32, bfloat16 or int8 (products.h), on any processor.
//
// W is packed once into panels of kPanel outputs: [out / kPanel][in / group][kPanel][group], where a group is the
// inputs that 4 bytes hold. A call packs x into tiles of up to kTileRows rows: [in / group][rows][words]. An output adds
// its groups strictly in order in one lane, in every tile: the result of a row does not depend on the number of
// rows, on its position among them or on the threads.
//
// A call can norm its input rows first, and can combine outputs that are gates and values into one.
//
// int8: W has one scale per output and is stored as w + 128 (VNNI multiplies unsigned by signed), x has one scale per
// row. The excess 128 * sum(x) is subtracted at the end.
#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "kernels.h"
#include "products.h"
#include "rows.h"

namespace {

constexpr int kPanel = 32;
constexpr int kVectors = kPanel / kWidth;
constexpr int kTileRows = kWidth == 16 ? 12 : 6;  // with two or more vectors of outputs: kSums sums
constexpr int kLine = 64;
constexpr int64_t kBlockBytes = 512 << 10;  // bytes of packed x per block, which all panels reuse; half of an L2 cache
constexpr int64_t kBlockTiles = 16;         // limit of tiles per block, so that threads finish together
constexpr int64_t kSerialWork = 1 << 20;    // multiply-adds below which waking other threads costs more than they save

INLINE int64_t panel_bytes(int64_t kind, int64_t in) { return ceil_div(in, group_of(kind)) * kPanel * kGroupBytes; }

// ---------------------------------------------------------------------------------------------------------------
// Packing W.

// Quantizes one output's weights and returns their scale. `q` is padded with zeros (that is 128) to whole groups.
template <typename T> float quantize_weight(const T* weight, int64_t in, uint8_t* q) {
  float top = 0.f;
  for (int64_t i = 0; i < in; i++) top = std::max(top, fabsf(to_float(weight[i])));
  const float inverse = int8_steps_per_unit(top);
  for (int64_t i = 0; i < in; i++) q[i] = uint8_t(int(nearbyintf(to_float(weight[i]) * inverse)) + 128);
  return top / kInt8Max;
}

// One panel from `outs` rows of W; the outputs beyond those stay 0.
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

// ---------------------------------------------------------------------------------------------------------------
// Multiplying.

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

template <typename K, int R = kTileRows>
INLINE void multiply(int rows, const char* w, const int32_t* x, int64_t groups, const char* ahead, int64_t tile,
                     int64_t tiles, int32_t* sums) {
  if (rows == R) return multiply_tile<K, R>(w, x, groups, ahead, tile, tiles, sums);
  if constexpr (R > 1) multiply<K, R - 1>(rows, w, x, groups, ahead, tile, tiles, sums);
}

template <typename T> INLINE void store_part(T* out, v16 y, int64_t count) {
  T part[kLanes];
  store16(part, y);
  memcpy(out, part, count * sizeof(T));
}

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

// Rows of x cut into tiles of nearly equal height.
struct Tiles {
  int64_t n, count;
  explicit Tiles(int64_t rows) : n(rows), count(ceil_div(rows, kTileRows)) {}
  int64_t start(int64_t tile) const { return tile * (n / count) + std::min(tile, n % count); }
  int rows(int64_t tile) const { return int(start(tile + 1) - start(tile)); }
};

template <typename K, typename T>
INLINE void store_tile(const Call<T>& c, const Target<T>& target, const int32_t* sums, const RowScale* scales,
                       int64_t row, int rows, int64_t first) {
  for (int half = 0; half < 2; half++) {
    const int64_t o = half * kLanes, count = std::min<int64_t>(kLanes, target.count - o);
    if (count <= 0) return;
    T bias[kLanes] = {};
    if (c.bias) memcpy(bias, c.bias + first + o, count * sizeof(T));
    const v16 added = load16(bias);
    for (int r = 0; r < rows; r++) {
      v16 y = K::finish(sums + r * kPanel + o, scales[row + r], c.scales + first + o);
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
  const int64_t groups = ceil_div(c.in, K::kGroup), bytes = groups * kPanel * kGroupBytes;
  const char *w = c.weight + panel * bytes, *ahead = c.weight + following * bytes;
  int32_t sums[kTileRows * kPanel];
  for (int64_t t = first_tile; t < last_tile; t++) {
    const int rows = tiles.rows(t);
    const int64_t row = tiles.start(t);
    multiply<K>(rows, w, x + row * groups * K::kWords, groups, ahead, t - first_tile, last_tile - first_tile, sums);
    store_tile<K>(c, target, sums, scales, row, rows, panel * kPanel);
  }
}

// Memory of a thread, kept between calls because allocating would fault in fresh pages.
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

// Packed rows and their tiles.
struct Packed {
  Tiles tiles;
  int64_t words;  // per row
  std::unique_ptr<int32_t[]> x;
  std::unique_ptr<RowScale[]> scales;
};

template <typename K, typename T> Packed pack_rows(Pass& pass, const Call<T>& c) {
  const int64_t words = ceil_div(c.in, K::kGroup) * K::kWords;
  Packed packed{Tiles(c.n), words, std::unique_ptr<int32_t[]>(new int32_t[c.n * words]),
                std::unique_ptr<RowScale[]>(new RowScale[c.n])};
  pass.run(packed.tiles.count, 1, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; t++) {
      const int64_t start = packed.tiles.start(t), rows = packed.tiles.rows(t);
      for (int64_t r = 0; r < rows; r++)
        packed.scales[start + r] =
            K::pack_row(row_of(c, start + r), c.in, rows * K::kWords, packed.x.get() + start * words + r * K::kWords);
    }
  });
  return packed;
}

// Calls run(first_tile, last_tile, panel) for every panel, one block of rows at a time.
template <typename Run> void over_panels(Pass& pass, const Packed& packed, int64_t panels, const Run& run) {
  const int64_t fitting = kBlockBytes / (packed.words * int64_t(sizeof(int32_t)) * kTileRows);
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

// Combines outputs [gate | up] into activation(gate) * up.
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

// Calls run(kind, type) with the types of that kind and storage.
template <typename Run> void with_kind(int64_t kind, int is_bf16, const Run& run) {
  if (kind == kFloat32) return run(Float32(), float());
  if (kind == kBfloat16) return run(Bfloat16(), uint16_t());
  return is_bf16 ? run(Int8(), uint16_t()) : run(Int8(), float());
}

template <typename T>
Call<T> make_call(const Linear& layer, const void* x, const Norm* norm, void* y, int64_t n) {
  return {(const T*)x, norm, (const char*)layer.packed, layer.scales, (const T*)layer.bias, (T*)y, n, layer.in, layer.out};
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------
// Called by forward.cpp.

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
// The C ABI. `kind`: 0 bfloat16, 1 int8, 2 float32. `is_bf16` selects the storage type of weight, x, bias and y.

extern "C" {

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
