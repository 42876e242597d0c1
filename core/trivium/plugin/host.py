"""Running one call as the numpy reference on the host, for an operator that a backend lacks: slow, exact, and announced."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trivium.errors import UnsupportedError
from trivium.ops import Batch, Call, KVSpec, Operator, PagedState, Pages, RecurrentState
from trivium.ops.state import state_of
from trivium.plugin.contract import Session


class HostFallbackWarning(RuntimeWarning):
    """An operator runs as the reference on the host because the backend has no kernel for it."""


def announce_fallbacks(backend: str, missing: Sequence[tuple[str, str]], *, strict: bool) -> None:
    """Warns of every (operator, reason) without a kernel; with `strict` raises UnsupportedError naming them all."""
    names = "; ".join(f"{name} ({reason})" for name, reason in dict(missing).items())
    if names and strict:
        raise UnsupportedError(f"backend {backend!r} has no kernel for {names}, and strict refuses the host fallback")
    if names:
        warnings.warn(f"backend {backend!r} runs on the host, slowly: {names}", HostFallbackWarning, stacklevel=3)


class HostState(NamedTuple):
    """A state's pages of one step on the host, with tables that count within them, and what is needed to write them back."""

    group: int
    ids: npt.NDArray[np.int64]
    pages: Pages
    state: PagedState | RecurrentState


def fetch_state(session: Session, spec: KVSpec, index: int, batch: Batch) -> HostState:
    """Exports the pages that state `index` can touch in this step."""
    group, slot = spec.group_of(index)
    table, slots = batch.block_tables[group], batch.slot_mapping[group]
    written = slots[slots >= 0] // spec.page_size
    ids = np.unique(np.concatenate([table[table >= 0].astype(np.int64), written]))
    pages = session.export_pages(group, ids.tolist())
    pages = pages._replace(tensors=tuple(tuple(np.array(t, np.float32) for t in layer) for layer in pages.tensors))
    local = np.where(table >= 0, np.searchsorted(ids, table), -1).astype(np.int32)
    page, offset = np.divmod(slots, spec.page_size)
    local_slots = np.where(slots >= 0, np.searchsorted(ids, page) * spec.page_size + offset, -1)
    return HostState(group, ids, pages, state_of(spec.groups[group].spec, pages.tensors[slot], local, local_slots))


def run_on_host(session: Session, spec: KVSpec, call: Call, args: Sequence[Any], batch: Batch, state: int = -1) -> list[Any]:
    """One call by its reference. `args`: the backend's tensors, weights as loaded, None; `state`: the index of the state argument.

    Returns host arrays for tensor results and None for a state result.
    """
    assert isinstance(call.op, Operator)
    fetched = fetch_state(session, spec, state, batch) if state >= 0 else None
    host = [_to_host(session, call, i, a, fetched) for i, a in enumerate(args)]
    results = call.op(*host, **call.attrs)
    if fetched is not None and any(r.is_state for r in call.op.signature.results):
        session.import_pages(fetched.group, fetched.ids.tolist(), fetched.pages)  # whose arrays the reference wrote into
    results = results if isinstance(results, tuple) else (results,)
    return [None if r.is_state else x for r, x in zip(call.op.signature.results, results, strict=True)]


def _to_host(session: Session, call: Call, i: int, arg: Any, fetched: HostState | None) -> Any:
    value = call.args[i]
    if value is None:
        return None
    if value.kind == "state":
        assert fetched is not None
        return fetched.state
    return session.read_weight(arg) if value.kind == "constant" else session.get(arg)
