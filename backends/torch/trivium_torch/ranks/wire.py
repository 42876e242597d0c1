"""Messages over a socket between processes of one machine: lengths, JSON, and the bytes of arrays. Nothing is pickled."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from trivium_torch.ranks.data import Array, Message

_LENGTH = struct.Struct("<Q")


class Gone(Exception):
    """The other side has closed the socket."""


class Wire:
    """One end."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def send(self, message: Message) -> None:
        """Sends a message; Gone if nobody is there."""
        arrays = [np.ascontiguousarray(a) for a in message.arrays]
        described = [[a.dtype.str, list(a.shape)] for a in arrays]
        head = json.dumps([message.head, described]).encode()
        try:
            self._end.sendall(_LENGTH.pack(len(head)) + head)
            for array in arrays:
                self._end.sendall(array.data.cast("B") if array.nbytes else b"")
        except OSError as e:
            raise Gone(str(e)) from e

    def recv(self) -> Message:
        """Waits for a message; Gone if none will come."""
        [length] = _LENGTH.unpack(self._read(_LENGTH.size))
        head, described = json.loads(self._read(length))
        return Message(head, [self._array(dtype, shape) for dtype, shape in described])

    def close(self) -> None:
        """Of this end."""
        self._end.close()

    def _array(self, dtype: str, shape: Sequence[int]) -> Array:
        array: Array = np.empty(shape, np.dtype(dtype))
        if array.nbytes:
            self._fill(array.data.cast("B"))
        return array

    def _read(self, length: int) -> bytes:
        data = bytearray(length)
        self._fill(memoryview(data))
        return bytes(data)

    def _fill(self, view: Any) -> None:
        try:
            while len(view):
                got = self._end.recv_into(view)
                if not got:
                    raise Gone("the other side has ended")
                view = view[got:]
        except OSError as e:
            raise Gone(str(e)) from e
