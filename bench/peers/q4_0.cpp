// Milliseconds of all linear layers of a token of Qwen3-0.6B's shapes in ggml's Q4_0, without the head, best of the runs:
// beside `python bench/linear.py --models qwen3-0.6b --rows 1`. LLAMA: the source of llama.cpp (scripts/install_peers).
//
//     cmake -S $LLAMA -B build -DBUILD_SHARED_LIBS=OFF && cmake --build build --target ggml
//     g++ -O2 -std=c++17 -I $LLAMA/ggml/include bench/peers/q4_0.cpp build/ggml/src/libggml{,-cpu,-base}.a -lgomp -o q4_0
//     ./q4_0 THREADS RUNS
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

constexpr int kLayers = 28;
constexpr int64_t kShapes[][2] = {{2048, 1024}, {1024, 1024}, {1024, 1024}, {1024, 2048}, {3072, 1024}, {3072, 1024}, {1024, 3072}};

// The type of buffers that llama.cpp chooses for weights: they are packed for the processor.
ggml_backend_buffer_type_t weight_buffers() {
  const ggml_backend_dev_t device = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
  const auto packed = (ggml_backend_dev_get_extra_bufts_t)ggml_backend_reg_get_proc_address(
      ggml_backend_dev_backend_reg(device), "ggml_backend_dev_get_extra_bufts");
  ggml_backend_buffer_type_t found = ggml_backend_cpu_buffer_type();
  if (packed)
    for (ggml_backend_buffer_type_t* type = packed(device); type && *type; type++) found = *type;
  return found;
}

int main(int, char** argv) {
  const ggml_init_params params{size_t(1) << 22, nullptr, true};
  ggml_context *weights = ggml_init(params), *context = ggml_init(params);
  std::vector<ggml_tensor*> all;
  for (int layer = 0; layer < kLayers; layer++)
    for (auto& shape : kShapes) all.push_back(ggml_new_tensor_2d(weights, GGML_TYPE_Q4_0, shape[1], shape[0]));
  ggml_backend_buffer_set_usage(ggml_backend_alloc_ctx_tensors_from_buft(weights, weight_buffers()), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
  std::mt19937 random(0);
  std::normal_distribution<float> normal(0, 0.02f);
  std::vector<float> numbers(3072 * 1024);
  for (float& number : numbers) number = normal(random);
  std::vector<char> quantized(ggml_row_size(GGML_TYPE_Q4_0, numbers.size()));
  ggml_cgraph* graph = ggml_new_graph_custom(context, 1024, false);
  ggml_tensor* inputs[3];
  for (int i = 0; i < 3; i++) inputs[i] = ggml_new_tensor_2d(context, GGML_TYPE_F32, 1024 * (i + 1), 1);
  for (ggml_tensor* weight : all) {
    ggml_quantize_chunk(GGML_TYPE_Q4_0, numbers.data(), quantized.data(), 0, weight->ne[1], weight->ne[0], nullptr);
    ggml_backend_tensor_set(weight, quantized.data(), 0, ggml_nbytes(weight));
    ggml_build_forward_expand(graph, ggml_mul_mat(context, weight, inputs[weight->ne[0] / 1024 - 1]));
  }
  const ggml_backend_t backend = ggml_backend_cpu_init();
  ggml_backend_cpu_set_n_threads(backend, atoi(argv[1]));
  ggml_backend_alloc_ctx_tensors(context, backend);
  for (ggml_tensor* input : inputs) ggml_backend_tensor_set(input, numbers.data(), 0, ggml_nbytes(input));
  double best = 1e9;
  for (int run = 0; run < atoi(argv[2]); run++) {
    const auto started = std::chrono::steady_clock::now();
    ggml_backend_graph_compute(backend, graph);
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count());
  }
  printf("%.3f\n", best * 1e3);
}
