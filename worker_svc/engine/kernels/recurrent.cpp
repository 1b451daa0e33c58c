// Recurrent layers: a causal convolution, then a state per head that each token changes and reads (recurrent.py).
//
// One arithmetic for prompts, decodes and recomputation: token by token, in float. A column of a state depends on the
// tokens of its row only, and sums run over keys in order. So a state is a function of its tokens, whatever the chunks,
// the other rows, the threads and the width of vectors.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "kernels.h"
#include "rows.h"
#include "vec.h"

namespace {

constexpr int kColumns = 4 * kLanes;  // of a state that one task computes: with 128 keys they fit the L1 cache
constexpr int64_t kMixedTokens = 8;   // that one task convolves, at most

INLINE v16 load_some(const float* x, int64_t count) {
  if (count >= kLanes) return load16(x);
  float lanes[kLanes] = {};
  memcpy(lanes, x, count * sizeof(float));
  return load16(lanes);
}

template <typename T> INLINE v16 load_some(const T* x, int64_t count) {
  if (count >= kLanes) return load16(x);
  float lanes[kLanes] = {};
  for (int64_t i = 0; i < count; i++) lanes[i] = to_float(x[i]);
  return load16(lanes);
}

template <typename T> INLINE void store_some(T* x, v16 v, int64_t count) {
  if (count >= kLanes) return store16(x, v);
  float lanes[kLanes];
  store16(lanes, v);
  for (int64_t i = 0; i < count; i++) x[i] = from_float<T>(lanes[i]);
}

INLINE v16 sigmoid16(v16 x) { return 1.f / (1.f + exp16(-x)); }
INLINE v16 silu16(v16 x) { return activate16(x, kSilu); }

// log(1 + e^x) as max(x, 0) + 2 atanh(y / (2 + y)), y = e^-|x|.
INLINE v16 softplus16(v16 x) {
  const v16 size = (v16)((u16v)x & 0x7fffffffu), y = exp16(-size), z = y / (y + 2.f), square = z * z;
  v16 sum = splat(1.f / 17.f);
  for (float odd : {15.f, 13.f, 11.f, 9.f, 7.f, 5.f, 3.f}) sum = fma16(sum, square, splat(1.f / odd));
  return vmax(x, splat(0.f)) + 2.f * fma16(sum * square, z, z);
}

// What a layer computes from the projections of all tokens before the recurrence.
struct Scratch {
  std::vector<float> mixed;   // [n, channels] the convolution's output
  std::vector<float> decays;  // [n, heads]
  std::vector<float> shares;  // [n, heads] how much of a new value a state takes
  std::vector<float> outputs;  // [n, heads * value_dim]

  void make_room(const Recurrence& r, int64_t n) {
    mixed.resize(n * r.channels);
    decays.resize(n * r.heads);
    shares.resize(n * r.heads);
    outputs.resize(n * r.heads * r.value_dim);
  }
};
thread_local Scratch scratch;  // of the calling thread, kept between steps

// Some columns of a state: 16 of them in a row of each key.
struct Columns {
  float* first;
  int64_t stride;

  INLINE float* operator()(int64_t d, int p) const { return first + d * stride + p * kLanes; }
};

// Memory of a thread for columns between two tokens, kept between calls. It is contiguous, because columns in a state are
// in few sets of the L1 cache and do not fit it.
inline Columns held_columns(int64_t key_dim, int64_t width) {
  thread_local std::vector<float> memory;
  const size_t needed = key_dim * width + kLanes;
  if (memory.size() < needed) memory.resize(needed);
  return {(float*)((uintptr_t(memory.data()) + 63) / 64 * 64), width};
}

// What a token does to the state of a head.
struct HeadToken {
  const float *q, *k;
  float decay, share;
};

template <typename T> struct Recurrent {
  const Recurrence& r;
  const StateRows& rows;
  const T* projected;
  T* out;
  float *mixed, *decays, *shares, *outputs;

  int64_t keys() const { return r.key_heads * r.key_dim; }
  int64_t values() const { return r.heads * r.value_dim; }
  int64_t columns() const { return (r.value_dim + kLanes - 1) / kLanes * kLanes; }  // of a state, in memory
  int64_t length(int64_t row) const { return rows.query_starts[row + 1] - rows.query_starts[row]; }
  bool is_new(int64_t row) const { return rows.context_lens[row] == 0; }
  HeadToken head_token(int64_t token, int64_t head) const {
    const float* q = mixed + token * r.channels + head / (r.heads / r.key_heads) * r.key_dim;
    return {q, q + keys(), decays[token * r.heads + head], shares[token * r.heads + head]};
  }
  float* slot(int64_t index) const { return r.states + index * r.slot_stride; }
  float* tail(int64_t index) const { return slot(index) + r.heads * r.key_dim * columns(); }

  // The convolution's input of a token: 16 channels from `c` on.
  INLINE v16 input16(int64_t token, int64_t c, int64_t count) const {
    const T* x = projected + token * r.width;
    if (r.kind != kShortConv) return load_some(x + c, count);
    return load_some(x + c, count) * load_some(x + 2 * r.channels + c, count);
  }

  // The same for position `i` of a row's tokens in this step; positions below 0 are in the tail of its state.
  INLINE v16 input16_at(int64_t row, int64_t i, int64_t c, int64_t count) const {
    if (i >= 0) return input16(rows.query_starts[row] + i, c, count);
    if (is_new(row)) return splat(0.f);
    return load_some(tail(rows.slots[row]) + (r.kernel - 1 + i) * r.channels + c, count);
  }

  // Tokens [begin, end) of a row: all of them in 16 channels, then in the next 16, so that weights are read once.
  void mix_tokens(int64_t row, int64_t begin, int64_t end) {
    std::vector<v16> inputs(r.kernel - 1 + end - begin);
    for (int64_t c = 0; c < r.channels; c += kLanes) convolve(row, begin, end, c, inputs.data());
    for (int64_t token = rows.query_starts[row] + begin; token < rows.query_starts[row] + end; token++) {
      if (r.kind == kShortConv) {
        gate_convolution(token);
        continue;
      }
      if (r.kind == kGatedDelta) normalize_heads(mixed + token * r.channels);
      gate_heads(token);
    }
  }

  void convolve(int64_t row, int64_t begin, int64_t end, int64_t c, v16* inputs) {
    const int64_t count = r.channels - c, before = r.kernel - 1;
    const v16 bias = r.conv_bias ? load_some(r.conv_bias + c, count) : splat(0.f);
    for (int64_t i = begin - before; i < end; i++) inputs[i - begin + before] = input16_at(row, i, c, count);
    float* y = mixed + (rows.query_starts[row] + begin) * r.channels + c;
    for (int64_t i = 0; i < end - begin; i++, y += r.channels) {
      v16 sum = bias;
      for (int64_t tap = 0; tap < r.kernel; tap++)
        sum = fma16(load_some(r.conv + tap * r.channels + c, count), inputs[i + tap], sum);
      store_some(y, r.kind == kShortConv ? sum : silu16(sum), count);
    }
  }

  void gate_convolution(int64_t token) {
    const T* gate = projected + token * r.width + r.channels;
    for (int64_t c = 0; c < r.channels; c += kLanes) {
      const int64_t count = r.channels - c;
      store_some(out + token * r.channels + c, load_some(gate + c, count) * load_some(mixed + token * r.channels + c, count),
                 count);
    }
  }

  // Queries and keys get length 1; queries are scaled.
  void normalize_heads(float* y) {
    const float scale = 1.f / sqrtf(float(r.key_dim));
    for (int64_t h = 0; h < 2 * r.key_heads; h++) {
      float* head = y + h * r.key_dim;
      const float norm = 1.f / sqrtf(sum_of_squares(head, r.key_dim) + 1e-6f) * (h < r.key_heads ? scale : 1.f);
      for (int64_t d = 0; d < r.key_dim; d++) head[d] *= norm;
    }
  }

  void gate_heads(int64_t token) {
    const T* b = projected + token * r.width + r.channels + values();
    const T* a = r.kind == kGatedDelta ? b + r.heads : b;
    for (int64_t h = 0; h < r.heads; h += kLanes) {
      const int64_t count = r.heads - h;
      v16 step = softplus16(load_some(a + h, count) + load_some(r.step_bias + h, count));
      if (r.kind == kMamba2) step = select(step < splat(r.min_step), splat(r.min_step), select(step > splat(r.max_step), splat(r.max_step), step));
      store_some(decays + token * r.heads + h, exp16(step * load_some(r.decay + h, count)), count);
      store_some(shares + token * r.heads + h, r.kind == kMamba2 ? step : sigmoid16(load_some(b + h, count)), count);
    }
  }

  // The inputs before position `end` of a row's tokens become the tail of a slot, which may be the row's own.
  void keep_tail(int64_t row, int64_t end, int64_t target) {
    float* kept = tail(target);
    for (int64_t j = 0; j + 1 < r.kernel; j++)
      for (int64_t c = 0; c < r.channels; c += kLanes)
        store_some(kept + j * r.channels + c, input16_at(row, end - (r.kernel - 1) + j, c, r.channels - c),
                   r.channels - c);
  }

  void keep_tails(int64_t row) {
    for (int64_t s = rows.snapshot_starts[row]; s < rows.snapshot_starts[row + 1]; s++)
      keep_tail(row, rows.snapshot_ends[s], rows.snapshot_slots[s]);
    keep_tail(row, length(row), rows.slots[row]);
  }

  // All tokens of a row through `parts` x 16 columns of a head's state, from column `first` on.
  template <int parts> void recur(int64_t row, int64_t head, int64_t first) {
    const int64_t base = head * r.key_dim * columns() + first;
    const Columns state{slot(rows.slots[row]) + base, columns()};
    if (is_new(row))
      for (int64_t d = 0; d < r.key_dim; d++) std::fill_n(state(d, 0), parts * kLanes, 0.f);
    int64_t begin = 0;
    const auto advance_to = [&](int64_t end) {
      if (begin < end)
        r.kind == kGatedDelta ? advance<parts, true>(state, row, head, first, begin, end)
                              : advance<parts, false>(state, row, head, first, begin, end);
      begin = end;
    };
    for (int64_t s = rows.snapshot_starts[row]; s < rows.snapshot_starts[row + 1]; s++) {
      advance_to(rows.snapshot_ends[s]);
      const Columns kept{slot(rows.snapshot_slots[s]) + base, columns()};
      for (int64_t d = 0; d < r.key_dim; d++) memcpy(kept(d, 0), state(d, 0), parts * kLanes * sizeof(float));
    }
    advance_to(length(row));
  }

  // Tokens [begin, end) of a row. For each: S *= decay; d = share * (v - S^T k), or share * v; S += k d^T; read = S^T q.
  // A token leaves S times the decay of the next one, and S^T k of that one, so that it reads and writes S once.
  template <int parts, bool is_delta>
  void advance(Columns state, int64_t row, int64_t head, int64_t first, int64_t begin, int64_t end) {
    const int64_t start = rows.query_starts[row] + begin, last = rows.query_starts[row] + end - 1;
    const int64_t left = r.value_dim - first;
    const Columns held = held_columns(r.key_dim, parts * kLanes);
    v16 known[parts];
    for (int p = 0; p < parts; p++) known[p] = splat(0.f);
    HeadToken now = head_token(start, head);
    if (is_delta) add_known(state, now, known);
    for (int64_t token = start; token <= last; token++) {
      const float* v = mixed + token * r.channels + 2 * keys() + head * r.value_dim + first;
      v16 change[parts], read[parts];
      for (int p = 0; p < parts; p++) {
        change[p] = (load_some(v + p * kLanes, left - p * kLanes) - known[p]) * now.share;
        known[p] = read[p] = splat(0.f);
      }
      const HeadToken next = token < last ? head_token(token + 1, head) : HeadToken{now.q, now.k, 1.f, 0.f};
      if (start == last)
        change_columns<false, false>(state, state, now, next, change, read, known);
      else if (token == start)
        change_columns<is_delta, false>(state, held, now, next, change, read, known);
      else
        change_columns<is_delta, true>(held, token < last ? held : state, now, next, change, read, known);
      float* o = outputs + (token * r.heads + head) * r.value_dim + first;
      for (int p = 0; p < parts; p++) {
        if (r.skip) read[p] = fma16(load_some(v + p * kLanes, left - p * kLanes), splat(r.skip[head]), read[p]);
        store_some(o + p * kLanes, read[p], left - p * kLanes);
      }
      now = next;
    }
  }

  template <int parts> INLINE void add_known(Columns state, HeadToken now, v16 (&known)[parts]) const {
    for (int64_t d = 0; d < r.key_dim; d++)
      for (int p = 0; p < parts; p++) known[p] = fma16(load16(state(d, p)) * now.decay, splat(now.k[d]), known[p]);
  }

  // `has_next`: also sums S^T k of the next token. `is_decayed`: of the columns in `from`.
  template <bool has_next, bool is_decayed, int parts>
  INLINE void change_columns(Columns from, Columns to, HeadToken now, HeadToken next, const v16 (&change)[parts],
                             v16 (&read)[parts], v16 (&known)[parts]) const {
    for (int64_t d = 0; d < r.key_dim; d++) {
      const v16 k = splat(now.k[d]), q = splat(now.q[d]), next_k = splat(next.k[d]);
      for (int p = 0; p < parts; p++) {
        const v16 s = load16(from(d, p)), changed = fma16(k, change[p], is_decayed ? s : s * now.decay);
        read[p] = fma16(changed, q, read[p]);
        const v16 decayed = changed * next.decay;
        store16(to(d, p), decayed);
        if (has_next) known[p] = fma16(decayed, next_k, known[p]);
      }
    }
  }

  void recur_columns(int64_t row, int64_t head, int64_t first) {
    switch (std::min<int64_t>(columns() - first, kColumns) / kLanes) {
      case 1: return recur<1>(row, head, first);
      case 2: return recur<2>(row, head, first);
      case 3: return recur<3>(row, head, first);
      default: return recur<4>(row, head, first);
    }
  }

  // The gate of each output, and the norm of each group of `norm_width` outputs before or after it.
  void end_token(int64_t token) {
    float* o = outputs + token * values();
    const T* z = projected + token * r.width + r.channels;
    T* y = out + token * values();
    if (!r.norms_first)
      for (int64_t c = 0; c < values(); c += kLanes)
        store_some(o + c, load_some(o + c, values() - c) * silu16(load_some(z + c, values() - c)), values() - c);
    for (int64_t g = 0; g < values(); g += r.norm_width) {
      const float scale = r.norm ? 1.f / sqrtf(sum_of_squares(o + g, r.norm_width) / float(r.norm_width) + r.eps) : 1.f;
      const float* weight = !r.norm ? nullptr : r.norm_is_shared ? r.norm : r.norm + g;
      for (int64_t c = 0; c < r.norm_width; c += kLanes) {
        const int64_t count = r.norm_width - c;
        v16 x = load_some(o + g + c, count) * scale;
        if (weight) x = x * load_some(weight + c, count);
        if (r.norms_first) x = x * silu16(load_some(z + g + c, count));
        store_some(y + g + c, x, count);
      }
    }
  }

  void run(Pass& pass, int64_t n) {
    const int64_t grain = std::clamp<int64_t>(n / (4 * pass.threads), 1, kMixedTokens);
    pass.run(n, grain, [&](int64_t first, int64_t last) {
      int64_t row = std::upper_bound(rows.query_starts, rows.query_starts + rows.count, first) - rows.query_starts - 1;
      for (int64_t end; first < last; first = end) {
        while (first >= rows.query_starts[row + 1]) row++;
        end = std::min<int64_t>(last, rows.query_starts[row + 1]);
        mix_tokens(row, first - rows.query_starts[row], end - rows.query_starts[row]);
      }
    });
    pass.run(rows.count, 1, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; row++) keep_tails(row);
    });
    if (r.kind == kShortConv) return;
    const int64_t parts = (columns() + kColumns - 1) / kColumns, tasks = r.heads * parts;
    pass.run(rows.count * tasks, 1, [&](int64_t first, int64_t last) {
      for (int64_t task = first; task < last; task++)
        recur_columns(task / tasks, task % tasks / parts, task % parts * kColumns);
    });
    pass.run(n, 1, [&](int64_t first, int64_t last) {
      for (int64_t token = first; token < last; token++) end_token(token);
    });
  }
};

template <typename T>
void run_recurrent(Pass& pass, const Recurrence& r, const StateRows& rows, const void* projected, void* out, int64_t n) {
  scratch.make_room(r, n);
  Recurrent<T>{r, rows, (const T*)projected, (T*)out, scratch.mixed.data(), scratch.decays.data(),
               scratch.shares.data(), scratch.outputs.data()}
      .run(pass, n);
}

}  // namespace

void recurrent(Pass& pass, int is_bf16, const Recurrence& r, const StateRows& rows, const void* projected, void* out,
               int64_t n) {
  is_bf16 ? run_recurrent<uint16_t>(pass, r, rows, projected, out, n)
          : run_recurrent<float>(pass, r, rows, projected, out, n);
}

void gate_outputs(Pass& pass, int is_bf16, void* out, const void* gate, int64_t n, int64_t width, int64_t gate_stride) {
  pass.run(n, 4, [&](int64_t first, int64_t last) {
    auto run = [&](auto type) {
      typedef decltype(type) T;
      for (int64_t i = first; i < last; i++) {
        T* y = (T*)out + i * width;
        const T* g = (const T*)gate + i * gate_stride;
        for (int64_t c = 0; c < width; c += kLanes)
          store_some(y + c, load_some(y + c, width - c) * sigmoid16(load_some(g + c, width - c)), width - c);
      }
    };
    is_bf16 ? run(uint16_t()) : run(float());
  });
}

extern "C" void quire_recurrent(int is_bf16, const void* recurrence, const void* rows, const void* projected, void* out,
                                int64_t n, int threads) {
  Pass pass(threads);
  recurrent(pass, is_bf16, *(const Recurrence*)recurrence, *(const StateRows*)rows, projected, out, n);
}

extern "C" void quire_gate_outputs(int is_bf16, void* out, const void* gate, int64_t n, int64_t width, int threads) {
  Pass pass(threads);
  gate_outputs(pass, is_bf16, out, gate, n, width, width);
}
