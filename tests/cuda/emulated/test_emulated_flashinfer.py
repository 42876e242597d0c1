"""The optional package flashinfer, by one of its interface: what it is told, when it is taken, and that it is never needed."""

from __future__ import annotations

import importlib
import warnings
from types import SimpleNamespace

import emulated_cuda
import fake_flashinfer
import numpy as np
import pytest
import torch
from fake_flashinfer import Wrapper
from tiny_checkpoints import make_checkpoint, tiny_config
from trivium_cuda import flashinfer, table
from trivium_cuda.session import DevicePaged, Reads
from trivium_torch.pages import Bytes, Floats, GroupStep

from trivium import LLM, SamplingParams
from trivium.models import build
from trivium.plugin import select_kernels


@pytest.fixture
def installed(monkeypatch):
    """What stands in for the package."""
    monkeypatch.setattr(flashinfer, "find_spec", lambda name: object() if name == "flashinfer" else None)
    monkeypatch.setattr(flashinfer, "importlib", SimpleNamespace(import_module=lambda name: fake_flashinfer))
    for name, value in {"plans": [], "runs": [], "off": 0.0}.items():
        monkeypatch.setattr(Wrapper, name, value)
    return fake_flashinfer


def opened(**options):
    backend = emulated_cuda.EmulatedBackend((emulated_cuda.EmulatedDevice(),))
    [device] = backend.probe().devices
    return backend.open(device, {"dtype": "float16", **options})


def own(session):
    return [k.name for k in session.kernels if k.name.startswith("flashinfer")]


def state(starts, contexts, table_rows, page_size=16, heads=2, n=64, make=Floats):
    """Random pages of float16 and a step of sequences over them."""
    draw, starts, contexts = torch.Generator().manual_seed(2), np.array(starts, np.int32), np.array(contexts, np.int32)
    rows = torch.randn((2, heads, 8 * page_size, n), generator=draw).to(torch.float16)
    blocks = np.array(table_rows, np.int32)
    where = (torch.from_numpy(a) for a in (blocks, np.full(starts[-1], -1, np.int64), starts, contexts))
    reads = Reads(*where, max_query=int(np.diff(starts).max()), max_context=int(contexts.max()))
    step = GroupStep(blocks, np.full(starts[-1], -1, np.int64), starts, contexts, page_size, 7 * page_size, torch.from_numpy)
    return DevicePaged(make((rows[0],)), make((rows[1],)), step, reads, page_size)


def attend(session, kv, *, heads=8, **attrs):
    q = torch.randn((int(kv.reads.query_starts[-1]), heads, 64), generator=torch.Generator().manual_seed(5)).to(torch.float16)
    args = q, kv, kv.reads.query_starts, kv.reads.context_lens, None
    return args, {"scale": 0.125, "window": None, "softcap": None, "causal": True, **attrs}


@pytest.mark.parametrize("starts", [(0, 1, 2), (0, 4, 5)], ids=["decodes", "a chunk and a decode"])
@pytest.mark.parametrize(("heads", "attrs"), [(8, {}), (2, {"window": 5}), (4, {"softcap": 2.0, "scale": 0.3})], ids=str)
def test_what_it_is_told_means_what_triton_computes(installed, starts, heads, attrs):
    """Pages out of order; with a window the table has none for what is out of sight."""
    session = opened()
    kv = state(starts, (37, 16), [[6, 1, 3], [2, 0, 0]] if "window" not in attrs else [[-1, 1, 3], [2, -1, -1]])
    args, attrs = attend(session, kv, heads=heads, **attrs)
    [run] = [k.run for k in session.kernels if k.name == "flashinfer paged_attention"]
    Wrapper.plans.clear()
    got, want = run(session, args, attrs), table.paged_attention(session, args, attrs)
    torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)
    assert run(session, args, attrs).shape == got.shape
    [told] = Wrapper.plans
    assert told["kind"].startswith("BatchDecode" if starts == (0, 1, 2) else "BatchPrefill"), "planned once for all layers"
    assert Wrapper.runs[-1][1][0].data_ptr() == kv.k.parts[0].data_ptr(), "pages are views"


def test_graphs_and_pages_of_bytes_are_triton_s(installed):
    session = opened()
    [run] = [k.run for k in session.kernels if k.name == "flashinfer paged_attention"]
    kv = state((0, 1, 2), (37, 16), [[6, 1, 3], [2, 0, 0]])
    args, attrs = attend(session, kv)
    Wrapper.runs.clear()
    session.capturing = True
    assert torch.equal(run(session, args, attrs), table.paged_attention(session, args, attrs))
    session.capturing = False
    numbers, scales = Bytes.rounded(kv.k.parts[0].transpose(0, 1))
    kept = Bytes((numbers.contiguous(), scales.contiguous()))
    given = (args[0], DevicePaged(kept, kept, kv.step, kv.reads, 16), *args[2:])
    assert torch.equal(run(session, given, attrs), table.paged_attention(session, given, attrs))
    assert not Wrapper.runs


@pytest.mark.parametrize(
    ("options", "off", "reason"),
    [
        ({}, 0.0, None),
        ({"dtype": "float32"}, 0.0, None),
        ({"batch_invariant": True}, 0.0, None),
        ({}, 0.1, "it is off by 0.1|is off by"),
        ({}, "broken", "on emulated it failed: no compiler"),
    ],
    ids=str,
)
def test_it_is_used_where_it_was_compared_and_agrees(installed, options, off, reason, monkeypatch):
    if off == "broken":

        def broken(*args, **kwargs):
            raise RuntimeError("no compiler")

        monkeypatch.setattr(Wrapper, "run", broken)
    else:
        monkeypatch.setattr(Wrapper, "off", off)
    if reason is None:
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            warnings.filterwarnings("ignore", module="triton")
            names = own(opened(**options))
        assert names == ([] if options else ["flashinfer paged_attention"])
    else:
        with pytest.warns(RuntimeWarning, match=f"flashinfer is not used: .*({reason})"):
            assert own(opened(**options)) == []


def test_without_it_nothing_is_said_and_what_can_not_be_imported_is_warned_of(monkeypatch):
    assert importlib.util.find_spec("flashinfer") is not None or flashinfer.kernels() == ()
    monkeypatch.setattr(flashinfer, "find_spec", lambda name: object())

    def broken(name):
        raise OSError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr(flashinfer, "importlib", SimpleNamespace(import_module=broken))
    with pytest.warns(RuntimeWarning, match=r"can't be imported, and is not used: libcudart\.so\.13"):
        assert own(opened()) == []


def test_explain_names_it_and_says_why_not(installed, emulated):
    backend = emulated_cuda.backend()
    [device] = backend.probe().devices
    for size, chosen in ((64, "flashinfer paged_attention"), (16, "triton paged_attention")):
        program = build(tiny_config("llama", head_dim=size))
        choice = next(c for c in select_kernels(program, backend.kernels(device)) if c.call.name == "paged_attention")
        assert choice.kernel.name == chosen
    assert [why for _, why in choice.refused] == ["heads of 16 numbers; it has 64, 128, 256"]


def test_a_model_answers_the_same_with_it_and_reads_pages_through_it(tmp_path, emulated, installed, monkeypatch):
    folder = make_checkpoint(tmp_path / "llama", "llama", num_hidden_layers=1, head_dim=64)
    load = {
        "dtype": "float16", "kv_dtype": "float16", "block_size": 16, "progress": False, "max_model_len": 32, "num_kv_blocks": 8,
        "max_num_seqs": 2, "max_num_batched_tokens": 4, "backend_options": {"graph_sizes": ()},
    }  # fmt: skip
    asked, found = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=1), []
    for there in (True, False):
        if not there:
            monkeypatch.setattr(flashinfer, "find_spec", lambda name: None)
        with LLM(folder, "cuda_emulated", **load) as llm:
            Wrapper.plans.clear()
            outputs = llm.generate([[5, 6, 7, 8, 9], [3]], asked)
        kinds = {told["kind"] for told in Wrapper.plans}
        assert kinds == ({"BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"} if there else set())
        found.append([[max(p.logprob for p in at.values()) for at in o.outputs[0].logprobs] for o in outputs])
    np.testing.assert_allclose(found[0], found[1], atol=0.02)
