// Compares the matrix instructions of an ARM processor with their specification.
#include "linear_matrices.h"

#if QUIRE_HAS_MATRICES
#include <cmath>

namespace {

constexpr int kCases = 256;

float flushed(float x) { return std::fabs(x) < std::numeric_limits<float>::min() ? std::copysign(0.f, x) : x; }

// x + rest, where `rest` is below the last bit of x, as a float rounded to odd.
float to_odd(double x, double rest) {
  if (!std::isfinite(x)) return float(x);
  float y = float(x);
  double error = x - double(y);
  if (error == 0) error = rest;
  if (error == 0) return flushed(y);
  if ((error < 0) == (y > 0)) y = std::nextafter(y, 0.f);  // truncate
  uint32_t bits;
  memcpy(&bits, &y, 4);
  bits |= 1;
  memcpy(&y, &bits, 4);
  return flushed(y);
}

float add_to_odd(float a, float b) {
  const double sum = double(a) + double(b), part = sum - double(a);
  return to_odd(sum, (double(a) - (sum - part)) + (double(b) - part));
}

// What one group of two bfloat16 adds to a sum.
float specified(float sum, const uint16_t* a, const uint16_t* b) {
  float products[2];
  for (int i = 0; i < 2; i++)
    products[i] = to_odd(double(flushed(to_float(a[i]))) * double(flushed(to_float(b[i]))), 0);
  return add_to_odd(flushed(sum), add_to_odd(products[0], products[1]));
}

struct Random {
  uint64_t state = 1;
  uint32_t next() { return uint32_t((state = state * 6364136223846793005u + 1442695040888963407u) >> 32); }
  // A finite bfloat16 within a factor of 2^range of 1.
  uint16_t number(int range) {
    const uint32_t bits = next();
    return uint16_t((bits & 0x807f) | (127 - range + (bits >> 16) % (2 * range + 1)) << 7);
  }
};

bool is_one_product_as_specified(Random& random, int range) {
  uint16_t a[8], b[8];
  float sums[4], expected[4], products[4], dots[4];
  for (int i = 0; i < 8; i++) a[i] = random.number(range), b[i] = random.number(range);
  for (int i = 0; i < 4; i++) {
    sums[i] = expected[i] = to_float(random.number(range)) * (1.f + float(i) * 0x1p-20f);
    for (int group = 0; group < 4; group += 2)
      expected[i] = specified(expected[i], a + i / 2 * 4 + group, b + i % 2 * 4 + group);
  }
  const int32x4_t x = vld1q_s32((const int32_t*)a), y = vld1q_s32((const int32_t*)b);
  vst1q_f32(products, MatrixBfloat16::multiply(vld1q_f32(sums), x, y));
  if (memcmp(products, expected, sizeof expected)) return false;
  for (int i = 0; i < 4; i++) expected[i] = specified(sums[i], a + 2 * i, b);
  vst1q_f32(dots, MatrixBfloat16::dot<0>(vld1q_f32(sums), x, y));
  return !memcmp(dots, expected, sizeof expected);
}

}  // namespace
#endif

extern "C" {

// Whether products of bfloat16 have the bits that linear_matrices.h specifies; 1 in a build without matrix instructions.
int quire_verify_matrices() {
#if QUIRE_HAS_MATRICES
  Random random;
  for (int i = 0; i < kCases; i++)
    if (!is_one_product_as_specified(random, i % 2 ? 3 : 60)) return 0;
#endif
  return 1;
}
}
