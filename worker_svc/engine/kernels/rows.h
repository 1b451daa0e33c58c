// Operations on one row that more than one kernel file needs.
#pragma once
#include <cmath>
#include <cstring>

#include "kernels.h"
#include "vec.h"

namespace {

template <typename T> void add_row(T* x, const T* residual, int64_t dim) {
  int64_t i = 0;
  for (; i + kLanes <= dim; i += kLanes) store16(x + i, load16(x + i) + load16(residual + i));
  for (; i < dim; i++) x[i] = from_float<T>(to_float(x[i]) + to_float(residual[i]));
}

template <typename T> void rms_norm_row(const T* x, const T* weight, T* out, int64_t dim, float eps) {
  const float scale = 1.f / sqrtf(sum_of_squares(x, dim) / float(dim) + eps);
  int64_t i = 0;
  for (; i + kLanes <= dim; i += kLanes) {
    T normed[kLanes];
    store16(normed, load16(x + i) * scale);
    store16(out + i, load16(normed) * load16(weight + i));
  }
  for (; i < dim; i++) out[i] = from_float<T>(round_to<T>(to_float(x[i]) * scale) * to_float(weight[i]));
}

template <typename T> void rms_offset_norm_row(const T* x, const T* weight, T* out, int64_t dim, float eps) {
  const float scale = 1.f / sqrtf(sum_of_squares(x, dim) / float(dim) + eps);
  int64_t i = 0;
  for (; i + kLanes <= dim; i += kLanes) store16(out + i, load16(x + i) * scale * (load16(weight + i) + 1.f));
  for (; i < dim; i++) out[i] = from_float<T>(to_float(x[i]) * scale * (to_float(weight[i]) + 1.f));
}

template <typename T>
void layer_norm_row(const T* x, const T* weight, const T* bias, T* out, int64_t dim, float eps) {
  const float mean = sum_of(x, dim) / float(dim);
  const float scale = 1.f / sqrtf(sum_of_squared_distances(x, mean, dim) / float(dim) + eps);
  int64_t i = 0;
  for (; i + kLanes <= dim; i += kLanes)
    store16(out + i, (load16(x + i) - mean) * scale * load16(weight + i) + load16(bias + i));
  for (; i < dim; i++) out[i] = from_float<T>((to_float(x[i]) - mean) * scale * to_float(weight[i]) + to_float(bias[i]));
}

// Row `row` of `norm`, [dim], into out; without weights the row itself. x keeps the sum with the residual.
template <typename T> void add_norm_row(const Norm& norm, int64_t row, T* out, int64_t dim) {
  T* x = (T*)norm.x + row * dim;
  if (norm.residual) add_row(x, (const T*)norm.residual + row * dim, dim);
  const T *weight = (const T*)norm.weights.weight, *bias = (const T*)norm.weights.bias;
  if (!weight) {
    memmove(out, x, dim * sizeof(T));
    return;
  }
  if (norm.kind == kRms) return rms_norm_row(x, weight, out, dim, norm.eps);
  if (norm.kind == kRmsOffset) return rms_offset_norm_row(x, weight, out, dim, norm.eps);
  layer_norm_row(x, weight, bias, out, dim, norm.eps);
}

// The error function to 2e-7: Abramowitz and Stegun 7.1.26, as erf of exact_ops.py.
INLINE v16 erf16(v16 x) {
  const u16v sign = (u16v)x & 0x80000000u;
  const v16 size = (v16)((u16v)x & 0x7fffffffu), t = 1.f / fma16(size, splat(0.3275911f), splat(1.f));
  v16 y = fma16(splat(1.061405429f), t, splat(-1.453152027f));
  y = fma16(y, t, splat(1.421413741f));
  y = fma16(y, t, splat(-0.284496736f));
  y = fma16(y, t, splat(0.254829592f));
  return (v16)((u16v)(1.f - y * t * exp16(-size * size)) | sign);
}

INLINE v16 activate16(v16 x, Activation activation) {
  if (activation == kSilu) return x / (1.f + exp16(-x));
  if (activation == kRelu2) return select(x < splat(0.f), v16{}, x * x);
  if (activation == kGelu) return 0.5f * x * (1.f + erf16(x * 0.70710678118654752f));
  const v16 inner = 0.79788456080286536f * (x + 0.044715f * x * x * x);
  return x * (1.f - 1.f / (exp16(2.f * inner) + 1.f));
}

// activation(gate) * up; of a clamped SwiGLU up + 1, both clamped to 7.
INLINE v16 gated16(v16 gate, v16 up, Activation activation) {
  if (activation != kClampedSwiglu) return activate16(gate, activation) * up;
  const v16 limit = splat(7.f);
  gate = select(gate > limit, limit, gate);
  up = select(up > limit, limit, select(up < -limit, -limit, up));
  return (up + 1.f) * (gate / (1.f + exp16(gate * -1.702f)));
}

// cap * tanh(x / cap)
INLINE v16 soft_cap16(v16 x, float cap) { return cap * (1.f - 2.f / (exp16(x * (2.f / cap)) + 1.f)); }

}  // namespace
