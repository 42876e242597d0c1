#define TRIVIUM_TIER avx512
#include "peak_impl.h"
