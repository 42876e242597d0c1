"""Grammars on SmolLM2's own tokenizer of 49,152 tokens, and on the model."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import numpy as np
import pytest

from trivium import LLM, SamplingParams
from trivium.sampling import StructuredOutputs
from trivium.text import Grammars, Tokenizer
from trivium.weights import open_checkpoint, resolve

pytestmark = pytest.mark.weights


def test_masks_are_those_of_brute_force_over_the_whole_vocabulary() -> None:
    tokenizer = Tokenizer.from_data(open_checkpoint(resolve("smollm2-135m")).tokenizer_data())
    spelled = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
    grammars = Grammars(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)
    rng = np.random.default_rng(1)
    words = ["naïve café", "naïveté", " 12345.678", "在线 now", "🙂🙂"]
    for _ in range(4):
        matcher = grammars.matcher(*StructuredOutputs(choice=words).spec, tokenizer.eos_ids)
        rest = [word.encode() for word in words]
        while not matcher.complete:
            bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")[: tokenizer.vocab_size]
            want = {
                i for i, text in enumerate(spelled)
                if text and i not in tokenizer.special_ids and any(word.startswith(text) for word in rest)
            }  # fmt: skip
            assert set(np.flatnonzero(bits)) == want | (tokenizer.eos_ids if b"" in rest else set())
            token = int(rng.choice(sorted(want)))
            rest = [word[len(spelled[token]) :] for word in rest if word.startswith(spelled[token])]
            matcher.accept(token)


def test_smollm2_answers_in_the_form_that_was_asked_for() -> None:
    schema: dict[str, Any] = {
        "type": "object", "required": ["capital", "population"], "additionalProperties": False,
        "properties": {"capital": {"type": "string", "maxLength": 20}, "population": {"type": "integer", "minimum": 0}},
    }  # fmt: skip
    with LLM("smollm2-135m", progress=False) as llm:
        asked = [{"role": "user", "content": "The capital of France and its population, as JSON."}]
        for temperature in (0.0, 1.5):
            params = SamplingParams(
                temperature=temperature, seed=1, max_tokens=100, structured_outputs={"json": schema, "whitespace_pattern": " ?"}
            )
            answer = llm.chat(asked, params)[0].outputs[0]
            if answer.finish_reason == "stop":
                jsonschema.validate(json.loads(answer.text), schema)
            assert answer.text.startswith("{")
        choice = SamplingParams(temperature=0, max_tokens=20, structured_outputs={"choice": ["Paris", "Rome", "Madrid"]})
        assert llm.generate("The capital of France is the city of ", choice)[0].outputs[0].text == "Paris"
