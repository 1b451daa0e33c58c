// Linear layers, y = x W^T + b, in float32, bfloat16 or int8 (products.h), on any processor.
//
// W is packed once into panels of kPanel outputs: [out / kPanel][in / group][kPanel][group], where a group is the
// inputs that 4 bytes hold, or for tiles into [out / kPanel][step][2][groups of a step][kPanel / 2][group]. A call packs x
// into row tiles, whose form depends on the instructions: linear_vectors.h, linear_tiles.h, linear_matrices.h. An output is
// one chain of additions, the same for every number of rows: the result of a row depends neither on its position among them
// nor on the threads.
//
// A call can norm its input rows first, and can combine outputs that are gates and values into one.
//
// int8: W has one scale per output and is stored as w + 128 (VNNI and AMX multiply unsigned by signed), x has one scale per
// row. The excess 128 * sum(x) is subtracted at the end.
#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "linear_4bit.h"
#include "linear_matrices.h"

namespace {

constexpr int64_t kAlignment = 64;         // of packed rows
constexpr int64_t kAlignedWords = kAlignment / int64_t(sizeof(int32_t));
constexpr int64_t kSerialWork = 1 << 20;    // multiply-adds below which waking other threads costs more than they save

// Groups of a panel: whole weight tiles, or pairs, where the kind is multiplied on tiles or matrices.
INLINE int64_t groups_of(int64_t kind, int64_t in) {
  const int64_t groups = ceil_div(in, group_of(kind));
#if QUIRE_HAS_TILES
  if (kind == kBfloat16 && has_few_groups(in)) return tiles::kFewGroups;
  if (kind != kFloat32) return ceil_div(groups, tiles::kGroups) * tiles::kGroups;
#elif QUIRE_HAS_MATRICES
  if (kind != kFloat32) return ceil_div(groups, 2) * 2;
#endif
  return groups;
}

// The place of group `g` of output `o` in a panel of `groups` groups.
INLINE int64_t group_offset(int64_t kind, int64_t groups, int64_t g, int64_t o) {
#if QUIRE_HAS_TILES
  if (kind != kFloat32) return tiles_offset(groups, g, o);
#endif
  return (g * kPanel + o) * kGroupBytes;
}

// Between a group and the next one of the same output, of the same weight tile.
INLINE int64_t group_stride(int64_t kind) {
#if QUIRE_HAS_TILES
  if (kind != kFloat32) return tiles::kRowBytes;
#endif
  return kPanel * kGroupBytes;
}

INLINE int64_t panel_bytes(int64_t kind, int64_t in) { return groups_of(kind, in) * kPanel * kGroupBytes; }

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

// One panel from `outs` rows [outs][groups] of 4-byte groups. The outputs beyond those become 0. Some groups of all rows, then
// the next ones: the lines that they fill stay in the first-level cache.
void pack_panel(int64_t kind, const char* rows, int64_t groups, int64_t outs, char* panel) {
  constexpr int64_t kAtOnce = 16;  // those of a weight tile
  if (outs < kPanel) memset(panel, 0, groups * kPanel * kGroupBytes);
  for (int64_t first = 0; first < groups; first += kAtOnce)
    for (int64_t o = 0; o < outs; o++) {
      const char* from = rows + (o * groups + first) * kGroupBytes;
      char* to = panel + group_offset(kind, groups, first, o);
      for (int64_t g = first; g < std::min(groups, first + kAtOnce); g++) {
        memcpy(to, from, kGroupBytes);
        from += kGroupBytes;
        to += group_stride(kind);
      }
    }
}

// The rows of a panel in whole groups, all zeros.
std::vector<char> rows_of_groups(int64_t kind, int64_t groups) {
  return std::vector<char>(kPanel * groups * kGroupBytes, kind == kInt8 ? char(128) : char(0));
}

template <typename T>
void pack_weight(int kind, const T* weight, int64_t out, int64_t in, float* scales, char* packed, int threads) {
  const int64_t groups = groups_of(kind, in);
  Pass(threads).run(ceil_div(out, kPanel), 1, [&](int64_t begin, int64_t end) {
    std::vector<char> rows = rows_of_groups(kind, groups);
    for (int64_t p = begin; p < end; p++) {
      const int64_t first = p * kPanel, outs = std::min<int64_t>(kPanel, out - first);
      for (int64_t o = 0; o < outs; o++) {
        char* row = rows.data() + o * groups * kGroupBytes;
        const T* from = weight + (first + o) * in;
        if (kind == kInt8)
          scales[first + o] = quantize_weight(from, in, (uint8_t*)row);
        else
          memcpy(row, from, in * sizeof(T));
      }
      pack_panel(kind, rows.data(), groups, outs, packed + p * panel_bytes(kind, in));
    }
  });
}

// Packs int8 weights as they are; their scales are the caller's.
void pack_steps(const int8_t* weight, int64_t out, int64_t in, char* packed, int threads) {
  const int64_t groups = groups_of(kInt8, in);
  Pass(threads).run(ceil_div(out, kPanel), 1, [&](int64_t begin, int64_t end) {
    std::vector<char> rows = rows_of_groups(kInt8, groups);
    for (int64_t p = begin; p < end; p++) {
      const int64_t first = p * kPanel, outs = std::min<int64_t>(kPanel, out - first);
      for (int64_t o = 0; o < outs; o++)
        for (int64_t i = 0; i < in; i++)
          rows[o * groups * kGroupBytes + i] = char(weight[(first + o) * in + i] + 128);
      pack_panel(kInt8, rows.data(), groups, outs, packed + p * panel_bytes(kInt8, in));
    }
  });
}

// Packs 4-bit codes [out][in], with scales and zeros [out][units]; fp4 has no zeros.
void pack_4bits(bool is_fp4, const uint8_t* codes, const uint16_t* scales, const uint8_t* zeros, int64_t out, int64_t in,
                int64_t unit, char* packed, int threads) {
  const int64_t units = units_of(in, unit);
  Pass(threads).run(ceil_div(out, kPanel), 1, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; p++) {
      const int64_t first = p * kPanel, outs = std::min<int64_t>(kPanel, out - first);
      pack_panel_4bit(is_fp4, codes + first * in, scales + first * units, zeros ? zeros + first * units : nullptr, in, unit,
                      outs, packed + p * panel_bytes_4bit(is_fp4, in, unit));
    }
  });
}

// ---------------------------------------------------------------------------------------------------------------
// Multiplying.

// Memory of a thread, kept between calls because allocating would fault in fresh pages.
template <typename T> T* buffer_of_thread(int64_t count) {
  thread_local std::vector<T> buffer;
  if (int64_t(buffer.size()) < count) buffer.resize(count);
  return buffer.data();
}

template <typename T> const T* plain_row(const Call<T>& c, int64_t row) {
  if (!c.norm) return c.x + (c.rows ? c.rows[row] : row) * c.x_stride;
  T* normed = buffer_of_thread<T>(c.in);
  add_norm_row(*c.norm, row, normed, c.in);
  return normed;
}

template <typename T> const T* row_of(const Call<T>& c, int64_t row) {
  const T* x = plain_row(c, row);
  if (!c.order) return x;
  thread_local std::vector<T> ordered;
  ordered.resize(c.in);
  for (int64_t i = 0; i < c.in; i++) ordered[i] = x[c.order[i]];
  return ordered.data();
}

// Calls that run in the same phases. More than one: the experts of a layer, or adapters, each with its own rows.
template <typename T> using Calls = std::vector<Call<T>>;

// Numbers the parts of several calls.
struct Numbers {
  std::vector<int64_t> ends;  // one past the last part of each call

  void add(int64_t count) { ends.push_back(count + total()); }
  int64_t total() const { return ends.empty() ? 0 : ends.back(); }
  int64_t call_of(int64_t part) const { return std::upper_bound(ends.begin(), ends.end(), part) - ends.begin(); }
  int64_t first(int64_t call) const { return call ? ends[call - 1] : 0; }
};

// Memory for the packed rows of the calling thread's current calls, for all threads that share them.
inline int32_t* memory_for_rows(int64_t count) {
  thread_local std::vector<int32_t> memory;
  const size_t words = count + kAlignment / sizeof(int32_t);
  if (memory.size() < words) memory.resize(words);
  return (int32_t*)((uintptr_t(memory.data()) + kAlignment - 1) / kAlignment * kAlignment);
}

template <typename K, typename T>
std::vector<Packed> pack_rows(Pass& pass, const Calls<T>& calls, std::vector<RowScale>& scales) {
  std::vector<Packed> packed;
  Numbers tiles, rows;
  int64_t words = 0;
  for (const Call<T>& c : calls) {
    packed.push_back({RowTiles(c.n, K::kTileRows), words, nullptr, nullptr});
    tiles.add(packed.back().tiles.count);
    rows.add(c.n);
    words += ceil_div(K::packed_rows(packed.back().tiles) * K::words_per_row(c.in, c.unit), kAlignedWords) * kAlignedWords;
  }
  int32_t* memory = memory_for_rows(words);
  scales.resize(rows.total());
  for (size_t i = 0; i < calls.size(); i++)
    packed[i].x = memory + packed[i].offset, packed[i].scales = scales.data() + rows.first(i);
  pass.run(tiles.total(), 1, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; t++) {
      const int64_t i = tiles.call_of(t), tile = t - tiles.first(i);
      const Packed& p = packed[i];
      for (int r = 0; r < p.tiles.rows(tile); r++) {
        const int64_t row = p.tiles.start(tile) + r;
        scales[rows.first(i) + row] =
            K::pack_row(row_of(calls[i], row), calls[i].in, calls[i].unit, p.tiles, tile, r, memory + p.offset);
      }
    }
  });
  return packed;
}

constexpr int64_t kPartBytes = 1 << 20;  // of weights: reading them takes about 60 us

// Panels of a part: some parts for each thread, which are so small that no thread waits long for the last one.
INLINE int64_t grain_of(int64_t panels, int64_t panel_bytes, int threads) {
  return std::max<int64_t>(1, std::min(panels / (8 * threads), kPartBytes / panel_bytes));
}

// The parts of a call: blocks of at most `block` row tiles, times groups of at most `grain` panels.
struct Division {
  int64_t block, grain, panels;

  int64_t groups() const { return ceil_div(panels, grain); }
};

// Calls run(call, first_tile, last_tile, panel) for all panels of each call, one block of rows at a time.
template <typename K, typename T, typename Run>
void over_panels(Pass& pass, const Calls<T>& calls, const std::vector<Packed>& packed, int64_t outputs_per_panel,
                 const Run& run) {
  Numbers numbers;
  std::vector<Division> divisions;
  for (size_t i = 0; i < calls.size(); i++) {
    const int64_t row_bytes = K::words_per_row(calls[i].in, calls[i].unit) * int64_t(sizeof(int32_t));
    const int64_t panels = ceil_div(calls[i].out, outputs_per_panel);
    divisions.push_back({std::clamp<int64_t>(K::kBlockBytes / (row_bytes * K::kTileRows), 1, kBlockTiles),
                         grain_of(panels, row_bytes * outputs_per_panel, pass.threads), panels});
    numbers.add(ceil_div(packed[i].tiles.count, divisions[i].block) * divisions[i].groups());
  }
  pass.run(numbers.total(), 1, [&](int64_t begin, int64_t end) {
    [[maybe_unused]] typename K::Scope scope{};
    [[maybe_unused]] bool has_few = false;
    for (int64_t part = begin; part < end; part++) {
      const int64_t call = numbers.call_of(part), i = part - numbers.first(call);
      const Division d = divisions[call];
      K::configure(scope, calls[call].in, has_few);
      const int64_t first = i / d.groups() * d.block, last = std::min(first + d.block, packed[call].tiles.count);
      const int64_t start = i % d.groups() * d.grain;
      for (int64_t panel = start; panel < std::min(start + d.grain, d.panels); panel++) run(call, first, last, panel);
    }
    end_stream();
  });
}

// Whether outputs [n, width] are too large for the caches.
template <typename K, typename T> bool is_streamed(const Call<T>& c, int64_t width) {
  return c.n * width * int64_t(sizeof(T)) > K::kStreamedBytes;
}

template <typename K, typename T> void multiply_all(Pass& pass, const Calls<T>& calls) {
  std::vector<RowScale> scales;
  const std::vector<Packed> packed = pack_rows<K>(pass, calls, scales);
  over_panels<K>(pass, calls, packed, kPanel, [&](int64_t call, int64_t first, int64_t last, int64_t panel) {
    const Call<T>& c = calls[call];
    const int64_t count = std::min<int64_t>(kPanel, c.out - panel * kPanel);
    const bool is_past_caches = !c.adds && is_streamed<K>(c, c.out);
    const Target<T> target{c.y + panel * kPanel, c.y_stride, count, nullptr, kSilu, is_past_caches, c.y_rows, c.adds};
    const int64_t following = (panel + 1) * kPanel < c.out ? panel + 1 : kNoPanel;
    multiply_panel(K(), c, packed[call], first, last, {panel, following}, target);
  });
}

// Combines outputs [gate | up] into activation(gate) * up.
template <typename K, typename T> void multiply_gated(Pass& pass, const Calls<T>& calls, Activation activation) {
  std::vector<RowScale> scales;
  const std::vector<Packed> packed = pack_rows<K>(pass, calls, scales);
  over_panels<K>(pass, calls, packed, 2 * kPanel, [&](int64_t call, int64_t first, int64_t last, int64_t panel) {
    const Call<T>& c = calls[call];
    const RowTiles& tiles = packed[call].tiles;
    const int64_t inner = c.out / 2, panels = inner / kPanel;
    const int64_t start = tiles.start(first), rows = tiles.start(last) - start;
    T* gates = buffer_of_thread<T>(rows * kPanel) - start * kPanel;
    const Target<T> to_gates{gates, kPanel, kPanel, nullptr, activation, false};
    const Target<T> to_y{c.y + panel * kPanel, inner, kPanel, gates, activation, is_streamed<K>(c, inner)};
    multiply_panel(K(), c, packed[call], first, last, {panel, panels + panel}, to_gates);
    multiply_panel(K(), c, packed[call], first, last, {panels + panel, panel + 1}, to_y);
  });
}

template <typename Run> void with_4bits(int64_t kind, int is_bf16, const Run& run) {
#if QUIRE_HAS_TILES
  typedef OnTiles<TiledFourBits<false>> Int4;
  typedef OnTiles<TiledFourBits<true>> Fp4;
#else
  typedef FourBits<1, false> Int4;
  typedef FourBits<1, true> Fp4;
#endif
  if (kind == kInt4) return is_bf16 ? run(Int4(), uint16_t()) : run(FourBits<2, false>(), float());
  is_bf16 ? run(Fp4(), uint16_t()) : run(FourBits<2, true>(), float());
}

// Calls run(kind, type) with the types of that kind and storage.
template <typename Run> void with_kind(int64_t kind, int is_bf16, const Run& run) {
  if (kind == kInt4 || kind == kFp4) return with_4bits(kind, is_bf16, run);
#if QUIRE_HAS_TILES
  typedef OnTiles<TiledBfloat16> OfBfloat16;
  typedef OnTiles<TiledInt8> OfInt8;
#elif QUIRE_HAS_MATRICES
  typedef OnMatrices<MatrixBfloat16> OfBfloat16;
  typedef OnMatrices<MatrixInt8> OfInt8;
#else
  typedef OnVectors<Bfloat16> OfBfloat16;
  typedef OnVectors<Int8> OfInt8;
#endif
  if (kind == kFloat32) return run(OnVectors<Float32>(), float());
  if (kind == kBfloat16) return run(OfBfloat16(), uint16_t());
  return is_bf16 ? run(OfInt8(), uint16_t()) : run(OfInt8(), float());
}

template <typename T> Call<T> call_of(const LinearRows& p, const Norm* norm = nullptr) {
  const Linear& layer = *p.layer;
  return {(const T*)p.x, norm, p.rows, (const char*)layer.packed, layer.scales, (const T*)layer.bias, (T*)p.y, p.n,
          layer.in, layer.out, p.x_stride ? p.x_stride : layer.in, p.y_stride ? p.y_stride : layer.out, p.y_rows, p.adds,
          layer.unit, layer.order};
}

template <typename T> Calls<T> calls_of(const std::vector<LinearRows>& parts) {
  Calls<T> calls;
  for (const LinearRows& p : parts) calls.push_back(call_of<T>(p));
  return calls;
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------
// Called by forward.cpp.

void linear(Pass& pass, int is_bf16, const Linear& layer, const void* x, void* y, int64_t n) {
  with_kind(layer.kind, is_bf16, [&](auto kind, auto type) {
    multiply_all<decltype(kind)>(pass, Calls<decltype(type)>{call_of<decltype(type)>({&layer, x, nullptr, y, n})});
  });
}

void linear_of_norm(Pass& pass, int is_bf16, const Linear& layer, const Norm& norm, void* y, int64_t n) {
  with_kind(layer.kind, is_bf16, [&](auto kind, auto type) {
    multiply_all<decltype(kind)>(pass, Calls<decltype(type)>{call_of<decltype(type)>({&layer, nullptr, nullptr, y, n}, &norm)});
  });
}

void gated_linear_of_norm(Pass& pass, int is_bf16, const Linear& layer, const Norm& norm, Activation activation, void* y,
                          int64_t n) {
  with_kind(layer.kind, is_bf16, [&](auto kind, auto type) {
    multiply_gated<decltype(kind)>(
        pass, Calls<decltype(type)>{call_of<decltype(type)>({&layer, nullptr, nullptr, y, n}, &norm)}, activation);
  });
}

void grouped_linear(Pass& pass, int is_bf16, const std::vector<LinearRows>& parts) {
  with_kind(parts[0].layer->kind, is_bf16, [&](auto kind, auto type) {
    multiply_all<decltype(kind)>(pass, calls_of<decltype(type)>(parts));
  });
}

void grouped_gated_linear(Pass& pass, int is_bf16, const std::vector<LinearRows>& parts, Activation activation) {
  with_kind(parts[0].layer->kind, is_bf16, [&](auto kind, auto type) {
    multiply_gated<decltype(kind)>(pass, calls_of<decltype(type)>(parts), activation);
  });
}

// ---------------------------------------------------------------------------------------------------------------
// The C ABI. `kind`: 0 bfloat16, 1 int8, 2 float32, 3 int4, 4 E2M1. `is_bf16` selects the storage type of weight, x, bias and y.

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

void quire_linear_pack_steps(const int8_t* weight, int64_t out, int64_t in, void* packed, int threads) {
  pack_steps(weight, out, in, (char*)packed, threads);
}

int64_t quire_linear_4bit_bytes(int kind, int64_t out, int64_t in, int64_t unit) {
  return ceil_div(out, kPanel) * panel_bytes_4bit(kind == kFp4, in, unit);
}

void quire_linear_4bit_pack(int kind, const uint8_t* codes, const uint16_t* scales, const uint8_t* zeros, int64_t out,
                            int64_t in, int64_t unit, void* packed, int threads) {
  pack_4bits(kind == kFp4, codes, scales, zeros, out, in, unit, (char*)packed, threads);
}

void quire_linear(int is_bf16, const Linear* layer, const void* x, void* y, int64_t n, int threads) {
  Pass pass(n * layer->in * layer->out > kSerialWork ? threads : 1);
  linear(pass, is_bf16, *layer, x, y, n);
}
}
