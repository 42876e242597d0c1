"""SamplingParams: defaults, what is refused and how the message reads, and what depends on vocabulary and backend."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trivium.errors import InvalidRequestError, UnsupportedError
from trivium.sampling import SamplingParams, bad_word_ids, check_ids


def test_defaults_are_the_known_ones():
    p = SamplingParams()
    assert (p.n, p.temperature, p.top_p, p.top_k, p.min_p, p.repetition_penalty) == (1, 1.0, 1.0, 0, 0.0, 1.0)
    assert (p.max_tokens, p.min_tokens, p.seed, p.logprobs, p.stop, p.stop_token_ids) == (16, 0, None, None, (), ())
    assert (p.presence_penalty, p.frequency_penalty, p.ignore_eos, p.skip_special_tokens) == (0.0, 0.0, False, True)


@pytest.mark.parametrize(
    ("field", "values", "range_words"),
    [
        ("temperature", [-0.1, 101, math.nan, math.inf, "1", True, None, [1], 1j], "a number from 0 up to 100"),
        ("top_p", [0, -1, 1.01, math.nan, "0.5", False], "a number above 0 up to 1"),
        ("min_p", [-0.1, 1.1, math.nan, True], "a number from 0 up to 1"),
        ("typical_p", [0, -1, 1.01, math.nan, "0.5"], "a number above 0 up to 1"),
        ("top_n_sigma", [-1.5, math.nan, math.inf, None], "a number from -1 up to 1000"),
        ("xtc_probability", [-0.1, 1.1, math.nan], "a number from 0 up to 1"),
        ("xtc_threshold", [-0.1, 1.1, True], "a number from 0 up to 1"),
        ("top_k", [-2, 1.5, True, "5", None, math.nan], "an integer from -1 up"),
        ("n", [0, -1, 129, 1.0, True, None], "an integer from 1 up to 128"),
        ("repetition_penalty", [0, -1, math.nan, math.inf], "a number above 0 up to 100"),
        ("presence_penalty", [-2.1, 2.1, math.nan, "x"], "a number from -2 up to 2"),
        ("frequency_penalty", [-2.1, 2.1, math.nan], "a number from -2 up to 2"),
        ("seed", [1.5, True, "7", 2**64, -(2**63) - 1], "an integer from"),
        ("max_tokens", [-1, 1.5, True, 2**31], "an integer from 0, at most 2**31 - 1, or None"),
        ("min_tokens", [-1, None, True], "an integer from 0"),
        ("logprobs", [-2, 0.5, True], "an integer from -1"),
        ("prompt_logprobs", [-2, True], "an integer from -1"),
        ("stop", ["", [""], [1], 5, ["a", None]], "a non-empty string or a list of them"),
        ("bad_words", ["", [3]], "a non-empty string or a list of them"),
        ("stop_token_ids", ["12", [-1], [1.5], [True], 5, [None]], "a list of token ids"),
        ("allowed_token_ids", [[], [-1], "1"], "token id"),
        ("logit_bias", [[1], {"5": 1}, {True: 1.0}, {-1: 1.0}, {1: 101}, {1: math.nan}, {1: "x"}], ""),
        ("ignore_eos", [1, None, "yes"], "True or False"),
        ("skip_special_tokens", [0], "True or False"),
    ],
)
def test_bad_values_are_refused_with_field_range_and_value(field, values, range_words):
    for value in values:
        with pytest.raises(InvalidRequestError) as caught:
            SamplingParams(**{field: value})
        assert caught.value.param == field
        assert field in str(caught.value) and range_words in str(caught.value) and "\n" not in str(caught.value)


def test_the_message_names_the_value():
    with pytest.raises(InvalidRequestError, match=r"^top_p must be a number above 0 up to 1, not 1\.5$"):
        SamplingParams(top_p=1.5)
    with pytest.raises(InvalidRequestError, match=r"\.\.\.$"):
        SamplingParams(temperature="x" * 10000)


def test_min_tokens_beyond_max_tokens_is_refused():
    with pytest.raises(InvalidRequestError, match="at most max_tokens"):
        SamplingParams(min_tokens=5, max_tokens=4)
    assert SamplingParams(min_tokens=5, max_tokens=None).min_tokens == 5


def test_good_values_are_normalised():
    p = SamplingParams(stop="end", stop_token_ids=[np.int64(3)], temperature=np.float32(0.5), top_k=np.int32(4), logit_bias={1: 2})
    assert p.stop == ("end",) and p.stop_token_ids == (3,) and type(p.stop_token_ids[0]) is int
    assert type(p.temperature) is float and type(p.top_k) is int and p.logit_bias == {1: 2.0}
    assert SamplingParams(stop=None, bad_words=None, stop_token_ids=None).stop == ()


def test_params_can_be_copied_pickled_hashed_and_replaced():
    p = SamplingParams(stop=["a"], logit_bias={4: 1.0}, allowed_token_ids=[4, 5])
    assert pickle.loads(pickle.dumps(p)) == p == copy.deepcopy(p)  # noqa: S301
    assert hash(p) == hash(copy.copy(p))
    assert dataclasses.replace(p, n=2).n == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        p.n = 3


@given(st.floats(0, 100), st.floats(1e-9, 1), st.integers(-1, 2**40), st.floats(0, 1), st.integers(-(2**63), 2**64 - 1))
def test_everything_in_range_is_accepted(temperature, top_p, top_k, min_p, seed):
    SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed).validate(vocab_size=10)


def test_a_models_own_defaults():
    config = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": None, "eos_token_id": 3}
    assert SamplingParams.from_config(config, max_tokens=9) == SamplingParams(temperature=0.6, top_k=20, top_p=0.95, max_tokens=9)
    assert SamplingParams.from_config(config, temperature=0.0).temperature == 0
    assert SamplingParams.from_config({"temperature": 0.6, "repetition_penalty": 1.2}) == SamplingParams(
        temperature=0, repetition_penalty=1.2
    )
    assert SamplingParams.from_config({}).temperature == 0


def test_used_names_what_the_sampler_must_do():
    assert SamplingParams(temperature=0, top_p=0.5, top_k=3, seed=1, stop="x").used() == frozenset()
    assert SamplingParams(top_p=0.5, top_k=-1).used() == {"temperature", "top_p"}
    assert SamplingParams(top_n_sigma=-1.0, xtc_threshold=0.3, typical_p=0.5).used() == {"temperature", "typical_p"}
    assert SamplingParams(temperature=0, logit_bias={1: 1.0}, logprobs=0).used() == {"logit_bias", "logprobs"}


def test_bad_words_are_tokenised_with_and_without_a_blank():
    encode = lambda text: [ord(c) for c in text]
    assert bad_word_ids(["ab", " c"], encode) == ((97, 98), (32, 97, 98), (99,), (32, 99))


def test_ids_are_bounded_on_both_sides():
    check_ids("prompt", [0, 9, np.int32(3)], 10)
    for bad in (-1, 10, 2**63, 1.5, True, None, "1"):
        with pytest.raises(InvalidRequestError, match="from 0 to 9") as caught:
            check_ids("prompt", [1, bad], 10)
        assert caught.value.param == "prompt"


@pytest.mark.faults
def test_o01_min_p_outside_its_range_is_refused():
    for value in (-0.1, 1.1):
        with pytest.raises(InvalidRequestError, match="min_p must be a number from 0 up to 1"):
            SamplingParams(min_p=value)
    for value in (0, 0.05, 0.999, 1.0):
        assert SamplingParams(temperature=1, min_p=value).min_p == value


@pytest.mark.faults
def test_o04_a_bias_on_a_padded_id_is_refused():
    with pytest.raises(InvalidRequestError, match="1010 is out of the vocabulary") as caught:
        SamplingParams(logit_bias={1010: 5.0}).validate(vocab_size=1000)
    assert caught.value.param == "logit_bias"
    SamplingParams(logit_bias={999: 5.0}).validate(vocab_size=1000)


@pytest.mark.faults
def test_o05_temperature_zero_is_accepted_as_int_and_float():
    assert SamplingParams(temperature=0).temperature == SamplingParams(temperature=0.0).temperature == 0


@pytest.mark.faults
def test_o06_top_k_may_be_larger_than_any_vocabulary_or_off():
    assert [SamplingParams(top_k=k).top_k for k in (9999999, -1, 0)] == [9999999, -1, 0]


@pytest.mark.faults
def test_o07_every_list_of_ids_passes_the_same_bounds_check():
    for params in ({"stop_token_ids": [60], "min_tokens": 4}, {"allowed_token_ids": [1, 50]}, {"logit_bias": {50: 1.0}}):
        with pytest.raises(InvalidRequestError, match="integers from 0 to 49"):
            SamplingParams(**params).validate(vocab_size=50)


@pytest.mark.faults
def test_o08_a_parameter_that_the_backend_lacks_is_refused_by_name():
    lacking = frozenset({"temperature", "top_k"})
    SamplingParams(temperature=0.5, top_k=3).check_supported(lacking, "fake", {})
    SamplingParams(temperature=0, top_p=0.5).check_supported(lacking, "fake", {})
    SamplingParams(top_p=0.5).check_supported(None, "fake", {})
    with pytest.raises(UnsupportedError, match="the backend fake can't do top_p: no nucleus unit") as caught:
        SamplingParams(top_p=0.5).check_supported(lacking, "fake", {"top_p": "no nucleus unit"})
    assert caught.value.param == "top_p"


@pytest.mark.faults
def test_o11_logprobs_zero_is_not_none():
    assert SamplingParams(logprobs=0).logprobs == 0 and SamplingParams().logprobs is None


@pytest.mark.parametrize(
    ("field", "values", "words"),
    [
        ("dry_multiplier", [-0.1, math.nan, 101], "a number from 0 up to 100"),
        ("dry_base", [0.9, math.inf, True], "a number from 1 up to 100"),
        ("dry_allowed_length", [0, 1.5, None], "an integer from 1"),
        ("dry_sequence_breakers", ["", [""], [3], [str(i) for i in range(33)]], "string"),
        ("best_of", [0, 129, 1.0], "an integer from 1 up to 128, or None"),
        ("truncate_prompt_tokens", [-2, 0, 1.5, True], "-1"),
        ("spaces_between_special_tokens", [None, 1], "True or False"),
    ],
)
def test_bad_values_of_the_engine_extras_are_refused(field, values, words):
    for value in values:
        with pytest.raises(InvalidRequestError, match=f"^{field} must be .*{words}") as caught:
            SamplingParams(**{field: value})
        assert caught.value.param == field


def test_best_of_is_at_least_n_and_needs_logprobs_only_if_it_chooses():
    with pytest.raises(InvalidRequestError, match=r"best_of must be at least n \(3\), not 2"):
        SamplingParams(n=3, best_of=2)
    assert SamplingParams(n=2, best_of=2).used() == {"temperature"}
    assert SamplingParams(n=1, best_of=2).used() == {"temperature", "logprobs"}


def test_dry_and_processors_reach_a_backend_as_biases():
    for fields in ({"dry_multiplier": 0.5}, {"logits_processors": {"x": None}}):
        assert SamplingParams(temperature=0, **fields).used() == {"logit_bias"}
    assert SamplingParams(temperature=0, dry_base=3.0, logits_processors={}).used() == frozenset()
