// Queries and latents of latent attention (decoder/latents.py): norm, rotation, store. attention_latents.h attends.
#include <algorithm>
#include <cmath>

#include "kernels.h"
#include "rows.h"

namespace {

constexpr int64_t kSerialWork = 32768;  // elements below which waking other threads costs more than they save

// Rotates the pairs of x into the two halves of `out`. A pair is two neighbours, or a number of each half.
template <typename T>
void rotate(const T* x, const float* cos, const float* sin, int64_t half, bool is_interleaved, T* out) {
  for (int64_t i = 0; i < half; i++) {
    const float a = to_float(x[is_interleaved ? 2 * i : i]), b = to_float(x[is_interleaved ? 2 * i + 1 : i + half]);
    out[i] = from_float<T>(a * cos[i] - b * sin[i]);
    out[i + half] = from_float<T>(b * cos[i] + a * sin[i]);
  }
}

}  // namespace

void latent_queries(Pass& pass, int is_bf16, const Latents& a, void* joined, int64_t stride, void* queries, int64_t n) {
  if (!a.query.in) return;
  auto norm = [&](auto type) {
    typedef decltype(type) T;
    pass.run(n, 4, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; i++) {
        T* row = (T*)joined + i * stride;
        rms_norm_row(row, (const T*)a.q_norm, row, a.query.in, a.eps);
      }
    });
  };
  is_bf16 ? norm(uint16_t()) : norm(float());
  grouped_linear(pass, is_bf16, {{&a.query, joined, nullptr, queries, n, stride}});
}

void head_linears(Pass& pass, int is_bf16, const Linear* linears, int64_t heads, HeadRows x, HeadRows y, int64_t n) {
  const int64_t bytes = is_bf16 ? 2 : 4;
  std::vector<LinearRows> parts;
  for (int64_t h = 0; h < heads; h++)
    parts.push_back({linears + h, (const char*)x.data + h * x.head_stride * bytes, nullptr,
                     (char*)y.data + h * y.head_stride * bytes, n, x.stride, y.stride});
  grouped_linear(pass, is_bf16, parts);
}

void latent_rope_store(Pass& pass, int is_bf16, const LatentTokens& tokens, const void* norm, float eps,
                       const Rotary& rotary, const int32_t* positions, const int64_t* slots, void* cache, void* q_out,
                       const LatentShape& s) {
  auto store = [&](auto type) {
    typedef decltype(type) T;
    const int64_t half = s.rope_dim / 2, used = s.rank + s.rope_dim;
    pass.run(tokens.n, 4, [&](int64_t first, int64_t last) {
      for (int64_t t = first; t < last; t++) {
        const float *cos = rotary.cos + positions[t] * half, *sin = rotary.sin + positions[t] * half;
        auto finish = [&](const T* rotated, T* row) {  // the numbers of a row of the pool after its latent
          rotate(rotated, cos, sin, half, s.is_interleaved, row + s.rank);
          std::fill_n(row + used, s.width - used, T(0));
        };
        const T* latent = (const T*)tokens.latents + t * tokens.latent_stride;
        T* row = (T*)cache + slots[t] * s.width;
        rms_norm_row(latent, (const T*)norm, row, s.rank, eps);
        finish(latent + s.rank, row);
        for (int64_t h = 0; h < s.heads; h++)
          finish((const T*)tokens.q + t * tokens.q_stride + h * (s.key_dim + s.rope_dim) + s.key_dim,
                 (T*)q_out + (t * s.heads + h) * s.width);
      }
    });
  };
  is_bf16 ? store(uint16_t()) : store(float());
}

extern "C" {

void quire_latent_rope_store(int is_bf16, const LatentTokens* tokens, const void* norm, float eps, const Rotary* rotary,
                             const int32_t* positions, const int64_t* slots, void* cache, void* q_out,
                             const LatentShape* shape, int threads) {
  Pass pass(threads_for(tokens->n * (shape->heads + 1) * shape->width, kSerialWork, threads));
  latent_rope_store(pass, is_bf16, *tokens, norm, eps, *rotary, positions, slots, cache, q_out, *shape);
}
}
