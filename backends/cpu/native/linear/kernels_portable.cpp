// The linear kernels in plain C++.
#include "simd_portable.h"

#include "dispatch.h"
#include "kernel.h"

namespace trivium::linear {

const LinearKernels& portable_kernels() {
  using Kernel = LinearKernel<PortableSimd>;
  static constexpr LinearKernels table = {
      Isa::portable, "portable", Kernel::quantise_row, Kernel::quantise_parts, Kernel::multiply, Kernel::dot_ceiling};
  return table;
}

}  // namespace trivium::linear
