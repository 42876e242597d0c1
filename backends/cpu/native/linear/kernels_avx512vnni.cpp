// The linear kernels in AVX-512 with VNNI.
#include "simd_avx512.h"

#include "dispatch.h"
#include "panel_kernel.h"

namespace trivium::linear {

const LinearKernels& avx512_vnni_kernels() {
  using Simd = Avx512Simd<true>;
  using Kernel = LinearKernel<Simd>;
  static constexpr LinearKernels table = {
      Isa::avx512_vnni, "avx512_vnni", Kernel::quantise_row, Kernel::quantise_parts, PanelKernel<Simd>::multiply, Kernel::dot_ceiling};
  return table;
}

}  // namespace trivium::linear
