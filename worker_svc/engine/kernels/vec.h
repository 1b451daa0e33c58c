// Arithmetic of 16 floats, and their storage as float or bfloat16, for all kernel files.
//
// Sums of 16 lanes have one fixed tree, and a multiply-add is fused only where `fma16` and `fma1` say so.
#pragma once
#include <limits>

#include "lanes.h"

// Whether products of bfloat16 use AMX tiles (tiles.h), and whether `vdpbf16ps` is there.
#if defined(QUIRE_NO_TILES)
#define QUIRE_HAS_TILES 0
#elif defined(QUIRE_EMULATED_TILES) || (defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__))
#define QUIRE_HAS_TILES 1
#else
#define QUIRE_HAS_TILES 0
#endif
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define QUIRE_HAS_DOTS 1
#else
#define QUIRE_HAS_DOTS 0
#endif
#define QUIRE_HAS_PAIRS (QUIRE_HAS_TILES || QUIRE_HAS_DOTS)
// Whether the matrix instructions of ARM are used (linear_matrices.h).
#if defined(__aarch64__) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC) && defined(__ARM_FEATURE_MATMUL_INT8) && \
    !defined(QUIRE_NO_MATRICES)
#define QUIRE_HAS_MATRICES 1
#else
#define QUIRE_HAS_MATRICES 0
#endif

namespace {

constexpr float kNegInf = -std::numeric_limits<float>::infinity();

INLINE float fma1(float a, float b, float c) {
#if defined(__FMA__) || defined(__ARM_NEON)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

INLINE v16 fma16(v16 a, v16 b, v16 c) {
#if defined(__AVX512F__)
  return fma_floats(a, b, c);
#else
  QUIRE_EACH_REGISTER c.part[i] = fma_floats(a.part[i], b.part[i], c.part[i]);
  return c;
#endif
}

INLINE v16 vmax(v16 a, v16 b) { return select(a > b, a, b); }

INLINE float to_float(float x) { return x; }
INLINE float to_float(uint16_t x) {
  uint32_t bits = uint32_t(x) << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

template <typename T> INLINE T from_float(float x);
template <> INLINE float from_float<float>(float x) { return x; }
// Round to nearest even; a NaN stays a NaN.
template <> INLINE uint16_t from_float<uint16_t>(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return x == x ? uint16_t(rounded) : uint16_t(0x7fc0);
}

// The value of x after it is stored as T and loaded.
template <typename T> INLINE float round_to(float x) { return to_float(from_float<T>(x)); }

INLINE Floats load_floats(const float* p) {
  Floats x;
  memcpy(&x, p, sizeof x);
  return x;
}
INLINE Floats load_floats(const uint16_t* p) {
#if defined(__AVX512F__)
  return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#endif
  Halves x;
  memcpy(&x, p, sizeof x);
  return (Floats)(__builtin_convertvector(x, Words) << 16);
}
INLINE void store_floats(float* p, Floats x) { memcpy(p, &x, sizeof x); }

#if defined(__AVX512F__)
template <typename T> INLINE v16 load16(const T* p) { return load_floats(p); }
#else
template <typename T> INLINE v16 load16(const T* p) {
  v16 x;
  QUIRE_EACH_REGISTER x.part[i] = load_floats(p + i * kWidth);
  return x;
}
#endif
#if defined(__AVX512BF16__) && defined(__AVX512DQ__)
// Numbers that vcvtneps2bf16 does not round as from_float does: it flushes denormals and keeps the payload of a NaN.
INLINE int rounds_otherwise(v16 x) {
  constexpr int kDenormalOrNan = 0x20 | 0x80 | 0x01;
  return _mm512_fpclass_ps_mask((__m512)x, kDenormalOrNan);
}
#endif
INLINE void store_floats(uint16_t* p, Floats x) {
  Halves result;
#if defined(__AVX512BF16__) && defined(__AVX512DQ__)
  if (__builtin_expect(rounds_otherwise(x) == 0, 1)) {
    result = (Halves)_mm512_cvtneps_pbh((__m512)x);
    return (void)memcpy(p, &result, sizeof result);
  }
#endif
  const Words bits = (Words)x, is_number = (Words)(x == x);
  const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  result = __builtin_convertvector((rounded & is_number) | (0x7fc0u & ~is_number), Halves);
  memcpy(p, &result, sizeof result);
}

#if defined(__AVX512F__)
template <typename T> INLINE void store16(T* p, v16 x) { store_floats(p, x); }
#else
template <typename T> INLINE void store16(T* p, v16 x) { QUIRE_EACH_REGISTER store_floats(p + i * kWidth, x.part[i]); }
#endif

// Stores 32 numbers as store16 does. `is_streamed`: past the caches where possible, which saves reading lines that are
// written as a whole; another thread may read them after an `end_stream` of this one.
INLINE void store32(float* p, v16 low, v16 high, bool) {
  store16(p, low);
  store16(p + kLanes, high);
}
INLINE void store32(uint16_t* p, v16 low, v16 high, [[maybe_unused]] bool is_streamed) {
#if defined(__AVX512BF16__) && defined(__AVX512DQ__)
  if (__builtin_expect((rounds_otherwise(low) | rounds_otherwise(high)) == 0, 1)) {
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
    if (is_streamed && uintptr_t(p) % sizeof both == 0)
      _mm512_stream_si512((__m512i*)p, both);
    else
      _mm512_storeu_si512(p, both);
    return;
  }
#endif
  store16(p, low);
  store16(p + kLanes, high);
}
INLINE void end_stream() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

template <typename T> INLINE v16 round16(v16 x) {
  T rounded[kLanes];
  store16(rounded, x);
  return load16(rounded);
}

// Sums 16 lanes in one fixed tree order: lane i plus lane i + 8, then i + 4, i + 2 and i + 1.
INLINE float sum_lanes(v16 x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)x);  // the same tree
#else
  for (int half = kRegisters / 2; half > 0; half /= 2)
    for (int i = 0; i < half; i++) x.part[i] += x.part[i + half];
  float a[kWidth];
  store_floats(a, x.part[0]);
  for (int half = kWidth / 2; half > 0; half /= 2)
    for (int i = 0; i < half; i++) a[i] += a[i + half];
  return a[0];
#endif
}
INLINE float max_lanes(v16 x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)x);
#else
  for (int half = kRegisters / 2; half > 0; half /= 2)
    for (int i = 0; i < half; i++) x.part[i] = x.part[i] > x.part[i + half] ? x.part[i] : x.part[i + half];
  float a[kWidth];
  store_floats(a, x.part[0]);
  for (int half = kWidth / 2; half > 0; half /= 2)
    for (int i = 0; i < half; i++) a[i] = a[i] > a[i + half] ? a[i] : a[i + half];
  return a[0];
#endif
}

// exp to about 1 ulp; NaN stays NaN, below -87.3 it is 0.
INLINE v16 exp16(v16 x) {
  const v16 hi = splat(88.3f), lo = splat(-87.3f);
  i16 is_zero = x < lo;
  x = select(x > hi, hi, x);
  x = select(x < lo, lo, x);
  const v16 magic = splat(12582912.f);  // adding it rounds to an integer
  v16 n = fma16(x, splat(1.44269504088896341f), magic) - magic;
  v16 r = fma16(n, splat(-0.693145751953125f), x);
  r = fma16(n, splat(-1.428606765330187045e-06f), r);
  v16 p = splat(1.9875691500e-4f);
  p = fma16(p, r, splat(1.3981999507e-3f));
  p = fma16(p, r, splat(8.3334519073e-3f));
  p = fma16(p, r, splat(4.1665795894e-2f));
  p = fma16(p, r, splat(1.6666665459e-1f));
  p = fma16(p, r, splat(5.0000001201e-1f));
  v16 e = fma16(p * r, r, r + 1.f);
  i16 shift = (to_ints(n) + 127) << 23;
  e = e * (v16)shift;
  return (v16)((i16)e & ~is_zero);
}

// Whether a block of the KV pool is stored in pairs, as products of bfloat16 read them.
template <typename T> INLINE bool is_paired(int64_t block_size, int64_t head_dim) {
  return QUIRE_HAS_PAIRS && sizeof(T) == 2 && block_size % kLanes == 0 && head_dim % 2 == 0;
}

template <typename T> INLINE float sum_of(const T* x, int64_t dim) {
  v16 acc{};
  int64_t i = 0;
  for (; i + kLanes <= dim; i += kLanes) acc = acc + load16(x + i);
  float sum = sum_lanes(acc);
  for (; i < dim; i++) sum += to_float(x[i]);
  return sum;
}

template <typename T> INLINE float sum_of_squared_distances(const T* x, float mean, int64_t dim) {
  v16 acc{};
  int64_t i = 0;
  for (; i + kLanes <= dim; i += kLanes) {
    const v16 v = load16(x + i) - mean;
    acc = fma16(v, v, acc);
  }
  float sum = sum_lanes(acc);
  for (; i < dim; i++) sum = fma1(to_float(x[i]) - mean, to_float(x[i]) - mean, sum);
  return sum;
}

template <typename T> INLINE float sum_of_squares(const T* x, int64_t dim) {
  v16 acc{};
  int64_t i = 0;
  for (; i + kLanes <= dim; i += kLanes) {
    v16 v = load16(x + i);
    acc = fma16(v, v, acc);
  }
  float sum = sum_lanes(acc);
  for (; i < dim; i++) sum = fma1(to_float(x[i]), to_float(x[i]), sum);
  return sum;
}

}  // namespace
