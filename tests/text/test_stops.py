"""Stop strings: found in the text whatever its pieces, cut exactly, and nothing of them shown too early."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import sentencepiece_gguf

from trivium.errors import InvalidRequestError
from trivium.text import Detokenizer, StopMatcher, Tokenizer

TEXT = "The answer is 42, and that is the whole answer.\nUser: thanks"


def brute_force(text: str, stops: list[str], include_stop: bool) -> tuple[str, str | None]:
    found = [(text.find(stop), len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    start, length, stop = min(found)
    return text[: start + length * include_stop], stop


def run(pieces: list[str], stops: list[str], include_stop: bool = False) -> tuple[list[str], str | None]:
    matcher = StopMatcher(stops, include_stop=include_stop)
    shown = []
    for piece in pieces:
        emitted, matched = matcher.push(piece)
        shown.append(emitted)
        if matched is not None:
            assert matcher.matched == matched
            break
    return [*shown, matcher.finish()], matcher.matched


@given(st.text("abc", max_size=40), st.lists(st.text("abc", min_size=1, max_size=5), max_size=4), st.booleans(), st.data())
@settings(max_examples=500, deadline=None)
def test_any_pieces_give_the_text_up_to_the_match_that_begins_first(
    text: str, stops: list[str], include: bool, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
    shown, matched = run(pieces, stops, include)
    assert ("".join(shown), matched) == brute_force(text, stops, include)


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=3))
@settings(max_examples=300, deadline=None)
def test_held_text_is_shorter_than_the_longest_stop(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    seen, shown = 0, ""
    for char in text:
        emitted, matched = matcher.push(char)
        seen, shown = seen + 1, shown + emitted
        if matched is not None:
            break
        assert text.startswith(shown)
        assert seen - len(shown) < max(map(len, stops))


def test_an_earlier_longer_match_is_waited_for_and_a_dead_one_is_not() -> None:
    assert run(["xab", "c"], ["abcd", "bc"])[1] == "bc"
    assert run(["xabc", "d"], ["abcd", "bc"]) == (["x", "", ""], "abcd")
    assert run(["xabc", "e"], ["abcd", "bc"]) == (["x", "a", ""], "bc")


def test_of_two_matches_at_one_place_the_shorter_wins() -> None:
    assert run(["x", "ab", "c"], ["abc", "ab"], include_stop=True) == (["x", "ab", ""], "ab")


def test_after_a_match_nothing_more_is_shown() -> None:
    matcher = StopMatcher(["b"])
    assert matcher.push("abc") == ("a", "b")
    assert matcher.push("ddd") == ("", "b")
    assert matcher.finish() == ""


def test_without_stops_all_passes_at_once() -> None:
    matcher = StopMatcher([])
    assert matcher.push("abc") == ("abc", None)
    assert matcher.finish() == ""


@pytest.mark.parametrize("stops", ["abc", [""], ["a", ""], [1]])
def test_stops_that_mean_nothing_are_refused(stops: object) -> None:
    with pytest.raises(InvalidRequestError, match="stop must be a list of strings"):
        StopMatcher(stops)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def sentencepiece() -> Tokenizer:
    return Tokenizer.from_data(sentencepiece_gguf())


def pieces_of(tokenizer: Tokenizer, text: str) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [detokenizer.push(i) for i in tokenizer.encode(text)] + [detokenizer.finish()]


@pytest.mark.faults
@pytest.mark.parametrize("include", [False, True])
def test_o13_stops_inside_and_across_tokens_cut_exactly(tokenizer: Tokenizer, include: bool) -> None:
    for start in range(len(TEXT)):
        for length in (1, 2, 7):
            stop = TEXT[start : start + length]
            shown, matched = run(pieces_of(tokenizer, TEXT), [stop, "zzz"], include)
            assert matched == stop
            assert "".join(shown) == TEXT[: TEXT.find(stop) + len(stop) * include]


@pytest.mark.faults
def test_o13_the_earliest_of_several_wins(tokenizer: Tokenizer) -> None:
    shown, matched = run(pieces_of(tokenizer, TEXT), ["whole", "42", "answer."])
    assert ("".join(shown), matched) == ("The answer is ", "42")


@pytest.mark.faults
def test_o14_no_part_of_a_stop_is_shown_before_the_rest_arrives(tokenizer: Tokenizer) -> None:
    pieces = pieces_of(tokenizer, TEXT)
    for start in range(5, len(TEXT) - 7):
        stop = TEXT[start : start + 7]
        shown, matched = run(pieces, [stop])
        assert "".join(shown) == TEXT[: TEXT.find(stop)]
        assert matched == stop


@pytest.mark.faults
def test_o14_text_that_only_looked_like_a_stop_is_released() -> None:
    assert run(["END", "LESS"], ["END."]) == (["", "ENDLESS", ""], None)
    assert run(["EN"], ["END"]) == (["", "EN"], None)


@pytest.mark.faults
def test_o16_a_stop_of_several_words_is_found_beside_a_longer_one(sentencepiece: Tokenizer) -> None:
    pieces = pieces_of(sentencepiece, TEXT)
    for start in range(5, 30):
        stop = TEXT[start : start + 17]
        shown, matched = run(pieces, [stop, stop + " which never occurs at all"])
        assert ("".join(shown), matched) == (TEXT[: TEXT.find(stop)], stop)
