#include "team.h"

#include <algorithm>
#include <chrono>
#include <memory>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t kMaxParts = 0xffff;
constexpr std::chrono::microseconds kAwake{50};  // about the time to wake a thread
constexpr int kPausesPerLook = 16;

int64_t parts_of(uint64_t ticket) { return int64_t(ticket >> 16 & 0xffff); }
int64_t next_of(uint64_t ticket) { return int64_t(ticket & 0xffff); }
bool has_part(uint64_t ticket) { return next_of(ticket) < parts_of(ticket); }

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Waits at most kAwake, and only while `is_wanted`; returns whether `is_true` became true.
template <typename Condition, typename Wanted> bool spin_until(const Condition& is_true, const Wanted& is_wanted) {
  const auto deadline = std::chrono::steady_clock::now() + kAwake;
  do {
    for (int i = 0; i < kPausesPerLook; i++) {
      if (is_true()) return true;
      if (!is_wanted()) return false;
      pause();
    }
  } while (std::chrono::steady_clock::now() < deadline);
  return is_true();
}

}  // namespace

Team::Team(int threads) {
  for (int i = 1; i < threads; i++) helpers_.emplace_back([this] { help(); });
}

Team::~Team() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    is_ending_ = true;
  }
  helpers_called_.notify_all();
  for (std::thread& helper : helpers_) helper.join();
}

Team& Team::of_this_thread(int threads) {
  thread_local std::unique_ptr<Team> team;
  if (!team || int(team->helpers_.size()) != threads - 1) team = std::make_unique<Team>(threads);
  return *team;
}

void Team::share(int64_t count, int64_t grain, Task task, const void* context) {
  grain = std::max({grain, int64_t(1), (count + kMaxParts - 1) / kMaxParts});
  const int64_t parts = (count + grain - 1) / grain;
  phase_ = {count, grain, task, context};
  num_done_.store(0, std::memory_order_relaxed);
  const uint64_t number = (ticket_.load(std::memory_order_relaxed) >> 32) + 1;
  ticket_.store(number << 32 | uint64_t(parts) << 16);
  if (num_asleep_.load()) wake_helpers();
  take_parts();
  await_done(parts);
}

void Team::take_parts() {
  uint64_t ticket = ticket_.load(std::memory_order_acquire);
  while (has_part(ticket)) {
    if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel, std::memory_order_acquire))
      continue;
    const int64_t first = next_of(ticket) * phase_.grain;
    phase_.task(phase_.context, first, std::min(first + phase_.grain, phase_.count));
    if (num_done_.fetch_add(1) + 1 == parts_of(ticket) && caller_sleeps_.load()) {
      std::lock_guard<std::mutex> lock(mutex_);
      parts_done_.notify_one();
    }
    ticket = ticket_.load(std::memory_order_acquire);
  }
}

void Team::await_done(int64_t parts) {
  const auto is_done = [&] { return num_done_.load() == parts; };
  if (spin_until(is_done, [] { return true; })) return;
  std::unique_lock<std::mutex> lock(mutex_);
  caller_sleeps_.store(true);
  parts_done_.wait(lock, is_done);
  caller_sleeps_.store(false);
}

void Team::wake_helpers() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    num_calls_++;
    num_asleep_.store(0);
  }
  helpers_called_.notify_all();
}

void Team::help() {
  while (await_part()) take_parts();
}

// Returns false when the team ends.
bool Team::await_part() {
  const auto has_any = [this] { return has_part(ticket_.load()); };
  const auto is_open = [this] { return is_open_.load(std::memory_order_relaxed); };
  while (!spin_until(has_any, is_open)) {
    std::unique_lock<std::mutex> lock(mutex_);
    num_asleep_++;
    const uint64_t seen = num_calls_;
    helpers_called_.wait(lock, [&] { return num_calls_ != seen || has_any() || is_ending_; });
    if (is_ending_) return false;
  }
  return true;
}
