"""Rounded weights on disk: the next start with the same checkpoint reads them instead of rounding again.

One file a tensor: its packed bytes, then their number and CRC-32C. Its name is a digest of what it depends on: where the numbers
come from (Weight.origin), the formats, and the build of the native module. So nothing is ever out of date, only unused; the files
used least recently go when all together take more than MAX_BYTES. Files appear whole, by renaming; what is damaged is made again.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trivium_cpu import _native

MAX_BYTES = 32 << 30
MIN_BYTES = 8 << 10
"""Smaller tensors are rounded in less than 0.5 ms."""
_FOOTER = struct.Struct("<8sQI")
_MAGIC = b"trvpack2"


def default_folder() -> Path:
    """Beside the models that trivium keeps."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trivium" / "packed"


class WeightCache:
    """One session's view of a folder. `parts`: what every file's name depends on."""

    def __init__(self, folder: Path, parts: Sequence[object]) -> None:
        self._folder, self._parts = folder, (_MAGIC, *parts)
        self._written = False
        self._works = True

    def path(self, *parts: object) -> Path:
        """The file of a tensor."""
        return self._folder / f"{blake2b(repr((self._parts, parts)).encode(), digest_size=20).hexdigest()}.bin"

    @staticmethod
    def is_whole(read: Any, nbytes: int) -> bool:
        """Whether what Runtime.read() found in a file is what write() wrote: `nbytes` packed bytes, undamaged."""
        return bool(read.whole and read.rest == _FOOTER.pack(_MAGIC, nbytes, read.crc32c))

    def write(self, path: Path, data: npt.NDArray[np.uint8]) -> None:
        """Keeps the packed bytes of a tensor, unless they are few, if the folder can be written."""
        if not self._works or data.nbytes < MIN_BYTES:
            return
        import tempfile

        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._folder, suffix=".part", delete=False) as file:
                part = Path(file.name)
                try:
                    file.write(data.data)
                    file.write(_FOOTER.pack(_MAGIC, data.nbytes, _native.crc32c(data)))
                    file.close()
                    part.replace(path)
                finally:
                    part.unlink(missing_ok=True)
            self._written = True
        except OSError as e:
            import logging

            self._works = False
            logging.getLogger(__name__).warning(
                "rounded weights can't be kept in %s (%s): the next start rounds them again", self._folder, e.strerror or e
            )

    def make_room(self) -> None:
        """Drops what was used least recently, if something was added."""
        if self._written:
            _evict(self._folder, MAX_BYTES)
        self._written = False


def _evict(folder: Path, limit: int) -> None:
    """Deletes the files used least recently until the rest is within `limit` bytes."""
    found = []
    for path in folder.iterdir():
        try:
            status = path.stat()
        except FileNotFoundError:  # another process makes room, too
            continue
        found.append((status.st_mtime_ns, status.st_size, path))
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if total <= limit:
            return
        path.unlink(missing_ok=True)
        total -= size
