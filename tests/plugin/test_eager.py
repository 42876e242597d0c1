"""The eager loop, the reference backend and the host fallback agree, state included."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

from trivium.errors import InvalidRequestError, UnsupportedError
from trivium.ops import Batch, Group, KVSpec, PagedKV, Program, Weight, new_builder
from trivium.ops.sample import plain_inputs
from trivium.plugin import HostFallbackWarning, Kernel, Session, select_kernels
from trivium_reference.plugin import ReferenceBackend, ReferenceSession

HIDDEN, HEADS, VOCAB, PAGE = 8, 2, 11, 4


def program() -> Program:
    b = new_builder()
    kv = b.state("kv0", PagedKV(HEADS, HIDDEN // HEADS))
    x = b.embedding(b.input("token_ids"), b.weight("embed", (VOCAB, HIDDEN)))
    heads = b.reshape(x, shape=("tokens", HEADS, HIDDEN // HEADS))
    kv = b.kv_write(kv, heads, heads)
    y = b.paged_attention(heads, kv, b.input("query_starts"), b.input("context_lens"), scale=0.5)
    x = b.add(x, b.reshape(y, shape=("tokens", HIDDEN)))
    logits = b.linear(b.gather_rows(x, b.input("sample_rows")), b.weight("embed", (VOCAB, HIDDEN)))
    return b.finish({"logits": logits}, vocab_size=VOCAB)


SPEC = KVSpec(PAGE, "float32", (Group(PagedKV(HEADS, HIDDEN // HEADS), (0,)),))


def batch(ids: list[int], start: int, pages: list[int]) -> Batch:
    positions = np.arange(start, start + len(ids), dtype=np.int32)
    slots = np.array(pages)[positions // PAGE] * PAGE + positions % PAGE
    return Batch(
        np.array(ids, np.int32), positions, np.array([0, len(ids)], np.int32), np.array([start + len(ids)], np.int32),
        np.array([[pages]], np.int32), slots[None].astype(np.int64), np.array([len(ids) - 1], np.int32), plain_inputs(1),
    )  # fmt: skip


def opened(kernels: Any = None) -> ReferenceSession:
    backend = ReferenceBackend()
    device = backend.probe().devices[0]
    session = ReferenceSession(backend.kernels(device) if kernels is None else kernels, strict=False)
    session.kv_store(SPEC, 6)
    return session


def compiled(session: Session) -> Any:
    weight = np.random.default_rng(3).standard_normal((VOCAB, HIDDEN)).astype(np.float32)
    stored = Weight("embed", weight.shape, "float32", weight, lambda data: data)
    return session.compile(program(), {"embed": session.load(stored, "float32")})


def logits(executable: Any, *args: Any) -> np.ndarray:
    return executable.run(batch(*args)).output("logits")


def expected(ids: list[int]) -> np.ndarray:
    """The same model written out with dense attention."""
    w = np.random.default_rng(3).standard_normal((VOCAB, HIDDEN)).astype(np.float32)
    x = w[ids]
    out = np.zeros_like(x[-1])
    for h in range(HEADS):
        part = x[:, h * 4 : h * 4 + 4]
        score = np.exp(0.5 * (part @ part[-1]) - (0.5 * (part @ part[-1])).max())
        out[h * 4 : h * 4 + 4] = (score / score.sum()) @ part
    return (x[-1] + out) @ w.T


def test_a_program_runs_and_equals_the_same_model_written_out():
    ids = [3, 1, 4, 1, 5, 9, 2]
    np.testing.assert_allclose(logits(compiled(opened()), ids, 0, [5, 2])[0], expected(ids), rtol=1e-5, atol=1e-5)


def test_chunks_and_single_tokens_through_pages_equal_the_whole():
    executable = compiled(opened())
    for chunk, start in (([3, 1, 4], 0), ([1, 5, 9], 3), ([2], 6)):
        got = logits(executable, chunk, start, [4, 1])
    np.testing.assert_allclose(got[0], expected([3, 1, 4, 1, 5, 9, 2]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lacking", ["linear", "kv_write", "paged_attention", "embedding"])
def test_an_operator_without_a_kernel_runs_on_the_host_with_a_warning_that_names_it(lacking):
    backend = ReferenceBackend()
    kernels = [k for k in backend.kernels(backend.probe().devices[0]) if k.op != lacking]
    with pytest.warns(HostFallbackWarning, match=lacking):
        executable = compiled(opened(kernels))
    logits(executable, [3, 1, 4, 1, 5], 0, [5, 2])
    np.testing.assert_allclose(logits(executable, [9, 2], 5, [5, 2])[0], expected([3, 1, 4, 1, 5, 9, 2]), rtol=1e-5, atol=1e-5)


class Headwise(ReferenceSession):
    """Exports views of pages that lie head by head, whose neutral form is not contiguous."""

    def export_pages(self, group: int, ids: Any) -> Any:
        pages = super().export_pages(group, ids)
        turned = (tuple(np.ascontiguousarray(t.swapaxes(1, 2)).swapaxes(1, 2) for t in layer) for layer in pages.tensors)
        return pages._replace(tensors=tuple(turned))


def test_the_host_writes_into_pages_however_a_backend_exports_them():
    backend = ReferenceBackend()
    kernels = [k for k in backend.kernels(backend.probe().devices[0]) if k.op != "kv_write"]
    session = Headwise(kernels, strict=False)
    session.kv_store(SPEC, 6)
    with pytest.warns(HostFallbackWarning, match="kv_write"):
        executable = compiled(session)
    logits(executable, [3, 1, 4, 1, 5], 0, [5, 2])
    np.testing.assert_allclose(logits(executable, [9, 2], 5, [5, 2])[0], expected([3, 1, 4, 1, 5, 9, 2]), rtol=1e-5, atol=1e-5)


def test_strict_refuses_the_host_fallback_by_name():
    session = ReferenceSession([], strict=True)
    session.kv_store(SPEC, 2)
    with pytest.raises(UnsupportedError, match="linear"):
        compiled(session)


def test_pages_move_between_sessions_and_within_one():
    first, second = opened(), opened()
    one, two = compiled(first), compiled(second)
    logits(one, [3, 1, 4, 1, 5], 0, [5, 2])
    second.import_pages(0, [0, 3], first.export_pages(0, [5, 2]))
    second.copy_pages([3], [1])
    np.testing.assert_allclose(logits(two, [9, 2], 5, [0, 1])[0], expected([3, 1, 4, 1, 5, 9, 2]), rtol=1e-5, atol=1e-5)


def test_an_unknown_option_is_refused_by_name():
    backend = ReferenceBackend()
    with pytest.raises(InvalidRequestError, match="turbo"):
        backend.open(backend.probe().devices[0], {"turbo": 1})


def test_selection_prefers_priority_and_keeps_the_reasons():
    from trivium.plugin import Kernel

    kernels = [
        Kernel("linear", print, "plain"),
        Kernel("linear", print, "fast", 5, lambda call: "needs a bias"),
        Kernel("linear", print, "good", 3),
    ]
    choice = next(c for c in select_kernels(program(), kernels) if c.call.name == "linear")
    assert choice.kernel is kernels[2]
    assert choice.next == (kernels[0],)
    assert choice.refused == ((kernels[1], "needs a bias"),)


class Strided(ReferenceSession):
    """Exports views of pages that lie in another order on the device: [pages, heads, head_dim, page_size]."""

    def export_pages(self, group: int, ids: Any) -> Any:
        pages = super().export_pages(group, ids)
        lying = (np.ascontiguousarray(t.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2) for t in pages.tensors[0])
        return pages._replace(tensors=(tuple(lying),))


def test_what_the_host_writes_reaches_pages_that_are_exported_in_another_order():
    backend = ReferenceBackend()
    session = Strided([k for k in backend.kernels(backend.probe().devices[0]) if k.op != "kv_write"], strict=False)
    session.kv_store(SPEC, 6)
    with pytest.warns(HostFallbackWarning):
        executable = compiled(session)
    plain = compiled(opened())
    for step in (([1, 2, 3, 4, 5], 0, [3, 1]), ([6], 5, [3, 1])):
        np.testing.assert_array_equal(logits(executable, *step), logits(plain, *step))


class Pair(NamedTuple):
    """A tensor of two halves."""

    left: np.ndarray
    right: np.ndarray


def test_a_tensor_that_is_a_named_tuple_is_one_result():
    def halves(session: Any, args: Any, attrs: Any) -> Pair:
        return Pair(*np.split(args[0] + args[1], 2, axis=-1))

    class Joining(ReferenceSession):
        def get(self, tensor: Any) -> Any:
            return np.concatenate(tensor, axis=-1) if isinstance(tensor, Pair) else super().get(tensor)

    backend = ReferenceBackend()
    others = [k for k in backend.kernels(backend.probe().devices[0]) if k.op not in ("add", "gather_rows")]
    session = Joining([Kernel("add", halves), *others], strict=False)
    session.kv_store(SPEC, 6)
    with pytest.warns(HostFallbackWarning, match="gather_rows"):
        executable = compiled(session)
    np.testing.assert_array_equal(logits(executable, [1, 2, 3], 0, [2]), logits(compiled(opened()), [1, 2, 3], 0, [2]))
