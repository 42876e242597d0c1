// The table of one tier, from the templates that are built for its instruction set.
#pragma once

#include "attention_panels.h"
#include "bidirectional_impl.h"
#include "latent_impl.h"
#include "recurrent_impl.h"
#include "rows_impl.h"

namespace trivium::TRIVIUM_TIER {

inline constexpr Kernels make_kernels(const char* name) {
  return {name,     add,      mul,  scale,  softcap, activation, gated,  rms_norm, layer_norm,
          rope,     max_of,   exp_of, dot, add_scaled, add_product, delta_rule, selective_scan, write_kv, write_latent, read_kv, queries,  attend, attend_whole, worth_of, merge,  products, W, finish};
}

}  // namespace trivium::TRIVIUM_TIER
