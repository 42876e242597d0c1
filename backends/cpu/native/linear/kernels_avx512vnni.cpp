// The linear kernels in AVX-512 with VNNI.
#include "simd_avx512.h"

#include "dispatch.h"
#include "kernel.h"

namespace trivium::linear {

const LinearKernels& avx512_vnni_kernels() {
  using Kernel = LinearKernel<Avx512Simd<true>>;
  static constexpr LinearKernels table = {
      Isa::avx512_vnni, "avx512_vnni", Kernel::quantise_row, Kernel::multiply, Kernel::dot_ceiling};
  return table;
}

}  // namespace trivium::linear
