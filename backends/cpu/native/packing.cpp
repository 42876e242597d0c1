#include "packing.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "checksum.h"

namespace trivium {
namespace {

constexpr int64_t kChunkBytes = 1 << 20;  // of a source: enough to make a call to the system cheap
constexpr int64_t kReadBytes = 1 << 20;
constexpr int64_t kPieceBytes = 128 << 10;  // read, then checked while they are in the processor's cache

// A file that is open for reading, or could not be opened.
class File {
public:
  explicit File(const std::string& path) : descriptor_(open(path.c_str(), O_RDONLY | O_CLOEXEC)) {}
  ~File() {
    if (descriptor_ >= 0) close(descriptor_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  // Bytes read: fewer than asked for at the file's end, or where it can't be read.
  int64_t read(int64_t offset, uint8_t* memory, int64_t bytes) const {
    int64_t done = 0;
    while (done < bytes) {
      const ssize_t count = pread(descriptor_, memory + done, static_cast<size_t>(bytes - done), static_cast<off_t>(offset + done));
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0) break;
      done += count;
    }
    return done;
  }
  // Where the system refuses that, nobody here can delete the file either.
  void mark_used() const { (void)futimens(descriptor_, nullptr); }

private:
  int descriptor_;
};

// Whether the file has all these bytes; their checksum.
std::pair<bool, uint32_t> read_checked(const File& file, int64_t offset, uint8_t* memory, int64_t bytes) {
  uint32_t value = 0;
  for (int64_t done = 0; done < bytes; done += kPieceBytes) {
    const int64_t piece = std::min(kPieceBytes, bytes - done);
    if (file.read(offset + done, memory + done, piece) < piece) return {false, 0};
    value = checksum().extend(value, memory + done, static_cast<size_t>(piece));
  }
  return {true, value};
}

std::string read_rest(const File& file, int64_t offset) {
  uint8_t rest[Filling::kMostRest];
  return {reinterpret_cast<const char*>(rest), static_cast<size_t>(file.read(offset, rest, Filling::kMostRest))};
}

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

void Packer::add(linear::PackedMatrix matrix, const linear::Source& source, bool mapped) { add({std::move(matrix), source, mapped, {}, {}}); }

std::shared_ptr<const Filling> Packer::read(linear::PackedMatrix matrix, std::string path) {
  auto filling = std::make_shared<Filling>();
  add({std::move(matrix), {}, false, std::move(path), filling});
  return filling;
}

void Packer::add(Work work) {
  const std::lock_guard guard(mutex_);
  if (!thread_.joinable()) thread_ = std::thread([this] { loop(); });
  waiting_.push_back(std::move(work));
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
std::vector<Packer::Chunk> Packer::split(const std::vector<Work>& batch) const {
  const int64_t threads = pool_.threads();
  std::vector<Chunk> chunks;
  for (int64_t thread = 0; thread < threads; ++thread) {
    for (size_t i = 0; i < batch.size(); ++i) {
      const int64_t tiles = batch[i].matrix.tiles(), end = tiles * (thread + 1) / threads;
      const int64_t bytes = batch[i].filling ? batch[i].matrix.view().tile_bytes : batch[i].source.row_bytes * linear::kTile;
      const int64_t step = std::max<int64_t>(1, (batch[i].filling ? kReadBytes : kChunkBytes) / std::max<int64_t>(1, bytes));
      for (int64_t tile = tiles * thread / threads; tile < end; tile += step) chunks.push_back({i, tile, std::min(end, tile + step)});
    }
  }
  return chunks;
}

void Packer::pack_chunk(Work& work, const Chunk& chunk) {
  backing_.prepare(work.matrix, chunk.begin, chunk.end);
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
}

void Packer::read_chunk(Work& work, Chunk& chunk) {
  backing_.prepare(work.matrix, chunk.begin, chunk.end);
  const File file(work.path);
  const int64_t each = work.matrix.view().tile_bytes;
  std::tie(chunk.filled, chunk.checksum) = read_checked(file, chunk.begin * each, work.matrix.tile(chunk.begin), (chunk.end - chunk.begin) * each);
  if (chunk.end < work.matrix.tiles()) return;
  work.filling->rest = read_rest(file, work.matrix.bytes());
  file.mark_used();
}

void Packer::pack(std::vector<Work>& batch) {
  std::vector<Chunk> chunks = split(batch);
  std::vector<linear::PackedMatrix> matrices;
  for (const Work& work : batch) matrices.push_back(work.matrix);
  backing_.begin(std::move(matrices));
  Shares shares(pool_.threads());
  pool_.run([&](Worker& worker) {
    worker.share(shares, static_cast<int64_t>(chunks.size()), [&](int64_t index) {
      Chunk& chunk = chunks[static_cast<size_t>(index)];
      Work& work = batch[chunk.work];
      if (work.filling) read_chunk(work, chunk);
      else pack_chunk(work, chunk);
    });
  });
  backing_.begin({});
  for (const Work& work : batch) {
    // Reading ahead has mapped again what lies beside each chunk.
    if (work.mapped) give_back(work.source.data, work.matrix.view().out * work.source.row_bytes);
    if (work.filling) work.filling->filled = true;
  }
  for (const Chunk& chunk : chunks) {  // of one matrix in the order of its bytes
    const Work& work = batch[chunk.work];
    if (!work.filling) continue;
    const int64_t bytes = (chunk.end - chunk.begin) * work.matrix.view().tile_bytes;
    work.filling->filled = work.filling->filled && chunk.filled;
    work.filling->checksum = join_checksums(work.filling->checksum, chunk.checksum, static_cast<uint64_t>(bytes));
  }
}

}  // namespace trivium
