// Counts what attention reads of a cache of keys: called for each load and store of sources that g++ compiled with
// -fsanitize=kernel-address (bench/cache_reads.py). Each thread has a second-level cache of its own, and all share a third
// level: 8 ways, least recently used.
#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

namespace {

constexpr int kLine = 64, kWays = 8;
uint64_t begin_, end_;
int64_t own_bytes_, shared_bytes_;
std::atomic<int64_t> from_shared_, from_memory_;
std::mutex mutex_;

struct Simulated {
  int64_t sets;
  std::vector<uint64_t> lines;  // [sets, ways], the newest first

  explicit Simulated(int64_t bytes) : sets(bytes / kLine / kWays), lines(sets * kWays) {}

  bool has(uint64_t line) {
    uint64_t* set = &lines[line % sets * kWays];
    int way = 0;
    while (way < kWays && set[way] != line) way++;
    const bool found = way < kWays;
    for (way = found ? way : kWays - 1; way > 0; way--) set[way] = set[way - 1];
    set[0] = line;
    return found;
  }
};

void touch(uint64_t at, uint64_t size) {
  static thread_local Simulated own(own_bytes_);
  static Simulated shared(shared_bytes_);
  const bool is_counted = at >= begin_ && at < end_;
  for (uint64_t line = at / kLine; line <= (at + size - 1) / kLine; line++) {
    if (own.has(line)) continue;
    const std::lock_guard<std::mutex> lock(mutex_);
    const bool is_shared = shared.has(line);
    if (is_counted) from_shared_ += kLine;
    if (is_counted && !is_shared) from_memory_ += kLine;
  }
}

}  // namespace

extern "C" {
void reads_begin(uint64_t begin, uint64_t bytes, int64_t own_bytes, int64_t shared_bytes) {
  begin_ = begin, end_ = begin + bytes, own_bytes_ = own_bytes, shared_bytes_ = shared_bytes;
  from_shared_ = from_memory_ = 0;
}
int64_t reads_from_shared() { return from_shared_; }
int64_t reads_from_memory() { return from_memory_; }

#define ACCESS(size)                                                  \
  void __asan_load##size##_noabort(uint64_t at) { touch(at, size); }  \
  void __asan_store##size##_noabort(uint64_t at) { touch(at, size); }
ACCESS(1) ACCESS(2) ACCESS(4) ACCESS(8) ACCESS(16)
void __asan_loadN_noabort(uint64_t at, uint64_t size) { touch(at, size); }
void __asan_storeN_noabort(uint64_t at, uint64_t size) { touch(at, size); }
void __asan_handle_no_return() {}
void* __asan_memcpy(void* to, const void* from, uint64_t size) {
  touch((uint64_t)from, size), touch((uint64_t)to, size);
  return __builtin_memcpy(to, from, size);
}
void* __asan_memset(void* to, int value, uint64_t size) {
  touch((uint64_t)to, size);
  return __builtin_memset(to, value, size);
}
void* __asan_memmove(void* to, const void* from, uint64_t size) {
  touch((uint64_t)from, size), touch((uint64_t)to, size);
  return __builtin_memmove(to, from, size);
}
}
