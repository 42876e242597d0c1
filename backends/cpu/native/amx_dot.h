// One dot of whole tiles by itself, for tests and for check_tiles.
#pragma once

#include "amx_tiles.h"

namespace trivium::amx {

enum class Dot : int { signed_signed, signed_unsigned, unsigned_signed, bfloat16 };

// c += a b in memory, rows kRowBytes apart. The configuration gives the shapes of c (tile 0), a (tile 1) and b (tile 2).
template <class Tiles>
void dot_once(Dot kind, const Config& config, const uint8_t* a, const uint8_t* b, uint8_t* c) {
  Tiles tiles(config);
  tiles.template load<0>(c, kRowBytes);
  tiles.template load<1>(a, kRowBytes);
  tiles.template load<2>(b, kRowBytes);
  switch (kind) {
    case Dot::signed_signed: tiles.template dot_signed_signed<0, 1, 2>(); break;
    case Dot::signed_unsigned: tiles.template dot_signed_unsigned<0, 1, 2>(); break;
    case Dot::unsigned_signed: tiles.template dot_unsigned_signed<0, 1, 2>(); break;
    case Dot::bfloat16: tiles.template dot_bfloat16<0, 1, 2>(); break;
  }
  tiles.template store<0>(c, kRowBytes);
}

void emulated_dot(Dot kind, const Config& config, const uint8_t* a, const uint8_t* b, uint8_t* c);
void hardware_dot(Dot kind, const Config& config, const uint8_t* a, const uint8_t* b, uint8_t* c);  // only with cpu_features().amx

}  // namespace trivium::amx
