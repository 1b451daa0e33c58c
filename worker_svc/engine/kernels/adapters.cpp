// Adapters (LoRA): the rows of a batch that use one have a product of two thin matrices added to the outputs of a linear
// layer. The adapters of a batch, of any ranks, run in the same phases. A row is multiplied by its own adapter only, by the
// kernels of linear.cpp, so neither the other rows nor their adapters change its result.
#include "kernels.h"

namespace {

// Memory of a thread, kept between calls because allocating would fault in fresh pages.
char* scratch_of_thread(int64_t bytes) {
  thread_local std::vector<char> memory;
  if (int64_t(memory.size()) < bytes) memory.resize(bytes);
  return memory.data();
}

}  // namespace

void add_adapters(Pass& pass, int is_bf16, const std::vector<LowRankRows>& parts, const void* x, void* y, int64_t width) {
  const int64_t element = is_bf16 ? 2 : 4;
  int64_t size = 0;
  for (const LowRankRows& p : parts) size += p.n * p.layer->shrink.out;
  if (!size) return;
  char* shrunk = scratch_of_thread(size * element);
  std::vector<LinearRows> down, up;
  for (const LowRankRows& p : parts) {
    const LowRank& layer = *p.layer;
    const int64_t rank = layer.shrink.out;
    if (!rank || !p.n) continue;
    down.push_back({&layer.shrink, x, p.rows, shrunk, p.n});
    for (int64_t i = 0; i < layer.num_parts; i++)
      up.push_back({&layer.expand[i], shrunk + layer.first_rank[i] * element, nullptr,
                    (char*)y + layer.first_output[i] * element, p.n, rank, width, p.rows, true});
    shrunk += p.n * rank * element;
  }
  grouped_linear(pass, is_bf16, down);
  grouped_linear(pass, is_bf16, up);
}

extern "C" {

// `parts` is LowRankRows[num_parts].
void quire_add_adapters(int is_bf16, const void* parts, int64_t num_parts, const void* x, void* y, int64_t width,
                        int threads) {
  Pass pass(threads);
  const LowRankRows* first = (const LowRankRows*)parts;
  add_adapters(pass, is_bf16, std::vector<LowRankRows>(first, first + num_parts), x, y, width);
}
}
