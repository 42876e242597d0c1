"""How far loading is."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

Progress = Callable[[int, int], None] | None
"""Is told bytes that are done, and all of them."""


@contextlib.contextmanager
def progress_bar(show: bool) -> Iterator[Progress]:
    """A progress bar over the bytes of the weights; nothing where standard error is no terminal."""
    if not show or not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm

    with tqdm(unit="B", unit_scale=True, desc="loading", leave=False) as bar:

        def report(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield report
