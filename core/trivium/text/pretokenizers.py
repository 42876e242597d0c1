"""How each byte-level vocabulary cuts text into words before merging, by the name that GGUF files carry.

The patterns are those of the models' own tokenizer.json files; the names are those of the key `tokenizer.ggml.pre`.
"""

from __future__ import annotations

import difflib

from trivium.errors import UnsupportedError

_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CLITICS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CLITICS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BLANKS}"
_QWEN2 = rf"{_CLITICS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BLANKS}"
_QWEN35 = rf"{_CLITICS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_BLANKS}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD, _SYMBOLS = r"[^\r\n\p{L}\p{N}]?", r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_TEKKEN = rf"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*|\p{{N}}|{_SYMBOLS}|{_BLANKS}"
_GPT4O = rf"{_LEAD}{_UPPER}*{_LOWER}+{_CLITICS}?|{_LEAD}{_UPPER}+{_LOWER}*{_CLITICS}?|\p{{N}}{{1,3}}|{_SYMBOLS}|{_BLANKS}"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_BLANKS}"
)
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"

_FAMILIES: dict[tuple[str, ...], str] = {
    (_GPT2,): "gpt-2 gpt2 default phi-2 mpt olmo jais jina-es jina-de jina-v2-es jina-v2-de roberta-bpe trillion granite-docling",
    (r"\p{N}", _GPT2): "smollm starcoder refact command-r codeshell exaone minerva-7b",
    (_LLAMA3,): "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 dbrx smaug-bpe chatglm-bpe glm4",
    (_QWEN2,): "qwen2 deepseek-r1-qwen stablelm2 kormo megrez", (_QWEN35,): "qwen35", (_TEKKEN,): "tekken",
    (_GPT4O,): "gpt-4o llama4 kanana2 minimax-m2", (r"\p{N}{1,3}", _CJK, _DEEPSEEK3): "deepseek-v3",
}  # fmt: skip
_SPLITS = {name: patterns for patterns, names in _FAMILIES.items() for name in names.split()}

WHOLE_WORDS_FIRST = frozenset({"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken"})
"""Vocabularies where a word that is a token is never cut, and that begin with BOS unless the file says otherwise."""


def splits(name: str) -> tuple[str, ...]:
    """Patterns to apply one after the other, each isolating its matches; UnsupportedError for a name that is not known."""
    if name not in _SPLITS:
        near = difflib.get_close_matches(name, _SPLITS, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(sorted(_SPLITS))}"
        raise UnsupportedError(
            f"the file's tokenizer uses the pre-tokenizer {name!r} (tokenizer.ggml.pre), which is not known; {hint}. "
            "Guessing would give wrong ids: use the model's Hugging Face folder (tokenizer.json) instead"
        )
    return _SPLITS[name]
