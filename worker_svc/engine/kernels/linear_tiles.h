// Linear layers on tiles (tiles.h), in bfloat16 and int8. An output is one chain: from 0, one product per step of 16
// groups, steps strictly in order. Nothing else takes part in it: neither the number of rows nor the place in a tile.
//
// Packed rows: [tile][step][16 rows][16 groups]. Rows beyond those of the tile hold anything; their sums are not stored.
// A step of a panel is two weight tiles, each 16 groups of half of the outputs. They are in the order in which they are
// read, because a processor fetches adjacent lines faster.
#pragma once
#include "linear.h"
#include "tiles.h"

#if QUIRE_HAS_TILES
namespace {

constexpr int kTileWords = tiles::kBytes / 4;
constexpr int kStepBytes = 2 * tiles::kBytes;    // of a panel
constexpr int kSumTile = tiles::kRows * kPanel;  // sums of a row tile and a panel
constexpr int64_t kChunk = 8;  // steps of a panel that stay in the first-level cache while all rows use them
constexpr int kCacheLine = 64;
constexpr int64_t kOwnPairs = 4;        // with at most so many pairs of row tiles, a panel is fetched when it is used
constexpr int64_t kOwnDistance = 1024;  // bytes from what is used to what is fetched; a longer distance is slower

// Whether a bfloat16 layer, like that of an adapter with a low rank, has at most half a step of inputs: its panels and tiles
// have 8 groups.
INLINE bool has_few_groups(int64_t in) { return in <= 2 * tiles::kFewGroups; }

// The place of group `g` of output `o` in a panel of `groups` groups.
INLINE int64_t tiles_offset(int64_t groups, int64_t g, int64_t o) {
  const int64_t of_tile = std::min<int64_t>(groups, tiles::kGroups);
  const int64_t tile = g / of_tile * 2 + o / tiles::kColumns;
  return tile * of_tile * tiles::kRowBytes + g % of_tile * tiles::kRowBytes + o % tiles::kColumns * kGroupBytes;
}

// The 16 groups of a row and a step.
INLINE int32_t* step_of_row(int32_t* row, int64_t step) { return row + step * kTileWords; }

struct TiledBfloat16 {
  static constexpr int kGroup = 2;
  static constexpr bool kHasFewGroups = true;
  static RowScale pack(const uint16_t* x, int64_t in, int64_t steps, int32_t* row) {
    constexpr int64_t kInputs = kGroup * tiles::kGroups;
    const int64_t whole = in / kInputs;
    for (int64_t s = 0; s < whole; s++) memcpy(step_of_row(row, s), x + s * kInputs, tiles::kRowBytes);
    if (whole == steps) return {1.f, 0};
    uint16_t last[kInputs] = {};
    memcpy(last, x + whole * kInputs, (in - whole * kInputs) * sizeof(uint16_t));
    memcpy(step_of_row(row, whole), last, tiles::kRowBytes);
    return {1.f, 0};
  }
  template <int kSum, int kRow, int kWeight> static INLINE void multiply() {
    tiles::multiply_bf16<kSum, kRow, kWeight>();
  }
  static INLINE v16 finish(const int32_t* sums, RowScale scale, const float* scales) {
    return Bfloat16::finish(sums, scale, scales);
  }
};

struct TiledInt8 {
  static constexpr int kGroup = 4;
  static constexpr bool kHasFewGroups = false;
  template <typename T> static RowScale pack(const T* x, int64_t in, int64_t steps, int32_t* row) {
    constexpr int64_t kInputs = kGroup * tiles::kGroups;
    memset(step_of_row(row, steps - 1), 0, tiles::kRowBytes);
    return Int8::quantize_row(x, in, [&](int64_t i, const int8_t* values) {
      memcpy((char*)step_of_row(row, i / kInputs) + i % kInputs, values, kLanes);
    });
  }
  template <int kSum, int kRow, int kWeight> static INLINE void multiply() {
    tiles::multiply_int8<kSum, kRow, kWeight>();
  }
  static INLINE v16 finish(const int32_t* sums, RowScale scale, const float* scales) {
    return Int8::finish(sums, scale, scales);
  }
};

// K: one of the two above.
template <typename K> struct OnTiles : K {
  static constexpr int kTileRows = tiles::kRows;
  static constexpr int64_t kBlockBytes = 1 << 20;  // half of an L2 cache: processors with AMX have 2 MB
  static constexpr int64_t kStreamedBytes = 2 << 20;
  typedef tiles::Scope Scope;

  // Changes the sizes of the tiles for a layer with `in` inputs; `has_few`: the sizes are those for few groups.
  static void configure(Scope& scope, int64_t in, bool& has_few) {
    if (!K::kHasFewGroups || has_few_groups(in) == has_few) return;
    has_few = !has_few;
    scope.change(has_few ? tiles::kFew : tiles::kWhole);
  }

  static int64_t panel_bytes(int64_t in) {
    return K::kHasFewGroups && has_few_groups(in) ? kStepBytes / 2 : steps(in) * kStepBytes;
  }

  static int64_t steps(int64_t in) { return ceil_div(in, K::kGroup * tiles::kGroups); }
  static int64_t words_per_row(int64_t in, int64_t) { return steps(in) * tiles::kGroups; }
  static int64_t packed_rows(const RowTiles& tiles) { return tiles.count * kTileRows; }

  template <typename T>
  static RowScale pack_row(const T* x, int64_t in, int64_t, const RowTiles&, int64_t tile, int row, int32_t* packed) {
    return K::pack(x, in, steps(in), packed + tile * steps(in) * kTileWords + row * tiles::kGroups);
  }
};

// R row tiles times H halves of a panel. The sums of a second half that is left out stay 0 and are not stored.
template <typename K, int R, int H> INLINE void multiply_tiles() {
  K::template multiply<0, 4, 6>();
  if constexpr (H == 2) K::template multiply<1, 4, 7>();
  if constexpr (R == 2) K::template multiply<2, 5, 6>();
  if constexpr (R == 2 && H == 2) K::template multiply<3, 5, 7>();
}

template <int R> INLINE void load_sums(const int32_t* sums) {
  constexpr int64_t stride = kPanel * sizeof(int32_t);
  tiles::load<0>(sums, stride);
  tiles::load<1>(sums + tiles::kColumns, stride);
  if constexpr (R == 2) {
    tiles::load<2>(sums + kSumTile, stride);
    tiles::load<3>(sums + kSumTile + tiles::kColumns, stride);
  }
}

template <int R> INLINE void zero_sums() {
  tiles::zero<0>();
  tiles::zero<1>();
  if constexpr (R == 2) {
    tiles::zero<2>();
    tiles::zero<3>();
  }
}

template <int R> INLINE void store_sums(int32_t* sums) {
  constexpr int64_t stride = kPanel * sizeof(int32_t);
  tiles::store<0>(sums, stride);
  tiles::store<1>(sums + tiles::kColumns, stride);
  if constexpr (R == 2) {
    tiles::store<2>(sums + kSumTile, stride);
    tiles::store<3>(sums + kSumTile + tiles::kColumns, stride);
  }
}

// `bytes` per step are fetched into the second-level cache, from `from` on.
struct Fetch {
  const char* from;
  int64_t bytes;
};

// Some steps of one panel, and of R row tiles which are `stride` words apart.
struct Steps {
  const int32_t* x;
  int64_t stride;
  const char* w;
  int64_t tile_bytes;  // of a weight tile
  int64_t count;
  bool is_first;
  Fetch fetch;
};

// R row tiles times H halves of a panel, added to sums [R][16][kPanel].
template <typename K, int R, int H> void multiply_steps(Steps s, int32_t* sums) {
  s.is_first ? zero_sums<R>() : load_sums<R>(sums);
  for (int64_t i = 0; i < s.count; i++) {
    for (int64_t line = 0; line < s.fetch.bytes; line += kCacheLine) __builtin_prefetch(s.fetch.from + line, 0, 2);
    tiles::load<4>(s.x, tiles::kRowBytes);
    if constexpr (R == 2) tiles::load<5>(s.x + s.stride, tiles::kRowBytes);
    tiles::load<6>(s.w, tiles::kRowBytes);
    if constexpr (H == 2) tiles::load<7>(s.w + s.tile_bytes, tiles::kRowBytes);
    multiply_tiles<K, R, H>();
    s.x += kTileWords;
    s.w += kStepBytes;
    s.fetch.from += s.fetch.bytes;
  }
  store_sums<R>(sums);
}

template <typename K, int R> void multiply_some(const Steps& s, bool is_half, int32_t* sums) {
  is_half ? multiply_steps<K, R, 1>(s, sums) : multiply_steps<K, R, 2>(s, sums);
}

struct Bytes {
  const char* begin;
  int64_t bytes;
};

// What is fetched while `steps` of a panel, from step `first` at `w` on, are multiplied with one pair of the row tiles.
//
// Few pairs: the first of them fetches these steps themselves, just before it uses them. Many pairs: each fetches an equal
// share of the next panel. A fetch occupies a buffer of the first-level cache until memory answers, so many at once would
// delay the loads of rows.
INLINE Fetch fetch_of(const char* w, int64_t first, int64_t steps, int64_t pair, int64_t pairs, const Bytes& next_panel) {
  if (pairs <= kOwnPairs) return {w + kOwnDistance, pair ? 0 : kStepBytes};
  const int64_t share = ceil_div(kStepBytes / kCacheLine, pairs) * kCacheLine;
  const int64_t done = (first * pairs + pair * steps) * share;
  return {next_panel.begin + done, done < next_panel.bytes ? share : 0};
}

// Rows of [first_tile, last_tile) times one panel. With more than two row tiles the panel is cut into chunks; storing
// and loading sums between them changes nothing. Sums are converted while the next ones are multiplied.
template <typename K, typename T>
void multiply_panel(OnTiles<K>, const Call<T>& c, const Packed& packed, int64_t first_tile, int64_t last_tile,
                    Panels panels, const Target<T>& target) {
  const int64_t steps = OnTiles<K>::steps(c.in), count = last_tile - first_tile, stride = steps * kTileWords;
  const int64_t bytes = OnTiles<K>::panel_bytes(c.in), tile_bytes = bytes / steps / 2;
  const char* w = c.weight + panels.panel * bytes;
  const bool has_next = panels.following != kNoPanel;
  const Bytes next_panel{c.weight + panels.following * bytes, has_next ? bytes : 0};
  const bool is_half = target.count <= tiles::kColumns;
  const int64_t pairs = ceil_div(count, 2), chunk = pairs > 1 ? kChunk : steps;
  alignas(64) int32_t sums[kBlockTiles * kSumTile];
  const auto store = [&](int64_t t, const int32_t* from) {
    const int64_t tile = first_tile + t;
    store_tile<K>(c, target, from, packed.scales, packed.tiles.start(tile), packed.tiles.rows(tile),
                  panels.panel * kPanel);
  };
  for (int64_t first = 0; first < steps; first += chunk)
    for (int64_t t = 0; t < count; t += 2) {
      const char* from = w + first * kStepBytes;
      const int64_t num = std::min(chunk, steps - first);
      const Steps some{packed.x + (first_tile + t) * stride + first * kTileWords, stride, from, tile_bytes, num,
                       first == 0, fetch_of(from, first, num, t / 2, pairs, next_panel)};
      int32_t* pair = sums + (steps > chunk ? t * kSumTile : 0);
      const bool has_two = t + 1 < count, is_last = first + chunk >= steps;
      has_two ? multiply_some<K, 2>(some, is_half, pair) : multiply_some<K, 1>(some, is_half, pair);
      if (is_last) store(t, pair);
      if (is_last && has_two) store(t + 1, pair + kSumTile);
    }
}

}  // namespace
#endif
