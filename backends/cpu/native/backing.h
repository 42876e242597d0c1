// Which pages lie under packed weights, while they are packed and after.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <set>
#include <vector>

#include "linear/linear.h"

namespace trivium {

// Kernels want huge pages. But in a virtual machine whose free memory goes back to its host (free page reporting), each huge page waits
// until the host has found and cleared 512 small ones: 6 ms measured where it otherwise takes 0.3, so 1.4 s for 650 MB on two threads.
// Small pages come from pieces too small to be reported, at once. So as soon as huge pages turn out to be slow, weights are packed into
// small ones, and between later steps these are made huge. Elsewhere nothing of that happens.
class Backing {
public:
  using Clock = std::chrono::steady_clock;

  // These are written next, or none. Not while prepare() runs.
  void begin(std::vector<linear::PackedMatrix> matrices);
  // Before tiles [begin, end) of one of them are written the first time, by the thread that will. Threads may do so at once.
  void prepare(linear::PackedMatrix& matrix, int64_t begin, int64_t end);
  // Makes pages huge until `budget` is spent, one at least. Not during a run. Returns whether any are left.
  bool enlarge(Clock::duration budget);
  // Bytes that wait for it, whole huge pages.
  int64_t small_bytes() const;
  // Leaves them as they are, and lets go of their matrices.
  void forget();
  // For tests: as if huge pages had turned out to be slow.
  void assume_slow() { slow_ = true; }

private:
  void touch(uintptr_t page);
  void keep_small();

  std::atomic<bool> slow_{false};
  mutable std::mutex mutex_;
  std::vector<linear::PackedMatrix> next_;      // those of begin()
  std::vector<linear::PackedMatrix> matrices_;  // keep the memory of `small_`
  std::set<uintptr_t> small_;                   // huge pages that consist of small ones
  int64_t touched_ = 0, spent_ = 0;             // huge pages since slowness was last judged, nanoseconds for them
};

}  // namespace trivium
