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
  std::vector<char> activated, terms, scaled, router_logits;
  std::vector<int32_t> chosen, tokens, places;
  std::vector<float> wide, logits, shares;
};

// x as float, in `wide`, unless it is float already.
const float* as_float(Pass& pass, int is_bf16, const void* x, int64_t n, int64_t dim, std::vector<float>& wide) {
  if (!is_bf16) return (const float*)x;
  wide.resize(n * dim);
  widen(pass, is_bf16, x, n, dim, wide.data());
  return wide.data();
}

// The outputs of the router [n, router.out] as float.
const float* router_logits(Pass& pass, int is_bf16, const Experts& e, const void* x, int64_t n, Scratch& s) {
  const int64_t width = e.router.out;
  s.router_logits.resize(n * width * sizeof(float));
  if (!e.is_float32) {
    linear(pass, is_bf16, e.router, x, s.router_logits.data(), n);
    return as_float(pass, is_bf16, s.router_logits.data(), n, width, s.logits);
  }
  linear(pass, 0, e.router, as_float(pass, is_bf16, x, n, e.router.in, s.wide), s.router_logits.data(), n);
  return (const float*)s.router_logits.data();
}

// to[i] = op(from[i]) for `count` numbers.
template <typename Op> void map_lanes(const float* from, float* to, int64_t count, const Op& op) {
  for (int64_t i = 0; i < count; i += kLanes) {
    float lanes[kLanes] = {};
    const int64_t width = std::min<int64_t>(kLanes, count - i);
    memcpy(lanes, from + i, width * sizeof(float));
    store16(lanes, op(load16(lanes)));
    memcpy(to + i, lanes, width * sizeof(float));
  }
}

INLINE v16 sigmoid16(v16 x) { return 1.f / (1.f + exp16(-x)); }

// Index of the highest number, the first of equal ones; -1 if all are -inf or NaN.
int64_t index_of_highest(const float* numbers, int64_t count) {
  int64_t best = -1;
  for (int64_t i = 0; i < count; i++)
    if (numbers[i] > kNegInf && (best < 0 || numbers[i] > numbers[best])) best = i;
  return best;
}

// The sum of the `count` highest of `numbers`, a copy.
float sum_of_highest(std::vector<float> numbers, int64_t count) {
  float sum = 0.f;
  for (int64_t i = 0; i < count; i++) {
    const int64_t best = index_of_highest(numbers.data(), numbers.size());
    if (best < 0) return sum;
    sum += numbers[best], numbers[best] = kNegInf;
  }
  return sum;
}

// Replaces the keys outside of the best groups by -inf.
void keep_top_groups(const Experts& e, float* keys) {
  const int64_t size = e.num_experts / e.num_groups;
  std::vector<float> sums(e.num_groups);
  for (int64_t g = 0; g < e.num_groups; g++)
    sums[g] = sum_of_highest(std::vector<float>(keys + g * size, keys + (g + 1) * size), e.group_best);
  std::vector<char> is_kept(e.num_groups);
  for (int64_t i = 0; i < e.top_groups; i++) {
    const int64_t best = std::max<int64_t>(index_of_highest(sums.data(), e.num_groups), 0);
    is_kept[best] = 1, sums[best] = kNegInf;
  }
  for (int64_t i = 0; i < e.num_experts; i++)
    if (!is_kept[i / size]) keys[i] = kNegInf;
}

// Scores of a token's experts. Returns what they are to be divided by.
float score(const float* logits, const Experts& e, float* scores) {
  if (e.is_sigmoid) {
    map_lanes(logits, scores, e.num_experts, [](v16 x) { return sigmoid16(x); });
    return 1.f;
  }
  float top = logits[0], total = 0.f;
  for (int64_t i = 1; i < e.num_experts; i++) top = std::max(top, logits[i]);
  map_lanes(logits, scores, e.num_experts, [&](v16 x) { return exp16(x - top); });
  for (int64_t i = 0; i < e.num_experts; i++) total += scores[i];
  return total;
}

constexpr float kSmallestSum = 1e-20f;  // as SMALLEST_SUM of torch_ops.py

// The experts of a token and their shares. `scores` and `keys` are memory for one number per expert.
void route(const float* logits, const Experts& e, float* scores, float* keys, int32_t* chosen, float* shares) {
  const float total = score(logits, e, scores);
  for (int64_t i = 0; i < e.num_experts; i++) keys[i] = e.correction ? scores[i] / total + e.correction[i] : scores[i];
  if (e.num_groups > 1) keep_top_groups(e, keys);
  float sum = 0.f;
  for (int64_t k = 0; k < e.top_k; k++) {
    // NaN logits: any expert; the outputs become NaN, and the row fails
    const int64_t best = std::max<int64_t>(index_of_highest(keys, e.num_experts), 0);
    chosen[k] = int32_t(best), shares[k] = scores[best], sum += scores[best];
    keys[best] = kNegInf;
  }
  for (int64_t k = 0; k < e.top_k; k++)
    shares[k] = shares[k] / (e.is_normalized ? sum + kSmallestSum : total) * float(e.scale);
  for (int64_t k = 0; k < e.top_k && e.scales; k++) shares[k] *= e.scales[chosen[k]];
  if (e.shared == kNoShared) return;
  chosen[e.top_k] = int32_t(e.num_experts);
  shares[e.top_k] = e.shared == kGatedShared ? sigmoid16(splat(logits[e.num_experts]))[0] : 1.f;
}

void route_all(const float* logits, const Experts& e, int64_t n, Scratch& s) {
  std::vector<float> scores(e.num_experts), keys(e.num_experts);
  for (int64_t t = 0; t < n; t++)
    route(logits + t * e.router.out, e, scores.data(), keys.data(), s.chosen.data() + t * e.num_used(),
          s.shares.data() + t * e.num_used());
}

// Sorts the choices by expert: the token of each place, the place of each choice. Returns the first place of each expert.
std::vector<int64_t> sort_by_expert(const Experts& e, int64_t n, Scratch& s) {
  const int64_t used = e.num_used();
  std::vector<int64_t> starts(e.total() + 1), next;
  for (int64_t i = 0; i < n * used; i++) starts[s.chosen[i] + 1]++;
  for (int64_t i = 0; i < e.total(); i++) starts[i + 1] += starts[i];
  next = starts;
  for (int64_t i = 0; i < n * used; i++) {
    s.places[i] = int32_t(next[s.chosen[i]]++);
    s.tokens[s.places[i]] = int32_t(i / used);
  }
  return starts;
}

// Inputs of experts, by place: rows of x times their shares, which become 1.
template <typename T> const T* scale_inputs(Pass& pass, const Experts& e, const T* x, int64_t n, int64_t dim, Scratch& s) {
  const int64_t used = e.num_used();
  s.scaled.resize(n * used * dim * sizeof(T));
  T* scaled = (T*)s.scaled.data();
  pass.run(n, 4, [&](int64_t first, int64_t last) {
    for (int64_t i = first * used; i < last * used; i++) {
      const T* from = x + i / used * dim;
      T* to = scaled + s.places[i] * dim;
      for (int64_t d = 0; d < dim; d++) to[d] = from_float<T>(to_float(from[d]) * s.shares[i]);
    }
  });
  std::fill(s.shares.begin(), s.shares.end(), 1.f);
  return scaled;
}

// out [dim] of token t = the sum of its terms times their shares.
template <typename T> void combine(const T* terms, const Experts& e, const Scratch& s, int64_t t, T* out, int64_t dim) {
  const int32_t* places = s.places.data() + t * e.num_used();
  const float* shares = s.shares.data() + t * e.num_used();
  int64_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) {
    v16 sum{};
    for (int64_t k = 0; k < e.num_used(); k++) sum = fma16(load16(terms + places[k] * dim + d), splat(shares[k]), sum);
    store16(out + d, sum);
  }
  for (; d < dim; d++) {
    float sum = 0.f;
    for (int64_t k = 0; k < e.num_used(); k++) sum = fma1(to_float(terms[places[k] * dim + d]), shares[k], sum);
    out[d] = from_float<T>(sum);
  }
}

template <typename T>
void run_experts(Pass& pass, int is_bf16, const Experts& e, const T* x, const T* routed, Activation activation, T* out,
                 int64_t n) {
  thread_local Scratch memory;
  Scratch& s = memory;  // a thread_local name would be the helper's own in its tasks
  const int64_t choices = n * e.num_used(), inner = e.down[0].in, dim = e.down[0].out;
  const int64_t widest = std::max(inner, e.down[e.total() - 1].in);
  s.chosen.resize(choices), s.tokens.resize(choices), s.places.resize(choices), s.shares.resize(choices);
  s.activated.resize((n * e.top_k * inner + n * widest) * sizeof(T)), s.terms.resize(choices * dim * sizeof(T));
  route_all(router_logits(pass, is_bf16, e, routed, n, s), e, n, s);
  const std::vector<int64_t> starts = sort_by_expert(e, n, s);
  const T* scaled = e.scales_inputs ? scale_inputs(pass, e, x, n, dim, s) : nullptr;
  std::vector<LinearRows> up, down;
  for (int64_t i = 0; i < e.total(); i++) {
    const int64_t first = starts[i], count = starts[i + 1] - first;
    if (!count) continue;
    // Only the shared expert, which is the last one, may have another width
    T *activated = (T*)s.activated.data() + first * inner, *terms = (T*)s.terms.data() + first * dim;
    if (scaled)
      up.push_back({&e.gate_up[i], scaled + first * dim, nullptr, activated, count});
    else
      up.push_back({&e.gate_up[i], x, s.tokens.data() + first, activated, count});
    down.push_back({&e.down[i], activated, nullptr, terms, count});
  }
  if (e.is_gated) {
    grouped_gated_linear(pass, is_bf16, up, activation);
  } else {
    grouped_linear(pass, is_bf16, up);
    activate(pass, is_bf16, s.activated.data(), n * e.top_k, inner, activation);
    if (e.shared != kNoShared)
      activate(pass, is_bf16, (T*)s.activated.data() + n * e.top_k * inner, n, e.down[e.num_experts].in, activation);
  }
  grouped_linear(pass, is_bf16, down);
  pass.run(n, 4, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; t++) combine((const T*)s.terms.data(), e, s, t, out + t * dim, dim);
  });
}

}  // namespace

void experts(Pass& pass, int is_bf16, const Experts& e, const void* x, const void* routed, Activation activation, void* out,
             int64_t n) {
  auto run = [&](auto type) {
    typedef decltype(type) T;
    run_experts(pass, is_bf16, e, (const T*)x, (const T*)routed, activation, (T*)out, n);
  };
  is_bf16 ? run(uint16_t()) : run(float());
}
