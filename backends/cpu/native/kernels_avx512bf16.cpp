#define TRIVIUM_TIER avx512bf16
#include "kernels_impl.h"

namespace trivium {

extern const Kernels kernels_avx512bf16;
constinit const Kernels kernels_avx512bf16 = avx512bf16::make_kernels("avx512bf16");

}  // namespace trivium
