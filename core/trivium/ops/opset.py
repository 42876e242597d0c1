"""The operator set, assembled from the files that define it."""

from __future__ import annotations

from collections.abc import Mapping

from trivium.ops import adapters, attention, collective, dense, latent, moe, recurrent, sample
from trivium.ops.builder import Builder
from trivium.ops.schema import Operator, collect

OPERATORS: Mapping[str, Operator] = collect(dense, adapters, attention, latent, moe, recurrent, collective, sample)
"""The operator set, by name."""


def new_builder() -> Builder:
    """A Builder over the whole operator set."""
    return Builder(OPERATORS)
