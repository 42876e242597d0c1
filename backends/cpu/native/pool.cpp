#include "pool.h"

#include <chrono>
#include <new>

namespace trivium {
namespace {

constexpr size_t kAlign = 64;
// How long a thread spins before it sleeps. Longer spins gain up to a tenth on an idle machine (50 us) and lose a third of the decode
// rate when another process wants one of the processors: a thread that spins has used up its share when its work arrives.
constexpr std::chrono::microseconds kSpin{10};

inline void relax() {
#if TRIVIUM_X86
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// Returns once `word` differs from `old`: spins (if `spin`), then sleeps.
void wait_change(std::atomic<uint32_t>& word, uint32_t old, std::atomic<uint32_t>& sleepers, bool spin) {
  for (int i = 0; i < 64; ++i) {
    if (word.load(std::memory_order_acquire) != old) return;
    relax();
  }
  const auto limit = std::chrono::steady_clock::now() + kSpin;
  while (spin && std::chrono::steady_clock::now() < limit) {
    for (int i = 0; i < 32; ++i) {
      if (word.load(std::memory_order_acquire) != old) return;
      relax();
    }
  }
  // Sequentially consistent against change(): either it sees the sleeper, or wait() sees the new value.
  sleepers.fetch_add(1);
  while (word.load() == old) word.wait(old);
  sleepers.fetch_sub(1);
}

void change(std::atomic<uint32_t>& word, uint32_t value, std::atomic<uint32_t>& sleepers) {
  word.store(value);
  if (sleepers.load() != 0) word.notify_all();
}

}  // namespace

// More threads than processors: one that spins would hold the processor that the one it waits for needs.
ThreadPool::ThreadPool(int threads)
    : threads_(threads < 1 ? 1 : threads), spin_(static_cast<unsigned>(threads_) <= std::thread::hardware_concurrency()) {
  for (int i = 0; i < threads_; ++i) workers_.push_back(std::make_unique<Worker>(*this, i));
  try {
    for (int i = 1; i < threads_; ++i) helpers_.emplace_back([this, i] { loop(i); });
  } catch (...) {
    // The system gives no more threads: those that run must be joined before the caller hears of it.
    stop_helpers();
    throw;
  }
}

void ThreadPool::stop_helpers() {
  stop_ = true;
  change(epoch_, epoch_.load() + 1, sleepers_);
  for (std::thread& helper : helpers_) helper.join();
}

ThreadPool::~ThreadPool() {
  stop_helpers();
  for (auto& worker : workers_) ::operator delete(worker->scratch_, std::align_val_t{kAlign});
}

void ThreadPool::reserve_scratch(size_t bytes) {
  if (bytes <= scratch_bytes_) return;
  for (auto& worker : workers_) {
    ::operator delete(worker->scratch_, std::align_val_t{kAlign});
    worker->scratch_ = nullptr;
    worker->scratch_ = ::operator new(bytes, std::align_val_t{kAlign});
  }
  scratch_bytes_ = bytes;
}

void ThreadPool::run_job(JobRef job) {
  job_ = job;
  if (threads_ > 1) change(epoch_, epoch_.load() + 1, sleepers_);
  job.call(job.context, *workers_[0]);
  barrier();
}

void ThreadPool::loop(int index) {
  uint32_t seen = 0;
  while (true) {
    wait_change(epoch_, seen, sleepers_, spin_);
    seen = epoch_.load(std::memory_order_acquire);
    if (stop_) return;
    job_.call(job_.context, *workers_[index]);
    barrier();
  }
}

void ThreadPool::barrier() {
  if (threads_ == 1) return;
  const uint32_t generation = generation_.load(std::memory_order_acquire);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == static_cast<uint32_t>(threads_)) {
    arrived_.store(0, std::memory_order_relaxed);
    change(generation_, generation + 1, sleepers_);
  } else {
    wait_change(generation_, generation, sleepers_, spin_);
  }
}

}  // namespace trivium
