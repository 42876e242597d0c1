"""Python's garbage collector while something large is built that stays."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """No garbage is looked for inside: modules, classes, Programs and vocabularies stay, and going through them again and again
    takes a twentieth of a start. Afterwards they count as what has survived collections; without that, the next one would go
    through them all. Nothing changes where the collector is off already or the process has frozen what it has, which would thaw."""
    with contextlib.ExitStack() as after:
        if gc.isenabled() and not gc.get_freeze_count():
            for step in (gc.enable, gc.unfreeze, gc.freeze):  # the last goes first
                after.callback(step)
            gc.disable()
        yield
