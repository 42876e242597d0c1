#define TRIVIUM_TIER portable
#include "kernels_impl.h"

namespace trivium {

extern const Kernels kernels_portable;
constinit const Kernels kernels_portable = portable::make_kernels("portable");

}  // namespace trivium
