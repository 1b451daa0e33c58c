// Log probabilities of chosen and of the most likely tokens, as logprobs.py specifies them. One thread computes a whole
// row, and every sum has a fixed order, so a row's values depend on its logits alone.
#include <algorithm>
#include <cmath>

#include "kernels.h"
#include "vec.h"

namespace {

constexpr int64_t kSumBlock = 1024;           // a multiple of kLanes; sums of blocks are added in double
constexpr int64_t kSerialLogprobs = 1 << 16;  // logits below which waking other threads costs more than they save

// The largest logit; `is_good` is false if there is NaN, +inf or no finite number.
template <typename T> float largest(const T* x, int64_t vocab, bool& is_good) {
  v16 top = splat(kNegInf);
  i16 is_nan = {};
  int64_t i = 0;
  for (; i + kLanes <= vocab; i += kLanes) {
    const v16 value = load16(x + i);
    is_nan |= value != value;
    top = vmax(value, top);
  }
  float highest = max_lanes(top);
  is_good = true;
  for (int lane = 0; lane < kLanes; lane++) is_good &= is_nan[lane] == 0;
  for (; i < vocab; i++) {
    const float value = to_float(x[i]);
    is_good &= value == value;
    highest = value > highest ? value : highest;
  }
  is_good &= highest != kNegInf && highest != -kNegInf;
  return highest;
}

// log(sum(exp(x - highest))).
template <typename T> double log_sum(const T* x, int64_t vocab, float highest) {
  double sum = 0;
  for (int64_t start = 0; start < vocab; start += kSumBlock) {
    const int64_t end = start + kSumBlock < vocab ? start + kSumBlock : vocab;
    v16 acc{};
    int64_t i = start;
    for (; i + kLanes <= end; i += kLanes) acc += exp16(load16(x + i) - highest);
    float rest[kLanes];
    std::fill_n(rest, kLanes, kNegInf);
    for (int lane = 0; i < end; i++, lane++) rest[lane] = to_float(x[i]) - highest;
    sum += double(sum_lanes(acc + exp16(load16(rest))));
  }
  return log(sum);
}

template <typename T> uint32_t rank_of(const T* x, int64_t vocab, uint32_t id) {
  const float value = to_float(x[id]);
  i16 greater = {};
  int64_t i = 0;
  for (; i + kLanes <= vocab; i += kLanes) greater -= load16(x + i) > value;
  uint32_t rank = 1;
  for (int lane = 0; lane < kLanes; lane++) rank += uint32_t(greater[lane]);
  for (; i < vocab; i++) rank += to_float(x[i]) > value;
  return rank;
}

// The ids of the `count` largest logits in falling order; of equal ones, the lowest id first.
template <typename T> void largest_ids(const T* x, int64_t vocab, int64_t count, uint32_t* ids) {
  int64_t found = 0;
  float bar = kNegInf;  // the smallest of `count` found logits
  auto look_at = [&](int64_t i) {
    const float value = to_float(x[i]);
    if (found == count && !(value > bar)) return;
    int64_t place = found < count ? found++ : count - 1;
    for (; place > 0 && value > to_float(x[ids[place - 1]]); place--) ids[place] = ids[place - 1];
    ids[place] = uint32_t(i);
    if (found == count) bar = to_float(x[ids[count - 1]]);
  };
  int64_t i = 0;
  for (; i < vocab && found < count; i++) look_at(i);
  for (; i + kLanes <= vocab; i += kLanes) {
    if (max_lanes(load16(x + i)) > bar)
      for (int lane = 0; lane < kLanes; lane++) look_at(i + lane);
  }
  for (; i < vocab; i++) look_at(i);
}

template <typename T>
void logprobs(const T* logits, const int64_t* lines, int64_t n, int64_t vocab, const uint32_t* chosen, int64_t num_top,
              float* values, uint32_t* ids, uint32_t* ranks, uint8_t* status, int threads) {
  auto run_rows = [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++) {
      const T* x = logits + lines[i] * vocab;
      float* row_values = values + i * (1 + num_top);
      uint32_t* row_ids = ids + i * (1 + num_top);
      bool is_good;
      const float highest = largest(x, vocab, is_good);
      status[i] = !is_good;
      if (!is_good) continue;
      row_ids[0] = chosen[i];
      if (num_top) largest_ids(x, vocab, num_top, row_ids + 1);
      ranks[i] = rank_of(x, vocab, chosen[i]);
      const double log_total = log_sum(x, vocab, highest);
      for (int64_t j = 0; j <= num_top; j++)
        row_values[j] = float(double(to_float(x[row_ids[j]]) - highest) - log_total);
    }
  };
  Pass(threads_for(n * vocab, kSerialLogprobs, threads)).run(n, 1, run_rows);
}

}  // namespace

extern "C" {

// Row i of the result describes line lines[i] of the logits. values and ids [n, 1 + num_top]: the chosen token, then the
// most likely tokens. status: 1 if the logits have NaN, +inf or no finite number; the row's other results are then
// unchanged.
void quire_logprobs(int is_bf16, const void* logits, const int64_t* lines, int64_t n, int64_t vocab,
                    const uint32_t* chosen, int64_t num_top, float* values, uint32_t* ids, uint32_t* ranks,
                    uint8_t* status, int threads) {
  if (is_bf16)
    logprobs((const uint16_t*)logits, lines, n, vocab, chosen, num_top, values, ids, ranks, status, threads);
  else
    logprobs((const float*)logits, lines, n, vocab, chosen, num_top, values, ids, ranks, status, threads);
}
}
