"""Importing torch where an extension that torch would load by itself may be broken.

Torch loads every distribution of the entry point group "torch.backends" at the end of its own import, and fails as a whole if
one of them fails (torch.__init__._import_device_backends). A vendor's extension without its driver would so take torch from
everybody.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_LOCK = threading.Lock()

LIBRARIES: Mapping[str, str] = {"torch_npu": "libascendcl.so"}
"""What an extension can't be loaded without: its import would fail half-way and leave os.getenv patched."""


def import_torch() -> None:
    """Imports torch and what extensions load. One that fails is left out, for its own backend to report. Nothing is done where
    torch is imported already, and none is loaded where the user has switched that off."""
    with _LOCK:
        if "torch" in sys.modules:
            return
        from importlib.metadata import entry_points  # slow to import, and a backend without its driver does not get here

        wanted = os.environ.get(_AUTOLOAD, "1") == "1"
        with _without_extensions():
            import torch  # noqa: F401
        for extension in entry_points(group="torch.backends") if wanted else ():
            load(extension)


def load(extension: EntryPoint) -> str:
    """Why an extension can't be loaded; "" once it is."""
    if (library := LIBRARIES.get(extension.name)) and (reason := missing(library)):
        return reason
    try:
        extension.load()()
    except Exception as e:  # whatever a stranger's module raises
        return f"{type(e).__name__}: {e}"
    return ""


def missing(library: str) -> str:
    """Why a shared library can't be loaded; "" if it can."""
    try:
        ctypes.CDLL(library)
    except OSError as e:
        return str(e)
    return ""


@contextmanager
def _without_extensions() -> Iterator[None]:
    before = os.environ.get(_AUTOLOAD)
    os.environ[_AUTOLOAD] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_AUTOLOAD]
        else:
            os.environ[_AUTOLOAD] = before
