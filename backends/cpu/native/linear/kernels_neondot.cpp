// The linear kernels on aarch64 with the dot product extension.
#include "simd_neon.h"

#include "dispatch.h"
#include "kernel.h"

namespace trivium::linear {

const LinearKernels& neon_kernels() {
  using Kernel = LinearKernel<NeonSimd>;
  static constexpr LinearKernels table = {Isa::neon, "neon", Kernel::quantise_row, Kernel::quantise_parts, Kernel::multiply, Kernel::dot_ceiling};
  return table;
}

}  // namespace trivium::linear
