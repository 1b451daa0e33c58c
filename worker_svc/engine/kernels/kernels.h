// What one kernel file calls of another, through the C ABI that Python uses too.
#pragma once
#include <cstdint>

extern "C" {

void quire_add_rms_norm(int is_bf16, void* x, const void* residual, const void* weight, void* out, int64_t n,
                        int64_t dim, float eps, int threads);

void quire_gated_activation(int is_bf16, const void* gate_up, void* out, int64_t n, int64_t dim, int activation,
                            int threads);

void quire_qk_norm_rope_store(int is_bf16, const void* qkv, const void* q_norm, const void* k_norm, const float* cos,
                              const float* sin, const int32_t* positions, const int64_t* slots, void* k_cache,
                              void* v_cache, void* q_out, int64_t n, int64_t q_heads, int64_t kv_heads,
                              int64_t head_dim, int64_t block_size, float eps, int threads);

void quire_paged_attention(int is_bf16, const void* q, const void* k_cache, const void* v_cache, void* out,
                           const int32_t* tables, int64_t table_stride, const int32_t* rows,
                           const int32_t* query_starts, const int32_t* context_lens, int64_t num_rows, int64_t q_heads,
                           int64_t kv_heads, int64_t head_dim, int64_t block_size, float scale, int threads);

void quire_linear(int kind, int is_bf16, const void* x, const void* packed, const float* scales, const void* bias,
                  void* y, int64_t n, int64_t in, int64_t out, int threads);
}
