"""The folder in which the result grows, layer by layer, until it is whole: so that a run that was stopped can go on.

manifest.json says what is being made from what, which parts are done, and what the next layer reads. Each part, and each new
manifest, is written beside its place, flushed to the disk, and then renamed: there is never half of one.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from filelock import FileLock, Timeout
from trivium.errors import CheckpointError, InvalidRequestError
from trivium.weights.formats import SAFETENSORS_TYPES
from trivium.weights.safetensors import SafetensorsFile

from trivium_compress.stored import Later, Stored

Array = npt.NDArray[Any]
_LOCK = ".lock"
VERSION = 1
"""Of the manifest and of how results are computed: a run can't go on what another version began."""
KINDS = frozenset(SAFETENSORS_TYPES)
"""The dtypes of safetensors."""
_PLAIN = {
    "float64": "F64", "float32": "F32", "float16": "F16", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint16": "U16", "uint8": "U8",
}  # fmt: skip


class Parts:
    """`folder`/manifest.json and the parts. `identity`: what decides the result; `done`: by part, what is known of its tensors;
    `resumed`: how many parts there were when it was opened."""

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        self.folder, self._manifest = folder, folder / "manifest.json"
        self.identity = json.loads(json.dumps({"version": VERSION, **identity}))
        self.done: dict[str, Any] = {}
        folder.mkdir(parents=True, exist_ok=True)
        if not self._manifest.exists() and any(path.name != _LOCK for path in folder.iterdir()):
            message = f"{folder} has files, but no manifest.json: it is not ours; give another output"
            raise InvalidRequestError(message, param="output")
        self._lock = FileLock(folder / _LOCK, timeout=0)
        try:
            self._lock.acquire()
        except Timeout:
            raise InvalidRequestError(f"another run is at work in {folder}; wait for it, or give another output") from None
        try:
            if self._manifest.exists():
                self._open()
            else:
                self._write()
        except BaseException:
            self.close()
            raise
        self.resumed = len(self.done)

    def close(self) -> None:
        """Lets others go on with the folder."""
        self._lock.release()

    def _open(self) -> None:
        try:
            found = json.loads(self._manifest.read_text("utf-8"))
            begun, self.done = dict(found["identity"]), dict(found["done"])
            files = {name: (self.folder / part["file"], part["live"], dict(part["kinds"])) for name, part in self.done.items()}
        except (ValueError, TypeError, KeyError) as e:
            raise CheckpointError(f"{self._manifest} is damaged ({type(e).__name__}); remove {self.folder} to begin anew") from None
        changed = [key for key in (*self.identity, *begun) if begun.get(key) != self.identity.get(key)]
        if changed:
            what = ", ".join(dict.fromkeys(changed))
            message = f"{self.folder} was begun with another {what}; remove it to begin anew, or give what it was begun with"
            raise InvalidRequestError(message, param=changed[0])
        for name, (path, *_) in files.items():
            if not path.is_file():
                raise CheckpointError(f"{self.folder}: the part {name} is missing; remove the folder to begin anew")

    def add(self, name: str, tensors: Mapping[str, Stored], facts: Mapping[str, Any], live: Mapping[str, Array] | None) -> None:
        """A finished part: its tensors, what else is to be known of it (JSON), and what the next layer reads (arrays by name)."""
        file, carried = f"part-{name}.safetensors", f"live-{name}.safetensors"
        write_safetensors(self.folder / file, tensors)
        if live is not None:
            kinds = {"float32": "F32", "int32": "I32"}
            write_safetensors(self.folder / carried, {key: Stored(a, kinds[a.dtype.name]) for key, a in live.items()})
        kinds = {key: stored.kind for key, stored in tensors.items()}
        old = [part["live"] for part in self.done.values() if part["live"] is not None]
        for part in self.done.values():
            part["live"] = None
        self.done[name] = {"file": file, "live": carried if live is not None else None, "kinds": kinds, **facts}
        self._write()
        for path in old:
            (self.folder / path).unlink(missing_ok=True)

    def live(self) -> dict[str, Array] | None:
        """What the last finished part left to be read."""
        files = [part["live"] for part in self.done.values() if part["live"] is not None]
        if not files:
            return None
        file = SafetensorsFile(self.folder / files[-1])
        return {name: np.array(file.weight(name, name).data) for name in file.tensors}

    def tensors(self, name: str) -> SafetensorsFile:
        """A finished part, opened."""
        return SafetensorsFile(self.folder / self.done[name]["file"])

    def forget_live(self) -> None:
        """Nothing follows any more."""
        for part in self.done.values():
            if part["live"] is not None:
                (self.folder / part["live"]).unlink(missing_ok=True)
                part["live"] = None

    def _write(self) -> None:
        with replacing(self._manifest) as path:
            path.write_text(json.dumps({"identity": self.identity, "done": self.done}), "utf-8")

    def remove(self) -> None:
        """The folder with all that is in it."""
        self.close()
        shutil.rmtree(self.folder)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A place to write to, which becomes `path` if nothing goes wrong."""
    new = path.with_name(path.name + ".new")
    try:
        yield new
        flush(new)
        new.replace(path)
        flush(path.parent)
    finally:
        new.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_safetensors(path: Path, tensors: Mapping[str, Stored | Later]) -> None:
    """A file in the safetensors layout: length of the header, header (JSON), the tensors' bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, stored in tensors.items():
        header[name] = {**_described(stored), "data_offsets": [at, at + stored.nbytes]}
        at += stored.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with replacing(path) as new, new.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for stored in tensors.values():
            array = stored.array if isinstance(stored, Stored) else stored.make()
            file.write(np.ascontiguousarray(array).view(np.uint8).data)


def _described(stored: Stored | Later) -> dict[str, Any]:
    if isinstance(stored, Later):
        return {"dtype": stored.kind, "shape": list(stored.shape)}
    kind = stored.kind if stored.kind in KINDS else _PLAIN[stored.array.dtype.name]
    return {"dtype": kind, "shape": list(stored.array.shape)}
