"""Streamed text is the text of the whole, for every kind of tokenizer and any ids."""

from __future__ import annotations

import pytest
from awkward_strings import awkward_strings
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tiny_tokenizers import byte_level_data, byte_level_gguf, sentencepiece_gguf

from trivium.text import Detokenizer, Tokenizer

TOKENIZERS = [
    Tokenizer.from_data(data)
    for data in (byte_level_data(), byte_level_gguf(), sentencepiece_gguf(), sentencepiece_gguf(add_space_prefix=True))
]


def stream(tokenizer: Tokenizer, ids: list[int], *, skip_special_tokens: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    return [detokenizer.push(i) for i in ids] + [detokenizer.finish()]


def one_id(tokenizer: Tokenizer, text: str) -> int:
    (token_id,) = tokenizer.encode(text, add_special_tokens=False)
    return token_id


@given(st.sampled_from(TOKENIZERS), st.text(max_size=40), st.booleans())
@settings(max_examples=300, deadline=None)
def test_streamed_text_is_the_text_that_was_encoded(tokenizer: Tokenizer, text: str, skip: bool) -> None:
    assume(not any(tokenizer.token_text(i) in text for i in tokenizer.special_ids))
    ids = tokenizer.encode(text, add_special_tokens=False)
    expected = text.replace("▁", " ") if tokenizer in TOKENIZERS[2:] else text
    assert "".join(stream(tokenizer, ids, skip_special_tokens=skip)) == expected


@given(st.sampled_from(TOKENIZERS), st.data(), st.booleans())
@settings(max_examples=300, deadline=None)
def test_any_ids_stream_to_the_bytes_of_all_tokens_decoded_at_once(tokenizer: Tokenizer, data: st.DataObject, skip: bool) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    shown = [i for i in ids if not (skip and i in tokenizer.special_ids)]
    whole = b"".join(tokenizer.token_bytes(i) for i in shown).decode("utf-8", "replace")
    whole = whole.removeprefix(" ") if tokenizer.strips_leading_space else whole
    assert "".join(stream(tokenizer, ids, skip_special_tokens=skip)) == whole
    assert tokenizer.decode(ids, skip_special_tokens=skip) == whole


@given(st.sampled_from(TOKENIZERS), st.text(st.characters(min_codepoint=0x80, exclude_categories=["Cs"]), min_size=1, max_size=12))
@settings(max_examples=200, deadline=None)
def test_no_piece_holds_a_broken_character(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text.replace("\ufffd", ""), add_special_tokens=False)
    assert "\ufffd" not in "".join(stream(tokenizer, ids))


@pytest.mark.faults
@pytest.mark.parametrize("streamed", [False, True])
def test_o25_special_tokens_are_hidden_or_shown_raw_and_add_no_blank(tokenizer: Tokenizer, streamed: bool) -> None:
    special = sorted(tokenizer.special_ids - {tokenizer.bos_id})[-1]
    tokens = [
        tokenizer.bos_id,
        *tokenizer.encode("he", add_special_tokens=False),
        special,
        *tokenizer.encode("or", add_special_tokens=False),
    ]
    ids = [i for i in tokens if i is not None]

    def show(skip: bool) -> str:
        return (
            "".join(stream(tokenizer, ids, skip_special_tokens=skip))
            if streamed
            else tokenizer.decode(ids, skip_special_tokens=skip)
        )

    blank = " " if tokenizer.strips_leading_space else ""  # the tokenizer's own blank before "or", not an added one
    assert show(True) == f"he{blank}or"
    assert show(False) == "".join(tokenizer.token_text(i) for i in ids)


@pytest.mark.faults
def test_o25_added_tokens_that_are_not_special_stay_visible(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<think>he", add_special_tokens=False)
    assert tokenizer.decode(ids).replace(" ", "") == "<think>he"
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.faults
@pytest.mark.parametrize(
    "text",
    [
        " a",
        "  two",
        "x\n\n y",
        "a    b",
        "a" + " " * 40 + "b",
        "\t\tif x:\n\t\t\ty",
        "    def f():\n        pass",
        "中文 日本語",
        " " * 9,
        "\n ",
    ],
)
def test_o26_blanks_survive_streaming_at_every_split(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids) == text
    for split in range(len(ids)):
        detokenizer = Detokenizer(tokenizer)
        head = "".join(detokenizer.push(i) for i in ids[:split])
        assert text.startswith(head)
        assert head + "".join(detokenizer.push(i) for i in ids[split:]) + detokenizer.finish() == text


@pytest.mark.faults
def test_o26_a_blank_that_begins_a_token_alone_is_not_lost(tokenizer: Tokenizer) -> None:
    text = "the quick  brown"
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = b"".join(tokenizer.token_bytes(i) for i in ids).decode()
    assert pieces == (" " if tokenizer.strips_leading_space else "") + text


@pytest.mark.faults
@pytest.mark.parametrize("kept", [1, 2, 3])
def test_o27_an_answer_cut_inside_a_character_ends_with_one_replacement(tokenizer: Tokenizer, kept: int) -> None:
    singles = {tokenizer.token_bytes(i): i for i in reversed(range(tokenizer.vocab_size)) if i not in tokenizer.special_ids}
    ids = tokenizer.encode("he", add_special_tokens=False) + [singles[bytes([byte])] for byte in "🦜".encode()[:kept]]
    pieces = stream(tokenizer, ids)
    assert pieces[-1] == "\ufffd"
    assert "\ufffd" not in "".join(pieces[:-1])
    assert "".join(pieces) == tokenizer.decode(ids) == "he\ufffd"


@pytest.mark.faults
def test_o27_broken_bytes_inside_a_text_become_replacements_where_they_are(tokenizer: Tokenizer) -> None:
    singles = {tokenizer.token_bytes(i): i for i in reversed(range(tokenizer.vocab_size)) if i not in tokenizer.special_ids}
    ids = [
        singles[b"\xf0"],
        singles[b"\x9f"],
        singles[b"h"],
        singles[b"\x80"],
        singles[b"\xe4"],
        singles[b"\xbd"],
        singles[b"\xa0"],
    ]
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids) == "\ufffdh\ufffd你"


def test_the_corpus_streams_as_it_decodes(tokenizer: Tokenizer) -> None:
    for text in awkward_strings():
        ids = tokenizer.encode(text)
        for skip in (True, False):
            assert "".join(stream(tokenizer, ids, skip_special_tokens=skip)) == tokenizer.decode(ids, skip_special_tokens=skip)
