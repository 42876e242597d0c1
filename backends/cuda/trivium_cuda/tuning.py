"""Tiles of products with quantised weights: timed once on the device at hand, and remembered in a file.

What is remembered holds for one kind of device, compute capability, version of torch, of Triton and of the kernels, and within
that for one shape of weight and one of BUCKETS of rows. Timing is of a graph of repeats, so that the host's time does not count;
a matrix that fits the chip's cache is then read from there, by every candidate alike.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources

from trivium.ops import Call, Pattern
from trivium.plugin import Kernel
from trivium_cuda import eights
from trivium_cuda.device import DeviceApi
from trivium_cuda.kernels.products import Matrix, Plan, plan, product, rows_plan
from trivium_cuda.session import CudaSession
from trivium_cuda.weights import W8A8, Float8, Int4, matrix_of
from trivium_torch.weights import Int8

KERNELS = 1
"""Raised with every change of the kernels that may change which tile is the best."""
BUCKETS = (1, 16, 64, 256, 2048)
"""Rows that are timed; a step's products go by the first that is no smaller, or the last."""
LIBRARY = "torch._scaled_mm"
REPEATS, TRIALS = 20, 3
Clock = Callable[[CudaSession, Callable[[], Any]], float]
Signature = tuple[Any, ...]


class Found(NamedTuple):
    """What was chosen for one shape and bucket, the seconds of all candidates that ran, and whether it was read from the file."""

    chosen: str
    seconds: Mapping[str, float]
    remembered: bool


class Tuned:
    """Choices by signature and bucket."""

    def __init__(self, choices: Mapping[tuple[Signature, int], Plan | str]) -> None:
        self.choices = choices

    def tile(self, w: Matrix, rows: int) -> Plan | None:
        """For activations as they come; None: the default."""
        found = self.choices.get((signature(w), bucket(rows)))
        return found if isinstance(found, Plan) else None

    def rows_choice(self, weight: Int8 | Float8, rows: int) -> Plan | str | None:
        """For rounded activations: a tile, LIBRARY, or None for the default."""
        return self.choices.get((rows_signature(weight), bucket(rows)))


def bucket(rows: int) -> int:
    """The one of BUCKETS that so many rows go by."""
    return next((b for b in BUCKETS if rows <= b), BUCKETS[-1])


def signature(w: Matrix) -> Signature:
    """What tells products with activations as they come apart."""
    return w.kind, w.n, w.k, w.group, w.zeros is not None, w.order is not None, w.scale_row, w.scale_block


def rows_signature(weight: Int8 | Float8) -> Signature:
    """What tells products with rounded activations apart."""
    return "rows of " + ("int8" if isinstance(weight, Int8) else "fp8"), *weight.shape, *weight.scales.shape


def neighbours(p: Plan) -> list[Plan]:
    """A tile and those that differ from it in one way; the default first."""
    found = [p]
    found += [p._replace(columns=c) for c in (p.columns // 2, p.columns * 2) if 32 <= c <= 128]
    found += [p._replace(stages=s) for s in (p.stages - 1, p.stages + 1) if 2 <= s <= 5]
    found += [p._replace(warps=w) for w in (p.warps // 2, p.warps * 2) if 4 <= w <= 8]
    return found + [p._replace(parts=n) for n in (p.parts // 2, p.parts * 2) if p.parts > 1 and 1 <= n <= 16]


def named(p: Plan) -> str:
    """A tile as a file and a person read it."""
    return f"{p.rows}x{p.columns}x{p.depth}, {p.parts} parts, {p.warps} warps, {p.stages} stages"


def identity(api: DeviceApi) -> str:
    """What a timing holds for."""
    major, minor = api.capability
    return f"{api.name}, {major}.{minor}, torch {torch.__version__}, triton {triton.__version__}, kernels {KERNELS}"


def default_path() -> Path:
    """In $XDG_CACHE_HOME/trivium or ~/.cache/trivium."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trivium" / "cuda-tiles.json"


class Memory:
    """The file: {identity: {operator: {"chosen": name, "seconds": {name: seconds}}}}. One that can't be read as that counts as
    empty, with a warning; so it is written anew."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> dict[str, Any]:
        try:
            found = json.loads(self.path.read_text("utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as e:
            return self._unread(str(e))
        sound = isinstance(found, dict) and all(isinstance(of, dict) and all(map(_is_entry, of.values())) for of in found.values())
        return found if sound else self._unread("it is no table of timings")

    def _unread(self, why: str) -> dict[str, Any]:
        warnings.warn(f"{self.path} is ignored, and tiles are timed again: {why}", RuntimeWarning, stacklevel=3)
        return {}

    def add(self, key: str, entries: Mapping[str, Any]) -> None:
        """Puts entries beside those that others wrote meanwhile; whoever reads sees all of the file or what it was before."""
        whole = self.read()
        whole[key] = {**whole.get(key, {}), **entries}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.path.parent, delete=False, encoding="utf-8") as file:
                json.dump(whole, file, indent=1, sort_keys=True)
            Path(file.name).replace(self.path)
        except OSError as e:
            warnings.warn(f"timings can't be kept in {self.path}: {e.strerror or e}", RuntimeWarning, stacklevel=3)


def _is_entry(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("chosen"), str) and isinstance(entry.get("seconds"), dict)


def best(
    operator: str,
    candidates: Mapping[str, Callable[[], Any]],
    known: Mapping[str, Any],
    seconds: Callable[[Callable[[], Any]], float],
) -> Found:
    """The quickest candidate; of equal ones the first. `known`: entries of the file, of which one counts if its choice is still a
    candidate. A candidate that the chip has no room for is left out; the first, which is the default, must run."""
    entry = known.get(operator)
    if entry is not None and entry["chosen"] in candidates:
        return Found(entry["chosen"], entry["seconds"], True)
    timed: dict[str, float] = {}
    for name, run in candidates.items():
        try:
            timed[name] = seconds(run)
        except OutOfResources:
            if not timed:
                raise
    return Found(min(timed, key=timed.__getitem__), timed, False)


def graph_seconds(session: CudaSession, run: Callable[[], Any]) -> float:
    """Seconds of one run on the device: of REPEATS in a graph, the quickest of TRIALS replays."""
    run()  # compiles, which a capture may not
    graph, _ = session.api.capture(lambda: [run() for _ in range(REPEATS)])
    taken = []
    for _ in range(TRIALS + 1):  # the first warms up
        session.synchronize()
        start = time.perf_counter()
        graph.replay()
        session.synchronize()
        taken.append(time.perf_counter() - start)
    return min(taken[1:]) / REPEATS


def tune(session: CudaSession, weights: Iterable[Any], where: bool | str, seconds: Clock = graph_seconds) -> Tuned:
    """Times what is not remembered, for each different quantised matrix among the weights. where: True or a path."""
    memory, key = Memory(default_path() if where is True else Path(str(where)).expanduser()), identity(session.api)
    known, choices, new = memory.read().get(key, {}), {}, {}
    matrices = {_signature(w): w for w in weights if isinstance(w, Int4 | Int8 | Float8 | W8A8) and len(w.shape) == 2}
    with session.api.active(), torch.inference_mode():
        for sign, weight in matrices.items():
            for rows in BUCKETS:
                candidates = _candidates(session, weight, rows)
                operator = f"{_text(sign)}, {str(session.dtype).removeprefix('torch.')}, {rows} rows"
                runs = {name: run for name, (_, run) in candidates.items()}
                found = best(operator, runs, known, lambda run: seconds(session, run))
                choices[sign, rows] = candidates[found.chosen][0]
                if not found.remembered:
                    new[operator] = {"chosen": found.chosen, "seconds": dict(found.seconds)}
    if new:
        memory.add(key, new)
    return Tuned(choices)


def _signature(weight: Int4 | Int8 | Float8 | W8A8) -> Signature:
    return rows_signature(weight.weight) if isinstance(weight, W8A8) else signature(matrix_of(weight))


def _text(sign: Signature) -> str:
    """As the file has it: kind, outputs by inputs, and the rest."""
    kind, out, inputs, *rest = sign
    return f"{kind} {out}x{inputs} ({' '.join(str(int(n)) for n in rest)})"


def _candidates(
    session: CudaSession, weight: Int4 | Int8 | Float8 | W8A8, rows: int
) -> dict[str, tuple[Plan | str, Callable[[], Any]]]:
    """(what it is, how it runs) of each candidate by name, the default first."""
    x = torch.randn(rows, weight.shape[1], dtype=session.dtype, device=session.device)
    if isinstance(weight, W8A8):
        return _rows_candidates(session, weight, eights.rounded(x, weight.kind))
    w = matrix_of(weight)
    default = plan(rows, w, x.dtype, x.device, invariant=False)
    return {named(p): (p, lambda p=p: product(x, w, None, x.dtype, tile=p)) for p in neighbours(default)}  # type: ignore[misc]


def _rows_candidates(session: CudaSession, weight: W8A8, x: eights.Rounded) -> dict[str, tuple[Plan | str, Callable[[], Any]]]:
    """The default first, be it the library or a tile."""
    inner, (m, k) = weight.weight, x.rows.numbers.shape
    kind = "int8" if isinstance(inner, Int8) else "fp8"
    default = rows_plan(m, len(inner.numbers), k, x.rows.numbers.device, kind=kind, invariant=False)

    def by_tile(p: Plan) -> Callable[[], Tensor]:
        return lambda: eights.by_triton(session, x, inner, None, p)

    found: dict[str, tuple[Plan | str, Callable[[], Any]]] = {named(p): (p, by_tile(p)) for p in neighbours(default)}
    if isinstance(inner, Int8) or eights.library_refuses(session, inner, x.dtype) is not None:
        return found
    library: dict[str, tuple[Plan | str, Callable[[], Any]]] = {
        LIBRARY: (LIBRARY, lambda: eights.by_library(x.rows, inner, None, x.dtype))
    }
    return {**library, **found} if m > eights.LIBRARY_FROM else {**found, **library}


class Notes:
    """What `trivium explain` says of the tiles of products on a device, from the file in the cache folder."""

    def __init__(self, api: DeviceApi) -> None:
        self._api = api

    def noted(self, kernel: Kernel) -> Kernel:
        """The kernel, with a note if it is one of products."""
        name = kernel.op.name if isinstance(kernel.op, Pattern) else kernel.op
        return replace(kernel, note=self.note) if name in ("linear", "gate_up") else kernel

    @cached_property
    def _known(self) -> Mapping[str, Any]:
        return cast(Mapping[str, Any], Memory(default_path()).read().get(identity(self._api), {}))

    def note(self, call: Call) -> str:
        """What was chosen for weights of the call's size, whatever they are held as."""
        weight = call.args[1]
        assert weight is not None
        size = f"{weight.shape[0]}x{weight.shape[1]}"
        found = [f"{name}: {entry['chosen']}" for name, entry in self._known.items() if size in name.split()]
        return f"with autotune {'; '.join(found)}" if found else "tiles by default: none of its size was timed"
