// Packing weights on the pool's threads while the caller goes on.
#pragma once

#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "linear/linear.h"
#include "pool.h"

namespace trivium {

// Packs matrices in the background, in the order they come, as many at a time as wait. From add() to finish() nothing else may run on
// the pool, and what sources point at must stay. All but the packing itself from one thread.
class Packer {
public:
  explicit Packer(ThreadPool& pool) : pool_(pool) {}
  ~Packer();  // what has not been begun is left
  Packer(const Packer&) = delete;
  Packer& operator=(const Packer&) = delete;

  // Packs `source` into `matrix`. mapped: the source lies in a shared map of a file, and its pages are given back to the system (which
  // keeps the file in its cache) as soon as they are packed, so that they don't count as this process's memory.
  void add(linear::PackedMatrix matrix, const linear::Source& source, bool mapped);
  // Waits until all is packed. Throws std::invalid_argument if something could not be held (see pack_tiles).
  void finish();
  // Bytes of mapped sources that were given back so far.
  int64_t bytes_given_back() const { return given_back_; }

private:
  struct Work {
    linear::PackedMatrix matrix;
    linear::Source source;
    bool mapped;
  };
  void loop();
  void pack(std::vector<Work>& batch);

  ThreadPool& pool_;
  std::thread thread_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Work> waiting_;
  std::string fault_;
  int64_t given_back_ = 0;
  bool busy_ = false, stop_ = false;
};

}  // namespace trivium
