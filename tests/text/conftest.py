from __future__ import annotations

import pytest
from tiny_tokenizers import byte_level_data, byte_level_gguf, sentencepiece_gguf

from trivium.text import Tokenizer

KINDS = {
    "byte-level json": byte_level_data,
    "byte-level gguf": byte_level_gguf,
    "sentencepiece": sentencepiece_gguf,
    "sentencepiece with prefix": lambda: sentencepiece_gguf(add_space_prefix=True),
}


@pytest.fixture(scope="session", params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer.from_data(KINDS[request.param]())
