"""Encoders and cross-encoders whose weights were rounded say nearly what transformers' model says of the weights as they were."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from encoder_cases import encoder, hidden_of, logits_of
from trivium_compress import Calibration, Recipe, quantise
from trivium_compress.evaluate import Material, Side, evaluate

from trivium import LLM
from trivium.errors import UnsupportedError

pytestmark = pytest.mark.oracles
TEXT = "the quick brown fox"


@pytest.mark.parametrize("name", ["bert", "roberta", "modernbert"])
@pytest.mark.parametrize("calibrated", [False, True])
def test_an_encoder_in_8_bits_keeps_its_embeddings(tmp_path: Path, name: str, calibrated: bool) -> None:
    model, words = encoder(name, tmp_path / "as-stored")
    (tmp_path / "text.txt").write_text(f"{TEXT} jumps over the lazy dog. " * 40)
    text = Calibration(tmp_path / "text.txt", windows=2, window=32) if calibrated else None
    quantise(tmp_path / "as-stored", tmp_path / "rounded", Recipe(format="int8"), text)
    want = hidden_of(model, words, TEXT).mean(axis=0)
    with LLM(tmp_path / "rounded", "torch", progress=False) as llm:
        rounded = {route.name for route in llm.loaded.routes if route.storage != "float32"}
        assert len(rounded) >= 4 * model.config.num_hidden_layers  # modernbert: Wqkv, Wo and two of the feed-forward block
        found = llm.embed(TEXT)[0].embedding
    assert 0.999 < found @ want / np.linalg.norm(want) < 1 - 1e-7


def test_a_cross_encoder_in_8_bits_keeps_its_scores(tmp_path: Path) -> None:
    model, words = encoder("bert", tmp_path / "as-stored", "ForSequenceClassification", num_labels=1)
    quantise(tmp_path / "as-stored", tmp_path / "rounded", Recipe(format="int8"))
    with LLM(tmp_path / "rounded", "torch", progress=False) as llm:
        (found,) = llm.score([(TEXT, "a lazy dog")])
    want = 1 / (1 + math.exp(-logits_of(model, words, TEXT, "a lazy dog").item()))
    assert found == pytest.approx(want, abs=0.01) and found != pytest.approx(want, abs=1e-7)


@pytest.mark.parametrize("against", [False, True])
def test_an_encoder_is_not_evaluated_and_the_reason_is_what_it_is(tmp_path: Path, against: bool) -> None:
    encoder("bert", tmp_path / "bert")
    (tmp_path / "text.txt").write_text(f"{TEXT} jumps over the lazy dog. " * 40)
    side = Side(str(tmp_path / "bert"), {"progress": False})
    with pytest.raises(UnsupportedError, match="reads whole texts and foretells no tokens") as refused:
        evaluate(side, Material(tmp_path / "text.txt"), side if against else None)
    assert refused.value.param == "model"
