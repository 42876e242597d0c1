"""Structured outputs through the whole engine, on both backends, with random weights and a trained byte-level tokenizer."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import threading
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tiny_checkpoints import make_checkpoint
from tiny_tokenizers import byte_level_data

from trivium import LLM, AsyncLLM, RequestOutput, SamplingParams, StructuredOutputs
from trivium.errors import InvalidRequestError

PROMPT = "the quick brown fox"
NEST = {
    "$ref": "#/$defs/node",
    "$defs": {"node": {
        "type": "object", "required": ["v", "children"], "additionalProperties": False,
        "properties": {
            "v": {"enum": [1, 2]}, "children": {"type": "array", "maxItems": 2, "items": {"$ref": "#/$defs/node"}},
            "twin": {"$ref": "#/$defs/node/properties/children/items"},
        },
    }},
}  # fmt: skip
SELF = {
    "type": "object", "required": ["v"], "additionalProperties": False,
    "properties": {"v": {"type": "boolean"}, "next": {"type": "array", "maxItems": 1, "items": {"$ref": "#"}}},
}  # fmt: skip
IDS = {"type": "array", "minItems": 1, "maxItems": 3, "items": {"type": "string", "pattern": r"^(\d+|ab:[a-z]+)$", "maxLength": 12}}
PERSON = {
    "type": "object", "required": ["name", "age"], "additionalProperties": False,
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 3, "maximum": 120}},
}  # fmt: skip
UNICODE = ["在线", "café", "🙂", 'q"\\', "Ünïcödé"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama whose vocabulary is padded past its tokenizer and has two end tokens."""
    data = byte_level_data()
    size = max(json.loads(data["tokenizer_json"])["model"]["vocab"].values()) + 1
    path = tmp_path_factory.mktemp("models") / "grammars"
    make_checkpoint(path, "llama", tokenizer=False, vocab_size=size + 75, eos_token_id=[0, 2], bos_token_id=1, pad_token_id=0)
    (path / "tokenizer.json").write_text(data["tokenizer_json"])
    (path / "tokenizer_config.json").write_text(json.dumps(data["config"]))
    return path


@pytest.fixture(scope="module", params=["reference", "cpu"])
def llm(request: pytest.FixtureRequest, folder: Path) -> Any:
    with LLM(folder, backend=request.param, progress=False, num_kv_blocks=400) as model:
        yield model


@pytest.fixture(autouse=True)
def nothing_is_left_behind(llm: LLM) -> Any:
    yield
    llm.engine.check()
    llm.engine.kv.check_idle()


def params(temperature: float = 2.0, max_tokens: int = 300, **fields: Any) -> SamplingParams:
    own = {name: fields.pop(name) for name in list(fields) if name in StructuredOutputs.__dataclass_fields__}
    own |= {"disable_any_whitespace": True} if own and "whitespace_pattern" not in own else {}
    return SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=3, structured_outputs=own or None, **fields)


def texts(llm: LLM, wanted: SamplingParams, count: int = 4) -> list[str]:
    """Texts that ended by themselves; `count` seeds, or one text at temperature 0."""
    seeds = range(count if wanted.temperature else 1)
    outputs = llm.generate([PROMPT] * len(seeds), [dataclasses.replace(wanted, seed=seed) for seed in seeds])
    finished = [output.outputs[0] for output in outputs]
    for one in finished:
        assert one.finish_reason in ("stop", "length")
        assert one.finish_reason == "stop" or len(one.token_ids) == wanted.max_tokens
    return [one.text for one in finished if one.finish_reason == "stop"]


@pytest.mark.parametrize("temperature", [0.0, 2.0])
@pytest.mark.parametrize("schema", [PERSON, IDS, NEST, {"type": "number"}, {"type": "object", "patternProperties": {"^x": {}}}])
def test_json_satisfies_its_schema(llm: LLM, schema: Any, temperature: float) -> None:
    for text in texts(llm, params(temperature, json=schema)):
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_regular_expressions_grammars_and_choices_hold(llm: LLM, temperature: float) -> None:
    phone = r"(\d{3}-){2}\d{4}"
    assert not [text for text in texts(llm, params(temperature, regex=phone)) if not re.fullmatch(phone, text)]
    assert set(texts(llm, params(temperature, choice=UNICODE))) <= set(UNICODE)
    lark = 'start: sum\nsum: NUMBER ("+" NUMBER)*\nNUMBER: /[0-9]{1,3}/'
    gbnf = 'root ::= num ("+" num)*\nnum ::= [0-9] [0-9]? [0-9]?'
    for grammar in (lark, gbnf):
        assert all(re.fullmatch(r"\d{1,3}(\+\d{1,3})*", text) for text in texts(llm, params(temperature, grammar=grammar)))
    assert all(isinstance(json.loads(text), dict) for text in texts(llm, params(temperature, json_object=True)))


@pytest.mark.faults
@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_o37_values_and_names_outside_ascii_stay_what_they_are(llm: LLM, temperature: float) -> None:
    found = texts(llm, params(temperature, json={"enum": UNICODE}))
    assert found and all(json.loads(text) in UNICODE for text in found)
    escaped = json.dumps({"enum": UNICODE}, ensure_ascii=True)
    assert texts(llm, params(temperature, json=escaped)) == found
    schema = {
        "type": "object", "required": ["größe", "c"], "additionalProperties": False,
        "properties": {"größe": {"enum": ["groß"]}, "c": {"const": 'say "\\é"'}},
    }  # fmt: skip
    assert {*texts(llm, params(temperature, json=schema))} == {
        json.dumps({"größe": "groß", "c": 'say "\\é"'}, ensure_ascii=False, separators=(",", ":"))
    }


@pytest.mark.faults
@pytest.mark.parametrize("temperature", [0.0, 2.0])
@pytest.mark.parametrize("schema", [NEST, SELF])
def test_o38_references_may_be_recursive(llm: LLM, schema: Any, temperature: float) -> None:
    found = texts(llm, params(temperature, json=schema), 8)
    for text in found:
        jsonschema.validate(json.loads(text), schema)
    assert found or temperature == 0


@pytest.mark.faults
@pytest.mark.parametrize("temperature", [0.0, 2.0])
@pytest.mark.parametrize("levels", [0, 1, 2, 3])
def test_o39_patterns_hold_at_any_depth(llm: LLM, levels: int, temperature: float) -> None:
    schema: dict[str, Any] = IDS
    for level in range(levels):
        array = {"type": "array", "items": schema, "minItems": 1, "maxItems": 2}
        schema = (
            array
            if level
            else {"type": "object", "properties": {"ids": schema}, "required": ["ids"], "additionalProperties": False}
        )
    found = texts(llm, params(temperature, json=schema))
    for text in found:
        jsonschema.validate(json.loads(text), schema)
    assert found or temperature == 0


def test_a_complete_text_ends_at_once_and_a_long_one_at_max_tokens(llm: LLM) -> None:
    done = llm.generate(PROMPT, params(0, choice=["brown"]))[0].outputs[0]
    assert (done.text, done.finish_reason, done.stop_reason) == ("brown", "stop", None)
    assert not {0, 2} & set(done.token_ids)
    cut = llm.generate(PROMPT, params(0, 4, regex="[a-z]{50}"))[0].outputs[0]
    assert cut.finish_reason == "length" and len(cut.token_ids) == 4 and re.fullmatch("[a-z]{1,50}", cut.text)
    short = llm.generate(PROMPT, params(0, choice=["brown"], min_tokens=200))[0].outputs[0]
    assert (short.text, short.finish_reason) == ("brown", "stop")


def test_only_where_the_text_may_end_end_tokens_can_come(llm: LLM) -> None:
    """Greedy, with a bias that makes both end tokens the likeliest wherever they are allowed."""
    ends = {"logit_bias": {0: 100, 2: 99}}
    one = llm.generate(PROMPT, params(0, regex="[a-z]{3,}", **ends))[0].outputs[0]
    assert len(one.text) >= 3 and one.text.isalpha() and one.token_ids[-1] in (0, 2) and one.finish_reason == "stop"
    ignored = llm.generate(PROMPT, params(0, 20, regex="[a-z]{3,}", ignore_eos=True, **ends))[0].outputs[0]
    assert ignored.finish_reason == "length" and not {0, 2} & set(ignored.token_ids)
    x = llm.tokenizer.encode("x", add_special_tokens=False)[-1]
    stopped = llm.generate(PROMPT, params(0, regex="[a-z]{3,}", stop_token_ids=[x], logit_bias={x: 100}))[0].outputs[0]
    assert stopped.stop_reason == x and len(stopped.text) >= 3


def test_stop_strings_still_end_a_text(llm: LLM) -> None:
    one = llm.generate(PROMPT, params(0, regex="(ab){40}", stop=["bab"]))[0].outputs[0]
    assert (one.text, one.finish_reason, one.stop_reason) == ("a", "stop", "bab")


@pytest.mark.parametrize("fields", [{"bad_words": ["b"]}, {"bad_words": ["b"], "min_tokens": 2}])
def test_a_request_that_is_left_without_a_token_ends_alone(llm: LLM, fields: Any) -> None:
    a, b = (llm.tokenizer.encode(char, add_special_tokens=False)[-1] for char in "ab")
    stuck = params(0, regex="ab", allowed_token_ids=[a, b], **fields)
    plain = SamplingParams(temperature=0, max_tokens=8)
    alone = llm.generate(PROMPT, plain)[0].outputs[0].token_ids
    failed, kept = llm.generate([PROMPT, PROMPT], [stuck, plain])
    assert failed.outputs[0].finish_reason == "error" and failed.outputs[0].token_ids in ([], [a])
    assert isinstance(failed.error, InvalidRequestError) and failed.error.param == "bad_words"
    assert kept.outputs[0].token_ids == alone and llm.engine.stats.failed_steps == 0


def test_what_can_never_give_a_token_is_refused_at_the_door(llm: LLM) -> None:
    a = llm.tokenizer.encode("a", add_special_tokens=False)[-1]
    for fields in ({"regex": "b+", "allowed_token_ids": [a]}, {"regex": "(a"}, {"json": {"type": "nothing"}}):
        with pytest.raises(InvalidRequestError) as refused:
            llm.generate(PROMPT, params(0, **fields))
        assert refused.value.param in ("structured_outputs", "allowed_token_ids")
    assert not llm.engine.has_unfinished()


def test_a_stream_joined_is_the_text_and_n_outputs_are_their_own(llm: LLM) -> None:
    wanted = params(2.0, json=PERSON)
    whole = llm.generate(PROMPT, wanted)[0].outputs[0]
    news = list(llm.stream(PROMPT, wanted))
    assert "".join(one.outputs[0].text for one in news if one.outputs) == whole.text
    assert [i for one in news for i in one.outputs[0].token_ids] == whole.token_ids
    three = llm.generate(PROMPT, dataclasses.replace(wanted, n=3))[0].outputs
    assert three[0].token_ids == whole.token_ids and len({one.text for one in three}) == 3
    for one in three:
        jsonschema.validate(json.loads(one.text), PERSON)


def test_neighbours_and_preemption_change_no_token(llm: LLM, folder: Path) -> None:
    mixed = [
        params(2.0, 60, json=PERSON),
        SamplingParams(temperature=1.0, seed=5, max_tokens=40),
        params(1.0, 60, regex="[a-z ]{60}"),
    ] * 3
    prompts = [PROMPT + " 1 2 3" * i for i in range(len(mixed))]
    alone = [llm.generate(prompt, wanted)[0].outputs[0].token_ids for prompt, wanted in zip(prompts, mixed, strict=True)]
    backend = llm.loaded.backend.name
    limits = {"block_size": 16, "num_kv_blocks": 10, "max_model_len": 150, "max_num_batched_tokens": 24}
    with LLM(folder, backend=backend, progress=False, **limits) as tight:
        together = [output.outputs[0].token_ids for output in tight.generate(prompts, mixed)]
        assert tight.engine.stats.preemptions > 0
    assert together == alone == [output.outputs[0].token_ids for output in llm.generate(prompts, mixed)]


def test_speculation_keeps_every_token(llm: LLM, folder: Path) -> None:
    mixed = [params(t, 80, **fields) for t in (0.0, 1.0) for fields in ({"json": PERSON}, {"regex": "(abc ){20}"}, {"json": IDS})]
    speculative = {"method": "ngram", "num_speculative_tokens": 4}
    with LLM(folder, backend=llm.loaded.backend.name, progress=False, speculative=speculative) as fast:
        drafted = [(o.outputs[0].token_ids, o.outputs[0].finish_reason) for o in fast.generate([PROMPT] * len(mixed), mixed)]
    assert drafted == [(o.outputs[0].token_ids, o.outputs[0].finish_reason) for o in llm.generate([PROMPT] * len(mixed), mixed)]


def test_an_abort_in_the_middle_leaves_nothing(llm: LLM) -> None:
    stream = llm.stream(PROMPT, params(2.0, regex="[a-z]{200}"))
    assert next(stream).outputs[0].finish_reason is None
    stream.close()
    assert texts(llm, params(0, choice=["fox"])) == ["fox"]


def test_async_requests_compile_away_from_the_engines_thread(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def job() -> list[RequestOutput]:
        async with AsyncLLM(folder, backend="reference", progress=False) as llm:
            threads = set()
            grammars = llm.engine.intake._grammars
            compile_ = grammars._compile
            monkeypatch.setattr(
                grammars, "_compile", lambda *spec: (threads.add(threading.current_thread().name), compile_(*spec))[1]
            )
            with pytest.raises(InvalidRequestError, match="unclosed group"):
                await llm.generate(PROMPT, params(0, regex="(a"))
            outputs = await llm.generate([PROMPT] * 4, params(0, json=PERSON))
            assert threads and not threads & {"trivium-engine", threading.main_thread().name}
            return outputs

    outputs = asyncio.run(job())
    assert len({output.outputs[0].text for output in outputs}) == 1
    jsonschema.validate(json.loads(outputs[0].outputs[0].text), PERSON)
