// Norms, activation, rotation, KV store and block copies of the CPU backend, behind a plain C ABI: raw pointers and
// sizes, no torch headers.
//
// Rules that make the result of a row independent of everything else, in all kernel files:
//  - every sum has one fixed order (16 lanes, then a fixed tree; or strictly by index);
//  - multiply-adds are fused only where `fma16` and `fma1` say so (-ffp-contract=off elsewhere).
// Storage is float or bfloat16 (as uint16_t), arithmetic is float.
#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels.h"
#include "rows.h"
#include "tiles.h"
#include "vec.h"

namespace {

constexpr int64_t kSerialWork = 32768;  // elements below which waking other threads costs more than they save

// Calls run(first, last, T()) for ranges of rows.
template <typename Run> void over_rows(Pass& pass, int is_bf16, int64_t n, const Run& run) {
  pass.run(n, 4, [&](int64_t first, int64_t last) {
    is_bf16 ? run(first, last, uint16_t()) : run(first, last, float());
  });
}

// x = op(x) for 16 lanes at a time, over rows x [n, dim].
template <typename Op> void map_rows(Pass& pass, int is_bf16, void* x, int64_t n, int64_t dim, const Op& op) {
  over_rows(pass, is_bf16, n, [&](int64_t first, int64_t last, auto type) {
    typedef decltype(type) T;
    T* row = (T*)x + first * dim;
    const int64_t count = (last - first) * dim;
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) store16(row + i, op(load16(row + i)));
    if (i == count) return;
    T rest[kLanes] = {};
    memcpy(rest, row + i, (count - i) * sizeof(T));
    store16(rest, op(load16(rest)));
    memcpy(row + i, rest, (count - i) * sizeof(T));
  });
}

// ---------------------------------------------------------------------------------------------------------------
// out = act(gate) * up of rows [gate | up].

template <typename T>
void gated_activation_row(const T* gate, const T* up, T* out, int64_t dim, Activation activation) {
  int64_t i = 0;
  for (; i + kLanes <= dim; i += kLanes) store16(out + i, gated16(load16(gate + i), load16(up + i), activation));
  if (i == dim) return;
  float g[kLanes] = {}, u[kLanes] = {}, y[kLanes];
  for (int64_t j = i; j < dim; j++) g[j - i] = to_float(gate[j]), u[j - i] = to_float(up[j]);
  store16(y, gated16(load16(g), load16(u), activation));
  for (int64_t j = i; j < dim; j++) out[j] = from_float<T>(y[j - i]);
}


// ---------------------------------------------------------------------------------------------------------------
// One fused QKV row per token: norm of q and k heads (optional), rotary embedding, q out, k and v into the pool.
// k_cache: [blocks, kv_heads, head_dim, block_size] (transposed: one dimension of 16 keys is one vector).
// v_cache: [blocks, kv_heads, block_size, head_dim].
// In a paired block (`is_paired`) two dimensions of a key, and one dimension of two values, are adjacent:
// [head_dim / 2, block_size, 2] and [block_size / 2, head_dim, 2].

template <typename T> INLINE float norm_scale(const T* x, int64_t width, const QkNorms& norms) {
  return 1.f / sqrtf(sum_of_squares(x, width) / float(width) + norms.eps);
}

// `scale` is that of the norm which the head belongs to, `weight` its part for this head; null: no norm.
template <typename T>
INLINE void norm_rope_head(const T* x, const T* weight, float scale, const QkNorms& norms, const float* cos,
                           const float* sin, int64_t half, int64_t head_dim, T* out) {
  const bool is_offset = norms.kind == kRmsOffset;
  auto normed16 = [&](int64_t d) {
    const v16 v = load16(x + d);
    if (!weight) return v;
    if (is_offset) return round16<T>(v * scale * (load16(weight + d) + 1.f));
    return round16<T>(round16<T>(v * scale) * load16(weight + d));
  };
  auto normed1 = [&](int64_t d) {
    const float v = to_float(x[d]);
    if (!weight) return v;
    if (is_offset) return round_to<T>(v * scale * (to_float(weight[d]) + 1.f));
    return round_to<T>(round_to<T>(v * scale) * to_float(weight[d]));
  };
  int64_t d = 0;
  for (; d + kLanes <= half; d += kLanes) {
    const v16 a = normed16(d), b = normed16(d + half), c = load16(cos + d), s = load16(sin + d);
    store16(out + d, a * c - b * s);
    store16(out + d + half, b * c + a * s);
  }
  for (; d < half; d++) {
    const float a = normed1(d), b = normed1(d + half);
    out[d] = from_float<T>(a * cos[d] - b * sin[d]);
    out[d + half] = from_float<T>(b * cos[d] + a * sin[d]);
  }
  for (d = 2 * half; d + kLanes <= head_dim; d += kLanes) store16(out + d, normed16(d));
  for (; d < head_dim; d++) out[d] = from_float<T>(normed1(d));
}

// Rotates pairs of neighbours in place.
template <typename T> INLINE void rotate_neighbours(T* x, const float* cos, const float* sin, int64_t half) {
  for (int64_t d = 0; d < half; d++) {
    const float a = to_float(x[2 * d]), b = to_float(x[2 * d + 1]);
    x[2 * d] = from_float<T>(a * cos[d] - b * sin[d]);
    x[2 * d + 1] = from_float<T>(b * cos[d] + a * sin[d]);
  }
}

// Stores one key in its block. `width` is 2 in a paired block, else 1.
template <typename T, int width> INLINE void store_key(const T* key, int64_t dim, int64_t block_size, T* out) {
  for (int64_t d = 0; d < dim; d += width) memcpy(out + d * block_size, key + d, width * sizeof(T));
}

// Stores one value in a paired block: number `side` of each pair. Another thread may be writing the other one.
template <typename T> INLINE void store_paired_value(const T* value, int64_t dim, int64_t side, T* pairs) {
  int64_t d = 0;
#if defined(__AVX512BW__)
  for (; sizeof(T) == 2 && d + kLanes <= dim; d += kLanes) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(value + d)));
    const __mmask32 is_stored = side ? 0xaaaaaaaau : 0x55555555u;
    _mm512_mask_storeu_epi16(pairs + 2 * d, is_stored, side ? _mm512_slli_epi32(wide, 16) : wide);
  }
#endif
  for (; d < dim; d++) pairs[2 * d + side] = value[d];
}

template <typename T> void scale_row(T* x, float factor, int64_t dim) {
  for (int64_t d = 0; d < dim; d++) x[d] = from_float<T>(to_float(x[d]) * factor);
}

template <typename T> struct Qkv {
  const T* qkv;
  QkNorms norms;
  Rotary rotary;
  const int32_t* positions;
  const int64_t* slots;
  T *k_cache, *v_cache, *q_out;
  QkvShape shape;
};

// `key` and `normed` are memory for one head each.
template <typename T> void store_token(const Qkv<T>& a, int64_t i, T* key, T* normed) {
  const QkvShape& s = a.shape;
  const int64_t dim = s.head_dim, half = a.rotary.dims / 2, stride = s.qkv_stride();
  const T *x = a.qkv + i * stride, *q_norm = (const T*)a.norms.q, *k_norm = (const T*)a.norms.k;
  const float *cos = a.rotary.cos + a.positions[i] * half, *sin = a.rotary.sin + a.positions[i] * half;
  const int64_t halves = a.rotary.is_interleaved ? 0 : half;  // what is rotated together with the norm
  const int64_t block = a.slots[i] / s.block_size, offset = a.slots[i] % s.block_size;
  // A norm of `width` numbers spans a head, or all heads, which have one scale then.
  auto norm_rope = [&](const T* first, int64_t h, const T* weight, int64_t width, float& scale, T* out) {
    const T* head = first + h * dim;
    const bool is_wide = width > dim;
    if (weight && !a.rotary.is_first && (h == 0 || !is_wide)) scale = norm_scale(head, width, a.norms);
    const T* first_weight = a.rotary.is_first ? nullptr : is_wide ? weight + h * dim : weight;
    norm_rope_head(head, first_weight, scale, a.norms, cos, sin, halves, dim, out);
    if (a.rotary.is_interleaved) rotate_neighbours(out, cos, sin, half);
    if (a.rotary.is_first && weight)
      norm_rope_head(out, weight, norm_scale(out, dim, a.norms), a.norms, cos, sin, 0, dim, out);
  };
  float q_scale = 1.f, k_scale = 1.f;
  for (int64_t h = 0; h < s.q_heads; h++)
    norm_rope(x, h, q_norm, a.norms.q_width, q_scale, a.q_out + (i * s.q_heads + h) * dim);
  if (a.rotary.q_scales) scale_row(a.q_out + i * s.q_heads * dim, a.rotary.q_scales[a.positions[i]], s.q_heads * dim);
  for (int64_t h = 0; h < s.kv_heads; h++) {
    norm_rope(x + s.q_heads * dim, h, k_norm, a.norms.k_width, k_scale, key);
    const T* value = x + (s.q_heads + s.kv_heads + h) * dim;
    if (a.norms.v) {
      norm_rope_head(value, (const T*)a.norms.v, norm_scale(value, dim, a.norms), a.norms, cos, sin, 0, dim, normed);
      value = normed;
    }
    const int64_t plane = (block * s.kv_heads + h) * dim * s.block_size;
    if (is_paired<T>(s.block_size, dim)) {
      store_key<T, 2>(key, dim, s.block_size, a.k_cache + plane + 2 * offset);
      store_paired_value(value, dim, offset % 2, a.v_cache + plane + offset / 2 * 2 * dim);
    } else {
      store_key<T, 1>(key, dim, s.block_size, a.k_cache + plane + offset);
      memcpy(a.v_cache + plane + offset * dim, value, dim * sizeof(T));
    }
  }
}

template <typename T> void store_tokens(Pass& pass, const Qkv<T>& a, int64_t n) {
  pass.run(n, 4, [&](int64_t first, int64_t last) {
    std::vector<T> key(a.shape.head_dim), normed(a.shape.head_dim);
    for (int64_t i = first; i < last; i++) store_token(a, i, key.data(), normed.data());
  });
}

// ---------------------------------------------------------------------------------------------------------------
// Copies whole blocks, in the given order. A layer has `num_blocks` blocks; layers are contiguous.

void copy_blocks(char* pool, const int64_t* src, const int64_t* dst, int64_t n, int64_t num_layers, int64_t num_blocks,
                 int64_t block_bytes) {
  for (int64_t layer = 0; layer < num_layers; layer++) {
    char* base = pool + layer * num_blocks * block_bytes;
    for (int64_t i = 0; i < n; i++) memmove(base + dst[i] * block_bytes, base + src[i] * block_bytes, block_bytes);
  }
}

}  // namespace

void add_norm(Pass& pass, int is_bf16, const Norm& norm, void* out, int64_t n, int64_t dim) {
  over_rows(pass, is_bf16, n, [&](int64_t first, int64_t last, auto type) {
    typedef decltype(type) T;
    for (int64_t i = first; i < last; i++) add_norm_row(norm, i, (T*)out + i * dim, dim);
  });
}

void scale_rows(Pass& pass, int is_bf16, void* x, int64_t n, int64_t dim, float factor) {
  map_rows(pass, is_bf16, x, n, dim, [&](v16 lanes) { return lanes * factor; });
}

void add_positions(Pass& pass, int is_bf16, void* x, const void* table, const int32_t* positions, int64_t n,
                   int64_t dim) {
  over_rows(pass, is_bf16, n, [&](int64_t first, int64_t last, auto type) {
    typedef decltype(type) T;
    for (int64_t i = first; i < last; i++) add_row((T*)x + i * dim, (const T*)table + positions[i] * dim, dim);
  });
}

void widen(Pass& pass, int is_bf16, const void* x, int64_t n, int64_t dim, float* out) {
  over_rows(pass, is_bf16, n, [&](int64_t first, int64_t last, auto type) {
    for (int64_t i = first * dim; i < last * dim; i++) out[i] = to_float(((const decltype(type)*)x)[i]);
  });
}

void activate(Pass& pass, int is_bf16, void* x, int64_t n, int64_t dim, Activation activation) {
  map_rows(pass, is_bf16, x, n, dim, [&](v16 lanes) { return activate16(lanes, activation); });
}

void gated_activation(Pass& pass, int is_bf16, const void* gate_up, void* out, int64_t n, int64_t dim,
                      Activation activation) {
  over_rows(pass, is_bf16, n, [&](int64_t first, int64_t last, auto type) {
    typedef decltype(type) T;
    for (int64_t i = first; i < last; i++) {
      const T* gate = (const T*)gate_up + i * 2 * dim;
      gated_activation_row(gate, gate + dim, (T*)out + i * dim, dim, activation);
    }
  });
}

void soft_cap(Pass& pass, int is_bf16, void* x, int64_t n, int64_t dim, float cap) {
  map_rows(pass, is_bf16, x, n, dim, [&](v16 lanes) { return soft_cap16(lanes, cap); });
}

void qk_norm_rope_store(Pass& pass, int is_bf16, const void* qkv, const QkNorms& norms, const Rotary& rotary,
                        const int32_t* positions, const int64_t* slots, void* k_cache, void* v_cache, void* q_out,
                        int64_t n, const QkvShape& shape) {
  auto store = [&](auto type) {
    typedef decltype(type) T;
    store_tokens(pass,
                 Qkv<T>{(const T*)qkv, norms, rotary, positions, slots, (T*)k_cache, (T*)v_cache, (T*)q_out, shape}, n);
  };
  is_bf16 ? store(uint16_t()) : store(float());
}

// ---------------------------------------------------------------------------------------------------------------
// The C ABI. `is_bf16` selects the storage type of every untyped pointer. Every change increments the version.

extern "C" {

int quire_abi_version() { return 33; }

// The instructions that this build computes with, as words. The last one, the width of vectors, affects no result.
const char* quire_arithmetic() {
  return ""
#if defined(__FMA__) || defined(__ARM_NEON)
         " fma"
#endif
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
         " bfloat16-pairs"
#endif
#if QUIRE_HAS_TILES
         " tiles"
#endif
#if QUIRE_HAS_MATRICES
         " bfloat16-matrices"
#endif
#if defined(__AVX512F__)
         " avx512f"
#elif defined(__AVX2__)
         " avx2"
#elif defined(__ARM_NEON)
         " neon"
#else
         " generic"
#endif
      ;
}

void quire_add_norm(int is_bf16, int kind, void* x, const void* residual, const void* weight, const void* bias, void* out,
                    int64_t n, int64_t dim, float eps, int threads) {
  Pass pass(threads_for(n * dim, kSerialWork, threads));
  add_norm(pass, is_bf16, {x, residual, {weight, bias}, NormKind(kind), eps}, out, n, dim);
}

void quire_activate(int is_bf16, void* x, int64_t n, int64_t dim, int activation, int threads) {
  Pass pass(threads_for(n * dim, kSerialWork, threads));
  activate(pass, is_bf16, x, n, dim, Activation(activation));
}

void quire_soft_cap(int is_bf16, void* x, int64_t n, int64_t dim, float cap, int threads) {
  Pass pass(threads_for(n * dim, kSerialWork, threads));
  soft_cap(pass, is_bf16, x, n, dim, cap);
}

void quire_gated_activation(int is_bf16, const void* gate_up, void* out, int64_t n, int64_t dim, int activation,
                            int threads) {
  Pass pass(threads_for(n * dim, kSerialWork, threads));
  gated_activation(pass, is_bf16, gate_up, out, n, dim, Activation(activation));
}

void quire_qk_norm_rope_store(int is_bf16, const void* qkv, const QkNorms* norms, const Rotary* rotary,
                              const int32_t* positions, const int64_t* slots, void* k_cache, void* v_cache, void* q_out,
                              int64_t n, const QkvShape* shape, int threads) {
  Pass pass(threads_for(n * shape->qkv_stride(), kSerialWork, threads));
  qk_norm_rope_store(pass, is_bf16, qkv, *norms, *rotary, positions, slots, k_cache, v_cache, q_out, n, *shape);
}

void quire_copy_blocks(void* pool, const int64_t* src, const int64_t* dst, int64_t n, int64_t num_layers,
                       int64_t num_blocks, int64_t block_bytes) {
  copy_blocks((char*)pool, src, dst, n, num_layers, num_blocks, block_bytes);
}
}
