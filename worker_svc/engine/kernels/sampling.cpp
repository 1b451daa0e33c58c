// Sampling, as noise.py specifies it. Noise is computed only for ids that can still be sampled.
#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels.h"
#include "vec.h"

namespace {

constexpr float kMaxNoise = 22.9f;
constexpr double kMassUnit = 1099511627776.0;  // 2^40
constexpr double kMassFloor = -60.0;           // exp of this or less rounds to a mass of 0
constexpr int64_t kSerialSampling = 1 << 19;   // logits below which waking other threads costs more than they save

enum SampleStatus : uint8_t { kSampled = 0, kNotFinite = 1 };

struct NoiseKey {
  uint32_t k0, k1, position, sample_index;
};

// 16 counters at once; word w of lane i is the random word of vocabulary id 4 * (first + i) + w.
INLINE void philox16(const NoiseKey& key, uint32_t first, uint32_t out[4][kLanes]) {
  typedef uint32_t u16 __attribute__((vector_size(64)));  // lanes.h has no products of 64 bits
  u16 c0, c1 = u16{} + key.position, c2 = u16{} + key.sample_index, c3 = {};
  for (int i = 0; i < kLanes; i++) c0[i] = first + i;
  uint32_t k0 = key.k0, k1 = key.k1;
  typedef uint64_t w16 __attribute__((vector_size(128)));
  for (int round = 0; round < 10; round++) {
    const w16 p0 = __builtin_convertvector(c0, w16) * uint64_t(0xD2511F53);
    const w16 p1 = __builtin_convertvector(c2, w16) * uint64_t(0xCD9E8D57);
    c0 = __builtin_convertvector(p1 >> 32, u16) ^ c1 ^ k0;
    c1 = __builtin_convertvector(p1, u16);
    c2 = __builtin_convertvector(p0 >> 32, u16) ^ c3 ^ k1;
    c3 = __builtin_convertvector(p0, u16);
    k0 += 0x9E3779B9;
    k1 += 0xBB67AE85;
  }
  memcpy(out[0], &c0, sizeof c0);
  memcpy(out[1], &c1, sizeof c1);
  memcpy(out[2], &c2, sizeof c2);
  memcpy(out[3], &c3, sizeof c3);
}

// The word that gives the most noise.
INLINE uint32_t smallest_word(const uint32_t words[4][kLanes]) {
  uint32_t lowest[kLanes];
  for (int i = 0; i < kLanes; i++)
    lowest[i] = std::min(std::min(words[0][i], words[1][i]), std::min(words[2][i], words[3][i]));
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; i++) lowest[i] = std::min(lowest[i], lowest[i + half]);
  return lowest[0];
}

INLINE float gumbel(uint32_t word) {
  const double u = (double(word) + 0.5) * 0x1p-32;
  return float(-log(-log1p(-u)));
}

// An upper bound of gumbel(word): -log1p(-u) >= u, and log2 is above its linear interpolation between powers of two.
INLINE float gumbel_bound(uint32_t word) {
  const float x = float(word) + 0.5f;
  uint32_t bits;
  memcpy(&bits, &x, 4);
  const float log2_below = float(int32_t(bits)) * 0x1p-23f - 127.f;
  return (32.f - log2_below) * 0.69314718f;
}

// Float order as unsigned integer order.
INLINE uint32_t order_key(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
INLINE float from_order_key(uint32_t key) {
  const uint32_t bits = key & 0x80000000u ? key & 0x7fffffffu : ~key;
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

// exp for x in [-60, 0] to about 1 ulp of double, written so that compilers vectorize it.
INLINE double exp_mass(double x) {
  const double n = nearbyint(x * 1.4426950408889634074);
  const double r = (x - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;
  double p = 1.0 / 6227020800.0;
  p = p * r + 1.0 / 479001600.0;
  p = p * r + 1.0 / 39916800.0;
  p = p * r + 1.0 / 3628800.0;
  p = p * r + 1.0 / 362880.0;
  p = p * r + 1.0 / 40320.0;
  p = p * r + 1.0 / 5040.0;
  p = p * r + 1.0 / 720.0;
  p = p * r + 1.0 / 120.0;
  p = p * r + 1.0 / 24.0;
  p = p * r + 1.0 / 6.0;
  p = p * r + 0.5;
  p = p * r * r + r + 1.0;
  const int64_t bits = (int64_t(n) + 1023) << 52;
  double power;
  memcpy(&power, &bits, 8);
  return p * power;
}

INLINE int64_t mass_of(float z, float top) {
  const double x = double(z) - double(top);
  return int64_t(exp_mass(x > kMassFloor ? x : kMassFloor) * kMassUnit + 0.5);  // truncation is floor here
}

// The largest value t with weight(z >= t) >= need, by radix descent over the order of floats. Equal values are kept or
// dropped together.
template <typename Weight>
float threshold_for(const float* z, int64_t n, float lowest, int64_t need, const Weight& weight) {
  static const int shifts[3] = {21, 10, 0}, widths[3] = {11, 11, 10};
  std::vector<int64_t> histogram(2048);
  uint32_t prefix = 0;
  for (int level = 0; level < 3; level++) {
    const int shift = shifts[level];
    const uint32_t mask = (1u << widths[level]) - 1;
    std::fill(histogram.begin(), histogram.end(), 0);
    for (int64_t i = 0; i < n; i++) {
      const uint32_t key = order_key(z[i]);
      const bool is_inside = level == 0 || (key >> (shift + widths[level])) == prefix;
      if (is_inside && z[i] >= lowest) histogram[(key >> shift) & mask] += weight(i);
    }
    int64_t bucket = mask;
    while (bucket > 0 && need > histogram[bucket]) need -= histogram[bucket--];
    prefix = (prefix << widths[level]) | uint32_t(bucket);
  }
  return std::max(lowest, from_order_key(prefix));
}

// Sampling parameters, one column each (names of request_fields).
#define SAMPLING_COLUMNS(COLUMN) \
  COLUMN(float, temperature)     \
  COLUMN(uint32_t, top_k)        \
  COLUMN(float, top_p)           \
  COLUMN(float, min_p)           \
  COLUMN(float, top_a)           \
  COLUMN(uint64_t, seed)         \
  COLUMN(uint32_t, sample_index)

struct SamplingColumns {
#define POINTER(type, name) const type* name;
  SAMPLING_COLUMNS(POINTER)
};
#define NAME(type, name) #name " "
const char* const kColumnNames = SAMPLING_COLUMNS(NAME);

// The masses of the ids from `lowest` on, 0 for the others, and their sum.
int64_t masses_from(const float* z, int64_t vocab, float top, float lowest, std::vector<int64_t>& mass) {
  mass.resize(vocab);
  int64_t total = 0;
  for (int64_t i = 0; i < vocab; i++) {
    const int64_t m = mass_of(z[i], top);
    mass[i] = z[i] >= lowest ? m : 0;
    total += mass[i];
  }
  return total;
}

// The smallest value that the filters keep. Each one sees the ids that the ones before it have kept.
float keep_threshold(const float* z, int64_t vocab, float top, const SamplingColumns& s, int64_t row) {
  const float top_p = s.top_p[row], min_p = s.min_p[row], top_a = s.top_a[row];
  const int64_t top_k = s.top_k[row];
  std::vector<int64_t> mass;
  float lowest = kNegInf;
  if (min_p > 0.f) lowest = top + float(log(double(min_p)));
  if (top_a > 0.f) {
    const double total = double(masses_from(z, vocab, top, lowest, mass));
    lowest = std::max(lowest, top + float(log(double(top_a) * kMassUnit / total)));
  }
  if (top_k > 0 && top_k < vocab) {
    int64_t left = 0;
    for (int64_t i = 0; i < vocab; i++) left += z[i] >= lowest;
    if (left > top_k) lowest = threshold_for(z, vocab, lowest, top_k, [](int64_t) { return int64_t(1); });
  }
  if (!(top_p < 1.f)) return lowest;
  const int64_t need = int64_t(ceil(double(top_p) * double(masses_from(z, vocab, top, lowest, mass))));
  return threshold_for(z, vocab, lowest, std::max<int64_t>(need, 1), [&](int64_t i) { return mass[i]; });
}

// argmax over kept ids of z + noise, ties to the lowest id. `z` is readable and -inf up to the next multiple of 64.
uint32_t gumbel_argmax(const float* z, int64_t vocab, uint32_t top_id, float lowest, const NoiseKey& key) {
  uint32_t words[4][kLanes];
  philox16(key, top_id >> 2, words);
  float best = z[top_id] + gumbel(words[top_id & 3][0]);
  uint32_t best_id = top_id;
  for (int64_t start = 0; start < vocab; start += 4 * kLanes) {
    const float* chunk = z + start;
    const v16 highest = vmax(vmax(load16(chunk), load16(chunk + 16)), vmax(load16(chunk + 32), load16(chunk + 48)));
    const float chunk_max = max_lanes(highest);
    float bar = best - (1e-3f + 1e-6f * fabsf(best));
    if (chunk_max + kMaxNoise < bar || chunk_max < lowest) continue;
    philox16(key, uint32_t(start >> 2), words);
    if (chunk_max + gumbel_bound(smallest_word(words)) < bar) continue;
    for (int i = 0; i < kLanes; i++) {
      for (int w = 0; w < 4; w++) {
        const float value = chunk[4 * i + w];
        if (!(value >= lowest) || value + gumbel_bound(words[w][i]) < bar) continue;
        const uint32_t id = uint32_t(start + 4 * i + w);
        const float score = value + gumbel(words[w][i]);
        if (score < best || (score == best && id >= best_id)) continue;
        best = score;
        best_id = id;
        bar = best - (1e-3f + 1e-6f * fabsf(best));
      }
    }
  }
  return best_id;
}

// Writes z = logits / temperature, padded with -inf to a multiple of 64. False when there is NaN, +inf or no finite
// number. `top_id` is the lowest id of the largest value.
template <typename T>
bool scale_logits(const T* logits, int64_t vocab, float temperature, float* z, uint32_t& top_id) {
  const int64_t padded = (vocab + 63) / 64 * 64;
  v16 top = splat(kNegInf);
  i16 is_bad = {};
  int64_t i = 0;
  for (; i + kLanes <= vocab; i += kLanes) {
    const v16 x = load16(logits + i);
    is_bad |= (x != x) | (x == -kNegInf);
    const v16 scaled = x / temperature;
    store16(z + i, scaled);
    top = vmax(scaled, top);
  }
  float highest = max_lanes(top);
  bool is_good = true;
  for (int lane = 0; lane < kLanes; lane++) is_good &= is_bad[lane] == 0;
  for (; i < vocab; i++) {
    const float x = to_float(logits[i]);
    is_good &= x == x && x != -kNegInf;
    z[i] = x / temperature;
    highest = z[i] > highest ? z[i] : highest;
  }
  std::fill(z + vocab, z + padded, kNegInf);
  if (!is_good || highest == kNegInf) return false;
  top_id = uint32_t(std::find(z, z + vocab, highest) - z);
  return true;
}

// The lowest id of the largest logit; false as for scale_logits. Four independent chains hide the latency of a maximum.
template <typename T> bool greedy_token(const T* logits, int64_t vocab, uint32_t& top_id) {
  constexpr int kChains = 4;
  v16 top[kChains];
  i16 found_at[kChains] = {}, is_nan = {};
  for (v16& chain : top) chain = splat(kNegInf);
  int64_t i = 0;
  for (; i + kChains * kLanes <= vocab; i += kChains * kLanes) {
    for (int c = 0; c < kChains; c++) {
      const v16 x = load16(logits + i + c * kLanes);
      const i16 is_higher = x > top[c];
      is_nan |= x != x;
      top[c] = select(is_higher, x, top[c]);
      found_at[c] = select(is_higher, i16{} + int32_t(i), found_at[c]);
    }
  }
  float highest = kNegInf;
  bool is_good = true;
  int64_t id_of_highest = -1;
  auto look_at = [&](float x, int64_t id) {
    if (!(x > highest) && !(x == highest && id < id_of_highest)) return;
    highest = x;
    id_of_highest = id;
  };
  for (int lane = 0; lane < kLanes; lane++) is_good &= is_nan[lane] == 0;
  for (int c = 0; c < kChains; c++)
    for (int lane = 0; lane < kLanes; lane++) look_at(top[c][lane], found_at[c][lane] + c * kLanes + lane);
  for (; i < vocab; i++) {
    const float x = to_float(logits[i]);
    is_good &= x == x;
    look_at(x, i);
  }
  top_id = uint32_t(id_of_highest);
  return is_good && highest != kNegInf && highest != -kNegInf;
}

template <typename T>
void sample(const T* logits, int64_t n, int64_t vocab, const SamplingColumns& columns, const int64_t* rows,
            const uint32_t* positions, uint32_t* tokens, uint8_t* status, int threads) {
  auto sample_rows = [&](int64_t first, int64_t last) {
    std::vector<float> z;
    for (int64_t i = first; i < last; i++) {
      const int64_t row = rows[i];
      const float temperature = columns.temperature[row];
      const bool is_greedy = temperature < 1e-5f;
      const T* row_logits = logits + i * vocab;
      uint32_t top_id = 0;
      if (!is_greedy) z.resize((vocab + 63) / 64 * 64);
      const bool is_good = is_greedy ? greedy_token(row_logits, vocab, top_id)
                                     : scale_logits(row_logits, vocab, temperature, z.data(), top_id);
      status[i] = is_good ? kSampled : kNotFinite;
      tokens[i] = top_id;
      if (!is_good || is_greedy) continue;
      const float lowest = keep_threshold(z.data(), vocab, z[top_id], columns, row);
      const uint64_t seed = columns.seed[row];
      const NoiseKey key{uint32_t(seed), uint32_t(seed >> 32), positions[i], columns.sample_index[row]};
      tokens[i] = gumbel_argmax(z.data(), vocab, top_id, lowest, key);
    }
  };
  Pass(threads_for(n * vocab, kSerialSampling, threads)).run(n, 1, sample_rows);
}

// One row of quire_filter_logits; `z` is scratch. Returns the number of ids that have a value.
template <typename T>
uint32_t filter_row(const T* x, int64_t vocab, const SamplingColumns& columns, int64_t row, std::vector<float>& z,
                    float* out) {
  const float temperature = columns.temperature[row];
  uint32_t top_id = 0;
  if (temperature < 1e-5f) {
    const bool is_good = greedy_token(x, vocab, top_id);
    std::fill_n(out, vocab, is_good ? kNegInf : NAN);
    if (is_good) out[top_id] = 0.f;
    return is_good;
  }
  z.resize((vocab + 63) / 64 * 64);
  if (!scale_logits(x, vocab, temperature, z.data(), top_id)) {
    std::fill_n(out, vocab, NAN);
    return 0;
  }
  const float lowest = keep_threshold(z.data(), vocab, z[top_id], columns, row);
  uint32_t kept = 0;
  for (int64_t i = 0; i < vocab; i++) {
    out[i] = z[i] >= lowest ? z[i] : kNegInf;
    kept += out[i] > kNegInf;
  }
  return kept;
}

template <typename T>
void filter(const T* logits, const int64_t* lines, int64_t n, int64_t vocab, const SamplingColumns& columns,
            const int64_t* rows, float* out, uint32_t* kept, int threads) {
  auto filter_rows = [&](int64_t first, int64_t last) {
    std::vector<float> z;
    for (int64_t i = first; i < last; i++)
      kept[i] = filter_row(logits + lines[i] * vocab, vocab, columns, rows[i], z, out + i * vocab);
  };
  Pass(threads_for(n * vocab, kSerialSampling, threads)).run(n, 1, filter_rows);
}

}  // namespace

extern "C" {

// The columns of quire_sample, in order.
const char* quire_sampling_columns() { return kColumnNames; }

// `columns` has the address of each column; row i of the logits is sampled with element rows[i] of each.
void quire_sample(int is_bf16, const void* logits, int64_t n, int64_t vocab, const SamplingColumns* columns,
                  const int64_t* rows, const uint32_t* positions, uint32_t* tokens, uint8_t* status, int threads) {
  if (is_bf16)
    sample((const uint16_t*)logits, n, vocab, *columns, rows, positions, tokens, status, threads);
  else
    sample((const float*)logits, n, vocab, *columns, rows, positions, tokens, status, threads);
}

// The values from which quire_sample draws, -inf for ids that it cannot return: row i of out [n, vocab] is that of line
// lines[i] of the logits with element rows[i] of each column. kept: the number of the other ids. NaN and 0 if the logits
// have NaN, +inf or no finite number.
void quire_filter_logits(int is_bf16, const void* logits, const int64_t* lines, int64_t n, int64_t vocab,
                         const SamplingColumns* columns, const int64_t* rows, float* out, uint32_t* kept, int threads) {
  if (is_bf16)
    filter((const uint16_t*)logits, lines, n, vocab, *columns, rows, out, kept, threads);
  else
    filter((const float*)logits, lines, n, vocab, *columns, rows, out, kept, threads);
}

// Noise of single ids, for tests.
void quire_gumbel_noise(uint64_t seed, uint32_t position, uint32_t sample_index, const uint32_t* ids, int64_t n,
                        float* out) {
  const NoiseKey key{uint32_t(seed), uint32_t(seed >> 32), position, sample_index};
  uint32_t words[4][kLanes];
  for (int64_t i = 0; i < n; i++) {
    philox16(key, ids[i] >> 2, words);
    out[i] = gumbel(words[ids[i] & 3][0]);
  }
}
}
