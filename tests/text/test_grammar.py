"""Grammars and matchers on small tokenizers: what is allowed, what is refused, and the cache."""

from __future__ import annotations

import json
import re
import threading
from typing import Any

import numpy as np
import pytest
from tiny_tokenizers import byte_level_data, sentencepiece_gguf

from trivium.errors import InvalidRequestError
from trivium.sampling import SamplingParams, StructuredOutputs
from trivium.text import Grammars, Matcher, Tokenizer
from trivium.text import grammar as module

TOKENIZERS = {"byte-level": byte_level_data, "sentencepiece": sentencepiece_gguf}


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer.from_data(TOKENIZERS[request.param]())


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)


def begin(grammars: Grammars, ends: frozenset[int] = frozenset(), **fields: Any) -> Matcher:
    return grammars.matcher(*StructuredOutputs(**fields).spec, ends)


def allowed(mask: np.ndarray) -> set[int]:
    return {i for i in range(32 * len(mask)) if mask[i // 32] >> np.uint32(i % 32) & 1}


def texts(tokenizer: Tokenizer) -> dict[int, bytes]:
    return {i: tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size) if i not in tokenizer.special_ids}


def test_a_mask_has_exactly_the_tokens_that_can_go_on(tokenizer: Tokenizer, grammars: Grammars) -> None:
    words = ["the quick", "they", "Ünï", "中文"]
    end = min(tokenizer.eos_ids)
    matcher, rest = begin(grammars, frozenset({end}), choice=words), [word.encode() for word in words]
    while not matcher.complete:
        found = allowed(matcher.mask())
        spelled = {i for i, text in texts(tokenizer).items() if text and any(word.startswith(text) for word in rest)}
        assert found == spelled | ({end} if b"" in rest else set())
        token = max(spelled)
        rest = [word[len(tokenizer.token_bytes(token)) :] for word in rest if word.startswith(tokenizer.token_bytes(token))]
        matcher.accept(token)
    assert b"" in rest


def test_end_tokens_are_allowed_exactly_where_the_text_may_end(tokenizer: Tokenizer, grammars: Grammars) -> None:
    a, stop = tokenizer.encode("a", add_special_tokens=False)[-1], tokenizer.encode("b", add_special_tokens=False)[-1]
    ends = tokenizer.eos_ids | {stop}
    matcher, unending = (begin(grammars, chosen, regex="aa+b*") for chosen in (ends, frozenset()))
    for made in range(3):
        assert (ends <= allowed(matcher.mask())) == (made >= 2) == bool(ends & allowed(matcher.mask()))
        assert not tokenizer.eos_ids & allowed(unending.mask())
        matcher.accept(a)
        unending.accept(a)
    matcher.accept(stop)
    assert matcher.complete and not unending.complete


def test_a_token_that_was_not_allowed_is_an_error(grammars: Grammars, tokenizer: Tokenizer) -> None:
    matcher = begin(grammars, regex="ab")
    with pytest.raises(InvalidRequestError, match="can't go on"):
        matcher.accept(tokenizer.encode("x", add_special_tokens=False)[-1])


def test_masks_ahead_are_those_that_come_and_nothing_changes(grammars: Grammars, tokenizer: Tokenizer) -> None:
    end = frozenset(tokenizer.eos_ids)
    path = [t for char in "abba" for t in tokenizer.encode(char, add_special_tokens=False)[-1:]]
    wrong = tokenizer.encode("x", add_special_tokens=False)[-1]
    for drafts, count in ((path, 3), ([*path[:2], wrong, *path[2:]], 2), ([wrong], 0), ([], 0), ([*path[:2], min(end)], 2)):
        matcher, twin = (begin(grammars, end, regex="ab(ba)?") for _ in range(2))
        before, ahead = matcher.mask(), matcher.masks_ahead(drafts)
        assert len(ahead) == count and np.array_equal(before, matcher.mask())
        for mask, token in zip(ahead, drafts, strict=False):
            twin.accept(token)
            assert np.array_equal(mask, twin.mask())


def test_matchers_of_one_grammar_go_their_own_ways(grammars: Grammars, tokenizer: Tokenizer) -> None:
    a, b = (tokenizer.encode(char, add_special_tokens=False)[-1] for char in "ab")
    one, other = begin(grammars, regex="a*b"), begin(grammars, regex="a*b")
    one.accept(a)
    one.accept(b)
    assert one.complete and not other.complete and {a, b} <= allowed(other.mask())


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"json": {"type": "foo"}}, "Invalid type: foo"),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"type": "string", "pattern": "(("}}, "unclosed group"),
        ({"json": {"$ref": "http://127.0.0.1/schema"}}, "does not fetch"),
        ({"json": {"$ref": "file:///etc/passwd"}}, "does not fetch"),
        ({"json": {"$ref": "#/$defs/none"}}, "none"),
        ({"json": False}, "Unsatisfiable"),
        ({"json": {"allOf": [{"type": "string"}, {"type": "integer"}]}}, "Unsatisfiable"),
        ({"json": {"$ref": "#"}}, "this json can't be used"),
        ({"grammar": "start: unknown"}, "unknown"),
        ({"grammar": '{"grammars": [{"json_schema": {}}]}'}, "Expected name"),
        ({"grammar": '%import "/etc/passwd"\nstart: "a"'}, "Expected name"),
        ({"grammar": "root ::= [a-"}, "GbnfToLarkError"),
    ],
)
def test_what_cannot_compile_is_refused_with_the_librarys_reason(grammars: Grammars, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(reason)) as refused:
        begin(grammars, **fields)
    assert refused.value.param == "structured_outputs"


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


HOSTILE: dict[str, dict[str, Any]] = {
    "repeats": {"regex": "(a{1,1000}){1,1000}"},
    "more repeats": {"regex": "(((a?){1000}){1000}){1000}"},
    "a state a subset": {"regex": "(a|b)*a(a|b){200}"},
    "letters": {"regex": r"(\p{L}|\w\d){1000}[^a]{1000}"},
    "parentheses": {"regex": "(" * 30_000 + "a" + ")" * 30_000},
    "nested rules": {"grammar": "start: " + "(" * 30_000 + '"a"' + ")" * 30_000},
    "nested GBNF": {"grammar": "root ::= " + "(" * 60_000 + '"a"' + ")" * 60_000},
    "long GBNF": {"grammar": "root ::= " + '"a" | ' * 20_000 + '"b"'},
    "ambiguous": {"grammar": 'start: s\ns: s s | s s s | "a" | "ab" | "b"'},
    "rules that repeat": {"grammar": 'start: (A{0,1000} B{0,1000}){0,1000}\nA: "a"\nB: "b"'},
    "deep": {"json": deep(60)},
    "deeper": {"json": deep(400)},
    "huge enum": {"json": {"enum": [f"value {i}" for i in range(8000)]}},
    "huge choice": {"choice": [f"value {i}" for i in range(8000)]},
    "remainders": {"json": {"type": "integer", "multipleOf": 1_000_003}},
    "least common multiple": {"json": {"allOf": [{"multipleOf": 997, "type": "integer"}, {"multipleOf": 1009}]}},
    "products": {
        "json": {"allOf": [
            {"anyOf": [{"type": "object", "properties": {f"p{i}{j}": {"type": "integer"}}} for j in range(6)]} for i in range(7)
        ]}
    },
    "properties": {"json": {"properties": {f"p{i}": {"type": "integer"} for i in range(4000)}, "additionalProperties": False}},
    "references": {
        "json": {"$ref": "#/$defs/a0", "$defs": {"a25": {"type": "integer"}} | {
            f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(25)
        }}
    },
    "items": {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 10**6}},
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_are_refused_or_cheap(name: str) -> None:
    """No clock: what runs past the limits is killed, so a hang would be a hang here."""
    tokenizer = Tokenizer.from_data(byte_level_data())
    grammars = Grammars(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)
    try:
        matcher = begin(grammars, tokenizer.eos_ids, **HOSTILE[name])
        for _ in range(30):
            if matcher.complete:
                break
            matcher.accept(min(allowed(matcher.mask())))
    except InvalidRequestError as refused:
        assert refused.param == "structured_outputs"


@pytest.mark.parametrize(
    "fields",
    [
        {}, {"regex": "a", "choice": ["b"]}, {"json_object": False}, {"json": 3}, {"json": "[1"}, {"json": "[1]"},
        {"json": deep(5000)}, {"json": "[" * 100_000}, {"json": {"const": float("nan")}}, {"json": {"const": {1, 2}}},
        {"json": {"const": "\ud800"}}, {"regex": 5}, {"regex": ""}, {"regex": "a" * 200_000}, {"choice": []},
        {"choice": "ab"}, {"choice": ["a", ""]}, {"choice": [1]}, {"choice": ["\udc00"]}, {"grammar": b"start"},
        {"json_object": "yes"}, {"json": {}, "whitespace_pattern": 1}, {"json": {}, "disable_any_whitespace": 1},
        {"jsonschema": {}}, "regex", ["a"],
    ],
)  # fmt: skip
def test_malformed_specifications_are_refused_at_construction(fields: Any) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        SamplingParams(structured_outputs=fields)
    assert refused.value.param == "structured_outputs"


def test_a_specification_may_come_in_many_forms() -> None:
    class Model:
        @staticmethod
        def model_json_schema() -> dict[str, Any]:
            return {"type": "integer"}

    same = [StructuredOutputs(json=form) for form in ({"type": "integer"}, '{"type":"integer"}', Model)]
    assert len(set(same)) == 1 and same[0].spec == ("json", '{"type": "integer"}')
    assert SamplingParams(structured_outputs={"choice": ["a", "b"]}).structured_outputs == StructuredOutputs(choice=("a", "b"))
    assert hash(SamplingParams(structured_outputs={"json": True})) == hash(SamplingParams(structured_outputs={"json": True}))
    assert json.loads(StructuredOutputs(json=True, disable_any_whitespace=True).spec[1])["x-guidance"] == {
        "whitespace_flexible": False
    }
    assert StructuredOutputs(json_object=True).spec == ("json", '{"type": "object"}')


def test_equal_grammars_are_compiled_once_and_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer.from_data(byte_level_data())
    grammars = Grammars(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)
    compiled, inside, original = [], threading.Barrier(2), grammars._compile

    def counting(kind: str, text: str) -> Any:
        compiled.append(text)
        if len(compiled) == 1:
            inside.wait()
        return original(kind, text)

    monkeypatch.setattr(grammars, "_compile", counting)
    monkeypatch.setattr(module, "CACHED", 3)
    threads = [threading.Thread(target=begin, args=(grammars,), kwargs={"regex": "a"}) for _ in range(5)]
    for thread in threads:
        thread.start()
    inside.wait()
    for thread in threads:
        thread.join()
    assert compiled == ["a"]
    for text in ("b", "c", "a", "d", "(", "a", "(", "b"):
        try:
            begin(grammars, regex=text)
        except InvalidRequestError:
            assert text == "("
    assert compiled == ["a", "b", "c", "d", "(", "b"] and len(grammars._known) == 3


def test_a_vocabulary_without_an_end_token_and_with_a_gap() -> None:
    class Gappy:
        vocab_size, special_ids = 64, frozenset({0})

        def token_bytes(self, token: int) -> bytes:
            return b"" if token > 40 else b"<s>" if token == 0 else bytes([96 + token])

    grammars = Grammars(Gappy(), 64, frozenset())
    matcher = begin(grammars, regex="[a-c]+")
    matcher.accept(1)
    assert allowed(matcher.mask()) == {1, 2, 3} and len(matcher.mask()) == 2
    with pytest.raises(InvalidRequestError, match="can't spell any text of it"):
        begin(grammars, regex="<s>")
