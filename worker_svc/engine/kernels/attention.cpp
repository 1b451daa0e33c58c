// Paged attention over mixed batches, as attention_plan.cpp divides it. Softmax is online over tiles of keys at absolute
// positions, so results depend neither on chunk boundaries nor on the other rows of a batch.
#include <algorithm>
#include <map>
#include <memory>
#include <vector>

#include "attention_dots.h"
#include "attention_lanes.h"
#include "attention_latents.h"
#include "attention_tiles.h"
#include "kernels.h"

namespace {

// Scratch memory of a thread, kept between calls because allocating would fault in fresh pages.
template <typename Scratch> Scratch& scratch_of_thread(int64_t head_dim, int64_t key_size, int64_t padded_dim) {
  thread_local std::map<int64_t, std::unique_ptr<Scratch>> of_dim;
  std::unique_ptr<Scratch>& scratch = of_dim[head_dim];
  if (!scratch) scratch = std::make_unique<Scratch>(key_size, padded_dim);
  return *scratch;
}

#if QUIRE_HAS_TILES
typedef TileProducts Products;
#elif QUIRE_HAS_DOTS
typedef Dots Products;
#endif

template <typename T> void attend(Pass& pass, const AttentionArgs<T>& a, const AttentionPlan& plan) {
  const int64_t padded_dim = (a.head_dim + kLanes - 1) / kLanes * kLanes, count = plan.tasks.size();
  const int64_t grain = std::clamp<int64_t>(count / (16 * pass.threads), 1, 8);
  pass.run(count, grain, [&](int64_t first, int64_t last) {
#if QUIRE_HAS_PAIRS
    if constexpr (sizeof(T) == sizeof(uint16_t)) {
      PairedScratch& scratch = scratch_of_thread<PairedScratch>(a.head_dim, Products::key_pairs(a.head_dim), padded_dim);
      Products products;  // configures the tiles of this thread
      for (int64_t i = first; i < last; i++)
        paired_task(a, plan, plan.tasks[i], plan.tasks[std::min(i + 1, count - 1)], products, scratch);
      return;
    }
#endif
    Scratch<T>& scratch = scratch_of_thread<Scratch<T>>(a.head_dim, a.head_dim, padded_dim);
    for (int64_t i = first; i < last; i++)
      for (int64_t j = 0; j < plan.tasks[i].num_spans; j++)
        attend_span(a, plan.spans[plan.tasks[i].first_span + j], plan.tasks[i].head, padded_dim, scratch);
  });
}

// Spans that are the heads of few tokens, with a scratch each. They go through their keys in turns, so that the cache
// that all threads share has what the first of them reads.
template <typename T> void attend_in_turns(Pass& pass, const LatentArgs<T>& a, const std::vector<Span>& spans) {
  thread_local std::map<int64_t, std::vector<LatentScratch<T>>> of_width;
  std::vector<LatentScratch<T>>& scratch = of_width[a.width];
  while (scratch.size() < spans.size()) scratch.emplace_back(a.width, a.width);
  int64_t most = 0;
  for (const Span& span : spans) most = std::max(most, span.num_keys);
  for (int64_t key = 0; key < most; key += kTurnKeys)
    pass.run(spans.size(), 1, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; i++) attend_latents(a, spans[i], key, key + kTurnKeys, scratch[i]);
    });
}

}  // namespace

void paged_attention(Pass& pass, int is_bf16, const AttentionPlan& plan, const AttentionRows& rows,
                     const QkvShape& shape, const void* q, const void* k_cache, const void* v_cache, void* out,
                     const Scores& scores) {
  auto run = [&](auto type) {
    typedef decltype(type) T;
    const int64_t block_shift = __builtin_ctzll(uint64_t(shape.block_size));
    const AttentionArgs<T> args{(const T*)q,   (const T*)k_cache, (const T*)v_cache, (T*)out,     rows,
                                shape.q_heads, shape.kv_heads,    shape.head_dim,    block_shift, scores};
    attend(pass, args, plan);
  };
  is_bf16 ? run(uint16_t()) : run(float());
}

void latent_attention(Pass& pass, int is_bf16, const AttentionPlan& plan, const AttentionRows& rows, int64_t block_size,
                      const void* q, const void* cache, void* out, const LatentShape& shape, float scale) {
  auto run = [&](auto type) {
    typedef decltype(type) T;
    const LatentArgs<T> args{(const T*)q, (const T*)cache, (T*)out, rows, shape.heads, shape.rank, shape.width,
                             __builtin_ctzll(uint64_t(block_size)), scale};
    const int64_t count = plan.spans.size();
    if (count > 1 && count <= 2 * pass.threads) return attend_in_turns(pass, args, plan.spans);
    pass.run(count, 1, [&](int64_t first, int64_t last) {
      auto& scratch = scratch_of_thread<LatentScratch<T>>(shape.width, shape.width, shape.width);
      for (int64_t i = first; i < last; i++) attend_latents(args, plan.spans[i], 0, kEveryKey, scratch);
    });
  };
  is_bf16 ? run(uint16_t()) : run(float());
}

extern "C" {

// Whether blocks of this storage type and size are laid out in pairs; see qk_norm_rope_store.
int quire_kv_is_paired(int is_bf16, int64_t block_size, int64_t head_dim) {
  return is_bf16 ? is_paired<uint16_t>(block_size, head_dim) : is_paired<float>(block_size, head_dim);
}

void quire_paged_attention(int is_bf16, const void* q, const void* k_cache, const void* v_cache, void* out,
                           const AttentionRows* rows, const QkvShape* shape, const Scores* scores, int threads) {
  Pass pass(threads);
  paged_attention(pass, is_bf16, plan_attention(*rows, *shape, threads), *rows, *shape, q, k_cache, v_cache, out, *scores);
}

void quire_latent_attention(int is_bf16, const void* q, const void* cache, void* out, const AttentionRows* rows,
                            int64_t block_size, const LatentShape* shape, float scale, int threads) {
  Pass pass(threads);
  latent_attention(pass, is_bf16, plan_latents(*rows, shape->heads, threads), *rows, block_size, q, cache, out, *shape,
                   scale);
}
}
