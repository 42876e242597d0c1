"""LoRA adapters: read by the plugin for the folder's format, and which of them stand in the model's slots."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from os import PathLike
from pathlib import Path

import numpy as np

from trivium.errors import CheckpointError, InvalidRequestError, UnsupportedError
from trivium.extensions import blame, expect, find, installed
from trivium.models.lora import Target
from trivium.ops.batch import F32, I32
from trivium.plugin.contract import Session, Tensor

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True, eq=False)
class Adapter:
    """One adapter in the host's memory. parts: by a target's module and rows, as other devices have other constants for it, a
    float32[r, in] and b float32[r, out], the scale in b. fingerprint: of all numbers; prefix pages are shared only between equal
    ones."""

    parts: Mapping[tuple[str, tuple[int, int] | None], tuple[F32, F32]]
    fingerprint: str


Placed = Mapping[Target, tuple[Tensor, Tensor]]
"""Each target's two constants on the device."""


class Adapters:
    """The adapters of one loaded model, by name, and its slots. More can be known than there are slots: those used least recently
    make way. `head_dim`: of queries and keys whose rows the checkpoint stores in interleaved order, 0: it doesn't."""

    def __init__(self, session: Session, placed: Placed, slots: int, rank: int, head_dim: int = 0) -> None:
        self.slots, self._session, self._placed, self._rank, self._head_dim = slots, session, placed, rank, head_dim
        self._known: dict[str, Adapter] = {}
        self._free = list(range(slots))
        self._resident: OrderedDict[Adapter, int] = OrderedDict()

    @property
    def names(self) -> tuple[str, ...]:
        """Names that requests may give, in the order of loading."""
        return tuple(self._known)

    def get(self, name: str) -> Adapter:
        """The adapter called `name`; InvalidRequestError if there is none."""
        if not isinstance(name, str) or name not in self._known:
            known = ", ".join(self._known) or "none"
            raise InvalidRequestError(f"no adapter is called {name!r:.80}; loaded are: {known}", param="adapter")
        return self._known[name]

    def add(self, name: str, adapter: Adapter) -> None:
        """Makes an adapter known."""
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            message = f"an adapter's name has letters, digits, '.', '_' and '-', 128 at most, not {name!r:.160}"
            raise InvalidRequestError(message, param="name")
        if name in self._known:
            raise InvalidRequestError(f"an adapter is called {name!r} already; unload it first", param="name")
        self._known[name] = adapter

    def remove(self, name: str, in_use: Collection[Adapter | None]) -> None:
        """Forgets a name. Those who use the adapter keep it; its slot is free, or the next to be given away."""
        adapter = self.get(name)
        del self._known[name]
        if adapter in self._resident:
            self._resident.move_to_end(adapter, last=False)
            if adapter not in in_use:
                self._free.append(self._resident.pop(adapter))

    def place(self, wanted: Sequence[Adapter | None], held: Collection[Adapter | None]) -> I32:
        """int32[len(wanted)], the slot of each, -1 for None; those that have none are written to the device, never over one of
        `held`. Not while a step runs."""
        for adapter in dict.fromkeys(adapter for adapter in wanted if adapter is not None):
            if adapter not in self._resident:
                victim = None if self._free else next(a for a in self._resident if a not in held)
                slot = self._free.pop() if victim is None else self._resident.pop(victim)
                self._free.append(slot)
                self._write(adapter, slot)
                self._resident[adapter] = self._free.pop()
            self._resident.move_to_end(adapter)
        return np.array([-1 if adapter is None else self._resident[adapter] for adapter in wanted], np.int32)

    def read(self, path: str | PathLike[str]) -> Adapter:
        """Reads an adapter's folder. Raises InvalidRequestError (no such folder, or a rank over the limit), CheckpointError
        (damaged, or not for this model) or UnsupportedError; nothing on the device changes."""
        try:
            folder = Path(path)
            found = path != "" and folder.is_dir()
        except (TypeError, ValueError, OSError):  # another type; a zero byte; too long a name
            found = False
        if not found:
            raise InvalidRequestError(f"an adapter is a folder on this machine, which {path!r:.200} is not", param="path")
        name = next((name for name in installed("adapter_format") if (folder / name).is_file()), None)
        if name is None:
            raise CheckpointError(f"{folder} is no adapter: {' or '.join(installed('adapter_format')) or 'a plugin'} is missing")
        reader, what = find("adapter_format", name)
        parts = expect(Mapping, blame(what)(reader)(folder, [*self._placed], self._rank, self._head_dim), what)
        digest = blake2b(digest_size=32)
        for target in self._placed:
            if target[:2] in parts:
                whole = blame(where := f"{what}: {target.module}")(_whole)(target, expect(tuple, parts[target[:2]], where))
                if not all(np.isfinite(x).all() for x in whole):
                    raise CheckpointError(f"{folder}: {target.module} has numbers that are not finite")
                digest.update(target.a.name.encode() + b"".join(x.tobytes() for x in parts[target[:2]]))
        return Adapter(parts, digest.hexdigest())

    def _write(self, adapter: Adapter, slot: int) -> None:
        for target, tensors in self._placed.items():
            for tensor, whole in zip(tensors, _whole(target, adapter.parts.get(target[:2]))):
                self._session.assign(tensor, slot, whole)


def _whole(target: Target, part: tuple[F32, F32] | None) -> list[F32]:
    """A target's a float32[rank, in] and b float32[rank, out], zeros behind what an adapter has; ValueError if it doesn't fit."""
    shapes = [tuple(map(int, value.shape[1:])) for value in (target.a, target.b)]
    own = [np.zeros((0, width), np.float32) for _, width in shapes] if part is None else part
    return [np.pad(x, ((0, s[0] - len(x)), (0, 0))).astype(np.float32).reshape(s) for x, s in zip(own, shapes, strict=True)]


def enabled(lora: Adapters | None) -> Adapters:
    """A model's adapters; UnsupportedError if it was loaded without."""
    if lora is None:
        raise UnsupportedError("this model was loaded without adapters; load it with enable_lora=True", param="enable_lora")
    return lora
