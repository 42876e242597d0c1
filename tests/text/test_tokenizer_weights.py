"""Real tokenizers, fetched through trivium's own model source."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from awkward_strings import awkward_strings

from trivium.text import Tokenizer
from trivium.weights import open_checkpoint, resolve

pytestmark = pytest.mark.weights
GOLDEN = Path(__file__).parent / "smollm2_ids.json"


@pytest.fixture(scope="module")
def smollm2_path() -> Path:
    return resolve("smollm2-135m")


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Tokenizer:
    return Tokenizer.from_data(open_checkpoint(smollm2_path).tokenizer_data())


@pytest.fixture(scope="module")
def gemma3() -> Tokenizer:
    return Tokenizer.from_data(open_checkpoint(resolve("gemma3-270m")).tokenizer_data())


def test_smollm2_ids_are_those_of_transformers(smollm2: Tokenizer) -> None:
    from make_smollm2_ids import digest

    golden = json.loads(GOLDEN.read_text())
    strings = awkward_strings()
    assert golden["strings"] == digest(strings), "the strings changed: make the golden ids again"
    for text, ids in zip(strings, golden["ids"], strict=True):
        assert smollm2.encode(text) == ids, text
        assert smollm2.decode(ids, skip_special_tokens=False) == text


def test_smollm2_chat_ends_a_turn_with_its_own_token(smollm2: Tokenizer) -> None:
    text = smollm2.render_chat([{"role": "user", "content": "hi"}])
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert smollm2.encode("<|im_end|>")[0] in smollm2.eos_ids
    assert smollm2.encode_chat([{"role": "user", "content": "hi"}]).count(smollm2.bos_id) == 3


def test_gemma3_goes_there_and_back(gemma3: Tokenizer) -> None:
    assert gemma3.vocab_size == 262_144
    assert gemma3.encode("Hello  world") == [2, 9259, 138, 12392]
    for text in awkward_strings():
        if "▁" not in text:
            ids = gemma3.encode(text, add_special_tokens=False)
            assert gemma3.decode(ids, skip_special_tokens=False) == text


@pytest.mark.oracles
def test_golden_ids_are_made_afresh(smollm2_path: Path) -> None:
    pytest.importorskip("transformers")
    from make_smollm2_ids import golden

    assert golden(str(smollm2_path)) == json.loads(GOLDEN.read_text())


@pytest.mark.oracles
@pytest.mark.slow
def test_gemma3_ids_are_those_transformers_reads_from_the_file(gemma3: Tokenizer) -> None:
    transformers = pytest.importorskip("transformers")
    path = resolve("gemma3-270m")
    oracle = transformers.PreTrainedTokenizerFast(gguf_file=path.name, name_or_path=str(path.parent))
    for text in awkward_strings():
        ids = gemma3.encode(text, add_special_tokens=False)
        assert ids == oracle.encode(text, add_special_tokens=False), text
        assert gemma3.decode(ids) == oracle.decode(ids, skip_special_tokens=True)
