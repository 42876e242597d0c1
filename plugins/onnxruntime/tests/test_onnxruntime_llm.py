"""The onnxruntime backend under LLM: found by its entry point, adapters, embeddings, log probabilities, a real model."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from trivium import LLM, SamplingParams
from trivium.errors import BackendNotFoundError
from trivium.plugin import find_plugins, resolve

pytest.importorskip("onnxruntime")
pytest.importorskip("onnx")
checkpoints = pytest.importorskip("tiny_checkpoints", reason="trivium's own test helpers are not on the path")
adapters = pytest.importorskip("peft_adapters", reason="trivium's own test helpers are not on the path")

LOAD = {"kv_dtype": "float32", "num_kv_blocks": 96, "max_num_batched_tokens": 24, "progress": False, "block_size": 16}
PROMPTS = [[(7 * i * i + n) % 250 for i in range(n)] for n in (1, 16, 37)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(autouse=True)
def installed(tmp_path_factory, monkeypatch):
    """The plugin's entry point, if it is not installed here."""
    if "onnxruntime" in find_plugins():
        return
    info = tmp_path_factory.mktemp("site") / "trivium_onnxruntime-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: trivium-onnxruntime\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[trivium]\nonnxruntime = trivium_onnxruntime.plugin\n")
    monkeypatch.setattr(sys, "path", [str(info.parent), *sys.path])


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A llama and two adapters of different ranks and modules."""
    folder = tmp_path_factory.mktemp("home")
    checkpoints.make_checkpoint(folder / "model", "llama")
    adapters.make_adapter(folder / "one", "llama", rank=4, seed=1)
    adapters.make_adapter(folder / "two", "llama", adapters.ATTENTION[:3], rank=7, seed=2)
    return folder


def test_devices_are_asked_for_by_provider_and_never_replaced():
    assert resolve("onnxruntime:cpu")[1].name == "cpu"
    with pytest.raises(BackendNotFoundError, match="cuda:0"):
        resolve("onnxruntime:cuda:0")


def adapted(home, backend):
    """Ids of every prompt with each adapter and without, in one batch."""
    with LLM(home / "model", backend, enable_lora=True, **LOAD) as llm:
        for name in ("one", "two"):
            llm.load_adapter(name, home / name)
        streams = [llm.stream(p, GREEDY, adapter=name) for p in PROMPTS for name in (None, "one", "two")]
        first = [next(stream) for stream in streams]
        return [[t for o in (one, *rest) for t in o.outputs[0].token_ids] for one, rest in zip(first, streams)]


def test_adapters_give_the_references_ids(home):
    found = adapted(home, "onnxruntime")
    assert found == adapted(home, "reference")
    assert len({tuple(ids) for ids in found}) > len(PROMPTS)


def test_embeddings_and_logprobs_are_close_to_the_references(home):
    scored = SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=3, logprobs=2, ignore_eos=True)
    seen = []
    for backend in ("onnxruntime", "reference"):
        with LLM(home / "model", backend, **LOAD) as llm:
            vectors = [o.embedding for o in llm.embed(PROMPTS)]
            outputs = llm.generate(PROMPTS, scored)
            chosen = [[next(iter(t.values())).logprob for t in o.outputs[0].logprobs] for o in outputs]
            seen.append((np.array(vectors), np.array(chosen), [o.outputs[0].token_ids for o in outputs]))
    (mine, logprobs, ids), (theirs, wanted, right) = seen
    np.testing.assert_allclose(mine, theirs, atol=1e-5)
    np.testing.assert_allclose(logprobs, wanted, atol=1e-4)
    assert ids == right


@pytest.mark.weights
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_smollm2_knows_the_capital(quantize):
    with LLM("smollm2-135m", "onnxruntime", quantize=quantize, max_model_len=256, progress=False) as llm:
        question = {"role": "user", "content": "What is the capital of France? Answer in one short sentence."}
        [output] = llm.chat([question], SamplingParams(temperature=0.0, max_tokens=20))
    assert "Paris" in output.outputs[0].text
