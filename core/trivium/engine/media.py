"""What stands for images in prompts: made by the tower's own executable when a step first needs it, kept by content, and written
among the step's tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

import numpy as np

from trivium.engine.executor import Model
from trivium.models.media import SLOT, Vision
from trivium.ops import Batch, Span, Tile
from trivium.ops.batch import F32, I32
from trivium.sampling import build_inputs

KEPT_BYTES = 256 << 20
"""Of what the tower made of tiles, the last used ones."""


class Images:
    """The images of `model`, whose Program takes ids from `first` on for rows of its constant "media". tower: runs vision.tower().
    None for both: it can't be run here, for the reason `refusal`."""

    def __init__(self, vision: Vision, model: Model, first: int | None, tower: Model | None, refusal: str) -> None:
        self.vision, self.refusal, self._model, self._first, self._tower = vision, refusal, model, first, tower
        self._kept: OrderedDict[bytes, F32] = OrderedDict()

    def close(self) -> None:
        """Closes the tower."""
        self._kept.clear()
        if self._tower is not None:
            self._tower.session.close()

    def stage(self, token_ids: I32, parts: Sequence[tuple[int, Span]]) -> None:
        """Writes what the tiles of a step's spans have become where its Program finds it, and their ids into token_ids, each span's
        from an index on. Not while a step runs."""
        assert self._tower is not None and self._first is not None, "a request with images was taken where none can be seen"
        made, first = self._encoded(self._tower, {span.tile.digest: span.tile for _, span in parts}), self._first
        pieces = [made[span.tile.digest][span.row : span.row + span.stop - span.start] for _, span in parts]
        for (at, _), piece in zip(parts, pieces):
            token_ids[at : at + len(piece)] = range(first, first := first + len(piece))
        rows = np.concatenate(pieces)
        for slot, some in enumerate(np.pad(rows, ((0, -len(rows) % SLOT), (0, 0))).reshape(-1, SLOT, rows.shape[1])):
            self._model.session.assign(self._model.media, slot, some)

    def _encoded(self, tower: Model, tiles: Mapping[bytes, Tile]) -> Mapping[bytes, F32]:
        """float32[tokens, hidden] of each tile, by digest."""
        new = [tile for digest, tile in tiles.items() if digest not in self._kept]
        most = tower.num_pages // (pages := -(-len(self.vision.positions) // tower.kv_spec.page_size))
        for some in (new[start : start + most] for start in range(0, len(new), most)):
            self._kept.update(zip((tile.digest for tile in some), self._run(tower, some, pages)))
        made = {digest: self._kept[digest] for digest in tiles}
        for digest in made:
            self._kept.move_to_end(digest)
        while len(self._kept) > KEPT_BYTES // (4 * self.vision.tokens * tower.hidden_size):
            self._kept.popitem(last=False)
        return made

    def _run(self, tower: Model, tiles: Sequence[Tile], pages: int) -> F32:
        """float32[tiles, tokens, hidden] of one step of the tower: each tile a sequence, on pages one after another."""
        n, patches, groups, size = len(tiles), len(self.vision.positions), len(tower.kv_spec.groups), tower.kv_spec.page_size
        for i, tile in enumerate(tiles):
            tower.session.assign(tower.media, i, self.vision.values(tile))
        slots = (np.arange(n)[:, None] * pages * size + np.arange(patches)).ravel()
        hidden = tower.executable.run(Batch(
            token_ids=np.arange(n * patches, dtype=np.int32), positions=np.tile(self.vision.positions, n),
            query_starts=np.arange(n + 1, dtype=np.int32) * np.int32(patches), context_lens=np.full(n, patches, np.int32),
            block_tables=np.tile(np.arange(n * pages, dtype=np.int32).reshape(1, n, pages), (groups, 1, 1)),
            slot_mapping=np.tile(slots.astype(np.int64), (groups, 1)), sample_rows=np.zeros(0, np.int32),
            sampling=build_inputs([], 1), pool_rows=np.arange(0, n * patches, patches // self.vision.tokens, dtype=np.int32),
        )).output("hidden")  # fmt: skip
        return np.array(hidden, np.float32).reshape(n, self.vision.tokens, tower.hidden_size)
