#define TRIVIUM_TIER portable
#include "peak_impl.h"
