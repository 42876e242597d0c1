"""Speculation with real backends: `reference` and `cpu`, drafts from lookups, from the same and from another model."""

from __future__ import annotations

import asyncio
import json

import pytest
from chat_models import make_chat_model
from tiny_checkpoints import make_checkpoint
from trivium import LLM, AsyncLLM, SamplingParams
from trivium.errors import InvalidRequestError, UnsupportedError

BACKENDS = ["reference", "cpu"]
PROMPTS = [[65, 66, 67, 65, 66], list(b"to be or not to be or not to"), [90] * 9]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_chat_model(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("models") / "draft", "qwen3", seed=5, num_hidden_layers=1)


def params():
    drawn = {"max_tokens": 24, "ignore_eos": True, "seed": 5}
    return [
        SamplingParams(temperature=0, **drawn),
        SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.2, logprobs=2, n=2, **drawn),
        SamplingParams(temperature=1.5, min_p=0.02, frequency_penalty=0.3, prompt_logprobs=1, **drawn),
    ]


def seen(outputs, backend="reference"):
    """Everything on `cpu`, whose numbers are the same for any number of rows; on `reference`, whose matrix products are not, the
    logprobs are left out."""
    if backend == "reference":
        return [[(c.text, c.token_ids) for c in o.outputs] for o in outputs]
    return [([(c.text, c.token_ids, c.logprobs) for c in o.outputs], o.prompt_logprobs) for o in outputs]


@pytest.fixture(scope="module")
def plain(folder):
    found = {}
    for backend in BACKENDS:
        with LLM(folder, backend=backend, seed=3) as llm:
            found[backend] = seen(llm.generate(PROMPTS, params()), backend)
    return found


def speculating(folder, target, **options):
    return LLM(folder, backend=target, seed=3, speculative={"adaptive": False, "num_speculative_tokens": 4, **options})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_lookups_change_nothing(folder, plain, backend, method):
    with speculating(folder, backend, method=method, prompt_lookup_min=1) as llm:
        outputs = llm.generate(PROMPTS, params())
        assert seen(outputs, backend) == plain[backend]
        assert llm.engine.stats.draft_tokens == sum(o.metrics.num_draft_tokens for o in outputs) > 0
        llm.engine.check()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("beside", BACKENDS)
def test_a_draft_model_on_any_backend_for_a_target_on_any_other(folder, plain, backend, beside):
    with speculating(folder, backend, method="draft", model=str(folder), backend=beside) as llm:
        assert seen(llm.generate(PROMPTS, params()), backend) == plain[backend]
        stats = llm.engine.stats
        assert stats.accepted_tokens >= 0.9 * stats.draft_tokens > 30 and stats.draft_seconds > 0
        llm.engine.speculator._drafter._kv.check_idle()


def test_a_draft_model_of_another_family(folder, other, plain):
    with speculating(folder, "cpu", method="draft", model=str(other), backend="reference") as llm:
        assert seen(llm.generate(PROMPTS, params()), "cpu") == plain["cpu"]
        assert llm.engine.stats.draft_tokens > 0


def test_streams_from_many_tasks(folder, plain):
    async def main():
        async with AsyncLLM(folder, backend="cpu", seed=3, speculative={"method": "suffix", "adaptive": False}) as llm:

            async def one(prompt, p):
                pieces = [o.outputs async for o in llm.stream(prompt, p)]
                return ["".join(c.text for piece in pieces for c in piece if c.index == i) for i in range(p.n)]

            return await asyncio.gather(*(one(prompt, p) for prompt, p in zip(PROMPTS, params())))

    assert asyncio.run(main()) == [[text for text, *_ in outputs] for outputs, _ in plain["cpu"]]


def test_another_vocabulary_is_refused_and_nothing_stays_open(folder, tmp_path):
    path = make_checkpoint(tmp_path / "odd", "llama")
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(UnsupportedError, match="another vocabulary") as raised:
        LLM(folder, backend="reference", speculative={"method": "draft", "model": str(path)})
    assert raised.value.param == "speculative"
    with pytest.raises(InvalidRequestError, match="ngram, suffix, draft"):
        LLM(folder, backend="reference", speculative={"method": "eagle"})
