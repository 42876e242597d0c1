"""Every sampling field through whole engines, on both backends: what comes out is what a plain reading of the field gives."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from chat_models import make_chat_model
from dry_oracle import brute

from trivium import LLM, SamplingParams
from trivium.errors import BackendError, InvalidRequestError, PluginError
from trivium.plugin import find_backends

HERE = [s.name for s in find_backends() if s.devices and s.name in ("reference", "cpu")]
LETTERS = tuple(range(97, 123))
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPT = [97, 98, 99, 32, 97, 98, 99, 32, 97, 98]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_chat_model(tmp_path_factory.mktemp("models") / "chat")


@pytest.fixture(scope="module")
def reference(folder):
    with LLM(folder, backend="reference", progress=False) as model:
        yield model


@pytest.fixture(scope="module", params=HERE)
def llm(folder, request):
    with LLM(folder, backend=request.param, dtype="float32", kv_dtype="float32", progress=False) as model:
        yield model


@pytest.fixture(autouse=True)
def nothing_is_left_behind(llm):
    yield
    llm.engine.check()
    assert not llm.engine.has_unfinished()


@pytest.fixture
def plugins(tmp_path, monkeypatch):
    """The distribution that holds helpers/shouting_plugin.py."""
    info = tmp_path / "shouting-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shouting\nVersion: 1.0\n")
    lines = ["[trivium.logits_processors]", "shout = shouting_plugin:shout", "faulty = shouting_plugin:faulty", "none = math"]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(tmp_path)


def ids_of(output) -> list[int]:
    return list(output.outputs[0].token_ids)


def reference_logits(reference, ids: list[int]) -> np.ndarray:
    """Logits behind `ids`, but for a constant."""
    [out] = reference.generate([[*ids, 0]], SamplingParams(max_tokens=0, prompt_logprobs=-1))
    return np.array([out.prompt_logprobs[-1][i].logprob for i in range(reference.loaded.vocab_size)])


def expected(reference, prompt: list[int], params: SamplingParams, ends: frozenset[int] = frozenset()) -> list[int]:
    """Greedy decoding under `params`, read off the fields one by one."""
    made: list[int] = []
    while len(made) < params.max_tokens and not (made and len(made) > params.min_tokens and made[-1] in ends):
        x = reference_logits(reference, prompt + made)
        seen = set(prompt) | set(made)
        for i in seen:
            x[i] = x[i] / params.repetition_penalty if x[i] > 0 else x[i] * params.repetition_penalty
            x[i] -= params.frequency_penalty * made.count(i) + params.presence_penalty * (i in made)
        for i, bias in (params.logit_bias or {}).items():
            x[i] += bias
        if params.dry_multiplier:
            breakers = frozenset((ord(c),) for c in params.dry_sequence_breakers)
            penalties = brute(prompt + made, breakers, params.dry_multiplier, params.dry_base, params.dry_allowed_length)
            for i, value in penalties.items():
                x[i] += value
        for word in params.bad_words:
            for ids in (list(word.encode()), list((" " + word).encode())):
                if (made[len(made) - len(ids) + 1 :] if len(ids) > 1 else []) == ids[:-1]:
                    x[ids[-1]] = -np.inf
        if len(made) < params.min_tokens:
            x[list(ends)] = -np.inf
        if params.allowed_token_ids:
            x[[i for i in range(len(x)) if i not in params.allowed_token_ids]] = -np.inf
        made.append(int(x.argmax()))
    return made


FIELDS = {
    "plain": {},
    "logit_bias": {"logit_bias": {101: 100.0, 102: 99.5}},
    "presence_penalty": {"presence_penalty": 1.5, "allowed_token_ids": LETTERS},
    "frequency_penalty": {"frequency_penalty": 1.0, "allowed_token_ids": LETTERS},
    "presence and frequency below zero": {"presence_penalty": -2.0, "frequency_penalty": -0.5},
    "DRY": {"dry_multiplier": 2.0, "dry_allowed_length": 1, "allowed_token_ids": LETTERS[:5]},
    "DRY with breakers": {
        "dry_multiplier": 2.0, "dry_allowed_length": 1, "dry_sequence_breakers": ["b", "x"], "allowed_token_ids": LETTERS[:5],
    },
    "bad_words": {"bad_words": ["a", "bc", "d e"], "allowed_token_ids": (*LETTERS[:6], 32)},
    "everything": {
        "dry_multiplier": 0.8, "presence_penalty": 0.3, "bad_words": ["a"], "logit_bias": {98: 1.5}, "allowed_token_ids": LETTERS,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", FIELDS)
def test_greedy_ids_are_those_that_a_plain_reading_of_the_fields_gives(llm, reference, name):
    params = dataclasses.replace(GREEDY, **FIELDS[name])
    [got] = llm.generate([PROMPT], params)
    assert ids_of(got) == expected(reference, PROMPT, params)


def test_min_tokens_and_stop_token_ids(llm, reference):
    free = expected(reference, PROMPT, GREEDY)
    for least in (0, 3):
        params = dataclasses.replace(GREEDY, stop_token_ids=free[1:3], min_tokens=least)
        [got] = llm.generate([PROMPT], params)
        want = expected(reference, PROMPT, params, frozenset(free[1:3]))
        assert ids_of(got) == want and (got.outputs[0].finish_reason, len(want) > 2) != ("length", False)


def test_dry_changes_a_text_that_repeats_itself(llm):
    plain, dry = (
        dataclasses.replace(GREEDY, max_tokens=40, allowed_token_ids=LETTERS[:3], dry_multiplier=m, dry_allowed_length=2)
        for m in (0, 5)
    )
    texts = [llm.generate([PROMPT], p)[0].outputs[0].text for p in (plain, dry)]
    triples = [len({t[i : i + 3] for i in range(38)}) for t in texts]
    assert triples[1] > triples[0]


def test_truncate_prompt_tokens_reads_the_end_of_the_prompt(llm):
    for keep, prompt in ((3, PROMPT[-3:]), (99, PROMPT), (1, PROMPT[-1:])):
        [got] = llm.generate([PROMPT], dataclasses.replace(GREEDY, truncate_prompt_tokens=keep, prompt_logprobs=0))
        [want] = llm.generate([prompt], dataclasses.replace(GREEDY, prompt_logprobs=0))
        assert got.prompt_token_ids == prompt and ids_of(got) == ids_of(want) and len(got.prompt_logprobs) == len(prompt)
    limit = llm.loaded.max_model_len
    [got] = llm.generate([[*PROMPT] * limit], dataclasses.replace(GREEDY, truncate_prompt_tokens=-1))
    assert len(got.prompt_token_ids) == limit - 12 and len(ids_of(got)) == 12


def test_best_of_returns_the_likeliest_a_token_best_first(llm):
    params = SamplingParams(temperature=1.5, seed=4, max_tokens=9, n=6, logprobs=0)
    [every] = llm.generate([PROMPT], params)
    mean = lambda out: sum(entry[i].logprob for entry, i in zip(out.logprobs, out.token_ids)) / len(out.token_ids)
    want = sorted(every.outputs, key=mean, reverse=True)[:2]
    for logprobs in (None, 0):
        [got] = llm.generate([PROMPT], dataclasses.replace(params, n=2, best_of=6, logprobs=logprobs))
        assert [out.token_ids for out in got.outputs] == [out.token_ids for out in want]
        assert [out.index for out in got.outputs] == [0, 1]
        assert all((out.logprobs is None) == (logprobs is None) for out in got.outputs)
    with pytest.raises(InvalidRequestError, match="best_of can't be streamed"):
        next(llm.stream(PROMPT, SamplingParams(n=1, best_of=2)))
    assert len(llm.generate([PROMPT], SamplingParams(n=2, best_of=2))[0].outputs) == 2


def test_logprobs_hold_what_both_dialects_need(llm):
    [got] = llm.generate([PROMPT], SamplingParams(temperature=1.2, seed=3, max_tokens=20, logprobs=3, ignore_eos=True))
    out = got.outputs[0]
    for token, entry in zip(out.token_ids, out.logprobs, strict=True):
        top = sorted((e for e in entry.values() if e.rank <= 3), key=lambda e: e.rank)
        assert next(iter(entry)) == token and [e.rank for e in top] == [1, 2, 3]
        assert top == sorted(top, key=lambda e: -e.logprob) and len(entry) in (3, 4)
        assert all(e.token_bytes == llm.tokenizer.token_bytes(i) and e.decoded_token for i, e in entry.items())
    spelled = b"".join(entry[token].token_bytes for token, entry in zip(out.token_ids, out.logprobs))
    shown = [i for i in out.token_ids if i < 256]
    assert spelled.startswith(bytes(shown[:1])) and len(spelled) >= len(shown)


def test_spaces_between_special_tokens_mean_nothing(llm):
    texts = {
        flag: llm.generate([PROMPT], dataclasses.replace(GREEDY, spaces_between_special_tokens=flag))[0].outputs[0].text
        for flag in (True, False)
    }
    assert texts[True] == texts[False]


def test_a_processor_of_a_plugin_rules_over_every_sample(llm, plugins):
    params = SamplingParams(temperature=1, n=3, seed=1, max_tokens=30, logits_processors={"shout": {"limit": 5}})
    [got] = llm.generate([PROMPT], params)
    assert [len(out.text) for out in got.outputs] == [5, 5, 5] and len({out.text for out in got.outputs}) == 3
    assert all(out.text.isupper() and out.finish_reason == "stop" for out in got.outputs)
    [short] = llm.generate([PROMPT], dataclasses.replace(params, bad_words=["A"], logits_processors={"shout": {"limit": 9}}))
    assert "A" not in short.outputs[0].text and len(short.outputs[0].text) == 9


def test_unknown_processors_and_arguments_are_refused_at_the_door(llm, plugins):
    with pytest.raises(
        InvalidRequestError, match="no logits processor is called 'shuot'; installed: faulty, none, shout"
    ) as caught:
        llm.generate([PROMPT], SamplingParams(logits_processors={"shuot": 1}))
    assert caught.value.param == "logits_processors"
    with pytest.raises(InvalidRequestError, match="limit"):
        llm.generate([PROMPT], SamplingParams(logits_processors={"shout": 3}))
    with pytest.raises(PluginError, match=r"must implement the hook trivium_logits_processor\(\) once"):
        llm.generate([PROMPT], SamplingParams(logits_processors={"none": 3}))
    for bad in ({"shout": print}, {1: 2}, "shout", {"shout": float("nan")}):
        with pytest.raises(InvalidRequestError, match="logits_processors must be a mapping"):
            SamplingParams(logits_processors=bad)


@pytest.mark.parametrize("how", ["raise", "nan", "id", "shape", "text", "ban"])
def test_a_processor_that_fails_ends_its_own_request_only(llm, plugins, how):
    alone = ids_of(llm.generate([PROMPT], GREEDY)[0])
    other = dataclasses.replace(GREEDY, logits_processors={"faulty": how})
    good, bad = llm.generate([PROMPT, PROMPT], [GREEDY, other])
    assert ids_of(good) == alone and good.error is None
    assert len(ids_of(bad)) == 2 and bad.outputs[0].finish_reason == "error"
    assert isinstance(bad.error, InvalidRequestError if how == "ban" else PluginError)
    assert ("no token is left" if how == "ban" else "logits processor 'faulty' (shouting 1.0) failed") in str(bad.error)
    [fine] = llm.generate([PROMPT], dataclasses.replace(GREEDY, logits_processors={"faulty": "fine"}))
    assert ids_of(fine) == alone


SPOILED = {
    "missing": lambda s: s._replace(logprobs=None, ranks=None, top_ids=None, top_logprobs=None),
    "nan": lambda s: s._replace(logprobs=np.full_like(s.logprobs, np.nan)),
    "positive": lambda s: s._replace(top_logprobs=s.top_logprobs + 50),
    "another id": lambda s: s._replace(top_ids=s.top_ids + 10**6),
    "too few": lambda s: s._replace(top_ids=s.top_ids[:, :1], top_logprobs=s.top_logprobs[:, :1]),
    "no rows": lambda s: s._replace(top_ids=s.top_ids[:0], top_logprobs=s.top_logprobs[:0]),
}


@pytest.mark.parametrize("how", SPOILED)
def test_nonsense_logprobs_of_a_backend_end_the_request_that_asked_for_them(llm, how, monkeypatch):
    alone = ids_of(llm.generate([PROMPT], GREEDY)[0])
    wait = llm.engine.runner.wait

    def spoiled(flight):
        wait(flight)
        if flight.sampled.logprobs is not None:
            flight.sampled = SPOILED[how](flight.sampled)

    monkeypatch.setattr(llm.engine.runner, "wait", spoiled)
    good, bad = llm.generate([PROMPT, PROMPT], [GREEDY, dataclasses.replace(GREEDY, logprobs=2)])
    assert ids_of(good) == alone and good.error is None
    assert isinstance(bad.error, BackendError) and llm.loaded.backend.name in str(bad.error)


def test_priority_and_salt_of_another_type_are_refused(llm):
    for fields in ({"priority": "high"}, {"priority": True}, {"cache_salt": 3}):
        with pytest.raises(InvalidRequestError, match="must be of type"):
            llm.engine.add_request(PROMPT, GREEDY, **fields)
