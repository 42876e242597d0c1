// Packing weights, and reading packed ones, on the pool's threads while the caller goes on.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "backing.h"
#include "linear/linear.h"
#include "pool.h"

namespace trivium {

// What became of a matrix that is read from a file; valid after Packer::finish().
struct Filling {
  bool filled = false;    // the file has as many bytes as the matrix
  uint32_t checksum = 0;  // of these (see checksum.h)
  std::string rest;       // what follows them in the file, up to kMostRest bytes
  static constexpr int64_t kMostRest = 64;
};

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
  // Reads the bytes of `matrix` from the start of a file, which is marked as used now.
  std::shared_ptr<const Filling> read(linear::PackedMatrix matrix, std::string path);
  // Waits until all is packed or read. Throws std::invalid_argument if something could not be held (see pack_tiles).
  void finish();
  // Bytes of mapped sources that were given back so far.
  int64_t bytes_given_back() const { return given_back_; }
  // The pages of what was packed or read. Not between add() and finish().
  Backing& backing() { return backing_; }

private:
  struct Work {
    linear::PackedMatrix matrix;
    linear::Source source;
    bool mapped;
    std::string path;
    std::shared_ptr<Filling> filling;  // null: it is packed from `source`
  };
  struct Chunk {
    size_t work;
    int64_t begin, end;  // tiles
    bool filled = false;
    uint32_t checksum = 0;
  };
  void add(Work work);
  void loop();
  void pack(std::vector<Work>& batch);
  std::vector<Chunk> split(const std::vector<Work>& batch) const;
  void pack_chunk(Work& work, const Chunk& chunk);
  void read_chunk(Work& work, Chunk& chunk);

  ThreadPool& pool_;
  Backing backing_;
  std::thread thread_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Work> waiting_;
  std::string fault_;
  int64_t given_back_ = 0;
  bool busy_ = false, stop_ = false;
};

}  // namespace trivium
