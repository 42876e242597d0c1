"""How much memory the pages get, and steps that lack some, over an emulated device too old for Triton."""

from __future__ import annotations

import emulated_cuda
import pytest
import torch
from tiny_checkpoints import make_checkpoint, tiny_config
from trivium_cuda import transfer

from trivium import LLM, SamplingParams
from trivium.errors import CapacityError

LOAD = {"dtype": "float32", "kv_dtype": "float32", "block_size": 16, "progress": False, "max_model_len": 96, "max_num_seqs": 4}
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture
def old(emulated, monkeypatch):
    device = emulated_cuda.EmulatedDevice((7, 5), total=1 << 20)
    monkeypatch.setattr(emulated_cuda, "DEVICES", (device,))
    return device


@pytest.fixture
def peaks(old, monkeypatch):
    """What the largest steps took."""
    peak, found = emulated_cuda.EmulatedDevice.peak, []
    monkeypatch.setattr(emulated_cuda.EmulatedDevice, "peak", lambda self, run: found.append(peak(self, run)) or found[-1])
    return found


def test_pages_get_their_share_of_what_the_largest_step_leaves(tmp_path, old, peaks):
    folder = make_checkpoint(tmp_path / "llama", "llama")
    config, pages = tiny_config("llama"), []
    for tokens in (16, 256):
        with LLM(folder, "cuda_emulated", max_num_batched_tokens=tokens, **{**LOAD, "max_num_seqs": 64}) as llm:
            session, loaded = llm.loaded.session, llm.loaded
            each = session.page_bytes(loaded.kv_spec)
            assert loaded.num_pages == int((old.free - peaks[-1]) * loaded.capabilities.memory_share) // each
            assert session.memory().kv >= loaded.num_pages * each
            pages.append(loaded.num_pages)
            assert len(llm.generate([[5, 6, 7]], GREEDY)[0].outputs[0].token_ids) == 6
            llm.engine.check()
        gates = 2 * 4 * tokens * config["intermediate_size"]
        assert gates < peaks[-1] < 40 * gates, "both halves of a gated block are there at once"
    assert pages[0] > pages[1] > 0


def test_a_step_that_leaves_nothing_for_pages_is_refused_with_the_numbers(tmp_path, old, peaks):
    folder = make_checkpoint(tmp_path / "llama", "llama")
    old.free = 1 << 16
    with pytest.raises(CapacityError, match="hold no sequence at all"):
        LLM(folder, "cuda_emulated", max_num_batched_tokens=256, **LOAD)
    assert peaks[-1] > old.free


def test_pages_that_were_asked_for_are_not_measured(tmp_path, old, peaks):
    folder = make_checkpoint(tmp_path / "llama", "llama")
    with LLM(folder, "cuda_emulated", num_kv_blocks=30, **LOAD) as llm:
        assert llm.loaded.num_pages == 30 and peaks == []


def test_pages_that_find_no_memory_to_come_back_through_undo_their_step_alone(tmp_path, old, monkeypatch):
    folder = make_checkpoint(tmp_path / "llama", "llama")
    prefix = [3 + i * 7 % 250 for i in range(40)]
    prompts = [[*prefix, 9], *[[i + j % 90 for j in range(50)] for i in range(3, 6)], [*prefix, 11]]
    bring, faults = transfer._bring, [True]

    def short_of_memory(*args):
        if faults:
            faults.pop()
            raise torch.OutOfMemoryError("no memory")
        return bring(*args)

    monkeypatch.setattr(transfer, "_bring", short_of_memory)
    options, found = {**LOAD, "num_kv_blocks": 10}, []
    for backend, more in (("reference", {}), ("cuda_emulated", {"kv_host_bytes": 1 << 24})):
        with LLM(folder, backend, **options, **more) as llm:
            if more:
                llm.engine.kv.tiers.prefill.seconds = lambda tokens: 1e9  # what can be restored is
            found.append([llm.generate([prompt], GREEDY)[0].outputs[0].token_ids for prompt in prompts])
            llm.engine.check()
            failed, released = llm.engine.stats.failed_steps, old.released
    assert found[0] == found[1] and not faults
    assert failed == 1 and released == 1
