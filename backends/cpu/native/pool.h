// Threads that walk a tape together: every thread runs the same function; they meet at barriers and share out work items.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

namespace trivium {

// Work items that threads share out. Each thread has a stretch of them of its own, from which it takes the first that is left, so that
// it reads memory in order; one that has nothing left helps the others. Counters lie on cache lines of their own.
class Shares {
public:
  explicit Shares(int threads) : counters_(std::make_unique<Counter[]>(static_cast<size_t>(threads))), threads_(threads) {}

  void reset() {
    for (int i = 0; i < threads_; ++i) counters_[i].next.store(0, std::memory_order_relaxed);
  }
  // Where the stretch of thread `owner` of `threads` begins among `count` items.
  static int64_t first(int owner, int threads, int64_t count) { return (count * owner + threads - 1) / threads; }
  // The next of `owner`'s items among `count`, or -1.
  int64_t take(int owner, int64_t count) {
    const int64_t begin = first(owner, threads_, count), end = first(owner + 1, threads_, count);
    if (begin >= end) return -1;
    const int64_t i = begin + counters_[owner].next.fetch_add(1, std::memory_order_relaxed);
    return i < end ? i : -1;
  }

private:
  struct alignas(64) Counter {
    std::atomic<int64_t> next{0};
  };
  std::unique_ptr<Counter[]> counters_;
  int threads_;
};

class ThreadPool;

// One thread's view of a run.
class Worker {
public:
  Worker(ThreadPool& pool, int index) : pool_(pool), index_(index) {}

  int index() const { return index_; }
  int threads() const;
  // All threads of the run meet here.
  void barrier();
  // Scratch memory of this thread: `bytes` from a 64-byte aligned address; valid until the next call. The pool must have
  // been told to reserve as much.
  void* scratch() const { return scratch_; }

  // Runs f(i) for items 0..count-1, shared with the other threads through `shares`, which must have been reset before the run. Which thread
  // takes which item is open, so f's result must not depend on it. No barrier before or after.
  template <typename F>
  void share(Shares& shares, int64_t count, F&& f) {
    for (int other = 0; other < threads(); ++other) {
      const int owner = (index_ + other) % threads();
      for (int64_t i = shares.take(owner, count); i >= 0; i = shares.take(owner, count)) f(i);
    }
  }

private:
  friend class ThreadPool;
  ThreadPool& pool_;
  int index_;
  void* scratch_ = nullptr;
  int64_t slept_ = 0;          // nanoseconds of this run
  int64_t lost_ = 0;           // nanoseconds of this run in which this thread neither ran nor slept: others had its processor
  int64_t total_lost_ = 0;     // of late, in runs that no two threads of the pool ended on one processor
  std::atomic<int> cpu_{-1};   // where this thread was at its last barrier; -1: unknown
  bool moves_ = false;         // it shall look for another processor
  std::chrono::steady_clock::time_point next_part_{};  // when it may look for one within a run
};

// `threads` threads, of which the caller of run() is one. Between runs the others spin for a moment, so that the next of a row of steps
// finds them awake, then sleep.
//
// On a machine that is shared: a thread whose processor another program takes holds up all the others at the next barrier. So where threads
// keep losing time to others, a run is done by fewer of them, and after a while all are tried again; and a thread that shares its processor with
// another of the pool, or with another program, looks once for a free one. None is ever pinned. What a run computes must not depend on how
// many threads take part.
class ThreadPool {
public:
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return threads_; }
  // Makes sure that each thread has `bytes` of scratch. Not during a run.
  void reserve_scratch(size_t bytes);
  // Calls job(worker) on every thread and returns when all are done. job must not throw.
  template <typename Job>
  void run(Job&& job) {
    run_job({[](void* context, Worker& worker) { (*static_cast<std::remove_reference_t<Job>*>(context))(worker); }, &job});
  }

private:
  friend class Worker;
  // A job without the allocation that a std::function may make.
  struct JobRef {
    void (*call)(void* context, Worker& worker) = nullptr;
    void* context = nullptr;
  };
  void run_job(JobRef job);
  void stop_helpers();
  void loop(int index);
  void barrier(Worker& worker);
  void take_part(Worker& worker);
  void after_run(std::chrono::steady_clock::duration busy);
  bool look_for_couples();
  void look_for_crowds();
  void move_away(int threads);
  void part(Worker& worker, int threads);
  void rest(int index);

  int threads_;
  const std::atomic<int64_t> spin_;  // nanoseconds at a barrier
  std::vector<std::unique_ptr<Worker>> workers_;
  std::vector<std::thread> helpers_;
  size_t scratch_bytes_ = 0;
  JobRef job_;
  bool stop_ = false;
  using Clock = std::chrono::steady_clock;
  int together_ = 0;             // runs in a row that found two threads on one processor
  int active_;                   // threads of the next run: the first of them
  Clock::duration busy_{};       // time in runs since lost time was last looked at
  Clock::duration coupled_{};    // that of runs that two threads ended on one processor
  int coupled_windows_ = 0;      // how often so in a row
  Clock::duration resting_;      // how long fewer threads work before all are tried again
  Clock::time_point retry_, next_move_;
  std::atomic<int64_t> patience_;

  // Each on a cache line of its own: the epoch is what helpers wait on (a count of runs, and in the low bits the threads of the run),
  // `arrived` and `generation` make the barrier; threads that take no part wait for the gate to reach beyond them.
  alignas(64) std::atomic<uint32_t> epoch_{0};
  alignas(64) std::atomic<uint32_t> arrived_{0};
  alignas(64) std::atomic<uint32_t> generation_{0};
  alignas(64) std::atomic<uint32_t> sleepers_{0};
  alignas(64) std::atomic<uint32_t> gate_;
};

inline int Worker::threads() const { return pool_.threads(); }
inline void Worker::barrier() { pool_.barrier(*this); }

}  // namespace trivium
