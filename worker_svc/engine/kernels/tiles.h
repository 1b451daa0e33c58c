// Tiles: 8 registers of 16 rows of 64 bytes, and products of them, on processors with AMX. QUIRE_HAS_TILES (vec.h) is 0 where
// the compiler or the processor lacks them, and with -DQUIRE_NO_TILES. -DQUIRE_EMULATED_TILES gives the same functions and the
// same bits in software, so that tests run the loops around them on any processor.
//
// A product adds to a sum tile [16 rows][16 columns] the product of a row tile [16 rows][16 groups] and a weight tile
// [16 groups][16 columns]; a group is 2 bfloat16 or 4 int8. What is added to a sum depends on its row and its column only.
//
// bfloat16: from 0, the even elements of the 16 pairs are one chain of fused multiply-adds, the odd ones another; the two
// are added, and their sum is added to the sum tile. Each operation rounds to nearest even. Denormals are 0 as operands and
// as results, and MXCSR has no influence. `vdpbf16ps` gives other bits: it adds each product to the sum itself.
// int8: exact, in 32 bits.
//
// A thread may use tiles only while it has a tiles::Scope, and only after quire_permit_tiles (tiles.cpp) returned 0.
#pragma once
#include "vec.h"

#if QUIRE_HAS_TILES
namespace tiles {

constexpr int kRows = 16, kColumns = 16, kGroups = 16;
constexpr int kRowBytes = 64, kBytes = kRows * kRowBytes;

// The sizes of the tiles of a scope: whole ones, unless changed. The processor reads this structure.
struct alignas(64) Config {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {kRowBytes, kRowBytes, kRowBytes, kRowBytes, kRowBytes, kRowBytes, kRowBytes, kRowBytes};
  uint8_t rows[16] = {kRows, kRows, kRows, kRows, kRows, kRows, kRows, kRows};

  // The same with another size of one tile.
  constexpr Config with(int tile, int num_rows, int num_bytes) const {
    Config changed = *this;
    changed.rows[tile] = uint8_t(num_rows);
    changed.row_bytes[tile] = uint16_t(num_bytes);
    return changed;
  }
};
inline constexpr Config kWhole;
// Products of 8 groups: row tiles in tiles 4 and 5, weight tiles in 6 and 7.
constexpr int kFewGroups = 8;
inline constexpr Config kFew = kWhole.with(4, kRows, kRowBytes / 2)
                                   .with(5, kRows, kRowBytes / 2)
                                   .with(6, kFewGroups, kRowBytes)
                                   .with(7, kFewGroups, kRowBytes);

#if defined(QUIRE_EMULATED_TILES)

struct State {
  alignas(64) char tiles[8][kRows][kRowBytes];
  const Config* config = nullptr;  // of the scope, if there is one
};
inline thread_local State state;

inline State& used_state() {
  if (!state.config) __builtin_trap();  // as the processor does
  return state;
}

class Scope {
 public:
  explicit Scope(const Config& config = kWhole) { change(config); }
  void change(const Config& config) { state.config = &config; }
  ~Scope() { state.config = nullptr; }
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;
};

template <int kTile> void zero() { memset(used_state().tiles[kTile], 0, kBytes); }
template <int kTile> void load(const void* from, int64_t stride) {
  zero<kTile>();
  const Config& config = *state.config;
  for (int r = 0; r < config.rows[kTile]; r++)
    memcpy(state.tiles[kTile][r], (const char*)from + r * stride, config.row_bytes[kTile]);
}
template <int kTile> void store(void* to, int64_t stride) {
  const Config& config = *used_state().config;
  for (int r = 0; r < config.rows[kTile]; r++)
    memcpy((char*)to + r * stride, state.tiles[kTile][r], config.row_bytes[kTile]);
}

INLINE v16 size_of(v16 x) { return (v16)((i16)x & 0x7fffffff); }
INLINE v16 flush(v16 x) { return select(size_of(x) < splat(0x1p-126f), (v16)((i16)x & int32_t(0x80000000)), x); }

// Fused on every processor: the product of two small numbers is inexact in float.
INLINE v16 fused(v16 a, v16 b, v16 c) {
#if defined(__FMA__) || defined(__ARM_NEON)
  return fma16(a, b, c);
#else
  float y[kLanes];
  for (int lane = 0; lane < kLanes; lane++) y[lane] = __builtin_fmaf(a[lane], b[lane], c[lane]);
  return load16(y);
#endif
}

// a * b + c. A result is a denormal if it is one after rounding with an unlimited exponent, hence the second product.
INLINE v16 flushed_fma(v16 a, v16 b, v16 c) {
  const v16 y = fused(a, b, c), scaled = fused(a * 0x1p32f, b * 0x1p32f, c * 0x1p64f);
  return select(size_of(scaled) < splat(0x1p-62f), (v16)((i16)y & int32_t(0x80000000)), y);
}

template <int kSum, int kRow, int kWeight> void multiply_bf16() {
  State& s = used_state();
  for (int r = 0; r < kRows; r++) {
    v16 chains[2] = {};
    for (int g = 0; g < s.config->rows[kWeight]; g++)
      for (int odd = 0; odd < 2; odd++) {
        u16v pairs;
        memcpy(&pairs, s.tiles[kWeight][g], kRowBytes);
        uint16_t x;
        memcpy(&x, s.tiles[kRow][r] + g * 4 + odd * 2, 2);
        const v16 w = odd ? (v16)(pairs & 0xffff0000u) : (v16)(pairs << 16);
        chains[odd] = flushed_fma(flush(splat(to_float(x))), flush(w), chains[odd]);
      }
    v16 sum;
    memcpy(&sum, s.tiles[kSum][r], kRowBytes);
    sum = flush(flush(sum) + flush(chains[0] + chains[1]));
    memcpy(s.tiles[kSum][r], &sum, kRowBytes);
  }
}

template <int kSum, int kRow, int kWeight> void multiply_int8() {
  State& s = used_state();
  for (int r = 0; r < kRows; r++)
    for (int c = 0; c < kColumns; c++) {
      int32_t sum;
      memcpy(&sum, s.tiles[kSum][r] + c * 4, 4);
      for (int i = 0; i < kRowBytes; i++)
        sum += int8_t(s.tiles[kRow][r][i]) * uint8_t(s.tiles[kWeight][i / 4][c * 4 + i % 4]);
      memcpy(s.tiles[kSum][r] + c * 4, &sum, 4);
    }
}

#else

// Configures the tiles of a thread, and releases them: the system need not save their 8 KB at a switch then, and a core
// with unused tiles sleeps more deeply. Both take about 140 ns together. Scopes do not nest.
class Scope {
 public:
  explicit Scope(const Config& config = kWhole) { change(config); }
  // The tiles lose their content.
  void change(const Config& config) { asm volatile("ldtilecfg %0" ::"m"(config)); }
  ~Scope() { asm volatile("tilerelease" ::: "memory"); }
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;

};

// Assembly: the intrinsics of some compilers are macros that need a literal number, and do not say that they read memory.
template <int kTile> INLINE void zero() { asm volatile("tilezero %%tmm%c0" ::"i"(kTile)); }
template <int kTile> INLINE void load(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(kTile) : "memory");
}
template <int kTile> INLINE void store(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(kTile) : "memory");
}
template <int kSum, int kRow, int kWeight> INLINE void multiply_bf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kRow), "i"(kWeight));
}
// Rows are signed, weights are not.
template <int kSum, int kRow, int kWeight> INLINE void multiply_int8() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kRow), "i"(kWeight));
}

#endif

}  // namespace tiles
#endif
