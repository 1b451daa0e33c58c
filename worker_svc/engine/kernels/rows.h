// Operations on one row that more than one kernel file needs.
#pragma once
#include <cmath>

#include "kernels.h"
#include "vec.h"

namespace {

// out = norm(x + residual) * weight; x keeps the sum. A null residual adds nothing.
template <typename T>
void add_rms_norm_row(T* x, const T* residual, const T* weight, T* out, int64_t dim, float eps) {
  int64_t i = 0;
  if (residual) {
    for (; i + kLanes <= dim; i += kLanes) store16(x + i, load16(x + i) + load16(residual + i));
    for (; i < dim; i++) x[i] = from_float<T>(to_float(x[i]) + to_float(residual[i]));
  }
  const float scale = 1.f / sqrtf(sum_of_squares(x, dim) / float(dim) + eps);
  for (i = 0; i + kLanes <= dim; i += kLanes) {
    T normed[kLanes];
    store16(normed, load16(x + i) * scale);
    store16(out + i, load16(normed) * load16(weight + i));
  }
  for (; i < dim; i++) out[i] = from_float<T>(round_to<T>(to_float(x[i]) * scale) * to_float(weight[i]));
}

INLINE float gelu1(float x, Activation activation) {
  if (activation == kGelu) return 0.5f * x * (1.f + erff(x * 0.70710678118654752f));
  const float inner = 0.79788456080286536f * (x + 0.044715f * x * x * x);
  return 0.5f * x * (1.f + tanhf(inner));
}

INLINE v16 activate16(v16 x, Activation activation) {
  if (activation == kSilu) return x / (1.f + exp16(-x));
  for (int i = 0; i < kLanes; i++) x[i] = gelu1(x[i], activation);
  return x;
}

}  // namespace
