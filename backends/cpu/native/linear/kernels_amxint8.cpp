// The integer linear kernels on the processor's tiles.
#include "simd_tiles.h"

#include "amx_kernel.h"
#include "dispatch.h"

namespace trivium::linear {
namespace {

using Kernel = AmxKernel<amx::HardwareTiles, TileSimd>;

void multiply(const MatrixView& matrix, const Input& input, Range rows, Range outs, const Output& output) {
  Kernel::multiply(matrix, input, rows, outs, output, avx512_vnni_kernels());
}

// Four sums of full tiles in registers: 16,384 multiply-adds a dot, as many as 256 of a vector's.
int64_t dot_ceiling(int64_t rounds) {
  amx::Config config;
  for (int tile = 0; tile < 6; ++tile) config.shape(tile, amx::kRows, amx::kRowBytes);
  amx::HardwareTiles tiles(config);
  tiles.zero<4>();
  tiles.zero<5>();
  for (int64_t dots = rounds * 12 / 256; dots > 0; dots -= 4) {
    tiles.dot_signed_unsigned<0, 4, 5>();
    tiles.dot_signed_unsigned<1, 4, 5>();
    tiles.dot_signed_unsigned<2, 4, 5>();
    tiles.dot_signed_unsigned<3, 4, 5>();
  }
  return rounds * 12;
}

}  // namespace

const LinearKernels& amx_kernels() {
  static const LinearKernels table = {Isa::amx, "amx", Kernel::quantise_row, Kernel::quantise_parts, multiply, dot_ceiling};
  return table;
}

}  // namespace trivium::linear
