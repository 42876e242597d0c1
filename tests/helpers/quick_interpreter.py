"""Triton's interpreter, several times as quick: it looks through the whole language at each call of one kernel function by another,
although the launch has done so. Here it does it once a launch for each module that functions take the language from."""

from __future__ import annotations

import inspect
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def install() -> None:
    """For this process; a second time does nothing."""
    real = interpreter._patch_lang
    if getattr(real, "once_a_launch", False):
        return
    done: set[frozenset[str]] = set()

    def patch(fn: Any) -> Any:
        modules = frozenset(m.__name__ for m in fn.__globals__.values() if inspect.ismodule(m) and m in (tl, tl.core))
        if modules in done:
            return None
        scope, inner = real(fn), bool(done)
        done.add(modules)
        if not inner:
            _at_end(scope, done.clear)
        return scope

    patch.once_a_launch = True  # type: ignore[attr-defined]
    interpreter._patch_lang = patch


def _at_end(scope: Any, forget: Any) -> None:
    restore = scope.restore

    def restored() -> None:
        forget()
        restore()

    scope.restore = restored
