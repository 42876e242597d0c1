// The table of one tier, from the templates that are built for its instruction set.
#pragma once

#include "attention_impl.h"
#include "rows_impl.h"

namespace trivium::TRIVIUM_TIER {

inline constexpr Kernels make_kernels(const char* name) {
  return {name,     add,      mul,  scale,  softcap, activation, gated,  rms_norm, layer_norm,
          rope,     max_of,   exp_of, dot, add_scaled, write_kv, read_kv, queries,  attend, merge,  products, W, finish};
}

}  // namespace trivium::TRIVIUM_TIER
