"""The host tier over an emulated device: pages leave and come back beside the steps, in the right order, and nobody waits but who
asks for a page. On a device too old for Triton, where only the steps are this backend's own."""

from __future__ import annotations

import emulated_cuda
import numpy as np
import pytest
import torch
from tiny_checkpoints import make_checkpoint
from trivium_cuda import transfer

from trivium import LLM, SamplingParams
from trivium.engine.runner import Runner
from trivium.ops import Group, KVSpec, PagedKV, Pages, Recurrent

LOAD = {"dtype": "float32", "kv_dtype": "float32", "num_kv_blocks": 10, "block_size": 16, "progress": False, "max_model_len": 96}
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PREFIX = [3 + i * 7 % 250 for i in range(40)]
PROMPTS = [[*PREFIX, 9], *[[i + j % 90 for j in range(50)] for i in range(3, 6)], [*PREFIX, 11]]


@pytest.fixture
def old(emulated, monkeypatch):
    device = emulated_cuda.EmulatedDevice((7, 5))
    monkeypatch.setattr(emulated_cuda, "DEVICES", (device,))
    return device


def answers(folder, backend, **options):
    with LLM(folder, backend, **{**LOAD, **options}) as llm:
        if llm.engine.kv.tiers is not None:
            llm.engine.kv.tiers.prefill.seconds = lambda tokens: 1e9  # what can be restored is
        outputs = [llm.generate([prompt], GREEDY)[0] for prompt in PROMPTS]
        llm.engine.check()
        return [o.outputs[0].token_ids for o in outputs], llm.engine.stats


@pytest.fixture
def guarded(old, monkeypatch):
    """Between two steps nothing may wait for the device, and every operation is a point of its queue."""
    move = Runner._move_pages

    def watched(self, plan):
        with emulated_cuda.host_reads_forbidden(old):
            return move(self, plan)

    monkeypatch.setattr(Runner, "_move_pages", watched)
    return old


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_pages_go_to_the_host_and_come_back_without_a_wait_between_steps(tmp_path, guarded, family):
    folder = make_checkpoint(tmp_path / family, family)
    want, _ = answers(folder, "reference")
    with emulated_cuda.queue_watched(guarded):
        found, stats = answers(folder, "cuda_emulated", kv_host_bytes=1 << 24)
    assert found == want
    assert stats.restored_host_tokens > 0 and stats.tier_faults == 0
    assert {way for way, _ in guarded.transfers} == {"in", "out"}


def test_a_copy_that_would_read_pages_too_early_is_noticed(tmp_path, old, monkeypatch):
    """The point that the copy waits for is taken before the pages are gathered."""
    folder = make_checkpoint(tmp_path / "llama", "llama")
    device = type(old)
    record, real = device.record, transfer.start_export

    def early(session, *args):
        point = session.api.record()
        monkeypatch.setattr(device, "record", lambda self: point)
        try:
            return real(session, *args)
        finally:
            monkeypatch.setattr(device, "record", record)

    monkeypatch.setattr(transfer, "start_export", early)
    with emulated_cuda.queue_watched(old):
        _, stats = answers(folder, "cuda_emulated", kv_host_bytes=1 << 24)
    assert stats.tier_faults > 0 and stats.restored_host_tokens == 0


def test_pages_that_a_step_writes_before_they_are_copied_are_noticed(tmp_path, old, monkeypatch):
    """Without the block in between the copy reads the pages themselves while the next step fills them."""
    folder = make_checkpoint(tmp_path / "llama", "llama")
    send = type(old).transfer

    def straight(self, target, source, after):
        if self.is_pinned(target):
            source = pages[0].view(torch.uint8).flatten()[: target.nbytes]
            target = target[: source.nbytes]
        return send(self, target, source, after)

    real = transfer.start_export
    pages = []

    def noting(session, group, layers, ids):
        pages[:] = [next(layers[0].tensors())[0, ids[0]]]  # of the first head
        return real(session, group, layers, ids)

    monkeypatch.setattr(type(old), "transfer", straight)
    monkeypatch.setattr(transfer, "start_export", noting)
    _, stats = answers(folder, "cuda_emulated", kv_host_bytes=1 << 24)
    assert stats.tier_faults > 0


def test_a_step_that_does_not_wait_for_pages_to_come_in_is_noticed(tmp_path, old, monkeypatch):
    folder = make_checkpoint(tmp_path / "llama", "llama")
    want, _ = answers(folder, "reference")
    monkeypatch.setattr(type(old), "follow", lambda self, event: None)
    found, stats = answers(folder, "cuda_emulated", kv_host_bytes=1 << 24)
    assert stats.restored_host_tokens > 0
    assert found != want, "what was restored is nonsense"


GROUPS = (Group(PagedKV(2, 8), (0, 2)), Group(PagedKV(1, 12, 32), (1,)), Group(Recurrent((3, 5)), (3,)))


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8", "fp8"])
@pytest.mark.parametrize("most", [transfer.MOST, 1])
def test_pages_of_every_kind_come_back_as_they_left(old, monkeypatch, kv_dtype, most):
    """In one copy or in one for each page; the pages are written again before they have landed."""
    monkeypatch.setattr(transfer, "MOST", most)
    backend = emulated_cuda.EmulatedBackend((old,))
    [device] = backend.probe().devices
    session = backend.open(device, {"dtype": "float32"})
    spec = KVSpec(16, kv_dtype, GROUPS)
    session.kv_store(spec, 6)
    rng = np.random.default_rng(3)
    for g, group in enumerate(GROUPS):
        shapes = [[(3, *shape) for shape in group.spec.page_shapes(16)] for _ in group.states]
        sent = tuple(tuple(rng.standard_normal(s).astype(np.float32) for s in layer) for layer in shapes)
        zeros = Pages(group, 16, kv_dtype, tuple(tuple(np.zeros_like(t) for t in layer) for layer in sent))
        session.import_pages(g, [4, 0, 3], Pages(group, 16, kv_dtype, sent))
        landing = session.start_export(g, [3, 4])
        held = session.export_pages(g, [4, 0, 3]).tensors
        session.import_pages(g, [4, 0, 3], zeros)
        left = landing().tensors
        for layer, mine, theirs in zip(held, left, sent, strict=True):
            for whole, part, x in zip(layer, mine, theirs, strict=True):
                np.testing.assert_array_equal(part, whole[[2, 0]])
                rows = np.abs(x).max(axis=-1, keepdims=True)
                loss = {"float32": 0, "bfloat16": 2**-8, "int8": 1 / 200, "fp8": 2**-4}[kv_dtype if group.spec.paged else "float32"]
                assert (np.abs(whole - x) <= loss * rows).all(), "at most the rounding of the stored form"
        assert not any(t.any() for layer in session.export_pages(g, [4, 0, 3]).tensors for t in layer)
    session.close()
