"""Which kernel runs a call, and why: the one place where backends, `explain` and the eager loop look."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from trivium.extensions import blame, expect
from trivium.ops import Call, Pattern, Program
from trivium.plugin.contract import Kernel


class Choice(NamedTuple):
    """The kernel for one call (None: the reference on the host), those that would have been next, and those that refused."""

    call: Call
    kernel: Kernel | None
    next: tuple[Kernel, ...]
    refused: tuple[tuple[Kernel, str], ...]


def kernel_name(kernel: Kernel) -> str:
    """A readable name: the kernel's own, else that of what it computes."""
    return kernel.name or (kernel.op.name if isinstance(kernel.op, Pattern) else kernel.op)


def choose(call: Call, kernels: Sequence[Kernel]) -> Choice:
    """The highest-priority kernel that supports the call (the first registered among equals)."""
    able, refused = [], []
    wanted = call.op if isinstance(call.op, Pattern) else call.op.name
    for kernel in sorted((k for k in kernels if k.op == wanted), key=lambda k: -k.priority):
        what = f"kernel {kernel_name(kernel)!r} of {getattr(kernel.supports, '__module__', 'a plugin')}: supports()"
        with blame(what):
            reason = expect(str | None, kernel.supports(call), what)
        if reason is None:
            able.append(kernel)
        else:
            refused.append((kernel, reason))
    return Choice(call, able[0] if able else None, tuple(able[1:]), tuple(refused))


def select_kernels(program: Program, kernels: Sequence[Kernel]) -> tuple[Choice, ...]:
    """A Choice for every call of a (fused) Program, in order."""
    return tuple(choose(call, kernels) for call in program.calls)


def patterns(kernels: Sequence[Kernel]) -> tuple[Pattern, ...]:
    """The fused patterns among the kernels, each once, in order of registration."""
    return tuple(dict.fromkeys(k.op for k in kernels if isinstance(k.op, Pattern)))


def accepts(pattern_call: Call, kernels: Sequence[Kernel]) -> bool:
    """Whether some kernel would run this fused call; fusion leaves the calls apart otherwise."""
    return choose(pattern_call, kernels).kernel is not None
