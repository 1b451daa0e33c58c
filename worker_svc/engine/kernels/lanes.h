// 16 lanes of float, int32_t or uint32_t, and the vectors of one register that they are made of.
//
// With AVX512 16 lanes are one register, and the compiler's vector type. Elsewhere they are a structure of several
// registers, because gcc keeps a vector that is wider than a register in memory. Both have the same operators, but
// `select(mask, a, b)` stands for `mask ? a : b`.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define INLINE inline __attribute__((always_inline))

namespace {

constexpr int kLanes = 16;

// Lanes of a register, and the number of registers that sums may take beside the other operands of a product.
#if defined(__AVX512F__)
constexpr int kWidth = 16, kSums = 24;
#elif defined(__AVX2__)
constexpr int kWidth = 8, kSums = 12;
#elif defined(__ARM_NEON)
constexpr int kWidth = 4, kSums = 20;
#else
constexpr int kWidth = 4, kSums = 12;
#endif
constexpr int kRegisters = kLanes / kWidth;  // of 16 lanes

typedef float Floats __attribute__((vector_size(4 * kWidth)));
typedef int32_t Ints __attribute__((vector_size(4 * kWidth)));
typedef uint32_t Words __attribute__((vector_size(4 * kWidth)));
typedef uint16_t Halves __attribute__((vector_size(2 * kWidth)));

INLINE Floats fma_floats(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
  return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

#if defined(__AVX512F__)

typedef float v16 __attribute__((vector_size(64)));
typedef int32_t i16 __attribute__((vector_size(64)));
typedef uint32_t u16v __attribute__((vector_size(64)));

INLINE v16 splat(float x) { return x - v16{}; }
template <typename V> INLINE V select(i16 mask, V a, V b) { return mask ? a : b; }
INLINE i16 to_ints(v16 x) { return __builtin_convertvector(x, i16); }
INLINE v16 to_floats(i16 x) { return __builtin_convertvector(x, v16); }
INLINE i16 lane_numbers() { return i16{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

#else

template <typename T> struct Lanes {
  typedef T Part __attribute__((vector_size(4 * kWidth)));
  Part part[kRegisters];

  Lanes() = default;
  // The same bits as another type.
  template <typename U> explicit INLINE Lanes(const Lanes<U>& other) {
    for (int i = 0; i < kRegisters; i++) part[i] = (Part)other.part[i];
  }
  INLINE T operator[](int lane) const { return part[lane / kWidth][lane % kWidth]; }
};
typedef Lanes<float> v16;
typedef Lanes<int32_t> i16;
typedef Lanes<uint32_t> u16v;

template <typename T> struct Scalar { typedef T type; };  // takes no part in the deduction of T

#define QUIRE_EACH_REGISTER for (int i = 0; i < kRegisters; i++)
#define QUIRE_OPERATOR(op, Result)                                                          \
  template <typename T> INLINE Result operator op(Lanes<T> a, Lanes<T> b) {                 \
    Result y;                                                                               \
    QUIRE_EACH_REGISTER y.part[i] = a.part[i] op b.part[i];                                 \
    return y;                                                                               \
  }                                                                                         \
  template <typename T> INLINE Result operator op(Lanes<T> a, typename Scalar<T>::type b) { \
    Result y;                                                                               \
    QUIRE_EACH_REGISTER y.part[i] = a.part[i] op b;                                         \
    return y;                                                                               \
  }                                                                                         \
  template <typename T> INLINE Result operator op(typename Scalar<T>::type a, Lanes<T> b) { \
    Result y;                                                                               \
    QUIRE_EACH_REGISTER y.part[i] = a op b.part[i];                                         \
    return y;                                                                               \
  }
QUIRE_OPERATOR(+, Lanes<T>)
QUIRE_OPERATOR(-, Lanes<T>)
QUIRE_OPERATOR(*, Lanes<T>)
QUIRE_OPERATOR(/, Lanes<T>)
QUIRE_OPERATOR(&, Lanes<T>)
QUIRE_OPERATOR(|, Lanes<T>)
QUIRE_OPERATOR(<<, Lanes<T>)
QUIRE_OPERATOR(>>, Lanes<T>)
QUIRE_OPERATOR(<, i16)
QUIRE_OPERATOR(>, i16)
QUIRE_OPERATOR(>=, i16)
QUIRE_OPERATOR(==, i16)
QUIRE_OPERATOR(!=, i16)
#undef QUIRE_OPERATOR

template <typename T> INLINE Lanes<T> operator-(Lanes<T> a) {
  QUIRE_EACH_REGISTER a.part[i] = -a.part[i];
  return a;
}
template <typename T> INLINE Lanes<T> operator~(Lanes<T> a) {
  QUIRE_EACH_REGISTER a.part[i] = ~a.part[i];
  return a;
}
template <typename T, typename U> INLINE Lanes<T>& operator+=(Lanes<T>& a, U b) { return a = a + b; }
template <typename T, typename U> INLINE Lanes<T>& operator-=(Lanes<T>& a, U b) { return a = a - b; }
template <typename T, typename U> INLINE Lanes<T>& operator|=(Lanes<T>& a, U b) { return a = a | b; }

INLINE v16 splat(float x) {
  v16 y;
  QUIRE_EACH_REGISTER y.part[i] = x - Floats{};
  return y;
}
template <typename T> INLINE Lanes<T> select(i16 mask, Lanes<T> a, Lanes<T> b) {
  QUIRE_EACH_REGISTER a.part[i] = mask.part[i] ? a.part[i] : b.part[i];
  return a;
}
INLINE i16 to_ints(v16 x) {
  i16 y;
  QUIRE_EACH_REGISTER y.part[i] = __builtin_convertvector(x.part[i], Ints);
  return y;
}
INLINE v16 to_floats(i16 x) {
  v16 y;
  QUIRE_EACH_REGISTER y.part[i] = __builtin_convertvector(x.part[i], Floats);
  return y;
}
INLINE i16 lane_numbers() {
  i16 y;
  for (int lane = 0; lane < kLanes; lane++) y.part[lane / kWidth][lane % kWidth] = lane;
  return y;
}

#endif

}  // namespace
