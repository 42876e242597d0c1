"""A tokenizer.json in the words of a GGUF file: read again, it cuts as the original does."""

from __future__ import annotations

import json
from typing import Any

import pytest
from awkward_strings import FIXED
from tiny_tokenizers import WORDS, byte_level_gguf, byte_level_json, sentencepiece_gguf
from trivium.errors import CheckpointError, UnsupportedError
from trivium_formats.gguf import describe_vocabulary, read_vocabulary
from trivium_formats.gguf.tokenizer import Words

TEXTS = [WORDS, *FIXED, "a  b   c", " 12345 don't"]


def again(content: dict[str, Any], size: int) -> Any:
    """What encodes, of what the file would say."""
    keys = describe_vocabulary(content, size)
    return read_vocabulary({f"tokenizer.ggml.{key}": value for key, value in keys.items()}).build()


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2", "qwen35", "tekken", "gpt-4o", "deepseek-v3"])
def test_every_way_to_cut_words_is_known_by_its_patterns(pre: str) -> None:
    import tokenizers

    text = Words(byte_level_gguf(pre)["read"].args[0]).build().to_str()
    original, found = tokenizers.Tokenizer.from_str(text), again(json.loads(text), 500)
    for sample in TEXTS:
        assert found.encode(sample, add_special_tokens=False).ids == original.encode(sample, add_special_tokens=False).ids


@pytest.mark.parametrize("prefix", [False, True])
def test_sentencepiece_s_merges_become_scores_and_stay_merges(prefix: bool) -> None:
    import tokenizers

    metadata = sentencepiece_gguf(add_space_prefix=prefix)["read"].args[0]
    text = Words(metadata).build().to_str()
    original, content = tokenizers.Tokenizer.from_str(text), json.loads(text)
    keys = describe_vocabulary(content, len(metadata["tokenizer.ggml.tokens"]))
    assert keys["tokens"] == metadata["tokenizer.ggml.tokens"]
    assert keys["add_space_prefix"] is prefix
    special = {i for i, kind in enumerate(metadata["tokenizer.ggml.token_type"]) if kind != 1}
    assert {i for i, kind in enumerate(keys["token_type"]) if kind != 1} == special
    for without in ({}, {"merges": []}):  # readers of this kind of vocabulary go by scores alone
        found = read_vocabulary({f"tokenizer.ggml.{key}": value for key, value in {**keys, **without}.items()}).build()
        for sample in TEXTS:
            assert found.encode(sample).ids == original.encode(sample).ids


def test_rows_of_the_embedding_without_a_token_are_unused_and_never_sampled() -> None:
    content = json.loads(byte_level_json())
    known = len(content["model"]["vocab"]) + 2  # <think> and </think>
    keys = describe_vocabulary(content, known + 9)
    assert keys["token_type"][known:] == [5] * 9
    assert read_vocabulary({f"tokenizer.ggml.{key}": value for key, value in keys.items()}).size == known
    with pytest.raises(CheckpointError, match=f"has the id {known - 1}, but the model knows {known - 1} tokens"):
        describe_vocabulary(content, known - 1)


@pytest.mark.parametrize(
    ("part", "value", "reason"),
    [
        ("model", {"type": "WordPiece", "vocab": {}}, "model is WordPiece"),
        ("pre_tokenizer", {"type": "Whitespace"}, "cuts words by Whitespace"),
        (
            "pre_tokenizer",
            {"type": "Split", "pattern": {"Regex": "x"}, "behavior": "Isolated", "invert": False},
            "cuts words by .'x'",
        ),
    ],
)
def test_what_has_no_name_in_the_format_is_refused(part: str, value: Any, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        describe_vocabulary({**json.loads(byte_level_json()), part: value}, 500)
