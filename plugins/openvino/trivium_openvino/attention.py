"""Storing keys and values and attention over pages: one operator of OpenVINO, PagedAttentionExtension, fed with the step's block
tables. OpenVINO has no such operator for either half alone, so the kernel is that of a pattern."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov
from openvino import opset15 as ops
from openvino.op import _PagedAttentionExtension

from trivium.ops import OPERATORS, Batch, Call, Case, PagedKV, PagedState, Pattern
from trivium.plugin import Kernel
from trivium_openvino.lowering import Lowering

I32 = npt.NDArray[np.int32]
CACHE_TYPES = {"u8": ov.Type.u8, "float32": ov.Type.f32, "float16": ov.Type.f16, "bfloat16": ov.Type.bf16}
_SOFTCAP = "OpenVINO's paged attention has no soft cap"
_CAUSAL = "OpenVINO's paged attention is causal"
_TOGETHER = "OpenVINO's paged attention stores keys and values and attends in one operator; the pattern store_attend has both"


def _store_attend(
    b: Any, q: Any, kv: Any, k: Any, v: Any, query_starts: Any, context_lens: Any, sinks: Any,
    *, scale: float, window: int | None, softcap: float | None, causal: bool,
) -> Any:  # fmt: skip
    """Storing the step's keys and values, and attention over all that the queries see."""
    stored = b.kv_write(kv, k, v)
    y = b.paged_attention(q, stored, query_starts, context_lens, sinks, scale=scale, window=window, softcap=softcap, causal=causal)
    return y, stored


def _cases(rng: np.random.Generator) -> Iterator[Case]:
    """Those of paged_attention that OpenVINO can run, with keys and values for the step's tokens."""
    for case in OPERATORS["paged_attention"].cases(rng):
        q, state, starts, contexts, sinks = case.args
        if case.attrs.get("softcap") is None and case.attrs.get("causal", True):
            assert isinstance(state, PagedState)
            k, v = (rng.standard_normal((len(q), *state.k.shape[2:]), dtype=np.float32) for _ in range(2))
            defaults = {"window": None, "softcap": None, "causal": True}
            yield Case((q, state, k, v, starts, contexts, sinks), {**defaults, **case.attrs})


def _possible(call: Call) -> str | None:
    q, _, k, v = call.args[:4]
    assert q is not None and k is not None and v is not None
    if call.attrs["softcap"] is not None:
        return _SOFTCAP
    if not call.attrs["causal"]:
        return _CAUSAL
    if q.shape[2] != k.shape[2] or k.shape != v.shape or int(q.shape[1]) % int(k.shape[1]):
        return "queries, keys and values must have one head size, and query heads be a multiple of kv heads"
    return None


def _past_lens(batch: Batch) -> I32:
    return np.asarray(batch.context_lens - np.diff(batch.query_starts), np.int32)


def _max_context(batch: Batch) -> I32:
    return np.array(batch.context_lens.max(initial=0), np.int32)


class Tables:
    """A group's block table as OpenVINO reads it: the pages of all sequences one after the other, and where each begins. A page
    that was given back (-1) lies outside the window; it is named as page 0 and not read."""

    def __init__(self, group: int, page_size: int) -> None:
        self._group, self._size = group, page_size

    def _blocks(self, batch: Batch) -> I32:
        return -(-batch.context_lens // np.int32(self._size))

    def indices(self, batch: Batch) -> I32:
        table = batch.block_tables[self._group]
        used = np.arange(table.shape[1]) < self._blocks(batch)[:, None]
        return np.asarray(np.maximum(table[used], 0), np.int32)

    def begins(self, batch: Batch) -> I32:
        return np.concatenate([[0], np.cumsum(self._blocks(batch))], dtype=np.int32)


def _lower(low: Lowering, call: Call) -> None:
    q, kv, k, v, _, _, sinks = call.args
    assert q is not None and kv is not None and k is not None
    state = low.state_of[kv]
    spec = low.program.states[state].spec
    assert isinstance(spec, PagedKV)
    flat = [ops.reshape(low.node(x), ops.constant(np.array([0, -1], np.int64)), special_zero=True) for x in (q, k, v)]
    attended = paged_attention(low, flat, state, spec, call.attrs, None if sinks is None else low.array(sinks))
    shape = ops.constant(np.array([-1, *q.shape[1:]], np.int64))
    low.set(call.results[0], ops.reshape(attended, shape, special_zero=False))
    low.state_of[call.results[1]] = state


def paged_attention(low: Lowering, qkv: list[Any], state: int, spec: PagedKV, attrs: Any, sinks: Any) -> Any:
    """The operator, for the state's own pages."""
    group, _ = low.spec.group_of(state)
    tables = Tables(group, low.spec.page_size)
    caches = [low.fix(array, CACHE_TYPES[low.spec.dtype]) for array in low.pool(state)]
    node = attention_node([
        *qkv, *caches,
        low.feed("past_lens", (-1,), _past_lens),
        low.feed("query_starts", (-1,), lambda batch: batch.query_starts),
        low.feed(("pages", group), (-1,), tables.indices),
        low.feed(("begins", group), (-1,), tables.begins),
        _constant(attrs["scale"], np.float32), _constant(attrs["window"] or 0, np.int32), _empty(np.float32),
        low.feed("max_context_len", (), _max_context),
    ], spec, sinks)  # fmt: skip
    return node.output(0)


def attention_node(inputs: list[Any], spec: PagedKV, sinks: npt.NDArray[np.float32] | None) -> Any:
    """The operator with its first 13 inputs as given and the rest (what evicts, rotates and scores pages) switched off."""
    none, zero = (lambda: _empty(np.int32)), (lambda: _constant(0, np.int32))
    sink = np.zeros((0, 0, 0, 0), np.float32) if sinks is None else sinks.reshape(1, -1, 1, 1)
    inputs = [
        *inputs, none(), none(), none(), _empty(np.float32), _empty(np.float32), zero(), zero(), ops.constant(sink), zero(),
        none(), none(), none(), none(), _empty(np.uint8), none(),
    ]  # fmt: skip
    node = _PagedAttentionExtension([i if isinstance(i, ov.Output) else i.output(0) for i in inputs])
    info = node.get_rt_info()
    for name, number in (("num_k_heads", spec.kv_heads), ("num_v_heads", spec.kv_heads), ("k_head_size", spec.head_dim),
                         ("v_head_size", spec.head_dim)):  # fmt: skip
        info[name] = number
    return node


def _constant(x: Any, dtype: Any) -> Any:
    return ops.constant(np.array(x, dtype))


def _empty(dtype: Any) -> Any:
    return ops.constant(np.zeros(0, dtype))


def _never(reason: str) -> Any:
    return lambda call: reason


def _half_alone(call: Call) -> str:
    if call.attrs.get("softcap") is not None:
        return _SOFTCAP
    return _TOGETHER if call.attrs.get("causal", True) else _CAUSAL


def _refused(low: Lowering, call: Call) -> None:
    raise AssertionError("never chosen")


STORE_ATTEND = Pattern("store_attend", _store_attend, frozenset({"sinks"}), _cases)
ATTENTION_KERNELS = (
    Kernel(STORE_ATTEND, _lower, "OpenVINO PagedAttention", supports=_possible),
    Kernel("paged_attention", _refused, "OpenVINO PagedAttention", supports=_half_alone),
    Kernel("kv_write", _refused, "OpenVINO PagedAttention", supports=_never(_TOGETHER)),
)
