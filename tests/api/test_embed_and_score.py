"""LLM.embed and LLM.loglikelihood on both backends, against transformers; the limits of a scored prompt."""

from __future__ import annotations

import asyncio

import day_one_chip
import numpy as np
import pytest
from fake_plugins import install
from model_cases import load_oracle
from tiny_checkpoints import FAMILIES, make_checkpoint

from trivium import LLM, AsyncLLM, PoolingParams, SamplingParams
from trivium.errors import ContextLengthError, InvalidRequestError, UnsupportedError
from trivium.plugin import HostFallbackWarning

BACKENDS = ["reference", "cpu"]
LOAD = {"dtype": "float32", "kv_dtype": "float32", "num_kv_blocks": 64, "progress": False}
PROMPTS = [[(7 * i * i + n) % 250 for i in range(n)] for n in (1, 16, 37, 50)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PAIRS = [
    ("The sky", " is blue"), ("a", "b"), ("trailing blanks  ", "count"), ("", "no context"), ("Ünï", "cöde"), ("The sky", " is"),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("models") / "llama", "llama")


@pytest.fixture(scope="module", params=BACKENDS)
def llm(request, folder):
    with LLM(folder, request.param, max_num_batched_tokens=24, **LOAD) as model:
        yield model


def vectors(outputs):
    return np.stack([output.embedding for output in outputs])


@pytest.mark.oracles
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings_equal_the_oracle_s_last_hidden_states(family, backend, tmp_path):
    torch = pytest.importorskip("torch")
    path = make_checkpoint(tmp_path, family)
    model = load_oracle(path)
    with torch.no_grad():
        states = [model.model(torch.tensor([p])).last_hidden_state[0].numpy().astype(np.float64) for p in PROMPTS]
    with LLM(path, backend, max_num_batched_tokens=24, **LOAD) as llm:
        for pooling, rows in [
            ("last", [s[-1] for s in states]),
            ("mean", [s.mean(0) for s in states]),
            ("cls", [s[0] for s in states]),
        ]:
            raw = vectors(llm.embed(PROMPTS, PoolingParams(pooling, normalize=False)))
            np.testing.assert_allclose(raw, rows, rtol=1e-4, atol=1e-4)
            cut = np.stack(rows)[:, :10]
            unit = vectors(llm.embed(PROMPTS, PoolingParams(pooling, dimensions=10)))
            np.testing.assert_allclose(unit, cut / np.linalg.norm(cut, axis=1, keepdims=True), rtol=1e-4, atol=1e-5)


@pytest.mark.oracles
def test_likelihoods_equal_the_oracle_s(llm, folder):
    torch = pytest.importorskip("torch")
    model = load_oracle(folder)
    for (context, continuation), (got, greedy) in zip(PAIRS, llm.loglikelihood(PAIRS), strict=True):
        ids = llm.encode(context + continuation)
        start = len(llm.encode(context.rstrip()))
        if start == 0:
            ids, start = [256, *ids], 1
        with torch.no_grad():
            rows = model(torch.tensor([ids])).logits[0, :, : llm.loaded.vocab_size].log_softmax(-1).numpy()[start - 1 : -1]
        assert got == pytest.approx(float(rows[np.arange(len(rows)), ids[start:]].sum()), rel=1e-4, abs=1e-4)
        assert greedy == (rows.argmax(-1).tolist() == ids[start:])


def test_the_most_likely_continuation_is_known_as_such(llm):
    context = "abcdefgh"
    [made] = llm.generate(context, SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, allowed_token_ids=range(60, 90)))
    best = made.outputs[0].text
    pairs = [(context, best[:1]), (context, "~")]
    (first, greedy), (other, not_greedy) = llm.loglikelihood(pairs)
    [free] = llm.generate(context, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
    assert greedy == (free.outputs[0].token_ids == llm.encode(best[:1])) and not not_greedy and other < first < 0


def test_on_cpu_an_embedding_has_the_same_bits_whatever_runs_beside_it(llm):
    params = PoolingParams("mean", normalize=False)
    alone = vectors([llm.embed([p], params)[0] for p in PROMPTS])
    stream = llm.stream([1, 2, 3], SamplingParams(max_tokens=40, ignore_eos=True, seed=1))
    next(stream)
    together = vectors(llm.embed(PROMPTS, params))
    assert sum(len(output.outputs[0].token_ids) for output in stream) == 39
    if llm.loaded.backend.name == "cpu":
        np.testing.assert_array_equal(together, alone)
    np.testing.assert_allclose(together, alone, rtol=1e-5, atol=1e-6)


def test_backends_agree(folder):
    def made(backend):
        with LLM(folder, backend, **LOAD) as llm:
            return vectors(llm.embed(PROMPTS, PoolingParams("mean"))), [value for value, _ in llm.loglikelihood(PAIRS)]

    for one, other in zip(made("reference"), made("cpu")):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_every_form_of_prompt_and_the_async_front(llm, folder):
    want = vectors(llm.embed("hello"))
    for prompts in (["hello"], [104, 101, 108, 108, 111], [np.array([104, 101, 108, 108, 111])]):
        np.testing.assert_array_equal(vectors(llm.embed(prompts)), want)
    assert llm.embed([]) == [] and llm.loglikelihood([]) == []

    async def front():
        async with AsyncLLM(folder, llm.loaded.backend.name, **LOAD) as model:
            return await asyncio.gather(model.embed("hello"), model.loglikelihood(PAIRS), model.generate([1, 2], GREEDY))

    embedded, scored, _ = asyncio.run(front())
    np.testing.assert_allclose(vectors(embedded), want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose([s for s, _ in scored], [s for s, _ in llm.loglikelihood(PAIRS)], rtol=1e-5)


def test_a_shared_context_is_computed_once(llm):
    context = "a context of more than two pages " * 2
    llm.loglikelihood([(context, " one")])
    before = llm.engine.stats.cached_tokens
    llm.loglikelihood([(context, " two"), (context, " three")])
    assert llm.engine.stats.cached_tokens - before >= 2 * 48


def test_what_can_t_be_pooled_or_scored_is_refused(llm):
    for refused in (PoolingParams(dimensions=65), "mean"):
        with pytest.raises(InvalidRequestError):
            llm.embed("x", refused)
    with pytest.raises(InvalidRequestError, match="nothing to score"):
        llm.loglikelihood([("a", "b"), ("context", "")])
    with pytest.raises(InvalidRequestError):
        llm.embed([9999])
    llm.engine.check()
    assert not llm.engine.has_unfinished()


@pytest.mark.faults
@pytest.mark.parametrize("backend", BACKENDS)
def test_o23_a_prompt_of_exactly_max_model_len_is_scored_and_one_more_is_refused_with_both_numbers(backend, folder):
    with LLM(folder, backend, max_model_len=64, num_kv_blocks=16, progress=False) as llm:
        for context, continuation in [("c" * 60, "abcd"), ("c", "x" * 63), ("c" * 63, "y")]:
            [(score, _)] = llm.loglikelihood([(context, continuation)])
            assert score < 0
        with pytest.raises(ContextLengthError, match=r"65 tokens .* 64"):
            llm.loglikelihood([("c" * 60, "abcde")])
        assert llm.embed([[5] * 64])[0].embedding.shape == (64,)
        with pytest.raises(ContextLengthError):
            llm.embed([[5] * 65])
        ids = [7] * 64
        scored = SamplingParams(max_tokens=0, prompt_logprobs=0)
        assert len(llm.generate([ids], scored)[0].prompt_logprobs) == 64
        for length, count in [(64, 1), (63, 2), (65, 0)]:
            with pytest.raises(ContextLengthError):
                llm.generate([[7] * length], SamplingParams(max_tokens=count))
        [cut] = llm.generate([ids[:62]], SamplingParams(max_tokens=None, ignore_eos=True))
        assert len(cut.outputs[0].token_ids) == 2 and cut.outputs[0].finish_reason == "length"


@pytest.mark.faults
def test_o50_a_plugin_of_version_1_generates_and_has_its_lack_of_embeddings_named(folder, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    install(tmp_path, "dayone", "from day_one_chip import trivium_backend")
    monkeypatch.setattr(day_one_chip.DayOne, "api_version", 1)
    with pytest.warns((HostFallbackWarning, DeprecationWarning)), LLM(folder, "dayone", num_kv_blocks=24, progress=False) as llm:
        assert set(llm.loaded.program.outputs) == {"logits"}
        assert "pool_rows" not in {value.name for value in llm.loaded.program.inputs}
        ids = llm.generate(PROMPTS, GREEDY)[2].outputs[0].token_ids
        with pytest.raises(UnsupportedError, match="dayone gives no hidden states") as refusal:
            llm.embed("x")
        assert refusal.value.param == "pooling"
    with LLM(folder, "reference", num_kv_blocks=24, progress=False) as llm:
        assert llm.generate(PROMPTS, GREEDY)[2].outputs[0].token_ids == ids


@pytest.mark.parametrize("pair", ["ab", ("a",), ("a", "b", "c"), 5, (1, 2), ("a", None)])
def test_what_is_no_pair_of_texts_is_named(llm, pair):
    with pytest.raises(InvalidRequestError, match=r"^what is scored must be pairs of texts, not "):
        llm.loglikelihood([("a", "b"), pair])
