// Linear layers whose weights stay in 4 bits: w = (code - zero) * scale, or E2M1 (`kFp4`) times a scale.
//
// A unit is `Linear::unit` inputs (a multiple of 8, at most 128) of an output, which have one scale and one zero. A panel is
// [unit][word of 8 codes][kPanel] words, then [unit][kPanel] scales in 16 bits, then [unit][kPanel] zeros in 8 bits, in whole
// cache lines. `kFp4` has scales of 8 bits, which are the exponents of floats, and no zeros. Bits 4 k of a word have input
// 2 k, and bits 16 + 4 k have input 2 k + 1.
//
// On vectors, each unit of a row of x is in fixed point: x = X * 2^e with |X| < 2^14, where e belongs to the largest
// magnitude of the unit. So bfloat16 numbers within a factor of 64 of the largest one are exact. float32 has a second part of
// 14 more bits. The sum of X * (code - zero) is an integer and exact, whatever instructions compute it. An output adds
// sum * (2^e * scale) of its units strictly in order. A row with a unit that is not finite becomes NaN.
//
// On tiles, bfloat16 weights are what a conversion of the checkpoint gives: (code - zero) * scale in float32, rounded to
// bfloat16. Some steps of a panel are widened at a time, and stay in the first-level cache while all rows use them.
//
// Packed rows: [tile][unit]{[rows] 2^e, [parts][rows] sums of X, [pair of inputs][rows][parts] X}.
#pragma once
#include "linear_tiles.h"
#include "linear_vectors.h"

namespace {

constexpr int kWordInputs = 8;
constexpr int kFp4ZeroStep = 12;  // the step of 0; see `kFp4Steps`
constexpr int64_t kMaxUnit = 128;
constexpr int kFixedBits = 14;                    // of the magnitude of X
constexpr uint32_t kInfinity = 0x7f800000, kLeastExponent = 40;  // as bits; units of x below 2^-87 have that of 2^-87
constexpr float kRounding = 12582912.f;           // adding it rounds to the nearest integer, ties to even

INLINE int64_t units_of(int64_t in, int64_t unit) { return ceil_div(in, unit); }
INLINE int64_t word_bytes(int64_t in, int64_t unit) {
  return units_of(in, unit) * unit / kWordInputs * kPanel * int64_t(sizeof(uint32_t));
}
INLINE int64_t panel_bytes_4bit(bool is_fp4, int64_t in, int64_t unit) {
  return word_bytes(in, unit) + ceil_div(units_of(in, unit) * kPanel * (is_fp4 ? 1 : 3), kLine) * kLine;
}

INLINE Ints load_bytes(const uint8_t* p) {
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
  return Ints{p[0], p[1], p[2], p[3]};
#endif
}

// A panel. `index` is unit * kPanel + the first of kWidth outputs.
template <bool kIsFp4> struct Panel4 {
  const char* words;
  const uint8_t *scales, *zeros;

  Panel4(const char* panel, int64_t in, int64_t unit)
      : words(panel), scales((const uint8_t*)panel + word_bytes(in, unit)),
        zeros(scales + units_of(in, unit) * kPanel * sizeof(uint16_t)) {}

  // In 16 bits: (1 + m / 1024) * 2^(e - 48) with 6 bits e and 10 bits m. All positive float16 are among these numbers.
  INLINE Floats scale(int64_t index) const {
    if constexpr (kIsFp4) return (Floats)((Words)load_bytes(scales + index) << 23);
    Halves x;
    memcpy(&x, scales + index * sizeof(uint16_t), sizeof x);
    return (Floats)((__builtin_convertvector(x, Words) << 13) + (79u << 23));
  }

  INLINE Ints zero(int64_t index) const {
    if constexpr (kIsFp4) return Ints{} + kFp4ZeroStep;
    return load_bytes(zeros + index);
  }
};

// Twice the values of E2M1, less the smallest one, in ascending order.
alignas(16) constexpr uint8_t kFp4Steps[16] = {0, 4, 6, 8, 9, 10, 11, 12, 13, 14, 15, 16, 18, 20, 24, 0};

// Per byte: the step of its code.
INLINE Words fp4_steps(Words codes) {
#if defined(__AVX512BW__)
  const __m512i table = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)kFp4Steps));
  return (Words)_mm512_shuffle_epi8(table, (__m512i)codes);
#elif defined(__AVX2__)
  const __m256i table = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)kFp4Steps));
  return (Words)_mm256_shuffle_epi8(table, (__m256i)codes);
#elif defined(__aarch64__)
  return (Words)vqtbl1q_u8(vld1q_u8(kFp4Steps), (uint8x16_t)codes);
#else
  uint8_t bytes[sizeof codes];
  memcpy(bytes, &codes, sizeof codes);
  for (uint8_t& byte : bytes) byte = kFp4Steps[byte];
  memcpy(&codes, bytes, sizeof codes);
  return codes;
#endif
}

// Inputs 2 k and 2 k + 1 of words, as steps in the low and the high half of each lane.
template <bool kIsFp4> INLINE Words steps_of(Words words, int k) {
  const Words codes = words >> (4 * k) & 0x000f000fu;
  return kIsFp4 ? fp4_steps(codes) : codes;
}

// sum + low halves + high halves of the products of signed 16-bit numbers.
INLINE Ints add_halves(Ints sum, Ints w, Ints x) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)w, (__m512i)x);
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
  return (Ints)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)w, (__m256i)x);
#else
  return sum + multiply_halves(w, x);
#endif
}

INLINE float float_of_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

INLINE int32_t bits_of_float(float x) {
  int32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

// kParts: 1 for rows in bfloat16, 2 for float32.
template <int kParts> struct FixedUnit {
  int16_t x[kParts][kMaxUnit];
  int32_t sums[kParts];
  float factor;

  // `unit` inputs of which `count` are given.
  template <typename T> void set(const T* given, int64_t count, int64_t unit) {
    float values[kMaxUnit] = {};
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) store16(values + i, load16(given + i));
    for (; i < count; i++) values[i] = to_float(given[i]);
    const uint32_t top = largest_bits(values, unit), exponent = std::max(top >> 23, kLeastExponent);
    const bool is_finite = top < kInfinity;
    const float up = is_finite ? float_of_bits((254 + kFixedBits - 1 - exponent) << 23) : 0.f;
    factor = is_finite ? float_of_bits((exponent - kFixedBits * kParts + 1) << 23) : std::numeric_limits<float>::quiet_NaN();
    round(values, unit, up);
  }

 private:
  static uint32_t largest_bits(const float* values, int64_t unit) {
    i16 tops{};
    for (int64_t i = 0; i < unit; i += kLanes) {
      const i16 size = (i16)load16(values + i) & 0x7fffffff;
      tops = select(size > tops, size, tops);
    }
    int32_t top = 0;
    for (int lane = 0; lane < kLanes; lane++) top = std::max(top, int32_t(tops[lane]));
    return uint32_t(top);
  }

  void round(const float* values, int64_t unit, float up) {
    i16 totals[kParts] = {};
    for (int64_t i = 0; i < unit; i += kLanes) {
      v16 rest = load16(values + i) * up;
      rest = select(rest == rest, rest, v16{});  // infinity times 0
      for (int p = 0; p < kParts; p++) {
        const v16 whole = (rest + kRounding) - kRounding;
        const i16 q = to_ints(whole);
        totals[p] += q;
        rest = (rest - whole) * float(1 << kFixedBits);
        for (int lane = 0; lane < kLanes; lane++) x[p][i + lane] = int16_t(q[lane]);
      }
    }
    for (int p = 0; p < kParts; p++) {
      sums[p] = 0;
      for (int lane = 0; lane < kLanes; lane++) sums[p] += totals[p][lane];
    }
  }
};

template <int kNumParts, bool kIsFp4> struct FourBits {
  static constexpr int kParts = kNumParts;
  static constexpr int kTileRows = kWidth == 16 ? 12 / kParts : kSums == 20 ? 5 / kParts : kParts == 1 ? 5 : 3;
  static constexpr int64_t kBlockBytes = 512 << 10;
  static constexpr int64_t kStreamedBytes = std::numeric_limits<int64_t>::max();
  struct Scope {};
  static void configure(Scope&, int64_t, bool&) {}

  static int64_t words_per_unit(int64_t unit) { return 1 + kParts + kParts * unit / 2; }
  static int64_t words_per_row(int64_t in, int64_t unit) { return units_of(in, unit) * words_per_unit(unit); }
  static int64_t packed_rows(const RowTiles& tiles) { return tiles.n; }

  template <typename T>
  static RowScale pack_row(const T* x, int64_t in, int64_t unit, const RowTiles& tiles, int64_t tile, int row,
                           int32_t* packed) {
    const int64_t rows = tiles.rows(tile);
    int32_t* to = packed + tiles.start(tile) * words_per_row(in, unit) + row;
    FixedUnit<kParts> fixed;
    for (int64_t i = 0; i < in; i += unit, to += rows * words_per_unit(unit)) {
      fixed.set(x + i, std::min(unit, in - i), unit);
      to[0] = bits_of_float(fixed.factor);
      for (int p = 0; p < kParts; p++) to[(1 + p) * rows] = fixed.sums[p];
      int32_t* pairs = to - row + (1 + kParts) * rows + row * kParts;
      for (int64_t pair = 0; pair < unit / 2; pair++)
        for (int p = 0; p < kParts; p++) memcpy(pairs + pair * rows * kParts + p, fixed.x[p] + 2 * pair, 4);
    }
    return {1.f, 0};
  }

  static INLINE v16 finish(const int32_t* sums, RowScale, const float*) { return load16((const float*)sums); }
};

template <typename K> constexpr int vectors_at_once_4bit(int rows) {
  int vectors = 1;
  while (vectors < kVectors && rows * vectors * 2 * K::kParts <= kSums) vectors *= 2;
  return vectors;
}

// The sums of one unit times its scales, added to sums [R, kPanel] of floats.
template <int kParts, bool kIsFp4, int R, int V>
INLINE void add_unit(const Ints (&sum)[R][V][kParts], const int32_t* x, const Panel4<kIsFp4>& panel, int64_t index,
                     float* sums) {
  for (int v = 0; v < V; v++) {
    const Floats scale = panel.scale(index + v * kWidth);
    const Ints zero = panel.zero(index + v * kWidth);
    for (int r = 0; r < R; r++) {
      Floats y = __builtin_convertvector(sum[r][v][0] - zero * x[R + r], Floats);
      if constexpr (kParts == 2) {
        const Floats low = __builtin_convertvector(sum[r][v][1] - zero * x[2 * R + r], Floats);
        y = y * float(1 << kFixedBits) + low;
      }
      float* to = sums + r * kPanel + v * kWidth;
      store_floats(to, fma_floats(y, scale * splat_floats(x[r]), load_floats(to)));
    }
  }
}

// R rows times V vectors of a panel, from its vector `first` on. kLines lines per word are fetched from `ahead`: to the
// first-level cache if one row uses them, else to the second level, since the first one has the rows.
template <int kParts, bool kIsFp4, int R, int V, int kLines>
void multiply_units(const Panel4<kIsFp4>& panel, int first, const int32_t* x, int64_t units, int64_t words, const char* ahead,
                    float* sums) {
  constexpr int kLevel = kLines == 2 ? 3 : 2;
  const char* w = panel.words + first * kWidth * kGroupBytes;
  for (int64_t u = 0; u < units; u++) {
    Ints sum[R][V][kParts] = {};
    const int32_t* pairs = x + R * (1 + kParts);
    for (int64_t i = 0; i < words; i++, w += kPanel * kGroupBytes, ahead += kLines * kLine) {
      Words codes[V];
      for (int v = 0; v < V; v++) codes[v] = load_words(w + v * kWidth * kGroupBytes);
      for (int line = 0; line < kLines; line++) __builtin_prefetch(ahead + line * kLine, 0, kLevel);
#pragma GCC unroll 4
      for (int k = 0; k < kWordInputs / 2; k++, pairs += R * kParts) {
        Ints steps[V];
        for (int v = 0; v < V; v++) steps[v] = (Ints)steps_of<kIsFp4>(codes[v], k);
        for (int r = 0; r < R; r++)
          for (int p = 0; p < kParts; p++) {
            const Ints pair = pairs[r * kParts + p] + Ints{};
            for (int v = 0; v < V; v++) sum[r][v][p] = add_halves(sum[r][v][p], steps[v], pair);
          }
      }
    }
    add_unit<kParts, kIsFp4, R, V>(sum, x, panel, u * kPanel + first * kWidth, sums + first * kWidth);
    asm volatile("" ::: "memory");  // the compiler would keep `sums` in the registers that products need
    x = pairs;
  }
}

// Fetches the scales and zeros of a panel, which are behind its words.
template <bool kIsFp4> INLINE void fetch_scales(const char* panel, int64_t units, int64_t words) {
  const char* scales = panel + units * words * kPanel * kGroupBytes;
  for (int64_t at = 0; at < units * kPanel * (kIsFp4 ? 1 : 3); at += kLine) __builtin_prefetch(scales + at, 0, 3);
}

// R rows, tile number `tile` of `tiles`, times a panel. As in multiply_tile, the first two passes fetch the next panel.
template <int kParts, bool kIsFp4, int R>
void multiply_tile_4bit(const Panel4<kIsFp4>& panel, const int32_t* x, int64_t units, int64_t words, const char* ahead,
                        int64_t tile, int64_t tiles, float* sums) {
  constexpr int V = vectors_at_once_4bit<FourBits<kParts, kIsFp4>>(R), kPasses = kVectors / V;
  for (int i = 0; i < R * kPanel; i += kWidth) store_floats(sums + i, Floats{});
  if (tile == 0) fetch_scales<kIsFp4>(ahead, units, words);
  for (int part = 0; part < kPasses; part++) {
    const int64_t pass = tile * kPasses + part;
    if (kPasses == 1 && tiles == 1)
      multiply_units<kParts, kIsFp4, R, V, 2>(panel, part * V, x, units, words, ahead, sums);
    else if (pass < 2)
      multiply_units<kParts, kIsFp4, R, V, 1>(panel, part * V, x, units, words, ahead + pass * units * words * kLine, sums);
    else
      multiply_units<kParts, kIsFp4, R, V, 0>(panel, part * V, x, units, words, ahead, sums);
  }
}

template <int kParts, bool kIsFp4, int R = FourBits<kParts, kIsFp4>::kTileRows>
INLINE void multiply_4bit(int rows, const Panel4<kIsFp4>& panel, const int32_t* x, int64_t units, int64_t words,
                          const char* ahead, int64_t tile, int64_t tiles, float* sums) {
  if (rows == R) return multiply_tile_4bit<kParts, kIsFp4, R>(panel, x, units, words, ahead, tile, tiles, sums);
  if constexpr (R > 1) multiply_4bit<kParts, kIsFp4, R - 1>(rows, panel, x, units, words, ahead, tile, tiles, sums);
}

// Rows of [first_tile, last_tile) times one panel.
template <int kParts, bool kIsFp4, typename T>
void multiply_panel(FourBits<kParts, kIsFp4>, const Call<T>& c, const Packed& packed, int64_t first_tile,
                    int64_t last_tile, Panels panels, const Target<T>& target) {
  typedef FourBits<kParts, kIsFp4> Kind;
  const int64_t bytes = panel_bytes_4bit(kIsFp4, c.in, c.unit);
  const Panel4<kIsFp4> panel(c.weight + panels.panel * bytes, c.in, c.unit);
  const char* ahead = panels.following == kNoPanel ? panel.words : c.weight + panels.following * bytes;
  float sums[Kind::kTileRows * kPanel];
  for (int64_t t = first_tile; t < last_tile; t++) {
    const int rows = packed.tiles.rows(t);
    const int64_t row = packed.tiles.start(t);
    multiply_4bit<kParts, kIsFp4>(rows, panel, packed.x + row * Kind::words_per_row(c.in, c.unit),
                                  units_of(c.in, c.unit), c.unit / kWordInputs, ahead, t - first_tile,
                                  last_tile - first_tile, sums);
    store_tile<Kind>(c, target, (const int32_t*)sums, packed.scales, row, rows, panels.panel * kPanel);
  }
}

#if QUIRE_HAS_TILES

template <bool kIsFp4> struct TiledFourBits : TiledBfloat16 {
  static constexpr bool kHasFewGroups = false;
};

// Two floats as bfloat16 in the low and the high half of each lane.
INLINE Words bfloat16_pairs(Floats low, Floats high) {
#if QUIRE_HAS_DOTS
  const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
  const __m512i lanes = (__m512i)(Words)lane_numbers();
  return (Words)_mm512_permutexvar_epi16(_mm512_or_si512(lanes, _mm512_slli_epi32(_mm512_add_epi32(lanes, _mm512_set1_epi32(16)), 16)), both);
#else
  const Words a = (Words)low, b = (Words)high;
  return (a + 0x7fffu + (a >> 16 & 1u)) >> 16 | ((b + 0x7fffu + (b >> 16 & 1u)) & 0xffff0000u);
#endif
}

// The weight tiles of one word of a panel: four groups of all outputs, from `to` on.
template <bool kIsFp4> INLINE void widen_word(const Panel4<kIsFp4>& panel, const char* words, int64_t index, char* to) {
  for (int v = 0; v < kVectors; v++) {
    const Words codes = load_words(words + v * kWidth * kGroupBytes);
    const Floats scale = panel.scale(index + v * kWidth);
    const Ints zero = panel.zero(index + v * kWidth);
    const int output = v * kWidth;
    char* tile = to + output / tiles::kColumns * tiles::kBytes + output % tiles::kColumns * kGroupBytes;
    for (int k = 0; k < kWordInputs / 2; k++) {
      const Words steps = steps_of<kIsFp4>(codes, k);
      const Floats low = __builtin_convertvector((Ints)(steps & 0xffffu) - zero, Floats) * scale;
      const Floats high = __builtin_convertvector((Ints)(steps >> 16) - zero, Floats) * scale;
      const Words pairs = bfloat16_pairs(low, high);
      memcpy(tile + k * tiles::kRowBytes, &pairs, sizeof pairs);
    }
  }
}

constexpr int kStepWords = 2 * tiles::kGroups / kWordInputs;

// Steps [first, first + count) of a panel as weight tiles.
template <bool kIsFp4>
void widen_steps(const Panel4<kIsFp4>& panel, int64_t in, int64_t unit, int64_t first, int64_t count, char* to) {
  const int64_t words = units_of(in, unit) * unit / kWordInputs, per_unit = unit / kWordInputs;
  for (int64_t i = first * kStepWords; i < (first + count) * kStepWords; i++) {
    char* tile = to + (i / kStepWords - first) * kStepBytes + i % kStepWords * 4 * tiles::kRowBytes;
    if (i >= words) {
      for (int half = 0; half < 2; half++) memset(tile + half * tiles::kBytes, 0, 4 * tiles::kRowBytes);
      continue;
    }
    const char* word = panel.words + i * kPanel * kGroupBytes;
    for (int line = 0; line < 2; line++) __builtin_prefetch(word + kOwnDistance + line * kLine, 0, 2);
    widen_word(panel, word, i / per_unit * kPanel, tile);
  }
}

// As the other one on tiles, with chunks for every number of rows.
template <bool kIsFp4, typename T>
void multiply_panel(OnTiles<TiledFourBits<kIsFp4>>, const Call<T>& c, const Packed& packed, int64_t first_tile,
                    int64_t last_tile, Panels panels, const Target<T>& target) {
  typedef TiledFourBits<kIsFp4> K;
  const int64_t steps = OnTiles<K>::steps(c.in), count = last_tile - first_tile, stride = steps * kTileWords;
  const Panel4<kIsFp4> panel(c.weight + panels.panel * panel_bytes_4bit(kIsFp4, c.in, c.unit), c.in, c.unit);
  const bool is_half = target.count <= tiles::kColumns;
  alignas(64) int32_t sums[kBlockTiles * kSumTile];
  alignas(64) char widened[kChunk * kStepBytes];
  for (int64_t first = 0; first < steps; first += kChunk) {
    const int64_t num = std::min(kChunk, steps - first);
    widen_steps<kIsFp4>(panel, c.in, c.unit, first, num, widened);
    for (int64_t t = 0; t < count; t += 2) {
      const Steps some{packed.x + (first_tile + t) * stride + first * kTileWords, stride, widened, tiles::kBytes, num,
                       first == 0, {widened, 0}};
      int32_t* pair = sums + t * kSumTile;
      t + 1 < count ? multiply_some<K, 2>(some, is_half, pair) : multiply_some<K, 1>(some, is_half, pair);
    }
  }
  for (int64_t t = 0; t < count; t++) {
    const int64_t tile = first_tile + t;
    store_tile<K>(c, target, sums + t * kSumTile, packed.scales, packed.tiles.start(tile), packed.tiles.rows(tile),
                  panels.panel * kPanel);
  }
}

#endif

constexpr uint32_t kFp4Zero = 7;  // its code

// One panel from codes [outs][in] of a byte each, and scales and zeros [outs][units], or scales alone if it is fp4.
inline void pack_panel_4bit(bool is_fp4, const uint8_t* codes, const uint16_t* scales, const uint8_t* zeros, int64_t in,
                            int64_t unit, int64_t outs, char* panel) {
  const int64_t units = units_of(in, unit), words = units * unit / kWordInputs;
  uint8_t* const to_scales = (uint8_t*)panel + word_bytes(in, unit);
  memset(panel, 0, panel_bytes_4bit(is_fp4, in, unit));
  for (int64_t o = 0; o < outs; o++) {
    for (int64_t u = 0; u < units; u++) {
      const int64_t index = u * kPanel + o;
      if (is_fp4) {
        to_scales[index] = uint8_t(scales[o * units + u]);
        continue;
      }
      ((uint16_t*)to_scales)[index] = scales[o * units + u];
      to_scales[units * kPanel * sizeof(uint16_t) + index] = zeros[o * units + u];
    }
    for (int64_t i = 0; i < words; i++) {
      uint32_t word = 0;
      for (int64_t j = 0; j < kWordInputs; j++) {
        const int64_t input = i * kWordInputs + j;
        const uint32_t padding = is_fp4 ? kFp4Zero : zeros[o * units + units - 1];
        const uint32_t code = input < in ? codes[o * in + input] : padding;
        word |= code << (j / 2 * 4 + j % 2 * 16);
      }
      memcpy(panel + (i * kPanel + o) * kGroupBytes, &word, sizeof word);
    }
  }
}

}  // namespace
