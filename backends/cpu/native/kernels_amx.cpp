#define TRIVIUM_TIER amx_tiles
#include "kernels_impl.h"

#include "attention_amx.h"

namespace trivium {

extern const Kernels kernels_amx;
constinit const Kernels kernels_amx = amx_tiles::make_tile_kernels<amx::HardwareTiles>("amx");

}  // namespace trivium
