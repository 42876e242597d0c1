"""Norms and gates that hand on 8 bits, where all that read their result are products that would round it to the same 8 bits.

A kernel is chosen by its call, which does not say how weights are held; here a tape's lines are seen together with its weights. Of
a layer's rounding passes (before q, k, v; output; gate, up; down) only that of attention's output is left. The numbers are those
of a pass of its own: what is rounded to 8 bits was rounded to the activations' dtype before, see kernels.norms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from trivium_cuda import table
from trivium_cuda.eights import Rounded
from trivium_cuda.kernels import activations, norms
from trivium_cuda.kernels.quantise import Kind
from trivium_cuda.session import CudaSession
from trivium_cuda.weights import W8A8
from trivium_torch.kernels.dense import Args, Attrs

if TYPE_CHECKING:
    from trivium_cuda.tape import Line


def rms_norm(kind: Kind, session: CudaSession, args: Args, attrs: Attrs) -> Rounded:
    x: Tensor = args[0]
    return Rounded(norms.rms_norm_quantise(x, args[1], attrs["eps"], attrs["offset"], kind=kind), x.shape, x.dtype)


def add_norm(kind: Kind, session: CudaSession, args: Args, attrs: Attrs) -> tuple[Tensor, Rounded]:
    x: Tensor = args[0]
    total, rows = norms.add_rms_norm_quantise(x, args[1], args[2], attrs["eps"], attrs["offset"], kind=kind)
    return total, Rounded(rows, x.shape, x.dtype)


def gated(kind: Kind, session: CudaSession, args: Args, attrs: Attrs) -> Rounded:
    g, up = args
    return Rounded(activations.gated_quantise(g, up, **attrs, quantise=kind), g.shape, g.dtype)


def gate_up(kind: Kind, session: CudaSession, args: Args, attrs: Attrs) -> Rounded:
    x, wg, bg, wu, bu = args
    return gated(kind, session, (table.linear(session, (x, wg, bg), {}), table.linear(session, (x, wu, bu), {})), attrs)


MAKERS: Mapping[Callable[..., Any], tuple[Callable[..., Any], int]] = {
    table.rms_norm: (rms_norm, 0), table.add_norm: (add_norm, 1), table.gated: (gated, 0), table.gate_up: (gate_up, 0),
}  # fmt: skip
"""Kernel -> the same that hands on 8 bits, and which of its results that is."""


def round_ahead(lines: Sequence[Line], weights: Sequence[Any]) -> list[Line]:
    """The lines of a tape, with the kernel changed of each one whose result only W8A8 products of one kind read. `weights`: what
    the registers hold that are constants."""
    readers: dict[int, list[Line]] = {}
    for line in lines:
        for register in set(line.args):
            readers.setdefault(register, []).append(line)

    def changed(line: Line) -> Line:
        if line.run is None or line.run not in MAKERS:
            return line
        run, which = MAKERS[line.run]
        register = line.results[which]
        reading = readers.get(register, [])
        kinds = {_kind(reader, register, weights) for reader in reading}
        kept = not any(register in reader.done for reader in reading)  # it is an output of the Program
        if kept or len(kinds) != 1 or None in kinds:
            return line
        [kind] = kinds
        return line._replace(run=partial(run, kind), name=f"{line.name} to {kind}")

    return [changed(line) for line in lines]


def _kind(line: Line, register: int, weights: Sequence[Any]) -> Kind | None:
    """The 8 bits to which a line rounds a register, which it reads as the activations of its products alone; None: it does not."""
    if line.args[0] != register or register in line.args[1:]:
        return None
    matrices = {table.linear: (1,), table.gate_up: (1, 3)}.get(line.run, ()) if line.run is not None else ()
    kinds = {w.kind if isinstance(w := weights[line.args[i]], W8A8) else None for i in matrices}
    return kinds.pop() if len(kinds) == 1 else None
