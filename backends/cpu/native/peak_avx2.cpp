#define TRIVIUM_TIER avx2
#include "peak_impl.h"
