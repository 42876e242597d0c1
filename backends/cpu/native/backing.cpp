#include "backing.h"

#include <sys/mman.h>
#include <unistd.h>

#include <ctime>
#include <utility>

namespace trivium {
namespace {

constexpr uintptr_t kHugePage = uintptr_t{2} << 20;
// Judged by so many pages at a time, of which each took so much of the thread's processor time (waiting for the host counts as that;
// being interrupted doesn't): clearing it at 1 GB/s.
constexpr int64_t kWindow = 4, kSlow = 2'000'000;

constexpr uintptr_t down(uintptr_t address, uintptr_t unit) { return address / unit * unit; }
constexpr uintptr_t up(uintptr_t address, uintptr_t unit) { return down(address + unit - 1, unit); }

uintptr_t page_bytes() {
  static const auto bytes = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

struct Span {
  uintptr_t begin, end;
};

Span span(linear::PackedMatrix& matrix, int64_t begin, int64_t end) {
  return {reinterpret_cast<uintptr_t>(matrix.tile(begin)), reinterpret_cast<uintptr_t>(matrix.tile(end))};
}

int64_t processor_time() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

#ifdef __linux__
// Of Linux 5.14 and 6.1, which the system's headers may lack: MADV_POPULATE_WRITE, MADV_COLLAPSE.
constexpr int kPopulate = 23, kCollapse = 25;

bool advise(uintptr_t begin, uintptr_t end, int advice) { return madvise(reinterpret_cast<void*>(begin), end - begin, advice) == 0; }
void make_small(uintptr_t begin, uintptr_t end) { advise(begin, end, MADV_NOHUGEPAGE); }
// Takes the pages in one call instead of a fault each, where the system can.
void populate(uintptr_t begin, uintptr_t end) { advise(begin, end, kPopulate); }
// Whether it could be; of a page that is huge, whether the system can do that at all.
bool make_huge(uintptr_t page) { return advise(page, page + kHugePage, MADV_HUGEPAGE) && advise(page, page + kHugePage, kCollapse); }
#else
void make_small(uintptr_t, uintptr_t) {}
void populate(uintptr_t, uintptr_t) {}
bool make_huge(uintptr_t) { return false; }
#endif

}  // namespace

void Backing::touch(uintptr_t page) {
  const int64_t before = processor_time();
  *reinterpret_cast<volatile uint8_t*>(page) = 0;
  const int64_t took = processor_time() - before;
  const std::lock_guard guard(mutex_);
  spent_ += took;
  if (++touched_ < kWindow || slow_) return;
  if (spent_ >= kWindow * kSlow && make_huge(page)) {
    slow_ = true;
    keep_small();
  }
  touched_ = spent_ = 0;
}

// All of them at once, before most of it is touched: pieces that are touched while the advice differs can't become one mapping again, and
// no huge page lies across two.
void Backing::keep_small() {
  for (linear::PackedMatrix& matrix : next_) {
    const Span all = span(matrix, 0, matrix.tiles());
    make_small(down(all.begin, page_bytes()), up(all.end, page_bytes()));
    for (uintptr_t huge = down(all.begin, kHugePage); huge < all.end; huge += kHugePage) small_.insert(huge);
    matrices_.push_back(matrix);
  }
}

void Backing::begin(std::vector<linear::PackedMatrix> matrices) {
  const std::lock_guard guard(mutex_);
  next_ = std::move(matrices);
  if (slow_) keep_small();
}

void Backing::prepare(linear::PackedMatrix& matrix, int64_t begin, int64_t end) {
  const Span written = span(matrix, begin, end);
  for (uintptr_t page = up(written.begin, kHugePage); page < written.end && !slow_; page += kHugePage) touch(page);
  if (slow_) populate(down(written.begin, page_bytes()), up(written.end, page_bytes()));
}

bool Backing::enlarge(Clock::duration budget) {
  const std::lock_guard guard(mutex_);
  for (const auto start = Clock::now(); !small_.empty();) {
    make_huge(*small_.begin());  // one that can't be stays small
    small_.erase(small_.begin());
    if (Clock::now() - start >= budget) break;
  }
  if (small_.empty()) matrices_.clear();
  return !small_.empty();
}

int64_t Backing::small_bytes() const {
  const std::lock_guard guard(mutex_);
  return static_cast<int64_t>(small_.size() * kHugePage);
}

void Backing::forget() {
  const std::lock_guard guard(mutex_);
  small_.clear();
  matrices_.clear();
}

}  // namespace trivium
