// The linear kernels in AVX-512 without VNNI.
#include "simd_avx512.h"

#include "dispatch.h"
#include "kernel.h"

namespace trivium::linear {

const LinearKernels& avx512_kernels() {
  using Kernel = LinearKernel<Avx512Simd<false>>;
  static constexpr LinearKernels table = {
      Isa::avx512, "avx512", Kernel::quantise_row, Kernel::quantise_parts, Kernel::multiply, Kernel::dot_ceiling};
  return table;
}

}  // namespace trivium::linear
