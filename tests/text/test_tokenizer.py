"""Tokenizers: every kind builds, keeps its special tokens whole, goes there and back, and refuses what it can't read."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from awkward_strings import awkward_strings
from encoder_cases import tokenizer_of
from tiny_tokenizers import byte_level_data, byte_level_gguf, gguf_data, sentencepiece_gguf, sentencepiece_vocabulary

from trivium.errors import CheckpointError, InvalidRequestError, UnsupportedError
from trivium.text import Tokenizer
from trivium_formats.gguf.tokenizer import Words


def test_importing_the_package_loads_no_tokenizer_library_and_no_jinja() -> None:
    code = "import sys, trivium.text; sys.exit(int('tokenizers' in sys.modules or 'jinja2' in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_kind_gives_back_the_text_it_was_given(tokenizer: Tokenizer) -> None:
    blank_spelled = tokenizer.decode(tokenizer.encode("a▁"), skip_special_tokens=False) != "a▁"
    for text in awkward_strings(specials=()):
        if blank_spelled and ("▁" in text or "<unk>" in text):
            continue  # SentencePiece writes a blank as U+2581, and may put one after a special token
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_prefixed_sentencepiece_puts_the_blank_before_each_piece_of_text_between_special_tokens() -> None:
    tokenizer = Tokenizer.from_data(sentencepiece_gguf(add_space_prefix=True))
    ids = tokenizer.encode("the<end_of_turn>the", add_special_tokens=False)
    assert [tokenizer.token_text(i) for i in ids] == [" the", "<end_of_turn>", " the"]
    assert tokenizer.decode(ids, skip_special_tokens=False) == "the<end_of_turn> the"
    assert tokenizer.decode(tokenizer.encode("  the")) == "  the"


def test_bytes_fall_back_where_a_character_has_no_token() -> None:
    tokenizer = Tokenizer.from_data(sentencepiece_gguf())
    ids = tokenizer.encode("é", add_special_tokens=False)
    assert b"".join(tokenizer.token_bytes(i) for i in ids) == "é".encode()
    assert tokenizer.encode("ÿ", add_special_tokens=False) == [4 + 0xC3, 4 + 0xBF]


def test_without_byte_tokens_unknown_characters_become_one_unknown_token() -> None:
    data = gguf_data(model="llama", tokens=["<unk>", "▁", "a"], scores=[0.0, -1.0, -2.0], token_type=[2, 1, 1], unknown_token_id=0)
    tokenizer = Tokenizer.from_data(data)
    assert tokenizer.encode("a€ßa") == [1, 2, 0, 2]


def test_ids_and_sets_that_the_engine_reads(tokenizer: Tokenizer) -> None:
    assert tokenizer.bos_id in tokenizer.special_ids
    assert tokenizer.eos_ids <= tokenizer.special_ids
    assert all(0 <= i < tokenizer.vocab_size for i in tokenizer.special_ids)
    think = tokenizer.encode("<think>", add_special_tokens=False)[-1]
    assert think not in tokenizer.special_ids
    assert tokenizer.token_text(think) == "<think>"
    with pytest.raises(InvalidRequestError, match=f"0 to {tokenizer.vocab_size - 1}"):
        tokenizer.token_bytes(tokenizer.vocab_size)
    with pytest.raises(InvalidRequestError, match="-1 is outside"):
        tokenizer.decode([-1])


def test_half_a_surrogate_pair_is_refused_with_its_place(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="character 2 is half of a surrogate pair"):
        tokenizer.encode("ab\ud83d")
    with pytest.raises(InvalidRequestError, match="not bytes"):
        tokenizer.encode(b"ab")  # type: ignore[arg-type]


def test_bos_and_eos_are_added_as_the_file_says() -> None:
    bare = Tokenizer.from_data(sentencepiece_gguf(add_bos_token=False)).encode("the")
    assert Tokenizer.from_data(sentencepiece_gguf()).encode("the") == [2, *bare]
    assert Tokenizer.from_data(sentencepiece_gguf(add_eos_token=True)).encode("the") == [2, *bare, 1]
    assert Tokenizer.from_data(sentencepiece_gguf(bos_token_id=None)).encode("the") == bare
    plain = Tokenizer.from_data(byte_level_gguf()).encode("the")
    tokenizer = Tokenizer.from_data(byte_level_gguf(pre="llama-bpe"))
    assert tokenizer.encode("the") == [tokenizer.bos_id, *plain]


def test_end_of_turn_and_message_end_an_answer_like_end_of_sequence() -> None:
    think = sentencepiece_vocabulary()[0].index("<think>")
    tokenizer = Tokenizer.from_data(sentencepiece_gguf(eot_token_id=think, eom_token_id=0))
    turn = tokenizer.encode("<end_of_turn>", add_special_tokens=False)
    assert tokenizer.eos_ids == {1, 0, think, *turn}


def test_harmony_end_separates_messages_and_ends_no_answer() -> None:
    def names(tokens: list[str]) -> set[str]:
        data = gguf_data(model="gpt2", tokens=["a", *tokens], token_type=[1] + [3] * len(tokens), merges=[])
        tokenizer = Tokenizer.from_data(data)
        return {tokenizer.token_text(i) for i in tokenizer.eos_ids}

    assert names(["<|end|>", "<|return|>", "<|call|>"]) == {"<|return|>", "<|call|>"}
    assert names(["<|end|>", "<|user|>"]) == {"<|end|>"}


def test_a_vocabulary_from_json_and_from_gguf_gives_the_same_ids() -> None:
    one, other = Tokenizer.from_data(byte_level_data()), Tokenizer.from_data(byte_level_gguf())
    assert one.vocab_size == other.vocab_size
    assert one.special_ids == other.special_ids
    assert one.eos_ids == other.eos_ids
    for text in awkward_strings():
        assert one.encode(text) == other.encode(text), text


def test_configuration_flags_replace_what_tokenizer_json_adds() -> None:
    plain = Tokenizer.from_data(byte_level_data()).encode("the")
    both = Tokenizer.from_data(byte_level_data(add_bos_token=True, add_eos_token=True))
    assert both.encode("the") == [both.bos_id, *plain, both.encode("<|im_end|>", add_special_tokens=False)[0]]


def test_tokens_that_only_the_configuration_names_are_added_if_they_have_an_id() -> None:
    config = {
        "added_tokens_decoder": {"5": {"content": "<think>", "special": True}},
        "additional_special_tokens": ["</think>", "<absent>"],
    }
    tokenizer = Tokenizer.from_data(byte_level_data(**config))
    texts = {tokenizer.token_text(i) for i in tokenizer.special_ids}
    assert {"<think>", "</think>"} <= texts
    assert "<absent>" not in texts
    assert len(tokenizer.encode("<absent>")) > 1


def test_special_tokens_may_be_null_or_a_mapping_as_transformers_writes_them() -> None:
    tokenizer = Tokenizer.from_data(byte_level_data(additional_special_tokens=None, extra_special_tokens={"think": "<think>"}))
    assert "<think>" in {tokenizer.token_text(i) for i in tokenizer.special_ids}


@pytest.mark.parametrize("templates", [["x"], [{"name": "default"}], [{"template": "x"}], 3, {"default": "x"}, None])
def test_chat_templates_that_are_none_are_left_out(templates: object) -> None:
    data = byte_level_data(chat_template=templates) | {"chat_template": None}
    assert Tokenizer.from_data(data).chat_template is None


def test_truncation_and_padding_in_tokenizer_json_are_ignored() -> None:
    data = byte_level_data()
    content = json.loads(data["tokenizer_json"])
    content["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {
        "strategy": {"Fixed": 50},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "x",
    }
    cut = Tokenizer.from_data(data | {"tokenizer_json": json.dumps(content)})
    assert cut.encode("the quick brown fox") == Tokenizer.from_data(data).encode("the quick brown fox")


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"model": "bert"}, UnsupportedError, "'bert'.*supported are gpt2, llama"),
        ({"model": "t5"}, UnsupportedError, "'t5'"),
        ({"model": None}, UnsupportedError, "kind ''"),
        ({"tokens": []}, CheckpointError, "0 tokens"),
        ({"token_type": [1]}, CheckpointError, "1 types"),
        ({"scores": [0.0]}, CheckpointError, "1 scores"),
        ({"eos_token_id": 10**6}, CheckpointError, "eos is token 1000000"),
        ({"bos_token_id": -1}, CheckpointError, "bos is token -1"),
        ({"merges": ["ab"]}, CheckpointError, "merge 0 .*'ab'"),
        ({"merges": ["a b c"]}, CheckpointError, "merge 0"),
        ({"merges": ["no such"]}, CheckpointError, "can't be built"),
    ],
)
def test_metadata_that_cannot_be_true_is_refused(changes: dict[str, object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Tokenizer.from_data(
            gguf_data(**({"model": "llama", "tokens": ["<unk>", "a"], "token_type": [2, 1], "scores": [0.0, 0.0]} | changes))
        ).check()


MERGING = {"model": "gpt2", "tokens": ["a", "b", "ab", "abb"], "token_type": [1] * 4}


@pytest.mark.parametrize(
    "merges", [["a b", "ab"], ["a b", "a b b", "ab"], ["a b", "ab  b"], ["a b", "b a"], ["a b", "c b"], ["a b", ""]]
)
def test_merges_that_cannot_be_are_found_before_a_text_is_encoded(merges: list[str]) -> None:
    tokenizer = Tokenizer.from_data(gguf_data(**MERGING, merges=merges))
    with pytest.raises(CheckpointError, match=r"merge \d"):
        tokenizer.check()
    with pytest.raises(CheckpointError, match=r"merge \d"):
        tokenizer.encode("ab")


def test_merges_of_tokens_that_are_control_characters_are_counted_as_any() -> None:
    tokens = ["a", "b", "c", "\0", "ab", "ab\0", "c\0", "\0c"]
    vocabulary = MERGING | {"tokens": tokens, "token_type": [1] * len(tokens)}
    Tokenizer.from_data(gguf_data(**vocabulary, merges=["a b", "ab \0"])).check()
    with pytest.raises(CheckpointError, match="merge 0"):
        Tokenizer.from_data(gguf_data(**vocabulary, merges=["a b \0 c", "\0", "c"])).check()


@pytest.mark.parametrize(
    "data", [byte_level_gguf(), sentencepiece_gguf(), sentencepiece_gguf(model="llama")], ids=["bytes", "gemma", "llama"]
)
def test_what_is_known_before_the_tokenizer_is_built_is_what_the_built_one_says(data: dict[str, Any]) -> None:
    words = Words(data["read"].args[0])
    backend = words.build()
    assert words.vocab == backend.get_vocab()
    added = {i: (t.content, t.special) for i, t in backend.get_added_tokens_decoder().items()}
    assert words.added == added
    assert backend.decoder is None, "what decodes is made of words.decoder alone"


def test_ids_become_text_without_building_what_encodes(monkeypatch: pytest.MonkeyPatch) -> None:
    built = Tokenizer.from_data(byte_level_gguf())
    ids = built.encode("the quick brown fox, 中文 😀")
    monkeypatch.setattr(Words, "build", lambda self: pytest.fail("it was built"))
    tokenizer = Tokenizer.from_data(byte_level_gguf())
    tokenizer.check()
    assert tokenizer.decode(ids) == "the quick brown fox, 中文 😀"
    assert (tokenizer.vocab_size, tokenizer.eos_ids, tokenizer.special_ids) == (built.vocab_size, built.eos_ids, built.special_ids)


def test_an_unknown_pretokenizer_is_refused_with_near_names() -> None:
    with pytest.raises(UnsupportedError, match=r"'qwen25'.*did you mean .*qwen2"):
        Tokenizer.from_data(byte_level_gguf(pre="qwen25"))
    with pytest.raises(UnsupportedError, match=r"known are .*llama-bpe"):
        Tokenizer.from_data(byte_level_gguf(pre="zzzzzzzz"))


def test_damaged_tokenizer_json_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json can't be read"):
        Tokenizer.from_data(byte_level_data() | {"tokenizer_json": "{"})


def test_a_decoder_that_is_not_known_is_refused_by_name() -> None:
    content = json.loads(byte_level_data()["tokenizer_json"]) | {
        "decoder": {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True}
    }
    with pytest.raises(UnsupportedError, match="CTC"):
        Tokenizer.from_data(byte_level_data() | {"tokenizer_json": json.dumps(content)})


@pytest.mark.parametrize("kind", ["wordpiece", "unigram", "bytes"])
def test_encoders_tokenizers_give_texts_and_pairs_the_ids_of_their_package(kind: str) -> None:
    own = tokenizer_of(kind)
    tokenizer = Tokenizer.from_data({"kind": "json", "tokenizer_json": own.to_str(), "config": {}, "chat_template": None})
    text, other = "the quick brown fox jumps", "Paris is lazy"
    assert tokenizer.encode(text) == own.encode(text).ids
    assert tokenizer.encode_pair(text, other) == own.encode(text, other).ids
    assert tokenizer.decode(own.encode(text).ids).strip() == own.decode(own.encode(text).ids).strip()


def test_a_pair_goes_through_a_template_that_has_its_roles_and_through_no_other() -> None:
    by_role = "{{ (messages | selectattr('role', 'eq', 'ROLE') | first).content }}"
    template = f"{by_role.replace('ROLE', 'query')}?{by_role.replace('ROLE', 'document')}"
    with_roles = Tokenizer.from_data(byte_level_data() | {"chat_template": template})
    assert with_roles.encode_pair("a b", "c") == with_roles.encode("a b?c", add_special_tokens=False)
    plain = Tokenizer.from_data(byte_level_data())
    assert plain.encode_pair("a b", "c") == [*plain.encode("a b"), *plain.encode("c")]


def test_half_of_a_character_in_a_pair_is_refused() -> None:
    tokenizer = Tokenizer.from_data(byte_level_data())
    with pytest.raises(InvalidRequestError, match="surrogate"):
        tokenizer.encode_pair("ok", "a\ud800")


def test_an_id_without_a_token_has_no_bytes() -> None:
    content = json.loads(byte_level_data()["tokenizer_json"])
    last = max(content["model"]["vocab"], key=content["model"]["vocab"].__getitem__)
    content["model"]["vocab"][last] = 1000
    tokenizer = Tokenizer.from_data(byte_level_data() | {"tokenizer_json": json.dumps(content)})
    assert tokenizer.vocab_size > 1000
    assert tokenizer.token_bytes(900) == b""
    assert tokenizer.decode([900, 1000]) == tokenizer.token_text(1000) != ""
