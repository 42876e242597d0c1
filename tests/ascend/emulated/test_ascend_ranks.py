"""Two ranks, each a process with an emulated NPU, that meet over an emulated HCCL: the ids are those of one device."""

from __future__ import annotations

from collections import Counter

import pytest
from emulated_cann import hccl
from fake_plugins import install
from tiny_checkpoints import make_checkpoint

from trivium import LLM, SamplingParams
from trivium.errors import UnsupportedError

PLUGIN = "from emulated_ranks import trivium_backend\n"
LOAD = {"num_kv_blocks": 8, "progress": False, "max_num_seqs": 4, "max_model_len": 128}
PROMPTS = [[5, 6, 7], [8], [(7 * i * i) % 250 for i in range(19)]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
ASKED = [
    GREEDY, SamplingParams(temperature=0.9, seed=5, max_tokens=3, ignore_eos=True),
    SamplingParams(temperature=1.2, seed=6, top_k=30, top_p=0.9, max_tokens=4, ignore_eos=True),
]  # fmt: skip
SIZES = {"head_dim": 128, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}


@pytest.fixture
def ranks(npu, tmp_path, monkeypatch):
    """ids(folder, options), and a folder in which the ranks note their collectives."""
    site, log = tmp_path / "site", tmp_path / "log"
    site.mkdir()
    log.mkdir()
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv(hccl.LOG, str(log))
    install(site, "ascend_emulated", PLUGIN)
    return log


def ids(folder, backend, asked=ASKED, **options):
    with LLM(folder, backend, **{**LOAD, **options}) as llm:
        found = [[c.token_ids for c in output.outputs] for output in llm.generate(PROMPTS, asked)]
        llm.engine.check()
        return found


def notes(log):
    """How often each rank did what, on which device, in which dtype."""
    return [Counter(tuple(line.split()) for line in (log / str(rank)).read_text().splitlines()) for rank in (0, 1)]


def test_two_ranks_by_heads_give_the_reference_s_ids(ranks, tmp_path):
    folder = make_checkpoint(tmp_path / "qwen3", "qwen3", **SIZES)
    exact = {"dtype": "float32", "kv_dtype": "float32"}
    found = ids(folder, "ascend_emulated", **exact, backend_options={"tensor_parallel": 2})
    assert found == ids(folder, "reference", **exact, block_size=128)
    first, second = notes(ranks)
    assert first["allreduce", "npu:0", "torch.float32"] == second["allreduce", "npu:1", "torch.float32"] > 0
    assert {name for name, *_ in first} == {name for name, *_ in second} == {"allreduce", "allgather"}


@pytest.mark.parametrize("by", ["tensor_parallel", "pipeline_parallel"])
def test_two_ranks_in_16_bits_give_the_ids_of_one_device(ranks, tmp_path, by):
    """With the fused operators, whose heads, layers and pages are those of the rank."""
    folder = make_checkpoint(tmp_path / "llama", "llama", **SIZES)
    found = ids(folder, "ascend_emulated", GREEDY, dtype="float16", backend_options={by: 2})
    assert found == ids(folder, "ascend", GREEDY, dtype="float16")
    first, second = notes(ranks)
    names = {name for name, *_ in first}, {name for name, *_ in second}
    by_layers = by == "pipeline_parallel"
    assert names == (({"send"}, {"recv"}) if by_layers else ({"allreduce", "allgather"},) * 2)
    assert {kind for _, _, kind in first} <= {"torch.float16", "torch.float32"}


def test_pages_of_ranks_are_those_of_one_device(ranks, tmp_path):
    folder = make_checkpoint(tmp_path / "llama", "llama", **SIZES)
    exact = {"dtype": "float32", "kv_dtype": "float32"}
    two = {"backend_options": {"tensor_parallel": 2}}
    found = ids(folder, "ascend_emulated", **exact, prefill="reference", **two)
    assert found == ids(folder, "reference", **exact, block_size=128)


def test_what_ranks_do_not_hold_is_refused(ranks, tmp_path):
    folder = make_checkpoint(tmp_path / "llama", "llama", **SIZES)
    with pytest.raises(UnsupportedError, match="can't be held as w8a8 by a group of ranks"):
        ids(folder, "ascend_emulated", dtype="float16", quantize="w8a8", backend_options={"tensor_parallel": 2})
