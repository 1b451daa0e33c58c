// Attention in bfloat16 over blocks that are stored in pairs: two dimensions of a key, two keys of a dimension of values.
// Here: the loop over tiles of keys, and the softmax. attention_dots.h and attention_tiles.h compute scores and outputs.
//
// Softmax weights are rounded to bfloat16 before they are summed and applied. A key that a query does not see has weight
// 0. Values after the last key, and before the first key that any query of the task sees, are read as 0: their blocks may
// be those of other rows, and hold NaN. Such products add zeros only, so a result does not depend on the other
// queries of its task: `finished` hides that adding 0 may flush a denormal sum or change the sign of a 0.
#pragma once
#include <algorithm>
#include <type_traits>
#include <vector>

#include "attention.h"

#if QUIRE_HAS_PAIRS
namespace {

typedef AttentionArgs<uint16_t> PairedArgs;

constexpr int kPairs = kKeyTile / 2, kGroupPairs = kLanes / 2;
constexpr int kScratchRows = kQueryTile + kSharingQueries;

// Memory that starts at a cache line.
template <typename T> class Lines {
 public:
  explicit Lines(int64_t count) : lines_((count * sizeof(T) + sizeof(Line) - 1) / sizeof(Line)) {}
  T* data() { return (T*)lines_.data(); }

 private:
  struct alignas(64) Line {
    char bytes[64];
  };
  std::vector<Line> lines_;
};

struct PairedScratch {
  const int64_t key_pairs, padded_dim;
  Lines<uint32_t> q, probs;                // [kScratchRows, key_pairs], [kScratchRows, kPairs]
  Lines<float> scores, acc;                // [kScratchRows, kKeyTile], [kScratchRows, padded_dim]
  Lines<uint32_t> k_pack, v_pack;          // [key_pairs, kKeyTile], [kPairs, padded_dim]
  Lines<uint32_t> v_head, v_tail, zeros;   // [kGroupPairs, padded_dim]
  Lines<v16> row_sum;                      // [kScratchRows] 16 sums, which are added at the end
  float row_max[kScratchRows];

  PairedScratch(int64_t key_pairs, int64_t padded_dim)
      : key_pairs(key_pairs),
        padded_dim(padded_dim),
        q(kScratchRows * key_pairs),
        probs(kScratchRows * kPairs),
        scores(kScratchRows * kKeyTile),
        acc(kScratchRows * padded_dim),
        k_pack(key_pairs * kKeyTile),
        v_pack(kPairs * padded_dim),
        v_head(kGroupPairs * padded_dim),
        v_tail(kGroupPairs * padded_dim),
        zeros(kGroupPairs * padded_dim),
        row_sum(kScratchRows) {}
};

// ---------------------------------------------------------------------------------------------------------------
// Keys and values.

// Keys `from` to `to` of a row and a KV head.
struct KeyRange {
  const int32_t* table;
  int64_t head, from, to;
};

// A tile of keys and values in groups of 16 keys. Strides are between pairs of dimensions, or of keys, in pairs.
struct PairedTile {
  const uint32_t *keys[kKeyTile / kLanes], *values[kKeyTile / kLanes];
  int64_t key_stride, value_stride;
  int count;  // keys
  int groups() const { return (count + kLanes - 1) / kLanes; }
};

// Packs blocks that are not stored in pairs.
void pack_pairs(const PairedArgs& a, const KeyRange& range, int64_t start, int count, PairedScratch& s) {
  const int64_t bs = a.block_size(), dim = a.head_dim;
  uint16_t *k_pack = (uint16_t*)s.k_pack.data(), *v_pack = (uint16_t*)s.v_pack.data();
  for (int j = 0; j < count; j++) {
    const int64_t position = start + j, offset = position & (bs - 1), plane = a.plane(range.table, position, range.head);
    const uint16_t *key = a.k_cache + plane + offset, *value = a.v_cache + plane + offset * dim;
    for (int64_t d = 0; d < dim; d++) {
      k_pack[(d / 2 * kKeyTile + j) * 2 + d % 2] = key[d * bs];
      v_pack[(j / 2 * s.padded_dim + d) * 2 + j % 2] = value[d];
    }
  }
}

// Copies the groups of paired blocks, for dimensions that need padding.
void pad_pairs(const PairedArgs& a, const KeyRange& range, int64_t start, int count, PairedScratch& s) {
  const int64_t bs = a.block_size(), dim = a.head_dim;
  for (int j = 0; j < count; j += kLanes) {
    const int64_t position = start + j, offset = position & (bs - 1), plane = a.plane(range.table, position, range.head);
    const uint32_t* keys = (const uint32_t*)(a.k_cache + plane) + offset;
    const uint32_t* values = (const uint32_t*)(a.v_cache + plane + offset * dim);
    for (int64_t d = 0; d < dim / 2; d++) memcpy(s.k_pack.data() + d * kKeyTile + j, keys + d * bs, kLanes * 4);
    for (int64_t p = 0; p < kGroupPairs; p++)
      memcpy(s.v_pack.data() + (j / 2 + p) * s.padded_dim, values + p * dim, dim * 4);
  }
}

bool are_keys_in_place(const PairedArgs& a, const PairedScratch& s) {
  return is_paired<uint16_t>(a.block_size(), a.head_dim) && s.key_pairs * 2 == a.head_dim && s.padded_dim == a.head_dim;
}

// The tile of a range that begins with key `start`: in place, or packed into the scratch memory.
PairedTile gather_pairs(const PairedArgs& a, const KeyRange& range, int64_t start, PairedScratch& s) {
  const int64_t bs = a.block_size(), dim = a.head_dim;
  const int count = int(std::min<int64_t>(kKeyTile, range.to - start)), groups = (count + kLanes - 1) / kLanes;
  const bool in_place = are_keys_in_place(a, s);
  if (!in_place) (is_paired<uint16_t>(bs, dim) ? pad_pairs : pack_pairs)(a, range, start, count, s);
  PairedTile tile;
  tile.count = count;
  tile.key_stride = in_place ? bs : kKeyTile;
  tile.value_stride = s.padded_dim;
  for (int v = 0; v < kKeyTile / kLanes; v++) {
    const int group = std::min(v, groups - 1);  // groups after the last one are only prefetched
    tile.keys[v] = s.k_pack.data() + group * kLanes;
    tile.values[v] = s.v_pack.data() + group * kGroupPairs * s.padded_dim;
    if (!in_place) continue;
    const int64_t position = start + group * kLanes, offset = position & (bs - 1);
    const int64_t plane = a.plane(range.table, position, range.head);
    tile.keys[v] = (const uint32_t*)(a.k_cache + plane + 2 * offset);
    tile.values[v] = (const uint32_t*)(a.v_cache + plane + offset * dim);
  }
  return tile;
}

// Replaces a group of values by a copy with zeros outside the keys `first` to `end` of the group.
void zero_outside(PairedTile& tile, int group, int first, int end, uint32_t* to, const PairedScratch& s) {
  const uint32_t* from = tile.values[group];
  tile.values[group] = to;
  auto is_inside = [&](int key) { return key >= first && key < end; };
  for (int p = 0; p < kGroupPairs; p++, to += s.padded_dim, from += tile.value_stride) {
    const uint32_t mask = (is_inside(2 * p) ? 0x0000ffffu : 0) | (is_inside(2 * p + 1) ? 0xffff0000u : 0);
    for (int64_t d = 0; d < s.padded_dim; d++) to[d] = from[d] & mask;
  }
}

// Makes the values after the last key 0.
void zero_tail(PairedTile& tile, PairedScratch& s) {
  const int last = tile.groups() - 1, count = tile.count - last * kLanes;
  if (count < kLanes) zero_outside(tile, last, 0, count, s.v_tail.data(), s);
}

// Makes the values before key `first` of the tile 0.
void zero_head(PairedTile& tile, int64_t first, PairedScratch& s) {
  for (int v = 0; v < tile.groups() && v * kLanes < first; v++) {
    const int unseen = int(first) - v * kLanes;
    if (unseen < kLanes)
      zero_outside(tile, v, unseen, kLanes, s.v_head.data(), s);
    else
      tile.values[v] = s.zeros.data();
  }
}

// ---------------------------------------------------------------------------------------------------------------
// Softmax.

// 2^x for x <= 0, within 0.0001 of it (relative); NaN stays NaN. 2^0 is 1.
INLINE v16 exp2_below(v16 x) {
#if defined(__AVX512DQ__)
  constexpr int kFloor = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;
  const v16 r = (v16)_mm512_reduce_ps((__m512)x, kFloor);  // x - floor(x); 0 for -inf
#else
  const v16 low = splat(-200.f), magic = splat(12582912.f);  // adding it rounds to an integer
  x = select(x < low, low, x);
  const v16 nearest = (x + magic) - magic, n = select(nearest > x, nearest - 1.f, nearest), r = x - n;
#endif
  v16 p = splat(7.70670387e-2f);
  p = fma16(p, r, splat(2.27644995e-1f));
  p = fma16(p, r, splat(6.95116786e-1f));
  p = fma16(p, r, splat(1.f));
#if defined(__AVX512DQ__)
  return (v16)_mm512_scalef_ps((__m512)p, (__m512)x);  // times 2^floor(x)
#else
  const i16 shift = to_ints(select(n == n, n, v16{})) << 23, is_zero = n < splat(-126.f);
  return (v16)(((i16)p + shift) & ~is_zero);
#endif
}

// Stores 32 weights as bfloat16; returns `sum` plus the stored weights.
INLINE v16 store_weights(v16 low, v16 high, uint32_t* probs, v16 sum) {
#if QUIRE_HAS_DOTS
  const __m512bh rounded = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
  _mm512_storeu_si512(probs, (__m512i)rounded);
  return (v16)_mm512_dpbf16_ps((__m512)sum, rounded, (__m512bh)_mm512_set1_epi32(0x3f803f80));
#else
  uint16_t* weights = (uint16_t*)probs;
  store16(weights, low);
  store16(weights + kLanes, high);
  return sum + load16(weights) + load16(weights + kLanes);
#endif
}

// Turns row `r` of the scores of a tile into weights. If masked, those of keys outside `sight`, which holds at least one,
// become 0.
template <bool kMasked> INLINE void softmax_row(PairedScratch& s, int r, Sight sight, int groups, float scale) {
  const float* scores = s.scores.data() + r * kKeyTile;
  uint32_t* probs = s.probs.data() + r * kPairs;
  const i16 lane = lane_numbers();
  auto score = [&](int v) __attribute__((always_inline)) {
    const v16 x = load16(scores + v * kLanes);
    if (!kMasked) return x;
    const int from = int(sight.from) - v * kLanes, to = int(sight.to) - v * kLanes;
    return select((lane >= from) & (lane < to), x, splat(kNegInf));
  };
  const float old_max = s.row_max[r];
  v16 top = splat(old_max);
  for (int v = 0; v < groups; v++) top = vmax(score(v), top);
  const float new_max = max_lanes(top), shift = -new_max * scale;
  v16 sum{};
  for (int v = 0; v < groups; v += 2) {
    const v16 low = exp2_below(fma16(score(v), splat(scale), splat(shift)));
    const v16 high = v + 1 < groups ? exp2_below(fma16(score(v + 1), splat(scale), splat(shift))) : v16{};
    sum = store_weights(low, high, probs + v * kGroupPairs, sum);
  }
  const v16 shrink = exp2_below(splat(fma1(old_max, scale, shift)));
  s.row_sum.data()[r] = fma16(s.row_sum.data()[r], shrink, sum);
  s.row_max[r] = new_max;
  if (shrink[0] == 1.f) return;
  float* acc = s.acc.data() + r * s.padded_dim;
  for (int64_t d = 0; d < s.padded_dim; d += kLanes) store16(acc + d, load16(acc + d) * shrink);
}

// Scales the scores of row `r`, caps them and adds the biases.
INLINE void scale_row(PairedScratch& s, int r, Sight sight, int groups, const Scores& scores) {
  float* row = s.scores.data() + r * kKeyTile;
  for (int v = 0; v < groups; v++) {
    v16 x = load16(row + v * kLanes) * scores.scale;
    if (scores.cap != 0.f) x = soft_cap16(x, scores.cap);
    if (sight.bias) x = x + load16(sight.bias + v * kLanes);
    store16(row + v * kLanes, x);
  }
}

// Row `r` sees the keys `sight` of the tile, if any.
INLINE void softmax_pairs(PairedScratch& s, int r, Sight sight, int groups, const Scores& scores) {
  constexpr float kLog2E = 1.44269504088896341f;  // exp(x) = 2^(x log2 e)
  const Sight inside{std::max<int64_t>(sight.from, 0), std::min<int64_t>(sight.to, groups * kLanes)};
  if (inside.from >= inside.to) return (void)std::fill_n(s.probs.data() + r * kPairs, groups * kGroupPairs, 0u);
  const bool is_scaled = scores.cap != 0.f || sight.bias;
  if (is_scaled) scale_row(s, r, sight, groups, scores);
  const float scale = is_scaled ? kLog2E : scores.scale * kLog2E;
  if (inside.to - inside.from == groups * kLanes)
    softmax_row<false>(s, r, inside, groups, scale);
  else
    softmax_row<true>(s, r, inside, groups, scale);
}

// An output as it is stored: sums of zeros and denormals are 0, whatever zeros were added to them.
INLINE v16 finished(v16 sum, float scale) {
  const v16 y = sum * scale, size = (v16)((i16)y & 0x7fffffff);
  return (v16)((i16)y & ~(size < splat(std::numeric_limits<float>::min())));
}

// ---------------------------------------------------------------------------------------------------------------
// Tasks.

// Rows `first` to first + count - 1 of the scratch memory over a range of keys; row first + i sees the keys sights[i].
// Prefetches the first tile of `next`. `products` computes one tile.
template <typename Products>
void attend_range(const PairedArgs& a, const KeyRange& range, const KeyRange& next, int first, int count,
                  const Sight* sights, Products& products, PairedScratch& s) {
  const bool in_place = are_keys_in_place(a, s);
  PairedTile tile = gather_pairs(a, range, range.from, s);
  for (int64_t key = range.from; key < range.to; key += kKeyTile) {
    const bool is_last = key + kKeyTile >= range.to;
    PairedTile ahead = tile;
    if (in_place) ahead = is_last ? gather_pairs(a, next, next.from, s) : gather_pairs(a, range, key + kKeyTile, s);
    zero_tail(tile, s);
    zero_head(tile, sights[0].from - key, s);  // no other row sees earlier keys
    Sight of_tile[kQueryTile];
    for (int i = 0; i < count; i++) of_tile[i] = sights[i].in_tile(key);
    products.attend(s, first, count, tile, ahead, of_tile, a.scores);
    if (!is_last) tile = in_place ? ahead : gather_pairs(a, range, key + kKeyTile, s);
  }
}

// Row `r` of the scratch memory for query vector `i` of a span.
void start_row(const PairedArgs& a, const Span& span, int64_t head, int64_t i, int r, PairedScratch& s) {
  const uint16_t* q = a.q + a.query(span.row, head, span.first + i);
  memcpy(s.q.data() + r * s.key_pairs, q, a.head_dim * sizeof(uint16_t));  // what pads it stays 0
  std::fill_n(s.acc.data() + r * s.padded_dim, s.padded_dim, 0.f);
  const bool is_scaled = a.scores.cap != 0.f || a.scores.bias.values;  // as in softmax_pairs
  s.row_max[r] = is_scaled ? a.sink(head, span.first + i) : a.sink(head, span.first + i) / a.scores.scale;
  s.row_sum.data()[r] = a.scores.sinks ? splat(1.f / kLanes) : v16{};
}

void finish_row(const PairedArgs& a, int r, uint16_t* out, PairedScratch& s) {
  const float scale = 1.f / sum_lanes(s.row_sum.data()[r]);
  for (int64_t d = 0; d < a.head_dim; d += kLanes) {
    uint16_t y[kLanes];
    store16(y, finished(load16(s.acc.data() + r * s.padded_dim + d), scale));
    memcpy(out + d, y, std::min<int64_t>(kLanes, a.head_dim - d) * sizeof(uint16_t));
  }
}

// Moves a row of the scratch memory.
void move_row(int from, int to, PairedScratch& s) {
  memcpy(s.q.data() + to * s.key_pairs, s.q.data() + from * s.key_pairs, s.key_pairs * sizeof(uint32_t));
  memcpy(s.acc.data() + to * s.padded_dim, s.acc.data() + from * s.padded_dim, s.padded_dim * sizeof(float));
  s.row_max[to] = s.row_max[from];
  s.row_sum.data()[to] = s.row_sum.data()[from];
}

// Keys of a span from `from` on.
KeyRange keys_of(const PairedArgs& a, const Span& span, const Task& task, int64_t from) {
  return {a.rows.table(span.row), task.head, from, a.end_key(span)};
}

KeyRange first_keys(const PairedArgs& a, const AttentionPlan& plan, const Task& task) {
  const Span& span = plan.spans[task.first_span];
  const KeyRange own = keys_of(a, span, task, a.first_key(span));
  return task.shared_keys && a.can_share_keys() ? KeyRange{own.table, own.head, 0, task.shared_keys} : own;
}

// Rows `first` on of the scratch memory, which hold the query vectors of a span, over its keys from `from` on.
template <typename Products>
void attend_span(const PairedArgs& a, const Span& span, const Task& task, int64_t from, const KeyRange& next, int first,
                 Products& products, PairedScratch& s) {
  Sight sights[kQueryTile];
  for (int i = 0; i < span.queries; i++) sights[i] = a.sight(span.row, task.head, span.first + i);
  attend_range(a, keys_of(a, span, task, from), next, first, span.queries, sights, products, s);
  for (int i = 0; i < span.queries; i++)
    finish_row(a, first + i, a.out + a.query(span.row, task.head, span.first + i), s);
}

// The spans of a task one by one.
template <typename Products>
void attend_spans(const PairedArgs& a, const Span* spans, const Task& task, const KeyRange& after, Products& products,
                  PairedScratch& s) {
  for (int64_t i = 0; i < task.num_spans; i++) {
    for (int j = 0; j < spans[i].queries; j++) start_row(a, spans[i], task.head, j, j, s);
    const bool is_last = i + 1 == task.num_spans;
    const KeyRange next = is_last ? after : keys_of(a, spans[i + 1], task, a.first_key(spans[i + 1]));
    attend_span(a, spans[i], task, a.first_key(spans[i]), next, 0, products, s);
  }
}

template <typename Products>
void paired_task(const PairedArgs& a, const AttentionPlan& plan, const Task& task, const Task& following,
                 Products& products, PairedScratch& s) {
  const Span* spans = plan.spans.data() + task.first_span;
  const KeyRange after = first_keys(a, plan, following);
  if (!task.shared_keys || !a.can_share_keys()) return attend_spans(a, spans, task, after, products, s);
  int count = 0;
  for (int64_t i = 0; i < task.num_spans; i++)
    for (int j = 0; j < spans[i].queries; j++) start_row(a, spans[i], task.head, j, count++, s);
  Sight sights[kSharingQueries];
  std::fill_n(sights, count, Sight{0, task.shared_keys});
  const KeyRange own = keys_of(a, *spans, task, task.shared_keys);
  attend_range(a, first_keys(a, plan, task), own, 0, count, sights, products, s);
  int row = 0;
  for (int64_t i = 0; i < task.num_spans; i++) {
    // In rows of their own: products may write to the rows after those of a span.
    for (int j = 0; j < spans[i].queries; j++) move_row(row++, kQueryTile + j, s);
    const bool is_last = i + 1 == task.num_spans;
    const KeyRange next = is_last ? after : keys_of(a, spans[i + 1], task, task.shared_keys);
    attend_span(a, spans[i], task, task.shared_keys, next, kQueryTile, products, s);
  }
}

}  // namespace
#endif
