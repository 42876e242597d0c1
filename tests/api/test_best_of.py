"""best_of and beam_width beside what else a request may ask: they go together, or are refused by name."""

from __future__ import annotations

import dataclasses
import re

import pytest
from chat_models import make_chat_model

from trivium import LLM, SamplingParams
from trivium.errors import InvalidRequestError

LOAD = {"dtype": "float32", "kv_dtype": "float32", "num_kv_blocks": 80, "progress": False}
MANY = SamplingParams(temperature=1.0, seed=4, n=5, max_tokens=12, logprobs=0, ignore_eos=True)
GRAMMAR = {"regex": "[a-c]{3,9}d"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_chat_model(tmp_path_factory.mktemp("models") / "chat")


@pytest.fixture(scope="module", params=["reference", "cpu"])
def opened(request, folder):
    """The model plain and with guesses from the text."""
    with LLM(folder, request.param, **LOAD) as plain:
        guess = {"method": "ngram", "num_speculative_tokens": 3}
        with LLM(folder, request.param, speculative=guess, **LOAD) as guessing:
            yield {"plain": plain, "guessing": guessing}
            guessing.engine.check()
        plain.engine.check()


def ranked(outputs, count):
    """The likeliest a token of several samples, best first."""
    mean = lambda o: sum(entry[t].logprob for entry, t in zip(o.logprobs, o.token_ids)) / len(o.token_ids)
    return [list(o.token_ids) for o in sorted(outputs, key=lambda o: -mean(o))[:count]]


@pytest.mark.parametrize("fields", [{}, {"structured_outputs": GRAMMAR}, {"stop": "a"}], ids=["free", "grammar", "stop"])
@pytest.mark.parametrize("how", ["plain", "guessing"])
def test_the_best_are_those_of_as_many_samples(opened, how, fields):
    params = dataclasses.replace(MANY, **fields)
    want = ranked(opened["plain"].generate("abcabcabc", params)[0].outputs, 2)
    [got] = opened[how].generate("abcabcabc", dataclasses.replace(params, n=2, best_of=5, logprobs=None))
    assert [list(o.token_ids) for o in got.outputs] == want and [o.index for o in got.outputs] == [0, 1]
    assert all(o.logprobs is None for o in got.outputs)
    if "structured_outputs" in fields:
        assert all(re.fullmatch(GRAMMAR["regex"], o.text) for o in got.outputs)


def test_a_stream_knows_no_best_and_is_refused_unless_all_are_returned(opened):
    llm = opened["plain"]
    with pytest.raises(InvalidRequestError, match="best_of can't be streamed") as refusal:
        next(llm.stream("ab", dataclasses.replace(MANY, n=2, best_of=5)))
    assert refusal.value.param == "best_of" and not llm.engine.has_unfinished()
    pieces = {i: [] for i in range(5)}
    for news in llm.stream("ab", dataclasses.replace(MANY, best_of=5)):
        for output in news.outputs:
            pieces[output.index] += output.token_ids
    assert list(pieces.values()) == [list(o.token_ids) for o in llm.generate("ab", MANY)[0].outputs]


@pytest.mark.parametrize("fields", [{"structured_outputs": GRAMMAR}, {"structured_outputs": {"json": {}}}, {"best_of": 3}])
def test_what_would_change_or_choose_among_beams_is_refused_with_them(fields):
    with pytest.raises(InvalidRequestError, match=f"{next(iter(fields))} must be left at its default with beam_width") as refusal:
        SamplingParams(beam_width=2, **fields)
    assert refusal.value.param == next(iter(fields))


def test_beams_run_without_guesses_where_others_have_them(opened):
    params = SamplingParams(beam_width=3, n=3, max_tokens=8)
    plain, guessing = (opened[how].generate("abcabcabc", params)[0].outputs for how in ("plain", "guessing"))
    assert [list(o.token_ids) for o in plain] == [list(o.token_ids) for o in guessing]
