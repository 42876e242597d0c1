"""What else the engine asks of a backend, on trivium_cuda over an emulated device: adapters, embeddings, beams, speculation, tiers,
and requests that move. On a device too old for Triton, where only the steps are this backend's own."""

from __future__ import annotations

import emulated_cuda
import numpy as np
import pytest
from peft_adapters import EVERY, make_adapter
from tiny_checkpoints import make_checkpoint
from trivium_cuda.executor import QueuedExecutable

from trivium import LLM, PoolingParams, SamplingParams
from trivium.engine import RequestState

LOAD = {"dtype": "float32", "kv_dtype": "float32", "num_kv_blocks": 48, "block_size": 16, "progress": False, "max_num_seqs": 4}
PROMPTS = [[(7 * i * i + n) % 250 for i in range(n)] for n in (1, 16, 37, 50)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
BACKENDS = ("reference", "cuda_emulated")


@pytest.fixture
def folder(tmp_path, emulated, monkeypatch):
    monkeypatch.setattr(emulated_cuda, "DEVICES", (emulated_cuda.EmulatedDevice((7, 5)),))
    return make_checkpoint(tmp_path / "llama", "llama")


def ids(outputs):
    return [[c.token_ids for c in output.outputs] for output in outputs]


def test_adapters_and_plain_requests_together(folder, tmp_path):
    names = {"one": make_adapter(tmp_path / "one", "llama", EVERY, seed=1), "two": make_adapter(tmp_path / "two", "llama", seed=2)}
    found = []
    for backend in BACKENDS:
        with LLM(folder, backend, enable_lora=True, **LOAD) as llm:
            for name, adapter in names.items():
                llm.load_adapter(name, adapter)
            made = ids(llm.generate(PROMPTS, GREEDY, adapter=["one", None, "two", "one"]))
            llm.unload_adapter("one")
            found.append((made, ids(llm.generate(PROMPTS, GREEDY, adapter="two"))))
    assert found[0] == found[1] and found[0][0] != found[0][1]


def test_embeddings(folder):
    found = []
    for backend in BACKENDS:
        with LLM(folder, backend, max_num_batched_tokens=24, **LOAD) as llm:
            found.append(np.stack([o.embedding for o in llm.embed(PROMPTS, PoolingParams("mean"))]))
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4, atol=1e-5)


ENCODERS = {
    "BertModel": {"hidden_act": "gelu", "type_vocab_size": 2, "sep_token_id": 7},
    "ModernBertModel": {"hidden_activation": "gelu", "local_attention": 8, "num_hidden_layers": 4},
    "Qwen3ForSequenceClassification": {"num_labels": 1},
}


@pytest.mark.parametrize("architecture", ENCODERS)
def test_encoders_and_classifiers_whose_steps_wait_for_nothing(folder, tmp_path, architecture, monkeypatch):
    run = QueuedExecutable.run

    def guarded(self, batch):
        with emulated_cuda.host_reads_forbidden(emulated_cuda.DEVICES[0]):
            return run(self, batch)

    monkeypatch.setattr(QueuedExecutable, "run", guarded)
    made = make_checkpoint(tmp_path / "encoder", "llama", architectures=[architecture], **ENCODERS[architecture])
    found = []
    pageless = {name: value for name, value in LOAD.items() if name not in ("num_kv_blocks", "block_size")}
    for backend in BACKENDS:
        with LLM(made, backend, max_num_batched_tokens=64, **pageless) as llm:
            found.append(np.stack([o.embedding for o in llm.embed([*PROMPTS, [5, 7, 6, 7, 9]])]))
            llm.engine.check()
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4, atol=1e-5)
    assert len(np.unique(found[0].round(4), axis=0)) == len(PROMPTS) + 1


@pytest.mark.parametrize(
    "options",
    [{"speculative": {"method": "ngram", "num_speculative_tokens": 3}}, {"num_kv_blocks": 12}, {"kv_host_bytes": 1 << 24}],
    ids=str,
)
def test_drafts_and_preemption_and_tiers(folder, options):
    found = []
    for backend in BACKENDS:
        with LLM(folder, backend, **{**LOAD, "max_model_len": 96, **options}) as llm:
            found.append((ids(llm.generate(PROMPTS, GREEDY)), ids(llm.generate(PROMPTS, GREEDY))))
            llm.engine.check()
    assert found[0] == found[1]


def test_beams(folder):
    beams = SamplingParams(max_tokens=5, beam_width=3, n=3, ignore_eos=True)
    found = []
    for backend in BACKENDS:
        with LLM(folder, backend, **LOAD) as llm:
            found.append(ids(llm.generate(PROMPTS[1:3], beams)))
    assert found[0] == found[1]


@pytest.mark.parametrize(("source", "target"), [BACKENDS, BACKENDS[::-1]])
def test_requests_move_with_their_pages(folder, source, target):
    with LLM(folder, "reference", **LOAD) as llm:
        wanted = ids(llm.generate(PROMPTS, GREEDY))
    with LLM(folder, source, **LOAD) as first, LLM(folder, target, **LOAD) as second:
        numbers = [first.engine.add_request(prompt, GREEDY) for prompt in PROMPTS]
        for _ in range(5):
            first.engine.step()
        states = [first.engine.export_request(n).to_bytes() for n in numbers]
        moved = [second.engine.import_request(RequestState.from_bytes(state)) for state in states]
        done = {}
        while second.engine.has_unfinished():
            done |= {o.request_id: o for o in second.engine.step() if o.finished}
        while first.engine.has_unfinished():
            first.engine.step()
        first.engine.check()
        second.engine.check()
    assert ids([done[n] for n in moved]) == wanted
