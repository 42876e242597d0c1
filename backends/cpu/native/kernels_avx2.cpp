#define TRIVIUM_TIER avx2
#include "kernels_impl.h"

namespace trivium {

extern const Kernels kernels_avx2;
constinit const Kernels kernels_avx2 = avx2::make_kernels("avx2");

}  // namespace trivium
