"""Keys and values in 8 bits on trivium_cuda over an emulated device: what Triton's kernels store is what trivium_torch's do."""

from __future__ import annotations

import dataclasses

import emulated_cuda
import numpy as np
import pytest
import torch
from tiny_checkpoints import make_checkpoint
from trivium_cuda import sampler
from trivium_torch.pages import Bytes, Eights

from trivium import LLM, SamplingParams
from trivium.conformance import collect_checks
from trivium.conformance.lab import Lab
from trivium.ops.state import kv_int8

NARROW = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 48}
LOAD = {
    "dtype": "float32", "block_size": 16, "progress": False, "max_model_len": 40, "num_kv_blocks": 12, "max_num_seqs": 2,
    "max_num_batched_tokens": 8,
}  # fmt: skip


def nearest_e4m3(x):
    """By search among all numbers of e4m3; of two the one with the even code."""
    codes = np.arange(128)
    exponent, fraction = codes >> 3, codes & 7
    sizes = np.where(exponent, (8 + fraction) * 2.0 ** (exponent - 10), fraction * 2.0**-9)[:127]  # the last is no number
    distance = np.abs(np.abs(x)[..., None].astype(np.float64) - sizes)
    best = distance.min(axis=-1, keepdims=True)
    found = np.where(distance == best, np.arange(127) + 1000 * (np.arange(127) & 1), 1 << 20).argmin(axis=-1)
    return np.copysign(sizes[found], x)


def kept_in_fp8(x):
    scale = torch.from_numpy(np.abs(x).max(axis=-1, keepdims=True) / np.float32(448)).to(torch.bfloat16).float().numpy()
    return nearest_e4m3(np.clip(x / np.where(scale == 0, np.inf, scale), -448, 448)).astype(np.float32) * scale


@pytest.mark.parametrize(("kind", "meant"), [(Eights, kept_in_fp8), (Bytes, kv_int8)])
def test_a_row_is_kept_as_the_nearest_numbers_times_its_scale_and_written_back_as_it_is(kind, meant):
    x = np.random.default_rng(2).standard_normal((6, 2, 24)).astype(np.float32) * np.array([1e-3, 1, 7, 300, 0, 1])[:, None, None]
    x = x.astype(np.float32)
    parts = [torch.zeros(2, 16, n, dtype=dtype) for n, dtype in kind.dtypes(24, "")]
    slots = torch.tensor([3, 0, 15, 7, 8, 9])
    store = kind(tuple(parts))
    store.write(slots, torch.from_numpy(x))
    first = store.read(slots[None])[:, 0].transpose(0, 1)
    np.testing.assert_array_equal(first.numpy(), meant(x))
    store.write(slots, first)
    assert torch.equal(store.read(slots[None])[:, 0].transpose(0, 1), first)


@pytest.mark.parametrize("kv_dtype", ["fp8", "int8"])
def test_the_same_pages_whether_triton_or_torch_writes_them(tmp_path, emulated, kv_dtype, monkeypatch):
    """Prompts of one chunk, so that what is stored does not depend on what was read."""
    monkeypatch.setattr(sampler, "_by_triton", sampler._by_torch)
    folder = make_checkpoint(tmp_path / "llama", "llama", **NARROW)
    found = []
    for capability in ((9, 0), (7, 5)):
        monkeypatch.setattr(emulated_cuda, "DEVICES", (emulated_cuda.EmulatedDevice(capability),))
        with LLM(folder, "cuda_emulated", kv_dtype=kv_dtype, **LOAD) as llm:
            engine = llm.engine
            engine.add_request([5, 6, 7, 8, 9], SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))
            outputs = []
            while engine.has_unfinished():
                outputs += [o.outputs[0].token_ids for o in engine.step() if o.finished]
            found.append((outputs, llm.loaded.session.export_pages(0, range(12)).tensors))
    assert found[0][0] == found[1][0]
    for mine, theirs in zip(found[0][1][0], found[1][1][0], strict=True):
        assert mine.any()
        np.testing.assert_allclose(mine, theirs, atol=np.abs(theirs).max() / 16)  # a code more or less where sums differ
        assert (mine != theirs).mean() < 0.01


def test_the_kit_judges_pages(monkeypatch):
    monkeypatch.setattr(sampler, "_by_triton", sampler._by_torch)
    backend = emulated_cuda.EmulatedBackend((emulated_cuda.EmulatedDevice(),))
    [device] = backend.probe().devices
    can = dataclasses.replace(backend.capabilities(device), page_sizes=(16,))
    lab = Lab(backend, device, can, backend.kernels(device), {"dtype": "float32"})
    rows = {check.name: check.run() for check in collect_checks(lab, ["pages"])}
    assert rows and {name: row.detail for name, row in rows.items() if row.status == "failed"} == {}
