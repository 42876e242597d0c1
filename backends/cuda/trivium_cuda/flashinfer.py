"""Attention over pages by the package flashinfer, where it is installed: optional, and proved against Triton's before it is used.

The wrappers plan a step on the host, once for all layers alike, and so can't be captured: in graphs, and for pages that are not in
the activations' dtype (its formats for bytes have one scale for a layer, or float32 ones), the kernel of Triton runs. Pages are
given as views, [pages, kv_heads, page_size, n], of how they lie here, [kv_heads, pages, page_size, n].

Source: the documentation of flashinfer 0.7 (docs.flashinfer.ai, flashinfer.decode and flashinfer.prefill).
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trivium.ops import Batch, Call
from trivium.ops.sample import plain_inputs
from trivium.plugin import Kernel
from trivium_cuda import table
from trivium_cuda.session import CudaSession, DevicePaged, Reads
from trivium_torch.kernels.dense import Args, Attrs
from trivium_torch.pages import Floats, GroupStep

PACKAGE = "flashinfer"
PRIORITY = table.PRIORITY + 5
WORKSPACE = 128 << 20
"""Bytes for intermediate sums, as its documentation recommends; zeros at first."""
HEADS = (64, 128, 256)
"""Numbers of a head for which its kernels are made."""
FAR = 1 << 32
"""Its strides are of 32 bits."""
TOLERANCE = 0.02
"""Of numbers of size 1 in 16 bits."""


class _Layout(NamedTuple):
    """What a plan depends on beside the step's sequences."""

    heads: int
    kv_heads: int
    n: int
    page_size: int
    dtype: torch.dtype
    scale: float
    window: int | None
    softcap: float | None
    causal: bool


class PagedAttention:
    """The kernel of `paged_attention` of one session."""

    def __init__(self, package: Any) -> None:
        self._package = package
        self._workspace: Tensor | None = None
        self._wrappers: dict[tuple[bool, _Layout], Any] = {}

    def run(self, session: CudaSession, args: Args, attrs: Attrs) -> Tensor:
        q, kv, *_ = args
        if session.capturing or not takes(q, kv):
            return table.paged_attention(session, args, attrs)
        layout = _Layout(
            q.shape[1], kv.k.parts[0].shape[0], q.shape[2], kv.page_size, q.dtype, attrs["scale"], attrs["window"],
            attrs["softcap"], attrs.get("causal", True),
        )  # fmt: skip
        wrapper = kv.step.once((PACKAGE, layout), lambda: self._planned(session, layout, kv.step))
        y: Tensor = wrapper.run(q.contiguous(), (_pages(kv.k, kv.page_size), _pages(kv.v, kv.page_size)))
        return y

    def _planned(self, session: CudaSession, layout: _Layout, step: GroupStep) -> Any:
        """The wrapper for the step, planned: that of decodes where every sequence has one query."""
        queries = np.diff(step.starts)
        decode = bool((queries == 1).all()) and layout.causal
        wrapper = self._wrappers.get((decode, layout))
        if wrapper is None:
            wrapper = self._wrappers[decode, layout] = self._made(session, layout, decode)
        used = -(-step.contexts // layout.page_size)
        pages = np.concatenate([row[:count] for row, count in zip(step.table, used, strict=True)])
        indices = np.maximum(pages, 0).astype(np.int32)  # pages out of a window's sight may be gone, and any is masked as well
        starts = np.append(0, np.cumsum(used)).astype(np.int32)
        last = (step.contexts - (used - 1) * layout.page_size).astype(np.int32)
        where = torch.from_numpy(starts), session.upload(indices), torch.from_numpy(last)
        sizes = layout.heads, layout.kv_heads, layout.n, layout.page_size
        shared: dict[str, Any] = {
            "window_left": -1 if layout.window is None else layout.window - 1, "logits_soft_cap": layout.softcap,
            "sm_scale": layout.scale, "q_data_type": layout.dtype, "kv_data_type": layout.dtype,
        }  # fmt: skip
        if decode:
            wrapper.plan(*where, *sizes, **shared)
        else:
            wrapper.plan(torch.from_numpy(step.starts.astype(np.int32)), *where, *sizes, causal=layout.causal, **shared)
        return wrapper

    def _made(self, session: CudaSession, layout: _Layout, decode: bool) -> Any:
        if self._workspace is None:
            self._workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=session.device)
        if not decode:
            return self._package.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "HND", backend="fa2")
        tensor_cores = layout.heads // layout.kv_heads >= 4
        return self._package.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, "HND", use_tensor_cores=tensor_cores, backend="fa2"
        )


def _pages(floats: Floats, page_size: int) -> Tensor:
    """[pages, kv_heads, page_size, n], a view."""
    numbers = floats.parts[0]
    return numbers.view(len(numbers), -1, page_size, numbers.shape[-1]).transpose(0, 1)


def takes(q: Tensor, kv: DevicePaged) -> bool:
    """Whether its kernels read these pages with these queries."""
    numbers = kv.k.parts[0]
    plain = len(kv.k.parts) == 1 and numbers.dtype == q.dtype and q.dtype in (torch.float16, torch.bfloat16)
    return plain and len(q) > 0 and numbers.stride(0) < FAR


def supports(call: Call) -> str | None:
    """Why its kernels can't run a call, whatever the pages are."""
    q = call.args[0]
    assert q is not None
    if q.shape[-1] not in HEADS:
        return f"heads of {q.shape[-1]} numbers; it has {', '.join(map(str, HEADS))}"
    return None if call.args[4] is None else "it takes no sinks"


def kernels() -> tuple[Kernel, ...]:
    """What the package offers here; nothing where it is not installed. One that can't be imported is warned of."""
    if find_spec(PACKAGE) is None:
        return ()
    try:
        package = importlib.import_module(PACKAGE)
    except Exception as e:  # whatever it is built on may be broken in ways of its own
        warnings.warn(f"{PACKAGE} is installed, but can't be imported, and is not used: {e}", RuntimeWarning, stacklevel=2)
        return ()
    run = PagedAttention(package).run
    return (Kernel("paged_attention", run, "flashinfer paged_attention", PRIORITY, supports, note=_note),)


def _note(call: Call) -> str:
    return "after a comparison with the next one on opening; in graphs, and for pages in other dtypes, the next one"


def proved(session: CudaSession, kernels: Sequence[Kernel]) -> list[Kernel]:
    """The kernels without those of the package that do not give what Triton's do on this device, with a warning; in float32, and
    where a row's bits must not depend on its neighbours, without them at all."""
    own = [k for k in kernels if isinstance(getattr(k.run, "__self__", None), PagedAttention)]
    if not own:
        return list(kernels)
    unfit = session.batch_invariant or session.dtype == torch.float32
    good = [] if unfit else [k for k in own if _agrees(session, k.run)]
    return [k for k in kernels if k not in own or k in good]


def _agrees(session: CudaSession, run: Callable[..., Tensor]) -> bool:
    """A step of decodes and a mixed one, of two sequences with pages out of order."""
    try:
        with session.api.active(), torch.inference_mode():
            worst = max(_difference(session, run, starts) for starts in ((0, 1, 2), (0, 5, 6)))
    except Exception as e:  # of its compiler, its driver's version, ...: whatever it is, the kernel is not for this device
        warnings.warn(f"{PACKAGE} is not used: on {session.api.name} it failed: {e}", RuntimeWarning, stacklevel=5)
        return False
    if worst > TOLERANCE:
        warnings.warn(f"{PACKAGE} is not used: on {session.api.name} it is off by {worst:.2g}", RuntimeWarning, stacklevel=5)
    return worst <= TOLERANCE


def _difference(session: CudaSession, run: Callable[..., Tensor], starts: tuple[int, ...]) -> float:
    """The largest between Triton's answer and this one's, for contexts of 40 and 17 tokens in pages of 16."""
    contexts = np.array([40, 17], np.int32)
    tables = np.array([[[5, 1, 4], [2, 3, 0]]], np.int32)
    tokens, seqs = starts[-1], len(contexts)
    batch = Batch(
        np.zeros(tokens, np.int32), np.zeros(tokens, np.int32), np.array(starts, np.int32), contexts, tables,
        np.full((1, tokens), -1, np.int64), np.arange(seqs, dtype=np.int32), plain_inputs(seqs), np.zeros(0, np.int32),
        np.zeros(0, np.int32),
    )  # fmt: skip
    made = torch.Generator(session.device).manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=made, dtype=torch.float32, device=session.device).to(session.dtype)

    upload = session.upload
    where = upload(tables[0]), upload(batch.slot_mapping[0]), upload(batch.query_starts), upload(contexts)
    reads = Reads(*where, max_query=starts[1], max_context=40)
    step = GroupStep.of(batch, 0, 16, 6, upload)
    kv = DevicePaged(Floats((draw(2, 7 * 16, 64),)), Floats((draw(2, 7 * 16, 64),)), step, reads, 16)
    q, attrs = draw(tokens, 8, 64), {"scale": 0.125, "window": None, "softcap": None, "causal": True}
    args = (q, kv, reads.query_starts, reads.context_lens, None)
    return float((run(session, args, attrs) - table.paged_attention(session, args, attrs)).abs().max())
