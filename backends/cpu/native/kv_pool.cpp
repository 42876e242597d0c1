#include "kv_pool.h"

#include <sys/mman.h>

#include <new>

namespace trivium {

LazyMemory::LazyMemory(size_t bytes) : size_(bytes < 1 ? 1 : bytes) {
  void* memory = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  data_ = static_cast<uint8_t*>(memory);
#if defined(MADV_HUGEPAGE)
  madvise(data_, size_, MADV_HUGEPAGE);  // advice only: without huge pages everything works, more slowly
#endif
}

LazyMemory::~LazyMemory() { munmap(data_, size_); }

}  // namespace trivium
