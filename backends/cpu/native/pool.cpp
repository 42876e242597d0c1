#include "pool.h"

#ifdef __linux__
#include <sched.h>
#endif

#include <algorithm>
#include <ctime>
#include <new>

namespace trivium {
namespace {

constexpr size_t kAlign = 64;
// How long a thread spins before it sleeps, nanoseconds: at a barrier, and between two runs. A sleeper takes 20 to 50 us to come, a
// decode step's work on the host 50 to 300. But a thread that spins has used up its share when its work arrives: with another process
// on one of the processors, spinning for 50 us costs a third of the decode rate. So between runs threads are patient only while nobody
// takes their processors from them.
constexpr int64_t kSpin = 10'000;
constexpr int64_t kPatience = 400'000;
// Time that threads lose to others is looked at after so much time in runs, and counts from such a share of it: beside a busy process a
// thread loses a third to a half, on an idle machine a few percent, beside a server's event loop with 32 streams a tenth. In a quarter of
// this window the loop's bursts would look like a busy process.
constexpr std::chrono::milliseconds kWindow{100};
constexpr double kLost = 0.15;
// How long fewer threads work before all are tried again, at first and at most.
constexpr std::chrono::milliseconds kRest{500}, kLongestRest{2000};
// So many runs in a row with two threads on one processor, and one of them looks for another; so many windows, and it is given up.
constexpr int kTogether = 4;
// A thread that finds itself on another's processor after it slept at a barrier looks for a free one at most so often.
constexpr std::chrono::milliseconds kPart{1};
constexpr uint32_t kThreadBits = 12;

int current_cpu() {
#ifdef __linux__
  return sched_getcpu();
#else
  return -1;
#endif
}

// Processor time of the calling thread, nanoseconds.
int64_t processor_time() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

int64_t nanoseconds(std::chrono::steady_clock::duration d) { return std::chrono::duration_cast<std::chrono::nanoseconds>(d).count(); }

inline void relax() {
#if TRIVIUM_X86
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// Returns once `word` differs from `old`: spins for `patience` nanoseconds, then sleeps. Returns how long it slept, nanoseconds.
int64_t wait_change(std::atomic<uint32_t>& word, uint32_t old, std::atomic<uint32_t>& sleepers, const std::atomic<int64_t>& patience) {
  using Clock = std::chrono::steady_clock;
  for (int i = 0; i < 64; ++i) {
    if (word.load(std::memory_order_acquire) != old) return 0;
    relax();
  }
  const auto start = Clock::now();
  while (Clock::now() - start < std::chrono::nanoseconds(patience.load(std::memory_order_relaxed))) {
    for (int i = 0; i < 32; ++i) {
      if (word.load(std::memory_order_acquire) != old) return 0;
      relax();
    }
  }
  // Sequentially consistent against change(): either it sees the sleeper, or wait() sees the new value.
  const auto tired = Clock::now();
  sleepers.fetch_add(1);
  while (word.load() == old) word.wait(old);
  sleepers.fetch_sub(1);
  return nanoseconds(Clock::now() - tired);
}

void change(std::atomic<uint32_t>& word, uint32_t value, std::atomic<uint32_t>& sleepers) {
  word.store(value);
  if (sleepers.load() != 0) word.notify_all();
}

}  // namespace

// More threads than processors: one that spins would hold the processor that the one it waits for needs.
ThreadPool::ThreadPool(int threads)
    : threads_(std::clamp(threads, 1, (1 << kThreadBits) - 1)),
      spin_(static_cast<unsigned>(threads_) <= std::thread::hardware_concurrency() ? kSpin : 0), active_(threads_), resting_(kRest),
      patience_(spin_.load()), gate_(static_cast<uint32_t>(threads_)) {
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
  gate_.store(static_cast<uint32_t>(threads_));
  gate_.notify_all();
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
  const auto start = Clock::now();
  job_ = job;
  if (active_ > 1) {
    const uint32_t count = (epoch_.load(std::memory_order_relaxed) >> kThreadBits) + 1;
    change(epoch_, count << kThreadBits | static_cast<uint32_t>(active_), sleepers_);
  }
  take_part(*workers_[0]);
  if (spin_ > 0) after_run(Clock::now() - start);
}

void ThreadPool::loop(int index) {
  uint32_t seen = 0;
  while (true) {
    wait_change(epoch_, seen, sleepers_, patience_);
    seen = epoch_.load(std::memory_order_acquire);
    if (stop_) return;
    // The word says it, not active_: a run without this thread may be over, and the next on its way.
    if (static_cast<uint32_t>(index) < (seen & ((1u << kThreadBits) - 1))) take_part(*workers_[index]);
    else rest(index);
  }
}

void ThreadPool::rest(int index) {
  for (uint32_t gate = gate_.load(); gate <= static_cast<uint32_t>(index); gate = gate_.load()) gate_.wait(gate);
}

void ThreadPool::take_part(Worker& worker) {
  if (worker.moves_) move_away(active_);
  worker.slept_ = 0;
  const auto start = Clock::now();
  const int64_t used = processor_time();
  job_.call(job_.context, worker);
  worker.lost_ = nanoseconds(Clock::now() - start) - (processor_time() - used) - worker.slept_;
  barrier(worker);
}

// Lets the calling thread run on a processor where no thread of this run was seen, then wherever it may again: nobody is pinned.
void ThreadPool::move_away(int threads) {
#ifdef __linux__
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;  // a machine of more than CPU_SETSIZE processors
  cpu_set_t free = allowed;
  for (int i = 0; i < threads; ++i) {
    const int cpu = workers_[i]->cpu_.load(std::memory_order_relaxed);
    if (cpu >= 0 && cpu < CPU_SETSIZE) CPU_CLR(static_cast<size_t>(cpu), &free);
  }
  if (CPU_COUNT(&free) > 0 && sched_setaffinity(0, sizeof free, &free) == 0) sched_setaffinity(0, sizeof allowed, &allowed);
#endif
}

// On the caller's thread, while the others wait.
void ThreadPool::after_run(Clock::duration busy) {
  for (const auto& worker : workers_) worker->moves_ = false;
  busy_ += busy;
  if (look_for_couples()) {
    coupled_ += busy;
  } else {
    for (int i = 0; i < active_; ++i) workers_[i]->total_lost_ += workers_[i]->lost_;
  }
  if (busy_ >= kWindow) look_for_crowds();
}

// Whether two threads ended the run on one processor. A thread that is woken where it last slept can stay on its waker's processor for good:
// with one of the two always asleep there is never a queue that the system would balance, and a step takes twice as long. Where they began says
// little: a waker's processor is the usual place to begin on, and the system parts them at once if another is free.
bool ThreadPool::look_for_couples() {
  Worker* second = nullptr;
  for (int i = 1; i < active_; ++i) {
    for (int j = 0; j < i; ++j) {
      const int cpu = workers_[j]->cpu_.load(std::memory_order_relaxed);
      if (cpu >= 0 && cpu == workers_[i]->cpu_.load(std::memory_order_relaxed)) second = workers_[i].get();
    }
  }
  together_ = second == nullptr ? 0 : together_ + 1;
  if (together_ >= kTogether) {
    second->moves_ = true;
    together_ = 0;
  }
  return second != nullptr;
}

// Threads that lose much time move, once in a while, and the next runs do with a thread less; so they do where the system puts two threads
// on one processor again and again, since another is taken. Half of them always work. What threads lose to each other does not count.
void ThreadPool::look_for_crowds() {
  const auto now = Clock::now();
  const bool may_move = now >= next_move_;
  coupled_windows_ = 2 * coupled_ > busy_ ? coupled_windows_ + 1 : 0;
  bool crowded = coupled_windows_ >= kTogether;
  for (int i = 0; i < active_; ++i) {
    Worker& worker = *workers_[i];
    const bool much = static_cast<double>(worker.total_lost_) > kLost * static_cast<double>(nanoseconds(busy_));
    worker.total_lost_ = 0;
    worker.moves_ = worker.moves_ || (much && may_move);
    crowded = crowded || much;
  }
  busy_ = coupled_ = {};
  if (crowded && may_move) next_move_ = now + kRest;
  if (crowded && active_ > (threads_ + 1) / 2) {
    if (active_ == threads_) resting_ = now < retry_ + kRest ? std::min<Clock::duration>(2 * resting_, kLongestRest) : kRest;
    retry_ = now + resting_;
    gate_.store(static_cast<uint32_t>(--active_));
  } else if (active_ < threads_ && now >= retry_) {
    gate_.store(static_cast<uint32_t>(active_ = threads_));
    gate_.notify_all();
  }
  patience_.store(crowded || active_ < threads_ ? kSpin : kPatience, std::memory_order_relaxed);
}

void ThreadPool::barrier(Worker& worker) {
  const auto expected = static_cast<uint32_t>(active_);  // once this thread has arrived, the next run may be on its way
  if (expected == 1) return;
  worker.cpu_.store(current_cpu(), std::memory_order_relaxed);
  const uint32_t generation = generation_.load(std::memory_order_acquire);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == expected) {
    arrived_.store(0, std::memory_order_relaxed);
    change(generation_, generation + 1, sleepers_);
  } else if (const int64_t slept = wait_change(generation_, generation, sleepers_, spin_); slept > 0) {
    worker.slept_ += slept;
    if (spin_ > 0) part(worker, static_cast<int>(expected));
  }
}

// A thread that slept at a barrier is woken where it last ran, or where its waker does; if that is one processor, the two take turns from
// there on although another may be free. The run's `threads` are given: after its last barrier the next may be on its way.
void ThreadPool::part(Worker& worker, int threads) {
  const int cpu = current_cpu();
  worker.cpu_.store(cpu, std::memory_order_relaxed);
  const auto is_here = [&](const auto& other) { return other.get() != &worker && other->cpu_.load(std::memory_order_relaxed) == cpu; };
  if (cpu < 0 || std::none_of(workers_.begin(), workers_.begin() + threads, is_here)) return;
  const auto now = Clock::now();
  if (now < worker.next_part_) return;
  worker.next_part_ = now + kPart;
  move_away(threads);
}

}  // namespace trivium
