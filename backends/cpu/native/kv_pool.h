// The pool of pages that all layers share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace trivium {

// Anonymous memory that costs nothing until it is touched, advised for huge pages where the system has them.
class LazyMemory {
public:
  explicit LazyMemory(size_t bytes);  // throws std::bad_alloc
  ~LazyMemory();
  LazyMemory(const LazyMemory&) = delete;
  LazyMemory& operator=(const LazyMemory&) = delete;

  uint8_t* data() const { return data_; }
  size_t size() const { return size_; }

private:
  uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

// `pages` pages of `page_bytes` bytes, zeroed. What lies where in a page is each layer's KvLayout at its own offset.
class KvPool {
public:
  KvPool(int64_t pages, int64_t page_bytes, int64_t page_size)
      : pages_(pages), page_bytes_(page_bytes), page_size_(page_size), memory_(static_cast<size_t>(pages * page_bytes)) {}

  int64_t pages() const { return pages_; }
  int64_t page_bytes() const { return page_bytes_; }
  int64_t page_size() const { return page_size_; }
  uint8_t* page(int64_t index) const { return memory_.data() + index * page_bytes_; }

private:
  int64_t pages_;
  int64_t page_bytes_;
  int64_t page_size_;
  LazyMemory memory_;
};

}  // namespace trivium
