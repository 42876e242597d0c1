#define TRIVIUM_TIER amx_emulated
#include "kernels_impl.h"

#include "attention_amx.h"

namespace trivium {

extern const Kernels kernels_amx_emulated;
constinit const Kernels kernels_amx_emulated = amx_emulated::make_tile_kernels<amx::EmulatedTiles>("amx_emulated");

}  // namespace trivium
