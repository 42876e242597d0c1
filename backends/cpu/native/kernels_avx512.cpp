#define TRIVIUM_TIER avx512
#include "kernels_impl.h"

namespace trivium {

extern const Kernels kernels_avx512;
constinit const Kernels kernels_avx512 = avx512::make_kernels("avx512");

}  // namespace trivium
