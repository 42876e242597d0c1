// The float32 ceiling of a tier, for profiles.
#pragma once

#include <cstdint>
#include <string>

namespace trivium {

// Independent float32 multiply-adds on registers, as fast as they go, `rounds` times over. Returns how many were done.
int64_t multiply_adds(const std::string& tier, int64_t rounds);

}  // namespace trivium
