"""The decorator that makes an operator of its reference, and the example calls that it makes from the signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from trivium.errors import ProgramError
from trivium.ops.schema import Arg, Case, InferResults, MakeCases, Operator, Signature, Tolerance, parse_signature
from trivium.ops.state import PagedState, RecurrentState

Array = npt.NDArray[Any]
Rng: TypeAlias = "np.random.Generator"

ROWS = (1, 2, 3, 8, 17, 75)
"""Numbers of tokens that every row-wise operator is tried with."""

SIZES: Mapping[str, Sequence[int]] = {
    "n": (8, 5, 16, 33, 64, 160, 7), "m": (12, 4, 12, 1, 7, 5, 9), "hidden": (8, 5, 16, 33, 64, 160, 7), "rows": ROWS,
    "in": (16, 32, 7, 64, 129, 160, 24), "out": (8, 33, 5, 600, 31, 70, 16), "vocab": (11,) * 7, "slots": (3,) * 7,
    "heads": (1, 4, 3, 9, 8, 6, 4), "kv_heads": (1, 2, 3, 3, 1, 2, 2), "head_dim": (8, 16, 5, 64, 32, 24, 128),
    "half": (4, 8, 2, 32, 8, 6, 16), "rank": (16, 32, 24, 64, 8, 32, 1), "rope_dim": (4, 8, 6, 16, 4, 8, 4),
    "dk": (8, 16, 5, 16, 32, 4, 8), "dv": (8, 8, 7, 32, 16, 4, 8), "channels": (4, 8, 5, 16, 33, 8, 4),
    "width": (4, 3, 4, 2, 4, 3, 2), "experts": (4, 4, 8, 16, 5, 6, 8), "top_k": (1, 2, 3, 4, 2, 1, 2),
    "inter": (12, 5, 16, 24, 33, 8, 16), "page_size": (4, 16, 4, 4, 16, 4, 16),
}  # fmt: skip
"""What a dimension of this name is in the first example, in the second and so on."""

STALE = 1e3
"""What pages and slots that no sequence owns are filled with: large enough that a kernel which reads them is seen."""


def normal(rng: Rng, *shape: int) -> npt.NDArray[np.float32]:
    """Standard normal numbers, float32[shape]."""
    return rng.standard_normal(shape, dtype=np.float32)


class Sequences(NamedTuple):
    """The sequences of an example step: query_starts int32[seqs+1], context_lens int32[seqs]."""

    query_starts: npt.NDArray[np.int32]
    context_lens: npt.NDArray[np.int32]


def sequences(queries: Sequence[int], contexts: Sequence[int]) -> Sequences:
    """Sequence s has queries[s] tokens in this step and contexts[s] tokens once it has run."""
    return Sequences(np.cumsum([0, *queries], dtype=np.int32), np.asarray(contexts, np.int32))


STEPS = (
    sequences([1], [1]), sequences([5], [5]), sequences([1, 1, 1], [7, 33, 16]), sequences([3, 1, 9], [10, 17, 9]),
    sequences([1] * 8, [2, 3, 5, 8, 13, 21, 34, 55]), sequences([17, 1], [40, 4]),
)  # fmt: skip
"""Prefill, decode, chunks that continue a context, and mixtures of them."""


def paged_state(
    rng: Rng, step: Sequences, key_shape: tuple[int, int], value_shape: tuple[int, int],
    *, page_size: int = 4, window: int | None = None,
) -> PagedState:  # fmt: skip
    """A state whose sequences hold random tokens on pages in random order; pages behind the window are given back (-1)."""
    used = [-(-int(c) // page_size) for c in step.context_lens]
    pages = rng.permutation(sum(used) + 3).astype(np.int32)
    table = np.full((len(used), max(used) + 1), -1, np.int32)
    k = np.full((len(pages), page_size, *key_shape), STALE, np.float32)
    v = np.full((len(pages), page_size, *value_shape), STALE, np.float32)
    slots, taken = [], 0
    for s, (blocks, context) in enumerate(zip(used, step.context_lens)):
        table[s, :blocks] = pages[taken : taken + blocks]
        taken += blocks
        at = np.arange(context)
        where = table[s, at // page_size].astype(np.int64), at % page_size
        k[where], v[where] = normal(rng, context, *key_shape), normal(rng, context, *value_shape)
        first = int(context - np.diff(step.query_starts)[s])
        slots.append((where[0] * page_size + where[1])[first:])
        if window is not None:
            table[s, : max(0, first - window + 1) // page_size] = -1
    return PagedState(k, v, table, np.concatenate(slots))


def recurrent_state(rng: Rng, step: Sequences, shape: tuple[int, ...]) -> RecurrentState:
    """A state with a random page for each sequence; pages that nobody owns, and those of sequences that start, hold STALE."""
    seqs = len(step.context_lens)
    table = rng.permutation(seqs + 2).astype(np.int32)[:seqs]
    data = np.full((seqs + 2, *shape), STALE, np.float32)
    continued = table[step.context_lens > np.diff(step.query_starts)]
    data[continued] = normal(rng, len(continued), *shape)
    return RecurrentState(data, table)


class Draw(NamedTuple):
    """What an argument of an example is drawn for: its shape, the step, and the call's sizes and attributes by name."""

    rng: Rng
    shape: tuple[int, ...]
    step: Sequences
    call: Mapping[str, Any]

    def normal(self) -> Array:
        return normal(self.rng, *self.shape)

    def uniform(self) -> Array:
        return self.rng.uniform(0, 1, self.shape)

    def integers(self, stop: int, start: int = 0) -> Array:
        return self.rng.integers(start, stop, self.shape)

    def paged(self, key_shape: tuple[int, int], value_shape: tuple[int, int]) -> PagedState:
        page_size, window = self.call["page_size"], self.call.get("window", self.call.get("chunk"))
        return paged_state(self.rng, self.step, key_shape, value_shape, page_size=page_size, window=window)

    def keys_and_values(self) -> PagedState:
        return self.paged(*((self.call["kv_heads"], self.call["head_dim"]),) * 2)

    def recurrent(self, *shape: int) -> RecurrentState:
        return recurrent_state(self.rng, self.step, shape)


_KINDS: Mapping[str, Callable[[Draw], Any]] = {
    "float": Draw.normal, "weight": Draw.normal, "PagedKV": Draw.keys_and_values,
    "LatentKV": lambda d: d.paged((1, d.call["rank"]), (1, d.call["rope_dim"])),
}  # fmt: skip


def times(factor: float) -> Callable[[Draw], Array]:
    """Normal numbers, multiplied."""
    return lambda d: d.normal() * factor


def operator(
    signature: str, *variants: Mapping[str, Any], draw: Mapping[str, Callable[[Draw], Any] | None] = MappingProxyType({}),
    sizes: Mapping[str, Sequence[Any]] = MappingProxyType({}), cases: MakeCases | None = None, tolerance: float = 1.0,
    infer: InferResults | None = None,
) -> Callable[[Callable[..., Any]], Operator]:  # fmt: skip
    """Makes an Operator of a numpy reference function; its keyword-only parameters are the operator's attributes.

    Its tolerances are a few units in the last place of each dtype, times `tolerance` for operators that sum long rows. Its example
    calls are `cases`, or made from the signature with the SIZES (or those in `sizes`). The number of tokens runs through ROWS or,
    where the operator is told about sequences, through STEPS (or sizes["step"]); an operator that takes any leading dimensions
    is also called with two. Each call is made with each of the `variants`: what attributes are, and how arguments are drawn that
    are not just normal numbers (None: absent); `draw` holds for all variants.
    """

    def make(fn: Callable[..., Any]) -> Operator:
        params = inspect.signature(fn).parameters.values()
        attrs = {p.name: p.default for p in params if p.kind is inspect.Parameter.KEYWORD_ONLY}
        parsed = parse_signature(signature)
        names = [p.name for p in params if p.kind is not inspect.Parameter.KEYWORD_ONLY]
        if names != [a.name for a in parsed.args]:
            raise ProgramError(f"{fn.__name__}: parameters {names} don't match the signature {signature!r}")
        calls = [(size, {**draw, **chosen}) for size in _sizes(parsed, sizes) for chosen in variants or ({},)]
        made = cases or (lambda rng: (_case(parsed, rng, *call) for call in calls))
        unit = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}
        tolerances = {dtype: Tolerance(tolerance * eps, tolerance * eps) for dtype, eps in unit.items()}
        return Operator(fn.__name__, parsed, fn, made, tolerances, attrs, infer)

    return make


def _sizes(signature: Signature, sizes: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """The sizes of each call, by the names of the dimensions; "..." is a tuple of them."""
    in_step = any(arg.name == "query_starts" for arg in signature.args)
    columns = {**SIZES, "step": STEPS if in_step else [sequences([n], [n + 3]) for n in ROWS], **sizes}
    calls = [dict(zip(columns, call)) for call in zip(*columns.values())]
    for call in calls:
        call["tokens"] = int(call["step"].query_starts[-1])
        call["..."] = (call["tokens"],)
    return [*calls, {**calls[0], "...": (3, 4)}] if "..." in (signature.args[0].dims or ()) else calls


def _case(signature: Signature, rng: Rng, sizes: Mapping[str, Any], chosen: Mapping[str, Any]) -> Case:
    fills = {arg: chosen.get(arg.name, _KINDS.get(arg.dtype)) for arg in signature.args}
    attrs = {k: v for k, v in chosen.items() if k not in [arg.name for arg in fills]}
    return Case(tuple(_argument(arg, rng, {**sizes, **attrs}, fill) for arg, fill in fills.items()), attrs)


def _argument(arg: Arg, rng: Rng, call: Mapping[str, Any], fill: Callable[[Draw], Any] | None) -> Any:
    if arg.name in Sequences._fields:
        return getattr(call["step"], arg.name)
    shape = [n for dim in arg.dims or () for n in (call[dim] if dim == "..." else (call[dim],))]
    if fill is None:
        return None
    value = fill(Draw(rng, tuple(shape), call["step"], call))
    return value if arg.is_state else np.asarray(value, np.int32 if arg.dtype == "int32" else np.float32)
