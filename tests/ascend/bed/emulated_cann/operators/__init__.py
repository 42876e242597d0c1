"""One file a family of operators. Importing this package declares all of them."""

from emulated_cann.operators import attention, basic, cache, experts, flash, layout, norms, quantised, rope, sampling  # noqa: F401
