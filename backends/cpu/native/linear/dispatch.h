// The kernel tables, one for each instruction set (kernels_*.cpp).
#pragma once

#include "linear.h"

namespace trivium::linear {

const LinearKernels& portable_kernels();
#ifdef TRIVIUM_X86
const LinearKernels& avx2_kernels();
const LinearKernels& avx512_kernels();
const LinearKernels& avx512_vnni_kernels();
const LinearKernels& amx_kernels();
const LinearKernels& amx_emulated_kernels();
#elif defined(TRIVIUM_AARCH64)
const LinearKernels& neon_kernels();
#endif

}  // namespace trivium::linear
