// Permission to use tiles, and single products for tests.
#include "tiles.h"

#if QUIRE_HAS_TILES && !defined(QUIRE_EMULATED_TILES)
#include <errno.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

extern "C" {

// 0 if this process may use the tiles of this build, or the build has none; else the system's error number. The system
// refuses tiles if it does not know them, and while a thread has an alternate signal stack that is too small for a signal
// frame with tiles. A permission holds for all threads, and cannot be withdrawn.
int quire_permit_tiles() {
#if QUIRE_HAS_TILES && !defined(QUIRE_EMULATED_TILES)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0 ? 0 : errno;
#else
  return 0;
#endif
}

// sums [16, 16] += product of rows [16, 16 groups] and weights [16 groups, 16]; returns 0 in a build without tiles.
int quire_tile_product(int is_int8, const void* rows, const void* weights, void* sums) {
#if QUIRE_HAS_TILES
  const tiles::Scope scope;
  tiles::load<0>(sums, tiles::kRowBytes);
  tiles::load<4>(rows, tiles::kRowBytes);
  tiles::load<6>(weights, tiles::kRowBytes);
  is_int8 ? tiles::multiply_int8<0, 4, 6>() : tiles::multiply_bf16<0, 4, 6>();
  tiles::store<0>(sums, tiles::kRowBytes);
  return 1;
#else
  return 0;
#endif
}
}
