"""Steps beyond one plain token a sequence as graphs, over an emulated device: drafts that are verified, and adapters."""

from __future__ import annotations

import warnings

import emulated_cuda
import pytest
from peft_adapters import EVERY, make_adapter
from tiny_checkpoints import make_checkpoint
from trivium_cuda import sampler
from trivium_cuda.graphs import GraphExecutable

from trivium import LLM, SamplingParams

NARROW = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 48}
LOAD = {
    "dtype": "float32", "kv_dtype": "float32", "block_size": 16, "progress": False, "max_model_len": 40, "num_kv_blocks": 12,
    "max_num_seqs": 2, "max_num_batched_tokens": 8,
}  # fmt: skip
AGAIN = [[5, 6, 7, 5, 6, 7, 5, 6], [9, 9, 9, 9]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
SAME = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logit_bias={7: 50.0, 9: 40.0})
"""A token that comes again and again: first the drafts after it are wrong, those of the prompt, and then right."""


def ids(outputs):
    return [c.token_ids for output in outputs for c in output.outputs]


@pytest.fixture
def steps(emulated, monkeypatch):
    """(tokens, sequences, graphs replayed) of every step, none of which may wait for the device."""
    monkeypatch.setattr(sampler, "_by_triton", sampler._by_torch)  # the interpreter takes long over it, and it is not captured
    run, seen = GraphExecutable.run, []

    def guarded(self, batch):
        before = emulated.replays
        with emulated_cuda.host_reads_forbidden(emulated):
            step = run(self, batch)
        seen.append((batch.tokens, batch.seqs, emulated.replays - before))
        return step

    monkeypatch.setattr(GraphExecutable, "run", guarded)
    return seen


def test_steps_that_verify_drafts_are_replayed_and_the_tokens_stay(tmp_path, emulated, steps):
    folder = make_checkpoint(tmp_path / "llama", "llama", **NARROW)
    drafts = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1, "adaptive": False}
    with LLM(folder, "reference", **LOAD) as llm:
        want = ids(llm.generate(AGAIN, [SAME, GREEDY]))
    options = {**LOAD, "backend_options": {"graph_sizes": (2, 6)}}
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        warnings.filterwarnings("ignore", "overflow", RuntimeWarning)  # the interpreter's whole numbers
        llm = LLM(folder, "cuda_emulated", speculative=drafts, strict=True, **options)
    with llm:
        assert llm.loaded.session.graph_queries == 3
        assert ids(llm.generate(AGAIN, [SAME, GREEDY])) == want
        assert 0 < llm.engine.stats.accepted_tokens < llm.engine.stats.draft_tokens
        llm.engine.check()
    verified = [replayed for tokens, seqs, replayed in steps if seqs < tokens <= 3 * seqs]
    assert verified and all(verified), "steps of several tokens a sequence are captured"
    assert {replayed for tokens, seqs, replayed in steps if tokens > 6} == {0}, "a step that fits no graph is not"


def test_without_drafts_only_one_token_a_sequence_is_captured(tmp_path, emulated, steps):
    folder = make_checkpoint(tmp_path / "llama", "llama", **NARROW)
    with LLM(folder, "cuda_emulated", **LOAD) as llm:
        llm.generate([[5, 6], [7]], SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))
    assert {(tokens, seqs): replayed for tokens, seqs, replayed in steps} == {(3, 2): 0, (2, 2): 1}


def test_steps_with_adapters_are_replayed_and_the_tokens_stay(tmp_path, emulated, steps):
    folder = make_checkpoint(tmp_path / "llama", "llama", **NARROW)
    adapters = {"one": make_adapter(tmp_path / "one", "llama", EVERY, seed=1, sizes=NARROW)}
    found = []
    for backend in ("reference", "cuda_emulated"):
        with LLM(folder, backend, enable_lora=True, max_loras=2, max_lora_rank=8, **LOAD) as llm:
            for name, adapter in adapters.items():
                llm.load_adapter(name, adapter)
            found.append(ids(llm.generate(AGAIN, GREEDY, adapter=["one", None])))
    with LLM(folder, "reference", **LOAD) as llm:
        plain = ids(llm.generate(AGAIN, GREEDY))
    assert found[0] == found[1]
    assert found[0][1] == plain[1] and found[0][0] != plain[0]
    assert [replayed for tokens, seqs, replayed in steps if tokens == seqs] and all(r for t, s, r in steps if t == s)
