"""How a family becomes an entry point."""

from __future__ import annotations

from trivium.models import Family
from trivium.plugin import hookimpl


class Hook:
    """One entry point: the hook gives `family`."""

    def __init__(self, family: Family) -> None:
        self._family = family

    @hookimpl
    def trivium_model(self) -> Family:
        return self._family
