// The linear kernels in AVX2.
#include "simd_avx2.h"

#include "dispatch.h"
#include "kernel.h"

namespace trivium::linear {

const LinearKernels& avx2_kernels() {
  using Kernel = LinearKernel<Avx2Simd>;
  static constexpr LinearKernels table = {
      Isa::avx2, "avx2", Kernel::quantise_row, Kernel::quantise_parts, Kernel::multiply, Kernel::dot_ceiling};
  return table;
}

}  // namespace trivium::linear
