#include "packing.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace trivium {
namespace {

constexpr int64_t kChunkBytes = 512 << 10;  // of a source: enough to make a call to the system cheap

struct Chunk {
  size_t work;
  int64_t begin, end;  // tiles
};

// Gives the pages of a file's map back, those at the ends too: what is read again is mapped again.
void give_back(const uint8_t* begin, int64_t bytes) {
  static const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto first = reinterpret_cast<uintptr_t>(begin) / page * page;
  const auto last = (reinterpret_cast<uintptr_t>(begin) + static_cast<uintptr_t>(bytes) + page - 1) / page * page;
  madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
}

}  // namespace

Packer::~Packer() {
  {
    const std::lock_guard guard(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Packer::add(linear::PackedMatrix matrix, const linear::Source& source, bool mapped) {
  const std::lock_guard guard(mutex_);
  if (!thread_.joinable()) thread_ = std::thread([this] { loop(); });
  waiting_.push_back({std::move(matrix), source, mapped});
  changed_.notify_all();
}

void Packer::finish() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return waiting_.empty() && !busy_; });
  if (const std::string fault = std::exchange(fault_, {}); !fault.empty()) throw std::invalid_argument(fault);
}

void Packer::loop() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return stop_ || !waiting_.empty(); });
    if (stop_) return;
    std::vector<Work> batch = std::exchange(waiting_, {});
    busy_ = true;
    lock.unlock();
    pack(batch);
    batch.clear();
    lock.lock();
    busy_ = false;
    changed_.notify_all();
  }
}

// Each thread's stretch of the chunks is its share of every matrix, which is about what it reads later: it touches that first.
void Packer::pack(std::vector<Work>& batch) {
  const int64_t threads = pool_.threads();
  std::vector<Chunk> chunks;
  for (int64_t thread = 0; thread < threads; ++thread) {
    for (size_t i = 0; i < batch.size(); ++i) {
      const int64_t tiles = batch[i].matrix.tiles(), end = tiles * (thread + 1) / threads;
      const int64_t step = std::max<int64_t>(1, kChunkBytes / std::max<int64_t>(1, batch[i].source.row_bytes * linear::kTile));
      for (int64_t tile = tiles * thread / threads; tile < end; tile += step) chunks.push_back({i, tile, std::min(end, tile + step)});
    }
  }
  Shares shares(static_cast<int>(threads));
  pool_.run([&](Worker& worker) {
    worker.share(shares, static_cast<int64_t>(chunks.size()), [&](int64_t index) {
      const Chunk& chunk = chunks[static_cast<size_t>(index)];
      Work& work = batch[chunk.work];
      std::string fault;
      try {
        linear::pack_tiles(work.matrix, work.source, chunk.begin, chunk.end);
      } catch (const std::exception& e) {
        fault = e.what();
      }
      const int64_t first = chunk.begin * linear::kTile, last = std::min(chunk.end * linear::kTile, work.matrix.view().out);
      const int64_t bytes = (last - first) * work.source.row_bytes;
      if (work.mapped) give_back(work.source.data + first * work.source.row_bytes, bytes);
      const std::lock_guard guard(mutex_);
      if (work.mapped) given_back_ += bytes;
      if (!fault.empty()) fault_ = fault;
    });
  });
  // Reading ahead has mapped again what lies beside each chunk.
  for (const Work& work : batch) {
    if (work.mapped) give_back(work.source.data, work.matrix.view().out * work.source.row_bytes);
  }
}

}  // namespace trivium
