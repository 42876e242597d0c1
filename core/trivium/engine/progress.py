"""How far loading is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from tqdm import tqdm

Progress = Callable[[int, int], None] | None
"""Is told bytes that are done, and all of them."""


@contextlib.contextmanager
def progress_bar(show: bool) -> Iterator[Progress]:
    """A progress bar over the bytes of the weights; nothing where standard error is no terminal."""
    if not show:
        yield None
        return
    with tqdm(unit="B", unit_scale=True, desc="loading", leave=False, disable=None) as bar:

        def report(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield report
