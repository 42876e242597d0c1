"""Small tokenizers of every kind, as `Tokenizer.from_data` takes them, made without any download."""

from __future__ import annotations

import json
from functools import cache, partial
from typing import Any

from awkward_strings import FIXED
from trivium_formats.gguf.tokenizer import read_vocabulary

WORDS = (
    "the quick brown fox jumps over the lazy dog and then some more words follow, with numbers"
    " 1 2 3 10 200 and code: def f(x): return x\n"
    "    indented lines  and   blanks\tand tabs\n\nParis is the capital of France. It's we're they'll don't. "
    "Ünïcödé 中文 日本語 мир 😀\n"
)
CONTROL, USER_DEFINED = 3, 4
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@cache
def byte_level_json(vocab_size: int = 400) -> str:
    """tokenizer.json of a byte-level BPE trained on a few lines, with ChatML's special tokens and <think> as added token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([WORDS] * 4 + [" ".join(FIXED)], trainer)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    return str(tokenizer.to_str())


def byte_level_data(**config: Any) -> dict[str, Any]:
    """As a Hugging Face folder gives it."""
    named = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    return {"kind": "json", "tokenizer_json": byte_level_json(), "config": named | config, "chat_template": CHATML}


def byte_level_gguf(pre: str = "gpt-2", **changes: Any) -> dict[str, Any]:
    """The same vocabulary as a GGUF file gives it."""
    content = json.loads(byte_level_json())
    vocab = content["model"]["vocab"] | {token["content"]: token["id"] for token in content["added_tokens"]}
    special = {token["content"]: CONTROL if token["special"] else USER_DEFINED for token in content["added_tokens"]}
    tokens = sorted(vocab, key=vocab.__getitem__)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"]]
    fields = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [special.get(token, 1) for token in tokens],
        "merges": merges,
    }
    ids = {"bos_token_id": vocab["<|im_start|>"], "eos_token_id": vocab["<|im_end|>"]}
    return gguf_data(**(fields | ids | changes))


@cache
def sentencepiece_vocabulary() -> tuple[list[str], list[float], list[int]]:
    """Tokens, scores and types of a hand-made SentencePiece-like vocabulary: control tokens, bytes, merges, characters."""
    pieces = "▁t he in ▁a re on ▁the er ▁s nd ▁w ▁o ing ou is ▁and aa aaa aaaa ▁▁ ▁▁▁ ▁▁▁▁ ab abc bc ca or "
    pieces += "▁wor ld ▁world ell ▁H ▁Hell ▁Hello 中文 😀😀"
    characters = dict.fromkeys("▁" + WORDS.replace(" ", "").replace("\n", "") + "ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    merged = pieces.split()
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    types = [3, 3, 3, 2] + [6] * 256
    tokens += ["<start_of_turn>", "<end_of_turn>", "<think>"] + merged + list(characters)
    types += [3, 3, 4] + [1] * (len(merged) + len(characters))
    scores = [-1000.0] * 263 + [-float(i) for i in range(len(merged) + len(characters))]
    return tokens, scores, types


def sentencepiece_gguf(**changes: Any) -> dict[str, Any]:
    """A Gemma-like tokenizer: byte fallback, BOS, no space put before the text unless `add_space_prefix=True` is given."""
    tokens, scores, types = sentencepiece_vocabulary()
    fields = {
        "model": "llama",
        "pre": "default",
        "tokens": tokens,
        "scores": scores,
        "token_type": types,
        "add_space_prefix": False,
    }
    ids = {"bos_token_id": 2, "eos_token_id": 1, "unknown_token_id": 3, "padding_token_id": 0}
    return gguf_data(**(fields | ids | changes))


def gguf_data(**fields: Any) -> dict[str, Any]:
    """tokenizer_data of a GGUF file; a field None is left out."""
    template = fields.pop("chat_template", None)
    metadata = {f"tokenizer.ggml.{key}": value for key, value in fields.items() if value is not None}
    return {"kind": "vocabulary", "read": partial(read_vocabulary, metadata), "chat_template": template}
