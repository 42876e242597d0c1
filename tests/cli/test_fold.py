"""Long listings are folded: nothing is lost or invented, and the whole stays short."""

from __future__ import annotations

import pytest
from chat_models import make_chat_model
from hypothesis import given
from hypothesis import strategies as st

from trivium.cli import main
from trivium.cli.fold import SAVED, WIDTH, cut, fold, folded, key, ranges, unnumbered


def unfold(keys, pieces):
    """What a reader makes of the folded listing: the announced lines, so many times."""
    out, pieces = [], list(pieces)
    while pieces:
        piece = pieces.pop(0)
        if not piece.period:
            out.append(keys[piece.start])
            continue
        inner = []
        while pieces and pieces[0].depth > piece.depth:
            inner.append(pieces.pop(0))
        out += unfold(keys, inner) * piece.times
    return out


@given(st.lists(st.sampled_from("abc"), max_size=40), st.integers(1, 6), st.lists(st.sampled_from("abc"), max_size=5))
def test_folding_loses_nothing(run, times, rest):
    keys = run * times + rest
    assert unfold(keys, fold(keys)) == keys


def test_repeats_inside_repeats():
    keys = (["local", "x"] * 5 + ["global", "y"]) * 3 + ["head"]
    assert [tuple(p) for p in fold(keys)] == [
        (0, 0, 12, 3), (1, 0, 2, 5), (2, 0, 0, 1), (2, 1, 0, 1), (1, 10, 0, 1), (1, 11, 0, 1), (0, 36, 0, 1),
    ]  # fmt: skip


def test_a_repeat_that_saves_little_stays():
    assert [p.period for p in fold(["a"] * SAVED)] == [0] * SAVED
    assert [p.period for p in fold(["a"] * (SAVED + 1))] == [1, 0]


def test_a_line_is_known_again_in_the_next_layer_only_if_it_is_wired_alike():
    first = "%y3[tokens, 576] = linear(%y2, @model.layers.0.q.weight[576], none, scale=0.125)"
    assert key(first) == key(first.replace("y3", "y23").replace("y2,", "y22,").replace("layers.0", "layers.11"))
    for other in (first.replace("y2,", "y1,"), first.replace("576], none", "577], none"), first.replace("0.125", "0.5")):
        assert key(first) != key(other)


def test_folded_says_how_often_and_where():
    lines = ["start", *(f"%y{n + 1} = f(%y{n}, @model.layers.{n}.w)" for n in range(9)), "end"]
    assert folded(lines).splitlines() == ["start", "9 times, layers 0 to 8:", "  %y1 = f(%y0, @model.layers.0.w)", "end"]


def test_cells():
    assert cut("abcdef", 6) == "abcdef" and cut("abcdefg", 6) == "abcde…"
    assert cut("eps=9.999999747378752e-06, scale=0.125", 99) == "eps=1e-05, scale=0.125"
    assert unnumbered("model.layers.12.mlp.w") == ("model.layers.*.mlp.w", [12]) and unnumbered("lm_head") == ("lm_head", [])
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8" and ranges([]) == ""


@pytest.mark.parametrize("command", ["inspect", "explain"])
def test_a_deep_model_reads_on_one_page(command, tmp_path, capsys):
    texts = []
    for layers in (8, 9):
        folder = make_chat_model(tmp_path / str(layers), num_hidden_layers=layers)
        assert main([command, str(folder), "--backend", "reference"]) == 0
        texts.append(capsys.readouterr().out.splitlines())
    assert len(texts[0]) == len(texts[1])
    assert max(map(len, texts[1])) <= WIDTH
    assert "9 times, layers 0 to 8:" in texts[1]
