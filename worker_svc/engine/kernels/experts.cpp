// A feed-forward part of experts: the tokens are sorted by expert, the linear layers of all experts run in the same phases,
// and the outputs of a token are added in the order of its experts' shares. So neither the other tokens nor the threads
// change a result.
#include <algorithm>
#include <vector>

#include "kernels.h"
#include "vec.h"

namespace {

// Memory of a thread, kept between calls because allocating would fault in fresh pages.
struct Scratch {
  std::vector<char> activated, terms;
  std::vector<int32_t> chosen, tokens, places;
  std::vector<float> shares;
};

// The experts of a token, in the order of decreasing share and then of their index, and their shares.
template <typename T> void route(const T* logits, const Experts& e, float* weights, int32_t* chosen, float* shares) {
  float top = to_float(logits[0]);
  for (int64_t i = 1; i < e.count; i++) top = std::max(top, to_float(logits[i]));
  float total = 0.f;
  for (int64_t i = 0; i < e.count; i += kLanes) {
    float lanes[kLanes] = {};
    const int64_t width = std::min<int64_t>(kLanes, e.count - i);
    for (int64_t j = 0; j < width; j++) lanes[j] = to_float(logits[i + j]) - top;
    store16(lanes, exp16(load16(lanes)));
    memcpy(weights + i, lanes, width * sizeof(float));
  }
  for (int64_t i = 0; i < e.count; i++) total += weights[i];
  float sum = 0.f;
  for (int64_t k = 0; k < e.top_k; k++) {
    int32_t best = -1;
    for (int64_t i = 0; i < e.count; i++)
      if (weights[i] >= 0.f && (best < 0 || weights[i] > weights[best])) best = int32_t(i);
    best = std::max(best, 0);  // NaN logits: any expert; the outputs become NaN, and the row fails
    chosen[k] = best, shares[k] = weights[best], sum += weights[best];
    weights[best] = -1.f;
  }
  for (int64_t k = 0; k < e.top_k; k++) shares[k] /= e.is_normalized ? sum : total;
}

template <typename T> void route_all(const T* logits, const Experts& e, int64_t n, Scratch& s) {
  std::vector<float> weights(e.count);
  for (int64_t t = 0; t < n; t++)
    route(logits + t * e.count, e, weights.data(), s.chosen.data() + t * e.top_k, s.shares.data() + t * e.top_k);
}

// Sorts the choices by expert: the token of each place, the place of each choice. Returns the first place of each expert.
std::vector<int64_t> sort_by_expert(const Experts& e, int64_t n, Scratch& s) {
  std::vector<int64_t> starts(e.count + 1), next;
  for (int64_t i = 0; i < n * e.top_k; i++) starts[s.chosen[i] + 1]++;
  for (int64_t i = 0; i < e.count; i++) starts[i + 1] += starts[i];
  next = starts;
  for (int64_t i = 0; i < n * e.top_k; i++) {
    s.places[i] = int32_t(next[s.chosen[i]]++);
    s.tokens[s.places[i]] = int32_t(i / e.top_k);
  }
  return starts;
}

// out [dim] of token t = the sum of its terms times their shares.
template <typename T> void combine(const T* terms, const Experts& e, const Scratch& s, int64_t t, T* out, int64_t dim) {
  const int32_t* places = s.places.data() + t * e.top_k;
  const float* shares = s.shares.data() + t * e.top_k;
  int64_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) {
    v16 sum{};
    for (int64_t k = 0; k < e.top_k; k++) sum = fma16(load16(terms + places[k] * dim + d), splat(shares[k]), sum);
    store16(out + d, sum);
  }
  for (; d < dim; d++) {
    float sum = 0.f;
    for (int64_t k = 0; k < e.top_k; k++) sum = fma1(to_float(terms[places[k] * dim + d]), shares[k], sum);
    out[d] = from_float<T>(sum);
  }
}

template <typename T>
void run_experts(Pass& pass, int is_bf16, const Experts& e, const T* x, const T* logits, Activation activation, T* out,
                 int64_t n) {
  thread_local Scratch s;
  const int64_t choices = n * e.top_k, inner = e.down[0].in, dim = e.down[0].out;
  s.chosen.resize(choices), s.tokens.resize(choices), s.places.resize(choices), s.shares.resize(choices);
  s.activated.resize(choices * inner * sizeof(T)), s.terms.resize(choices * dim * sizeof(T));
  route_all(logits, e, n, s);
  const std::vector<int64_t> starts = sort_by_expert(e, n, s);
  std::vector<LinearRows> up, down;
  for (int64_t i = 0; i < e.count; i++) {
    const int64_t first = starts[i], count = starts[i + 1] - first;
    if (!count) continue;
    T *activated = (T*)s.activated.data() + first * inner, *terms = (T*)s.terms.data() + first * dim;
    up.push_back({&e.gate_up[i], x, s.tokens.data() + first, activated, count});
    down.push_back({&e.down[i], activated, nullptr, terms, count});
  }
  grouped_gated_linear(pass, is_bf16, up, activation);
  grouped_linear(pass, is_bf16, down);
  const Scratch& filled = s;  // a thread_local name would be the helper's own in its tasks
  pass.run(n, 4, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; t++) combine((const T*)filled.terms.data(), e, filled, t, out + t * dim, dim);
  });
}

}  // namespace

void experts(Pass& pass, int is_bf16, const Experts& e, const void* x, const void* router_logits, Activation activation,
             void* out, int64_t n) {
  auto run = [&](auto type) {
    typedef decltype(type) T;
    run_experts(pass, is_bf16, e, (const T*)x, (const T*)router_logits, activation, (T*)out, n);
  };
  is_bf16 ? run(uint16_t()) : run(float());
}
