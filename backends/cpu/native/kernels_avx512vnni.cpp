#define TRIVIUM_TIER avx512vnni
#include "kernels_impl.h"

namespace trivium {

extern const Kernels kernels_avx512vnni;
constinit const Kernels kernels_avx512vnni = avx512vnni::make_kernels("avx512vnni");

}  // namespace trivium
