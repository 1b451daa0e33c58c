// Arithmetic of linear layers for each kind of number: how x is packed, how a vector of outputs adds one group of inputs,
// and how a sum becomes a result.
//
// A vector is as wide as the processor's registers (`kWidth` lanes). Its width changes no result: a lane is one output,
// and adds its inputs strictly in order. `quire_arithmetic` (cpu.cpp) lists what does change results: whether
// multiply-adds are fused, and whether one instruction multiplies pairs of bfloat16. int8 sums are exact.
#pragma once
#include <algorithm>

#include "vec.h"

namespace {

enum Kind { kBfloat16 = 0, kInt8 = 1, kFloat32 = 2, kInt4 = 3, kFp4 = 4 };

constexpr int kGroupBytes = 4;  // size of a weight's group, for every kind
constexpr float kInt8Max = 127.f;
constexpr float kInt8Smallest = 1e-35f;  // rows and weights up to this become 0: the inverse overflows

// Whether one instruction multiplies groups of four int8.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || (defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD))
#define QUIRE_HAS_QUADS 1
#else
#define QUIRE_HAS_QUADS 0
#endif

INLINE int group_of(int64_t kind) { return kind == kInt8 ? 4 : kind == kBfloat16 ? 2 : 1; }
INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
INLINE float int8_steps_per_unit(float largest) { return largest > kInt8Smallest ? kInt8Max / largest : 0.f; }

INLINE Floats splat_floats(int32_t bits) { return (Floats)(bits + Ints{}); }

INLINE Words load_words(const char* p) {
  Words words;
  memcpy(&words, p, sizeof words);
  return words;
}

// Per lane: product of the low halves plus product of the high halves, as signed 16-bit numbers.
INLINE Ints multiply_halves(Ints a, Ints b) {
#if defined(__AVX512BW__)
  return (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__) && !defined(__AVX512F__)
  return (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__) && !defined(__AVX2__)
  return (Ints)_mm_madd_epi16((__m128i)a, (__m128i)b);
#elif defined(__aarch64__)
  const int16x8_t x = (int16x8_t)a, y = (int16x8_t)b;
  return (Ints)vpaddq_s32(vmull_s16(vget_low_s16(x), vget_low_s16(y)), vmull_high_s16(x, y));
#else
  return (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

// Stores 16 numbers that are small enough as bytes.
INLINE void store_bytes(int8_t* p, i16 x) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm512_cvtepi32_epi8((__m512i)x);
  memcpy(p, &bytes, sizeof bytes);
#else
  typedef int8_t Bytes __attribute__((vector_size(kWidth)));
  QUIRE_EACH_REGISTER {
    const Bytes bytes = __builtin_convertvector(x.part[i], Bytes);
    memcpy(p + i * kWidth, &bytes, sizeof bytes);
  }
#endif
}

// Scale and offset that turn the sums of a row of x into results.
struct RowScale {
  float scale;
  int32_t offset;  // the sum of the excess in every weight
};

// Each kind K has
//   kGroup     inputs of a group
//   kWords     32-bit words that a group of x is packed into
//   Sum        kWidth running sums
//   Weights    a group of kWidth outputs, unpacked; `load` reads it
//   add        sum plus one group of x
//   pack_row   packs one row of x: the words of a group are adjacent, groups are `stride` words apart
//   finish     16 sums as floats

struct Float32 {
  typedef Floats Sum, Weights;
  static constexpr int kGroup = 1, kWords = 1;
  static INLINE Weights load(const char* w) { return (Floats)load_words(w); }
  static INLINE Sum add(Sum sum, Weights w, const int32_t* x) { return fma_floats(w, splat_floats(*x), sum); }
  static RowScale pack_row(const float* x, int64_t in, int64_t stride, int32_t* packed) {
    for (int64_t i = 0; i < in; i++) memcpy(packed + i * stride, x + i, 4);
    return {1.f, 0};
  }
  static INLINE v16 finish(const int32_t* sums, RowScale, const float*) { return load16((const float*)sums); }
};

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
// One instruction multiplies pairs.
struct Bfloat16 {
  typedef Floats Sum;
  typedef Words Weights;
  static constexpr int kGroup = 2, kWords = 1;
  static INLINE Weights load(const char* w) { return load_words(w); }
  static INLINE Sum add(Sum sum, Weights w, const int32_t* x) {
    return (Sum)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)_mm512_set1_epi32(*x));
  }
  static RowScale pack_row(const uint16_t* x, int64_t in, int64_t stride, int32_t* packed) {
    for (int64_t g = 0; g < in / 2; g++) memcpy(packed + g * stride, x + 2 * g, 4);
    if (in % 2) packed[in / 2 * stride] = x[in - 1];
    return {1.f, 0};
  }
  static INLINE v16 finish(const int32_t* sums, RowScale, const float*) { return load16((const float*)sums); }
};
#else
// Widened to float: the even input of a group, then the odd one.
struct Bfloat16 {
  typedef Floats Sum;
  struct Weights {
    Floats even, odd;
  };
  static constexpr int kGroup = 2, kWords = 2;
  static INLINE Weights load(const char* w) {
    const Words pairs = load_words(w);
    return {(Floats)(pairs << 16), (Floats)(pairs & 0xffff0000u)};
  }
  static INLINE Sum add(Sum sum, const Weights& w, const int32_t* x) {
    return fma_floats(w.odd, splat_floats(x[1]), fma_floats(w.even, splat_floats(x[0]), sum));
  }
  static RowScale pack_row(const uint16_t* x, int64_t in, int64_t stride, int32_t* packed) {
    for (int64_t i = 0; i < in; i++) packed[i / 2 * stride + i % 2] = int32_t(uint32_t(x[i]) << 16);
    if (in % 2) packed[in / 2 * stride + 1] = 0;
    return {1.f, 0};
  }
  static INLINE v16 finish(const int32_t* sums, RowScale, const float*) { return load16((const float*)sums); }
};
#endif

struct Int8 {
  typedef Ints Sum;
  static constexpr int kGroup = 4;
#if QUIRE_HAS_QUADS
  typedef Words Weights;
  static constexpr int kWords = 1;
#if defined(__aarch64__)
  // Weights become signed, so their sums have no excess.
  static constexpr int kExcess = 0;
  static INLINE Weights load(const char* w) { return load_words(w) ^ 0x80808080u; }
#else
  static constexpr int kExcess = 128;
  static INLINE Weights load(const char* w) { return load_words(w); }
#endif
  static INLINE Sum add(Sum sum, Weights w, const int32_t* x) {
#if defined(__aarch64__)
    return (Ints)vdotq_s32((int32x4_t)sum, (int8x16_t)w, (int8x16_t)vdupq_n_s32(*x));
#elif defined(__AVX512VNNI__)
    return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, _mm512_set1_epi32(*x));
#else
    return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)w, _mm256_set1_epi32(*x));
#endif
  }
  static INLINE void store_group(const int8_t* q, int32_t* packed) { memcpy(packed, q, 4); }
#else
  static constexpr int kExcess = 128;
  // Inputs 0 and 2 of a group, and inputs 1 and 3, as 16-bit numbers.
  struct Weights {
    Ints even, odd;
  };
  static constexpr int kWords = 2;
  static INLINE Weights load(const char* w) {
    const Words quads = load_words(w);
    return {(Ints)(quads & 0x00ff00ffu), (Ints)(quads >> 8 & 0x00ff00ffu)};
  }
  static INLINE Sum add(Sum sum, const Weights& w, const int32_t* x) {
    return sum + multiply_halves(w.even, x[0] + Ints{}) + multiply_halves(w.odd, x[1] + Ints{});
  }
  static INLINE void store_group(const int8_t* q, int32_t* packed) {
    for (int i = 0; i < 2; i++) packed[i] = int32_t(uint32_t(uint16_t(q[i])) | uint32_t(q[i + 2]) << 16);
  }
#endif

  // The largest magnitude of a row; NaN if the row holds a NaN.
  template <typename T> static float largest(const T* x, int64_t in, v16 tail) {
    v16 tops = vmax(tail, -tail);
    i16 is_nan = tail != tail;
    for (int64_t i = 0; i + kLanes <= in; i += kLanes) {
      const v16 v = load16(x + i);
      is_nan |= v != v;
      tops = vmax(vmax(v, -v), tops);
    }
    bool has_nan = false;
    for (int lane = 0; lane < kLanes; lane++) has_nan |= is_nan[lane] != 0;
    return has_nan ? std::numeric_limits<float>::quiet_NaN() : max_lanes(tops);
  }

  // Calls store(i, values) with 16 rounded inputs from i on; those beyond `in` are 0.
  template <typename T, typename Store> static RowScale quantize_row(const T* x, int64_t in, const Store& store) {
    const int64_t whole = in / kLanes * kLanes;
    float rest[kLanes] = {};
    for (int64_t i = whole; i < in; i++) rest[i - whole] = to_float(x[i]);
    const v16 tail = load16(rest);
    const float top = largest(x, in, tail), inverse = int8_steps_per_unit(top);
    const v16 magic = splat(12582912.f);  // adding it rounds to the nearest integer, ties to even
    i16 total = {};
    for (int64_t i = 0; i < in; i += kLanes) {
      const v16 v = (i < whole ? load16(x + i) : tail) * inverse;
      const i16 q = to_ints((v + magic) - magic) & (v == v);
      total += q;
      int8_t values[kLanes];
      store_bytes(values, q);
      store(i, values);
    }
    int32_t sum = 0;
    for (int lane = 0; lane < kLanes; lane++) sum += total[lane];
    return {top / kInt8Max, kExcess * sum};
  }

  template <typename T> static RowScale pack_row(const T* x, int64_t in, int64_t stride, int32_t* packed) {
    return quantize_row(x, in, [&](int64_t i, const int8_t* values) {
      const int64_t groups = std::min<int64_t>(kLanes / 4, ceil_div(in - i, 4));
      for (int64_t g = 0; g < groups; g++) store_group(values + 4 * g, packed + (i / 4 + g) * stride);
    });
  }

  static INLINE v16 finish(const int32_t* sums, RowScale row, const float* scales) {
    const i16 sum = (i16)load16((const float*)sums);
    return to_floats(sum - row.offset) * (row.scale * load16(scales));
  }
};

}  // namespace
