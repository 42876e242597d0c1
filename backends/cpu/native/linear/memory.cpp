// Memory of packed weights.
#include <sys/mman.h>

#include <new>

#include "layout.h"

namespace trivium::linear {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

constexpr size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

std::shared_ptr<uint8_t> map_memory(size_t bytes) {
  const size_t padded = bytes + kHugePage;
  void* map = mmap(nullptr, padded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (map == MAP_FAILED) throw std::bad_alloc();
  auto* start = reinterpret_cast<uint8_t*>(round_up(reinterpret_cast<size_t>(map), kHugePage));
#ifdef MADV_HUGEPAGE
  madvise(start, bytes, MADV_HUGEPAGE);  // a wish: without huge pages everything still works, slower
#endif
  return {start, [map, padded](uint8_t*) { munmap(map, padded); }};
}

}  // namespace

std::shared_ptr<uint8_t> Arena::allocate(size_t bytes) {
  const size_t needed = round_up(bytes, kAlign);
  if (needed > size_ - used_) {
    size_ = round_up(needed > map_bytes_ ? needed : map_bytes_, kHugePage);
    map_ = map_memory(size_);
    used_ = 0;
  }
  std::shared_ptr<uint8_t> piece(map_, map_.get() + used_);
  used_ += needed;
  return piece;
}

int64_t tile_bytes(Layout layout, int64_t in) {
  switch (layout) {
    case Layout::float32: return in * kTile * 4;
    case Layout::float16: return (in + in % 2) * kTile * 2;
    case Layout::bfloat16: return (in + in % 2) * kTile * 2;
    default: return shape(layout).row_bytes(in);
  }
}

PackedMatrix::PackedMatrix(Arena& arena, Layout layout, int64_t out, int64_t in) {
  view_ = {nullptr, out, in, tile_bytes(layout, in), layout};
  memory_ = arena.allocate(static_cast<size_t>(bytes()));
  view_.data = memory_.get();
}

}  // namespace trivium::linear
