// The integer linear kernels on emulated tiles: for tests.
#include "simd_tiles.h"

#include "amx_kernel.h"
#include "dispatch.h"

namespace trivium::linear {
namespace {

using Kernel = AmxKernel<amx::EmulatedTiles, TileSimd>;

void multiply(const MatrixView& matrix, const Input& input, Range rows, Range outs, const Output& output) {
  Kernel::multiply(matrix, input, rows, outs, output, avx512_vnni_kernels());
}

}  // namespace

const LinearKernels& amx_emulated_kernels() {
  static const LinearKernels table = {
      Isa::amx_emulated, "amx_emulated", Kernel::quantise_row, Kernel::quantise_parts, multiply, avx512_vnni_kernels().dot_ceiling};
  return table;
}

}  // namespace trivium::linear
