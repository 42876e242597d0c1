"""A tokenizer from the metadata of a GGUF file (keys `tokenizer.ggml.*`, GGUF specification)."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from operator import add
from typing import TYPE_CHECKING, Any

import numpy as np

from trivium.errors import CheckpointError, UnsupportedError
from trivium.text import Vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BLANK = "\u2581"  # how SentencePiece writes a space
_ROLES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token", "seperator": "sep_token"}
_ENDS = ("eot", "eom")  # of turn and of message
_KINDS = ("gpt2", "llama", "gemma4")  # the first is byte-level, the others are SentencePiece's
_MARK = "\0"
_BLOCK = 1024  # merges that are checked at a time: what they are cut into is gone before it leaves the processor's cache
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6  # values of `tokenizer.ggml.token_type`

# How each byte-level vocabulary cuts text into words before merging, by the name that files carry (`tokenizer.ggml.pre`). The
# patterns are those of the models' own tokenizer.json files.
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


def read_vocabulary(metadata: Mapping[str, Any]) -> Vocabulary:
    """What the keys `tokenizer.*` of a file say. Raises what Words does. Unused tokens at the end are none: they only fill the rows
    of the embedding."""
    words = Words(metadata)
    count = 1 + int(np.flatnonzero(words.types != _UNUSED).max(initial=-1))
    return Vocabulary(
        words.vocab.get, words.tokens.__getitem__, words.added, words.decoder, count, words.build, words.check, words.config(),
        words.ends,
    )  # fmt: skip


class Words:
    """The metadata, checked: tokens, types and scores are equally many, ids lie inside. CheckpointError for what can't be true,
    UnsupportedError for kinds that generate no text. found: all values by key, without the prefix. added: the control tokens, which
    are special, and the user-defined ones, as (text, special) by id. ends: the tokens that end a turn or a message. prefix: whether
    SentencePiece puts a blank before a text."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.found = found = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
        self.model, self.pre = str(found.get("model", "")), str(found.get("pre", "default"))
        if self.model not in _KINDS:
            known = ", ".join(_KINDS)
            raise UnsupportedError(f"the file's tokenizer is of kind {self.model!r} (tokenizer.ggml.model); supported are {known}")
        self.cuts = splits(self.pre) if self.model == "gpt2" else []
        self.tokens = list(map(str, found.get("tokens", ())))
        count = len(self.tokens)
        self.types = np.fromiter(found.get("token_type") or [_NORMAL] * count, np.int64)
        self.scores: Sequence[float] = found.get("scores", [0.0] * count)
        if not count or not len(self.types) == len(self.scores) == count:
            counts = f"{count} tokens, {len(self.types)} types and {len(self.scores)} scores"
            raise CheckpointError(f"the file's tokenizer has {counts}; they must be equally many, and some")
        self.ids = {key: int(found[name]) for key in (*_ROLES, *_ENDS) if (name := f"{key}_token_id") in found}
        for key, token_id in self.ids.items():
            if not 0 <= token_id < count:
                raise CheckpointError(f"the file's tokenizer says {key} is token {token_id}, but has {count} tokens")
        self.ends = {self.ids[key] for key in _ENDS if key in self.ids}
        named, special = set(self.ids.values()), (_CONTROL, _UNKNOWN)
        marked = np.flatnonzero(np.isin(self.types, (_CONTROL, _UNKNOWN, _USER_DEFINED))).tolist()
        texts = [(i, self.tokens[i]) for i in sorted({*marked, *named}) if self.tokens[i].strip(" ")]
        self.prefix = self.model == "llama" and found.get("add_space_prefix") is not False
        if self.model != "gpt2":
            self.tokens = [_BLANK * len(token) if token and not token.strip(" ") else token for token in self.tokens]
        self.vocab = dict(zip(self.tokens, range(count)))
        self._merges_checked = False
        self.added = {self.vocab[text]: (text, i in named or int(self.types[i]) in special) for i, text in texts}

    @property
    def decoder(self) -> dict[str, Any]:
        """How tokens become text, as tokenizer.json says it."""
        if self.model == "gpt2":
            return {"type": "ByteLevel"}
        blanks = {"type": "Replace", "pattern": {"String": _BLANK}, "content": " "}
        strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if self.prefix else []
        return {"decoders": [blanks, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]}

    def check(self) -> None:
        """CheckpointError unless each merge has two parts, which are tokens and make one."""
        listed = self.found.get("merges", ())
        blocks = (listed[start : start + _BLOCK] for start in range(0, len(listed), _BLOCK))
        if self._merges_checked or all(_are_merges(block, self.vocab) for block in blocks):
            self._merges_checked = True
            return
        for i, merge in enumerate(listed):
            if merge.count(" ") != 1 or not self.vocab.keys() >= {*merge.split(" "), merge.replace(" ", "")}:
                reason = f"merge {i} is {merge!r}, not two tokens that make one with a blank between"
                raise CheckpointError(f"the file's tokenizer can't be built: {reason}")

    def merges(self) -> list[tuple[str, str]]:
        """The merges, which must have been checked."""
        parts = " ".join(self.found.get("merges", ())).split(" ")
        return list(zip(parts[::2], parts[1::2]))

    def config(self) -> dict[str, Any]:
        """What tokenizer_config.json would say. A prompt gets BOS and EOS as the file says, else as its kind of vocabulary does."""
        begins = self.model == "llama" or self.pre in WHOLE_WORDS_FIRST
        said = {key: self.found[key] for key in ("add_bos_token", "add_eos_token") if self.found.get(key) is not None}
        key = "tokenizer.chat_template."
        named = {name.removeprefix(key): str(text) for name, text in self.found.items() if name.startswith(key)}
        templates = [{"name": name, "template": text} for name, text in named.items()]
        roles = {role: self.tokens[self.ids[key]] for key, role in _ROLES.items() if key in self.ids}
        return {**roles, "add_bos_token": begins, **said, "chat_template": templates}

    def build(self) -> Tokenizer:
        """What encodes (and nothing that decodes), which takes most of the time."""
        from tokenizers import AddedToken

        self.check()
        try:
            backend = _byte_level(self) if self.model == "gpt2" else _sentencepiece(self)
        except Exception as error:  # the tokenizers package raises plain Exception
            raise CheckpointError(f"the file's tokenizer can't be built: {error}") from error
        backend.add_tokens([AddedToken(text, normalized=False, special=how) for _, (text, how) in sorted(self.added.items())])
        return backend


def _are_merges(listed: Sequence[str], vocabulary: Mapping[str, int]) -> bool:
    """Whether each merge has two parts, which are tokens and make one: in one sweep, and False as well if a part is the mark that
    the sweep puts between merges."""
    parts = f" {_MARK} ".join(listed).split(" ")
    left, right, marks = parts[::3], parts[1::3], len(listed) - 1
    if len(parts) != 2 * len(listed) + marks or not parts.count(_MARK) == parts[2::3].count(_MARK) == marks:
        return False
    return all(map(vocabulary.__contains__, itertools.chain(left, right, map(add, left, right))))


def _byte_level(vocabulary: Words) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, models
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

    cuts = [Split(Regex(pattern), behavior="isolated") for pattern in vocabulary.cuts]
    whole, prefix = vocabulary.pre in WHOLE_WORDS_FIRST, bool(vocabulary.found.get("add_space_prefix"))
    backend = Tokenizer(models.BPE(vocab=vocabulary.vocab, merges=vocabulary.merges(), ignore_merges=whole))
    backend.pre_tokenizer = Sequence([*cuts, ByteLevel(add_prefix_space=prefix, use_regex=False)])
    return backend


def _sentencepiece(vocabulary: Words) -> Tokenizer:
    from tokenizers import Tokenizer, models, normalizers

    tokens = vocabulary.tokens
    unknown = tokens[vocabulary.ids["unknown"]] if "unknown" in vocabulary.ids else None
    merges = vocabulary.merges() or derive_merges(tokens, vocabulary.types.tolist(), vocabulary.scores)
    backend = Tokenizer(models.BPE(vocab=vocabulary.vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    blanks = normalizers.Replace(" ", _BLANK)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_BLANK), blanks]) if vocabulary.prefix else blanks
    return backend


def describe_vocabulary(content: Mapping[str, Any], size: int) -> dict[str, Any]:
    """The keys of `size` tokens (those behind the last one are unused), their types, merges and cuts, from the content of a
    tokenizer.json; UnsupportedError for what the format has no word for. Ids of roles are another matter."""
    model, added = content["model"], {token["id"]: token for token in content.get("added_tokens") or ()}
    if model.get("type", "BPE") != "BPE":
        raise UnsupportedError(f"the tokenizer's model is {model['type']}; GGUF files are written for BPE")
    by_id = {i: text for text, i in model["vocab"].items()} | {i: token["content"] for i, token in added.items()}
    if max(by_id) >= size:
        raise CheckpointError(f"the tokenizer has the id {max(by_id)}, but the model knows {size} tokens")
    tokens = [by_id.get(i, f"[UNUSED_{i}]") for i in range(size)]
    pairs = [pair.split(" ", 1) if isinstance(pair, str) else pair for pair in model.get("merges") or ()]
    types = [_UNUSED if i not in by_id else _NORMAL for i in range(size)]
    for i, token in added.items():
        types[i] = _CONTROL if token["special"] else _USER_DEFINED
    keys: dict[str, Any] = {"tokens": tokens, "token_type": types, "merges": [" ".join(pair) for pair in pairs]}
    if not model.get("byte_fallback"):
        return {"model": "gpt2", "pre": _cut_name(content), **keys}
    rank = {token: -float(i) for i, token in reversed([*enumerate(map("".join, pairs))])}
    for i, token in by_id.items():
        if re.fullmatch("<0x[0-9A-F]{2}>", token):
            types[i] = _BYTE
    if model.get("unk_token") in model["vocab"]:
        types[model["vocab"][model["unk_token"]]] = _UNKNOWN
    scores = [rank.get(token, -float(len(pairs))) for token in tokens]
    return {"model": "llama", "scores": scores, "add_space_prefix": "Prepend" in _kinds(content.get("normalizer")), **keys}


def _kinds(part: Any) -> dict[str, Any]:
    """The steps of a part of tokenizer.json by their type."""
    steps = (part or {}).get("normalizers") or (part or {}).get("pretokenizers") or [part]
    return {step["type"]: step for step in steps if step}


def _cut_name(content: Mapping[str, Any]) -> str:
    """The name of how words are cut before merging; UnsupportedError if there is none that does the same."""
    steps = content.get("pre_tokenizer") or {}
    patterns: list[str] = []
    for step in steps.get("pretokenizers", [steps]):
        if step.get("type") == "Split" and not step.get("invert") and step.get("behavior") == "Isolated":
            patterns.append(step["pattern"].get("Regex", ""))
        elif step.get("type") == "Digits" and step.get("individual_digits"):
            patterns.append(r"\p{N}")
        elif step.get("type") == "ByteLevel":
            patterns += [_GPT2] if step.get("use_regex", True) else []
        else:
            raise UnsupportedError(f"the tokenizer cuts words by {step.get('type')}, for which GGUF files have no name")
    whole = bool(content["model"].get("ignore_merges"))
    names = [name for name, cuts in _SPLITS.items() if cuts == tuple(patterns) and (name in WHOLE_WORDS_FIRST) == whole]
    if not names:
        raise UnsupportedError(f"the tokenizer cuts words by {patterns}, for which GGUF files have no name known here")
    return names[0]


def derive_merges(tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Merges that give a BPE model the ids of SentencePiece, which joins the neighbours whose union scores best.

    A token yields one merge for each way to cut it into two tokens; best score first, user-defined tokens before all, as
    SentencePiece takes those whole; cuts of one token by longest left part.
    """
    usable = [i for i, kind in enumerate(types) if kind in (_NORMAL, _USER_DEFINED)]
    best_first = sorted(usable, key=lambda i: (types[i] != _USER_DEFINED, -scores[i]))
    known = {tokens[i] for i in usable}
    cuts = ((token[:at], token[at:]) for i in best_first for token in [tokens[i]] for at in range(len(token) - 1, 0, -1))
    return [(left, right) for left, right in cuts if left in known and right in known]


def splits(name: str) -> tuple[str, ...]:
    """Patterns to apply one after the other, each isolating its matches; UnsupportedError for a name that is not known."""
    if name not in _SPLITS:
        import difflib

        near = difflib.get_close_matches(name, _SPLITS, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(sorted(_SPLITS))}"
        message = f"the file's tokenizer uses the pre-tokenizer {name!r} (tokenizer.ggml.pre), which is not known; {hint}"
        advice = "Guessing would give wrong ids: use the model's Hugging Face folder (tokenizer.json) instead"
        raise UnsupportedError(f"{message}. {advice}")
    return _SPLITS[name]
