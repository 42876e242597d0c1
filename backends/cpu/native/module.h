// What the files of the extension module share.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <initializer_list>
#include <memory>
#include <vector>

#include "kernels.h"
#include "linear/linear.h"
#include "packing.h"
#include "pool.h"
#include "tape.h"

namespace trivium {

using ByteRows = nanobind::ndarray<const uint8_t, nanobind::ndim<2>, nanobind::c_contig, nanobind::device::cpu>;

// One opened device: its threads, its kernels and the memory of its weights.
struct Runtime {
  Runtime(std::shared_ptr<ThreadPool> threads, const Kernels& rows, const linear::LinearKernels& matrices)
      : pool(std::move(threads)), kernels(rows), linear(matrices), packer(*pool) {}

  std::shared_ptr<ThreadPool> pool;
  const Kernels& kernels;
  const linear::LinearKernels& linear;
  linear::Arena arena;
  std::vector<ByteRows> sources;  // what the packer reads
  Packer packer;
};

using FloatArray = nanobind::ndarray<nanobind::numpy, float>;
using IntArray = nanobind::ndarray<nanobind::numpy, int32_t>;

// A numpy array with memory of its own, not initialised.
template <typename T>
nanobind::ndarray<nanobind::numpy, T> new_array(std::initializer_list<size_t> dims) {
  size_t count = 1;
  for (const size_t d : dims) count *= d;
  T* memory = new T[count];
  nanobind::capsule owner(memory, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  return {memory, dims, owner};
}

void bind_tape(nanobind::module_& m);
void bind_attention(nanobind::module_& m);
void bind_amx(nanobind::module_& m);
void bind_checksum(nanobind::module_& m);

namespace linear {
void bind_linear(nanobind::module_& m);
}

}  // namespace trivium
