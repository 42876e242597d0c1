"""A model without weights, for tests of the engine: the logits of a position are a pure function of the tokens that it can read.

FakeExecutable keeps token ids in its pages, written by slot mapping and read back by block table, so any mistake in paging changes
the output or is noted in `violations`. `continuation` computes what must come out, with lists only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
from trivium.engine import PoolingParams
from trivium.ops import Batch, Group, KVSpec, PagedKV, Recurrent, Sampled
from trivium.ops.sample import plain_inputs, sample
from trivium.plugin.contract import Capabilities

VOCAB = 89
EOS = 2
HIDDEN = 12
Windows = Sequence[int | str | None]


def spec_of(windows: Windows, page_size: int) -> KVSpec:
    """One layer a group: a window, None for full attention, "recurrent" for a recurrent state."""
    states = [Recurrent((2,)) if w == "recurrent" else PagedKV(1, 1, w) for w in windows]
    return KVSpec(page_size, "float32", tuple(Group(state, (i,)) for i, state in enumerate(states)))


def mix(tokens: Sequence[int]) -> int:
    """A number that depends on every token and its place."""
    h = 7
    for token in tokens:
        h = (h * 1_000_003 + int(token) + 1) % 2**61
    return h


def logits_of(reads: Sequence[int]) -> np.ndarray:
    """float32[VOCAB] from one number a group."""
    rng = np.random.Generator(np.random.PCG64(list(reads)))
    return (rng.standard_normal(VOCAB) * 3).astype(np.float32)


def hidden_of(reads: Sequence[int]) -> np.ndarray:
    """float32[HIDDEN], as logits_of."""
    return logits_of(reads)[:HIDDEN]


def continuation(
    prompt: Sequence[int], count: int, windows: Windows, *, ends: frozenset[int] = frozenset(), **sampling: Any
) -> list[int]:
    """The tokens that must follow `prompt`; `sampling` as for ops.sample.plain_inputs."""
    tokens = list(prompt)
    for _ in range(count):
        reads = [mix(tokens if w is None or w == "recurrent" else tokens[-w:]) for w in windows]
        inputs = plain_inputs(1, **{"position": len(tokens), **sampling})
        tokens.append(int(sample(logits_of(reads)[None], inputs, vocab_size=VOCAB).ids[0]))
        if tokens[-1] in ends:
            break
    return tokens[len(prompt) :]


class Fault(RuntimeError):
    """Thrown by tests."""


@dataclass
class FakeStep:
    sampled: Sampled
    hook: Callable[[str, Batch | None], None]
    hidden: np.ndarray

    def tokens(self) -> Sampled:
        self.hook("tokens", None)
        return self.sampled

    def output(self, name: str) -> np.ndarray:
        return {"hidden": self.hidden}[name]


@dataclass
class FakeExecutable:
    """`hook(point, batch)` is called at "run" and "tokens" and may raise; `clock` advances by `seconds(batch)` a step."""

    spec: KVSpec
    pages: int
    hook: Callable[[str, Batch | None], None] = lambda point, batch: None
    violations: list[str] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)
    copied: int = 0

    def __post_init__(self) -> None:
        size = self.pages * self.spec.page_size
        self._cells = np.full((size, 3), -1, np.int64)  # group, position, token
        self._state: dict[int, list[int]] = {}

    def run(self, batch: Batch) -> FakeStep:
        self._check_shapes(batch)
        self.batches.append(batch)
        try:
            self.hook("run", batch)
        except BaseException:
            self._spoil(batch)
            raise
        for g, group in enumerate(self.spec.groups):
            if group.spec.paged:
                self._cells[batch.slot_mapping[g]] = np.stack([np.full(batch.tokens, g), batch.positions, batch.token_ids], axis=1)
        rows: dict[int, list[int]] = {int(row): [] for row in (*batch.sample_rows, *batch.pool_rows)}
        for s in range(batch.seqs):
            for g, group in enumerate(self.spec.groups):
                self._read(batch, s, g, group, rows)
            if not self.spec.groups:
                self._read_whole(batch, s, rows)
        logits = np.array([logits_of(rows[int(row)]) for row in batch.sample_rows], np.float32).reshape(-1, VOCAB)
        hidden = np.array([hidden_of(rows[int(row)]) for row in batch.pool_rows], np.float32).reshape(-1, HIDDEN)
        if not len(logits):
            return FakeStep(Sampled(np.zeros(0, np.int32)), self.hook, hidden)
        return FakeStep(sample(logits, batch.sampling, vocab_size=VOCAB), self.hook, hidden)

    def copy_pages(self, src: Sequence[int], dst: Sequence[int]) -> None:
        """What the engine asks of the session."""
        self.hook("copy", None)
        cells = self._cells.reshape(self.pages, -1, 3)
        cells[list(dst)] = cells[list(src)]
        self._state |= {d: self._state[s] for s, d in zip(src, dst) if s in self._state}
        self.copied += len(src)

    def _read(self, batch: Batch, s: int, g: int, group: Group, rows: dict[int, list[int]]) -> None:
        start, end, context = (int(x) for x in (batch.query_starts[s], batch.query_starts[s + 1], batch.context_lens[s]))
        if not group.spec.paged:
            self._recur(batch, s, g, start, end, context, rows)
            return
        for row in range(start, end):
            position = context - end + row
            first = 0 if group.spec.window is None else max(0, position - group.spec.window + 1)
            where = np.arange(first, position + 1)
            pages = batch.block_tables[g, s, where // self.spec.page_size].astype(np.int64)
            got = self._cells[pages * self.spec.page_size + where % self.spec.page_size]
            self._expect((pages >= 0).all(), f"group {g} reads a page that is gone")
            self._expect((got[:, 0] == g).all() and (got[:, 1] == where).all(), f"group {g} reads another's tokens")
            if row in rows:
                rows[row].append(mix(got[:, 2].tolist()))

    def _read_whole(self, batch: Batch, s: int, rows: dict[int, list[int]]) -> None:
        """Without groups every row depends on all tokens of its sequence, which must be there."""
        start, end, context = (int(x) for x in (batch.query_starts[s], batch.query_starts[s + 1], batch.context_lens[s]))
        self._expect(context == end - start, "a sequence is not whole in its step")
        for row in rows.keys() & set(range(start, end)):
            rows[row] = [mix(batch.token_ids[start:end]), row - start]

    def _recur(self, batch: Batch, s: int, g: int, start: int, end: int, context: int, rows: dict[int, list[int]]) -> None:
        page = int(batch.block_tables[g, s, 0])
        history = [] if context == end - start else self._state.get(page, [])
        self._expect(len(history) == context - (end - start), f"group {g} has another position's state")
        named = batch.slot_mapping[g, start:end] // self.spec.page_size
        self._expect(page >= 0 and bool((named == page).all()), "the slots name another page")
        for row in range(start, end):
            history = [*history, int(batch.token_ids[row])]
            if row in rows:
                rows[row].append(mix(history))
        self._state[page] = history

    def _check_shapes(self, batch: Batch) -> None:
        t, s, g = batch.tokens, batch.seqs, len(self.spec.groups)
        self._expect(batch.token_ids.dtype == batch.positions.dtype == batch.sample_rows.dtype == np.int32, "wrong dtype")
        self._expect(batch.block_tables.dtype == np.int32 and batch.block_tables.shape[:2] == (g, s), "wrong block tables")
        self._expect(batch.block_tables.flags.c_contiguous, "block tables are not contiguous")
        self._expect(batch.slot_mapping.dtype == np.int64 and batch.slot_mapping.shape == (g, t), "wrong slot mapping")
        self._expect(bool((batch.slot_mapping >= 0).all()), "a token has no slot")
        owners = np.bincount(batch.block_tables[batch.block_tables >= 0], minlength=self.pages)
        self._expect(bool((owners[batch.slot_mapping // self.spec.page_size] == 1).all()), "a page is written that two can read")
        self._expect(len(batch.query_starts) == s + 1 and batch.query_starts[-1] == t, "wrong query starts")
        self._expect(bool((np.diff(batch.sample_rows) > 0).all()), "sample rows do not ascend")
        self._expect(len(batch.sampling.seed) == len(batch.sample_rows), "sampling has other rows")

    def _spoil(self, batch: Batch) -> None:
        """What the contract allows after a failed run: the pages named by slot_mapping may hold anything."""
        for page in {int(p) for p in (batch.slot_mapping // self.spec.page_size).ravel()}:
            self._cells[page * self.spec.page_size : (page + 1) * self.spec.page_size] = -9
            self._state.pop(page, None)

    def _expect(self, good: bool, what: str) -> None:
        if not good:
            self.violations.append(what)


class FakeTokenizer:
    """Ids 0..VOCAB-1: 0 pad, 1 begin, 2 end (special, without text), then one letter or word each."""

    vocab_size = VOCAB
    special_ids = frozenset({0, 1, EOS})
    eos_ids = frozenset({EOS})
    strips_leading_space = False

    def __init__(self, bos_id: int | None = None) -> None:
        self.bos_id = bos_id

    def token_text(self, token: int) -> str:
        return f"<{token}>" if token < 3 else chr(ord("0") + token)

    def token_bytes(self, token: int) -> bytes:
        return self.token_text(token).encode()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(c) - ord("0") for c in text if c != " "]

    def text(self, tokens: Sequence[int]) -> str:
        """What a client sees."""
        return "".join(self.token_text(t) for t in tokens if t > 2)


def fake_model(
    windows: Windows = (None,), *, page_size: int = 4, pages: int = 400, max_model_len: int = 512, fingerprint: str = "fake"
) -> Any:
    """What the engine asks of a loaded model, as SimpleNamespace; `.executable` is a FakeExecutable."""
    spec = spec_of(windows, page_size)
    executable = FakeExecutable(spec, pages)
    return SimpleNamespace(
        backend=SimpleNamespace(name="fake"), capabilities=Capabilities(("float32",), (), ("float32",)),
        session=SimpleNamespace(copy_pages=executable.copy_pages), executable=executable, kv_spec=spec, num_pages=pages,
        vocab_size=VOCAB, max_model_len=max_model_len, eos_ids=frozenset({EOS}), fingerprint=fingerprint,
        hidden_size=HIDDEN, lora=None, images=None, pooling=PoolingParams("last", normalize=True),
    )  # fmt: skip


class Clock:
    """A simulated clock."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now
