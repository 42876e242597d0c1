"""Writes tests/text/smollm2_ids.json: ids that `transformers` gives the awkward strings with SmolLM2's tokenizer.

The vocabulary is read with the `gguf` package; the pipeline around it is the one of the model's own tokenizer.json: single
digits, then GPT-2's byte-level split. Run: python tests/helpers/make_smollm2_ids.py FILE.gguf [OUTPUT.json]
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from awkward_strings import awkward_strings

TARGET = Path(__file__).parents[1] / "text" / "smollm2_ids.json"


def reference_tokenizer(path: str) -> Any:
    """The `transformers` tokenizer of the file's vocabulary."""
    import gguf
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    fields = gguf.GGUFReader(path).fields
    tokens, types, merges = (fields[f"tokenizer.ggml.{key}"].contents() for key in ("tokens", "token_type", "merges"))
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[tuple(merge.split(" ")) for merge in merges]))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token, kind in zip(tokens, types) if kind == 3]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|im_start|>", eos_token="<|im_end|>")


def digest(strings: list[str]) -> str:
    """Changes when the strings do."""
    return hashlib.sha256("\0".join(strings).encode()).hexdigest()


def golden(path: str) -> dict[str, Any]:
    """The file's content."""
    strings = awkward_strings()
    tokenizer = reference_tokenizer(path)
    return {"strings": digest(strings), "ids": [tokenizer.encode(text, add_special_tokens=False) for text in strings]}


if __name__ == "__main__":
    output = Path(sys.argv[2]) if len(sys.argv) > 2 else TARGET
    output.write_text(json.dumps(golden(sys.argv[1]), separators=(",", ":")) + "\n")
