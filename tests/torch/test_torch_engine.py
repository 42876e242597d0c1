"""The whole engine on the torch backend: the tokens are the reference's, under every schedule, with adapters, embeddings and beams,
and requests move to and from other backends."""

from __future__ import annotations

import numpy as np
import pytest
from peft_adapters import EVERY, make_adapter
from tiny_checkpoints import FAMILIES, make_checkpoint

from trivium import LLM, PoolingParams, SamplingParams
from trivium.engine import RequestState
from trivium.plugin import find_backends

pytest.importorskip("torch")

HERE = {status.name for status in find_backends() if status.devices}
LOAD = {"dtype": "float32", "kv_dtype": "float32", "num_kv_blocks": 96, "block_size": 16, "progress": False}
PROMPTS = [[(7 * i * i + n) % 250 for i in range(n)] for n in (1, 16, 37, 50)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
ASKED = [
    GREEDY, SamplingParams(temperature=0.9, seed=5, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=1.2, seed=6, top_k=30, top_p=0.9, min_p=0.01, max_tokens=12, ignore_eos=True, logprobs=3),
    SamplingParams(temperature=0.8, seed=7, repetition_penalty=1.3, logit_bias={7: 2.0}, max_tokens=12, ignore_eos=True),
]  # fmt: skip
SETTINGS = [
    {}, {"max_num_batched_tokens": 7}, {"block_size": 8}, {"max_num_seqs": 2},
    {"num_kv_blocks": 34, "block_size": 4, "max_model_len": 64},
    {"enable_prefix_caching": False}, {"speculative": {"method": "ngram", "num_speculative_tokens": 3}},
]  # fmt: skip


def ids(outputs):
    return [[c.token_ids for c in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    home = tmp_path_factory.mktemp("models")
    return {family: make_checkpoint(home / family, family) for family in FAMILIES}


@pytest.fixture(scope="module")
def wanted(folders):
    found = {}
    for family, folder in folders.items():
        with LLM(folder, "reference", **LOAD) as llm:
            found[family] = ids(llm.generate(PROMPTS, ASKED))
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_the_reference_s(folders, wanted, family):
    with LLM(folders[family], "torch:cpu", strict=True, **LOAD) as llm:
        assert ids(llm.generate(PROMPTS, ASKED)) == wanted[family]
        llm.engine.check()


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_no_schedule_changes_the_tokens(folders, wanted, family, settings):
    with LLM(folders[family], "torch:cpu", **{**LOAD, **settings}) as llm:
        first = ids(llm.generate(PROMPTS, ASKED))
        again = ids(llm.generate(PROMPTS, ASKED))
        if settings == {}:
            assert llm.engine.stats.cached_tokens > 0
        if "num_kv_blocks" in settings and family == "llama":  # the other's windows give pages back
            assert llm.engine.stats.preemptions > 0
        llm.engine.check()
    assert first == again == wanted[family]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bits_are_the_same_alone_and_together(folders, dtype):
    with LLM(folders["qwen3"], "torch:cpu", **{**LOAD, "dtype": dtype, "kv_dtype": "auto", "enable_prefix_caching": False}) as llm:
        assert {route.resident for route in llm.loaded.routes} == {dtype, "float32"}
        together = ids(llm.generate(PROMPTS, ASKED))
        assert together == [ids(llm.generate([p], a))[0] for p, a in zip(PROMPTS, ASKED)]


def test_int8_weights_change_little(folders):
    scored = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=1)

    def logprobs(**options):
        with LLM(folders["llama"], "torch:cpu", **{**LOAD, **options}) as llm:
            [output] = llm.generate([PROMPTS[3]], scored)
        return np.array([p[i].logprob for i, p in zip(PROMPTS[3][1:], output.prompt_logprobs[1:])])

    plain, rounded = logprobs(), logprobs(quantize="int8")
    assert 0 < np.abs(plain - rounded).mean() < 0.1


def test_beams_equal_the_reference_s(folders):
    beams = SamplingParams(max_tokens=6, beam_width=3, n=3, ignore_eos=True)
    found = []
    for backend in ("reference", "torch:cpu"):
        with LLM(folders["llama"], backend, **LOAD) as llm:
            found.append(ids(llm.generate(PROMPTS[1:3], beams)))
    assert found[0] == found[1]


def test_adapters_and_plain_requests_together_equal_the_reference_s(folders, tmp_path):
    names = {"one": make_adapter(tmp_path / "one", "llama", EVERY, seed=1), "two": make_adapter(tmp_path / "two", "llama", seed=2)}
    found = []
    for backend in ("reference", "torch:cpu"):
        with LLM(folders["llama"], backend, enable_lora=True, **LOAD) as llm:
            for name, folder in names.items():
                llm.load_adapter(name, folder)
            made = ids(llm.generate(PROMPTS, GREEDY, adapter=["one", None, "two", "one"]))
            llm.unload_adapter("one")
            found.append((made, ids(llm.generate(PROMPTS, GREEDY, adapter="two")), ids(llm.generate(PROMPTS, GREEDY))))
    assert found[0] == found[1] and found[0][1] != found[0][2]


@pytest.mark.parametrize("pooling", ["last", "mean", "cls"])
def test_embeddings_equal_the_reference_s(folders, pooling):
    found = []
    for backend in ("reference", "torch:cpu"):
        with LLM(folders["llama"], backend, max_num_batched_tokens=24, **LOAD) as llm:
            found.append(np.stack([o.embedding for o in llm.embed(PROMPTS, PoolingParams(pooling))]))
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("source", "target"), [("cpu", "torch:cpu"), ("torch:cpu", "cpu"), ("torch:cpu", "reference")])
def test_requests_move_between_backends(folders, wanted, source, target):
    if "cpu" not in HERE and "cpu" in (source, target):
        pytest.skip("the cpu backend is not built here")
    with LLM(folders["gemma3"], source, **LOAD) as first, LLM(folders["gemma3"], target, **{**LOAD, "block_size": 32}) as second:
        numbers = [first.engine.add_request(prompt, asked) for prompt, asked in zip(PROMPTS, ASKED)]
        for _ in range(5):
            first.engine.step()
        moved = [second.engine.import_request(RequestState.from_bytes(first.engine.export_request(n).to_bytes())) for n in numbers]
        done = {}
        while second.engine.has_unfinished():
            done |= {o.request_id: o for o in second.engine.step() if o.finished}
        first.engine.check()
        second.engine.check()
    assert ids([done[n] for n in moved]) == wanted["gemma3"]


@pytest.mark.weights
def test_a_real_model_knows_the_capital_of_france():
    question = [{"role": "user", "content": "What is the capital of France? Answer in one short sentence."}]
    with LLM("smollm2-135m", "torch:cpu", max_model_len=256, num_kv_blocks=32) as llm:
        assert "Paris" in llm.chat(question, SamplingParams(temperature=0.0, max_tokens=16))[0].outputs[0].text
