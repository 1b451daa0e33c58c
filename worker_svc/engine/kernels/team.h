// A thread and the helpers that share its work, one phase after another.
//
// A phase is a number of tasks that may run in any order. Each thread that is awake takes the next task, so no thread
// waits for one that sleeps or has lost its core to another process. A phase ends when all tasks are done; the caller
// runs all of them if no helper is awake. Between the phases of a pass helpers spin for a moment; between passes they
// sleep, because other processes need the cores.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

class Team {
 public:
  explicit Team(int threads);
  ~Team();

  // The calling thread's team; a team of another size is replaced.
  static Team& of_this_thread(int threads);

  void open() { is_open_.store(true, std::memory_order_relaxed); }
  void close() { is_open_.store(false, std::memory_order_relaxed); }

  typedef void (*Task)(const void* context, int64_t first, int64_t last);
  // Runs task(context, first, last) over all parts of [0, count), each of at least `grain`, then returns.
  void share(int64_t count, int64_t grain, Task task, const void* context);

 private:
  struct Phase {
    int64_t count, grain;
    Task task;
    const void* context;
  };

  void help();
  bool await_part();
  void take_parts();
  void await_done(int64_t parts);
  void wake_helpers();

  Phase phase_{};  // written while no part is open, read by threads that have taken a part
  // The phase's number (32 bits), its number of parts (16) and the next part (16). A thread takes a part by incrementing
  // it; the exchange fails if the thread has read an earlier phase.
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<int64_t> num_done_{0};
  alignas(64) std::atomic<bool> is_open_{false};
  std::atomic<int> num_asleep_{0};  // helpers that must be woken
  std::atomic<bool> caller_sleeps_{false};
  std::mutex mutex_;
  std::condition_variable helpers_called_, parts_done_;
  uint64_t num_calls_ = 0;  // under the mutex
  bool is_ending_ = false;    // under the mutex
  std::vector<std::thread> helpers_;
};

// A series of phases. With one thread they run in the calling thread.
class Pass {
 public:
  explicit Pass(int threads) : team_(threads > 1 ? &Team::of_this_thread(threads) : nullptr), threads(threads) {
    if (team_) team_->open();
  }
  ~Pass() {
    if (team_) team_->close();
  }
  Pass(const Pass&) = delete;
  Pass& operator=(const Pass&) = delete;

  // task(first, last) for parts of [0, count), none smaller than `grain` except the last.
  template <typename Task> void run(int64_t count, int64_t grain, const Task& task) {
    if (!team_ || count <= grain) {
      if (count > 0) task(0, count);
      return;
    }
    auto call = [](const void* context, int64_t first, int64_t last) { (*(const Task*)context)(first, last); };
    team_->share(count, grain, call, &task);
  }

 private:
  Team* team_;

 public:
  const int threads;
};

// Number of threads for this amount of work: one if waking others costs more than they save.
inline int threads_for(int64_t work, int64_t serial_work, int threads) { return work > serial_work ? threads : 1; }
