"""Pages of the fake model on the move: a Session over the cells of FakeExecutable, whose pages can be exported and imported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from fake_model import FakeExecutable, fake_model
from trivium.kv import Layout
from trivium.ops import Pages

_HISTORIES: list[list[int]] = []
"""What the numbers of an exported recurrent state stand for."""


class FakeSession:
    """k holds positions, v tokens; a recurrent state [index into _HISTORIES, length]. `hook(point)` may raise."""

    def __init__(self, executable: FakeExecutable, hook: Callable[[str], None] = lambda point: None) -> None:
        self.executable, self.hook = executable, hook
        self.copy_pages = executable.copy_pages
        self.exported = self.imported = 0

    def export_pages(self, group: int, ids: Sequence[int]) -> Pages:
        self.hook("export")
        self.exported += len(ids)
        spec, which = self.executable.spec, self.executable.spec.groups[group]
        if not which.spec.paged:
            found = []
            for page in ids:
                _HISTORIES.append(self.executable._state[page])
                found.append([len(_HISTORIES) - 1, len(_HISTORIES[-1])])
            return Pages(which, spec.page_size, spec.dtype, ((np.array(found, np.float32),),))
        cells = self.executable._cells.reshape(-1, spec.page_size, 3)[list(ids)].astype(np.float32)
        return Pages(which, spec.page_size, spec.dtype, ((cells[:, :, 1, None, None], cells[:, :, 2, None, None]),))

    def start_export(self, group: int, ids: Sequence[int]) -> Callable[[], Pages]:
        pages = self.export_pages(group, ids)
        return lambda: pages

    def import_pages(self, group: int, ids: Sequence[int], pages: Pages) -> None:
        self.hook("import")
        self.imported += len(ids)
        spec, (tensors,) = self.executable.spec, pages.tensors
        if not spec.groups[group].spec.paged:
            for page, (index, length) in zip(ids, tensors[0].tolist()):
                assert len(_HISTORIES[int(index)]) == length
                self.executable._state[page] = list(_HISTORIES[int(index)])
            return
        cells = self.executable._cells.reshape(-1, spec.page_size, 3)
        for page, k, v in zip(ids, *tensors):
            assert k.shape == v.shape == (spec.page_size, 1, 1)
            cells[page] = np.stack([np.full(spec.page_size, group), k[:, 0, 0], v[:, 0, 0]], axis=1)


def moving_model(windows: Any = (None,), **options: Any) -> Any:
    """fake_model() with a FakeSession and a layout."""
    model = fake_model(windows, **options)
    model.session = FakeSession(model.executable)
    model.layout = Layout(model.fingerprint, "fake", model.kv_spec)
    return model
