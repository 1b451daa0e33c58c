// Paged attention over mixed batches. A task is up to kQueryTile query vectors of one row and one KV head; query
// vector i of a row is token i / group, head i % group. Softmax is online over tiles of keys at absolute positions, so
// results depend neither on chunk boundaries nor on the other rows of a batch.
#include <algorithm>
#include <memory>
#include <vector>

#include "attention_lanes.h"
#include "attention_pairs.h"
#include "kernels.h"

namespace {

// Scratch memory of a thread, kept between calls because allocating would fault in fresh pages.
template <typename Scratch> Scratch& scratch_of_thread(int64_t head_dim, int64_t padded_dim) {
  thread_local std::unique_ptr<Scratch> scratch;
  thread_local int64_t dim = 0;
  if (dim != head_dim) scratch = std::make_unique<Scratch>(head_dim, padded_dim), dim = head_dim;
  return *scratch;
}

template <typename T> void attend(Pass& pass, const AttentionArgs<T>& a, const std::vector<Task>& tasks) {
  const int64_t padded_dim = (a.head_dim + kLanes - 1) / kLanes * kLanes, count = tasks.size();
  const int64_t grain = std::clamp<int64_t>(count / (16 * pass.threads), 1, 8);
  pass.run(count, grain, [&](int64_t first, int64_t last) {
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
    if constexpr (sizeof(T) == sizeof(uint16_t)) {
      PairedScratch& scratch = scratch_of_thread<PairedScratch>(a.head_dim, padded_dim);
      for (int64_t i = first; i < last; i++)
        paired_task(a, tasks[i], tasks[std::min(i + 1, count - 1)], padded_dim, scratch);
      return;
    }
#endif
    Scratch<T>& scratch = scratch_of_thread<Scratch<T>>(a.head_dim, padded_dim);
    for (int64_t i = first; i < last; i++) attention_task(a, tasks[i], padded_dim, scratch);
  });
}

}  // namespace

std::vector<AttentionTask> attention_tasks(const int32_t* query_starts, const int32_t* context_lens, int64_t num_rows,
                                           int64_t q_heads, int64_t kv_heads) {
  const int64_t group = q_heads / kv_heads;
  std::vector<AttentionTask> tasks;
  for (int32_t b = 0; b < num_rows; b++) {
    const int64_t queries = (query_starts[b + 1] - query_starts[b]) * group;
    for (int64_t first = 0; first < queries; first += kQueryTile) {
      const int64_t count = std::min<int64_t>(kQueryTile, queries - first);
      const int64_t num_keys = context_lens[b] + (first + count - 1) / group + 1;
      for (int32_t h = 0; h < kv_heads; h++) tasks.push_back({b, h, int32_t(first), int32_t(count), num_keys});
    }
  }
  return tasks;
}

void paged_attention(Pass& pass, int is_bf16, const std::vector<AttentionTask>& tasks, const void* q,
                     const void* k_cache, const void* v_cache, void* out, const int32_t* tables, int64_t table_stride,
                     const int32_t* rows, const int32_t* query_starts, const int32_t* context_lens,
                     const QkvShape& shape, float scale) {
  auto run = [&](auto type) {
    typedef decltype(type) T;
    const AttentionArgs<T> args{(const T*)q,    (const T*)k_cache, (const T*)v_cache, (T*)out,
                                tables,         table_stride,      rows,              query_starts,
                                context_lens,   shape.q_heads,     shape.kv_heads,    shape.head_dim,
                                __builtin_ctzll(uint64_t(shape.block_size)), scale};
    attend(pass, args, tasks);
  };
  is_bf16 ? run(uint16_t()) : run(float());
}

extern "C" {

// Whether blocks of this storage type and size are laid out in pairs; see qk_norm_rope_store.
int quire_kv_is_paired(int is_bf16, int64_t block_size) {
  return is_bf16 ? is_paired<uint16_t>(block_size) : is_paired<float>(block_size);
}

void quire_paged_attention(int is_bf16, const void* q, const void* k_cache, const void* v_cache, void* out,
                           const int32_t* tables, int64_t table_stride, const int32_t* rows,
                           const int32_t* query_starts, const int32_t* context_lens, int64_t num_rows, int64_t q_heads,
                           int64_t kv_heads, int64_t head_dim, int64_t block_size, float scale, int threads) {
  Pass pass(threads);
  paged_attention(pass, is_bf16, attention_tasks(query_starts, context_lens, num_rows, q_heads, kv_heads), q, k_cache,
                  v_cache, out, tables, table_stride, rows, query_starts, context_lens,
                  {q_heads, kv_heads, head_dim, block_size}, scale);
}
}
