"""Decode steps as NPU graphs: the same tokens as call by call, padded up to the captured sizes, within what the device has."""

from __future__ import annotations

import warnings

import pytest
from tiny_checkpoints import make_checkpoint

from trivium import LLM, SamplingParams

LOAD = {"progress": False, "strict": True, "dtype": "float16", "kv_dtype": "float16", "num_kv_blocks": 24, "max_model_len": 256}
PROMPTS = [[(7 * i * i + n) % 250 for i in range(n)] for n in (1, 37, 130)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
FIA = "aclnnFusedInferAttentionScoreV4"
MODELS = {
    "wide heads": ("llama", {"head_dim": 128}), "narrow heads": ("llama", {"head_dim": 64}),
    "window": ("mistral", {"head_dim": 128, "sliding_window": 20}), "two windows": ("gemma3", {"head_dim": 32}),
    "soft cap": ("gemma2", {"head_dim": 32}),
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    home = tmp_path_factory.mktemp("models")
    return {name: make_checkpoint(home / name, family, **sizes) for name, (family, sizes) in MODELS.items()}


@pytest.fixture(scope="module")
def wanted(folders):
    found = {}
    for name, folder in folders.items():
        options = {**LOAD, "dtype": "float32", "kv_dtype": "float32", "num_kv_blocks": 60, "block_size": 16}
        with LLM(folder, "torch:cpu", **options) as llm:
            found[name] = ids(llm.generate(PROMPTS, GREEDY))
    return found


def ids(outputs):
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("model", [name for name in MODELS if name != "soft cap"])
def test_captured_steps_give_the_same_tokens(npu, folders, wanted, model):
    """Three sequences in a graph of four."""
    with LLM(folders[model], "ascend", max_num_seqs=4, **LOAD) as llm:
        assert [graph.size for graph in llm.loaded.executable.graphs] == [1, 2, 4]
        npu.log.clear()
        assert ids(llm.generate(PROMPTS, GREEDY)) == wanted[model]
        llm.engine.check()
    layers = 4 if model == "two windows" else 2
    assert npu.log.count("aclnnScatterPaKvCache") == layers  # the prefill; what follows is replayed
    assert npu.log.ran.count("aclnnScatterPaKvCache") == 8 * layers


def test_lengths_of_a_replay_are_those_of_the_step(npu, folders, wanted, monkeypatch):
    """With those of its capture instead, the tokens are others."""
    from trivium_ascend.graphs import Group

    fill = Group.fill

    def stale(self, *args):
        fill(self, *args)
        self.lengths[:] = [1] * self.size

    monkeypatch.setattr(Group, "fill", stale)
    with LLM(folders["wide heads"], "ascend", max_num_seqs=4, **LOAD) as llm:
        assert ids(llm.generate(PROMPTS, GREEDY)) != wanted["wide heads"]


def test_fewer_graphs_than_asked_for_warn_and_run_eagerly(npu, folders, wanted, monkeypatch):
    monkeypatch.setattr(npu, "graph_limit", 1)
    with pytest.warns(RuntimeWarning, match="batch size 2 could not be captured and runs eagerly"):
        llm = LLM(folders["wide heads"], "ascend", max_num_seqs=4, **LOAD)
    with llm:
        assert [graph.size for graph in llm.loaded.executable.graphs] == [4]
        assert ids(llm.generate(PROMPTS, GREEDY)) == wanted["wide heads"]


def test_a_model_without_fused_attention_says_so_once_and_runs_eagerly(npu, folders, wanted):
    with pytest.warns(RuntimeWarning, match="not captured but run call by call: paged_attention is not one fused operator"):
        llm = LLM(folders["soft cap"], "ascend", max_num_seqs=4, **LOAD)
    with llm:
        assert not llm.loaded.executable.graphs
        assert ids(llm.generate(PROMPTS, GREEDY)) == wanted["soft cap"]


def test_graphs_are_bounded_by_the_chip_s_streams(npu):
    from trivium_ascend.plugin import AscendBackend

    backend = AscendBackend()
    can = backend.capabilities(backend.probe().devices[0])
    assert can.graph_capture and can.max_graphs // can.graph_cost(80) == 22


@pytest.mark.parametrize("model", ["wide heads", "window"])
def test_a_device_that_lags_behind_changes_nothing(emulated, folders, wanted, model):
    """Tasks wait until the host synchronises: an id that was read, or memory that was reused, too early would show."""
    from emulated_cann import late_device

    drawn = SamplingParams(temperature=0.8, seed=3, max_tokens=8, ignore_eos=True)
    with LLM(folders[model], "ascend", max_num_seqs=4, **LOAD) as llm:
        prompt = llm.generate(PROMPTS, drawn)
    with late_device(), LLM(folders[model], "ascend", max_num_seqs=4, **LOAD) as llm:
        assert ids(llm.generate(PROMPTS, GREEDY)) == wanted[model]
        assert ids(llm.generate(PROMPTS, drawn)) == ids(prompt)
        llm.engine.check()


def test_nothing_is_captured_that_the_user_did_not_get_a_warning_for(npu, folders):
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        with LLM(folders["wide heads"], "ascend", max_num_seqs=4, **LOAD) as llm:
            assert len(llm.loaded.executable.graphs) == 3
