"""Merges derived from scores give the ids of SentencePiece's own rule, which is written out here by brute force."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import gguf_data, sentencepiece_gguf, sentencepiece_vocabulary

from trivium.text import Tokenizer
from trivium_formats.gguf.tokenizer import derive_merges


def brute_force(text: str, scores: dict[str, float]) -> list[str]:
    """Join the two neighbours whose union has the best score, the leftmost of equals, until none has one."""
    symbols = list(text)
    while True:
        joined = [(-scores[a + b], i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in scores]
        if not joined:
            return symbols
        _, i = min(joined)
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]


@given(st.text("abc the▁world Hello", max_size=60))
@settings(max_examples=200, deadline=None)
def test_ids_are_those_of_the_greedy_rule(text: str) -> None:
    tokens, scores, types = sentencepiece_vocabulary()
    known = {token: score for token, score, kind in zip(tokens, scores, types) if kind == 1}
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    pieces = brute_force(text.replace(" ", "▁"), known)
    assert [tokens[i] for i in ids] == pieces


TOKENIZER = Tokenizer.from_data(sentencepiece_gguf())


@given(st.lists(st.text("abcd", min_size=2, max_size=5), unique=True, max_size=20), st.text("abcd", max_size=30), st.data())
@settings(max_examples=150, deadline=None)
def test_random_vocabularies_of_closed_pieces(grown: list[str], text: str, data: st.DataObject) -> None:
    pieces = ["a", "b", "c", "d"]
    for piece in grown:  # as in training: a piece is made of two that were there before
        if any(piece[:i] in pieces and piece[i:] in pieces for i in range(1, len(piece))):
            pieces.append(piece)
    scores = {piece: -float(i) for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer.from_data(
        gguf_data(
            model="llama",
            tokens=["<unk>", *pieces],
            scores=[0.0, *scores.values()],
            token_type=[2] + [1] * len(pieces),
            unknown_token_id=0,
            add_space_prefix=False,
        )
    )
    assert [tokenizer.token_text(i) for i in tokenizer.encode(text)] == brute_force(text, scores)


@given(st.lists(st.text("ab▁é😀", min_size=1, max_size=6), unique=True, min_size=1, max_size=40), st.data())
@settings(max_examples=150, deadline=None)
def test_every_cut_of_every_token_is_a_merge_best_score_first(tokens: list[str], data: st.DataObject) -> None:
    scores = data.draw(st.lists(st.integers(-9, 0).map(float), min_size=len(tokens), max_size=len(tokens)))
    types = data.draw(st.lists(st.sampled_from([1, 1, 1, 3, 4, 5]), min_size=len(tokens), max_size=len(tokens)))
    usable = {token for token, kind in zip(tokens, types) if kind in (1, 4)}
    order = sorted((i for i, kind in enumerate(types) if kind in (1, 4)), key=lambda i: (types[i] != 4, -scores[i], i))
    cuts = [(tokens[i][:n], tokens[i][n:]) for i in order for n in reversed(range(1, len(tokens[i])))]
    assert derive_merges(tokens, types, scores) == [(left, right) for left, right in cuts if left in usable and right in usable]


def test_a_vocabulary_without_normal_tokens_has_no_merges() -> None:
    assert derive_merges(["<s>"], [3], [0.0]) == []
    assert derive_merges(["", "a"], [1, 1], [0.0, 0.0]) == []


def test_runs_of_blanks_and_long_words_are_quick_and_whole() -> None:
    text = "a" * 20_000 + " " * 20_000
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text
