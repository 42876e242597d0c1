"""A tokenizer from the metadata of a GGUF file (keys `tokenizer.ggml.*`, GGUF specification)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trivium.errors import CheckpointError, UnsupportedError
from trivium.text.pretokenizers import WHOLE_WORDS_FIRST, splits

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BLANK = "\u2581"  # how SentencePiece writes a space
_ROLES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token", "seperator": "sep_token"}
_ENDS = ("eot", "eom")  # of turn and of message
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # values of `tokenizer.ggml.token_type`


class _Vocabulary:
    """The metadata, checked: tokens, types and scores are equally many, ids lie inside. CheckpointError for what can't be true,
    UnsupportedError for kinds that generate no text. found: all values by key, without the prefix."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.found = found = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
        self.model, self.pre = str(found.get("model", "")), str(found.get("pre", "default"))
        if self.model not in _BUILDERS:
            known = ", ".join(_BUILDERS)
            raise UnsupportedError(f"the file's tokenizer is of kind {self.model!r} (tokenizer.ggml.model); supported are {known}")
        self.tokens = [str(token) for token in found.get("tokens", ())]
        count = len(self.tokens)
        self.types = [int(kind) for kind in found.get("token_type", ())] or [_NORMAL] * count
        self.scores: Sequence[float] = found.get("scores", [0.0] * count)
        if not count or not len(self.types) == len(self.scores) == count:
            counts = f"{count} tokens, {len(self.types)} types and {len(self.scores)} scores"
            raise CheckpointError(f"the file's tokenizer has {counts}; they must be equally many, and some")
        self.ids = {key: int(found[name]) for key in (*_ROLES, *_ENDS) if (name := f"{key}_token_id") in found}
        for key, token_id in self.ids.items():
            if not 0 <= token_id < count:
                raise CheckpointError(f"the file's tokenizer says {key} is token {token_id}, but has {count} tokens")
        self.merges = [tuple(merge.split(" ")) for merge in found.get("merges", ())]
        for i, merge in enumerate(self.merges):
            if len(merge) != 2 or not all(merge):
                text = " ".join(merge)
                raise CheckpointError(f"merge {i} of the file's tokenizer is {text!r}; expected are two parts and a blank between")

    def config(self) -> dict[str, Any]:
        """What tokenizer_config.json would say. A prompt gets BOS and EOS as the file says, else as its kind of vocabulary does."""
        begins = self.model == "llama" or self.pre in WHOLE_WORDS_FIRST
        adds = {f"add_{key}_token": self.found.get(f"add_{key}_token") for key in ("bos", "eos")}
        adds["add_bos_token"] = begins if adds["add_bos_token"] is None else adds["add_bos_token"]
        key = "tokenizer.chat_template."
        named = {name.removeprefix(key): str(text) for name, text in self.found.items() if name.startswith(key)}
        templates = [{"name": name, "template": text} for name, text in named.items()]
        roles = {role: self.tokens[self.ids[key]] for key, role in _ROLES.items() if key in self.ids}
        return {**roles, **adds, "chat_template": templates}


def read(metadata: Mapping[str, Any]) -> tuple[Tokenizer, dict[str, Any], set[int]]:
    """The tokenizer, with its control tokens special and its user-defined tokens added; what tokenizer_config.json would say; and
    the tokens that end a turn or a message."""
    from tokenizers import AddedToken

    vocabulary = _Vocabulary(metadata)
    try:
        backend = _BUILDERS[vocabulary.model](vocabulary)
    except UnsupportedError:
        raise
    except Exception as error:  # the tokenizers package raises plain Exception
        raise CheckpointError(f"the file's tokenizer can't be built: {error}") from error
    added, named = [], set(vocabulary.ids.values())
    for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types)):
        special = kind in (_CONTROL, _UNKNOWN) or index in named
        if (special or kind == _USER_DEFINED) and token.strip(" "):
            added.append(AddedToken(token, normalized=False, special=special))
    backend.add_tokens(added)
    return backend, vocabulary.config(), {vocabulary.ids[key] for key in _ENDS if key in vocabulary.ids}


def _byte_level(vocabulary: _Vocabulary) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

    vocab = {token: index for index, token in enumerate(vocabulary.tokens)}
    cuts = [Split(Regex(pattern), behavior="isolated") for pattern in splits(vocabulary.pre)]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=vocabulary.merges, ignore_merges=vocabulary.pre in WHOLE_WORDS_FIRST))
    prefix = bool(vocabulary.found.get("add_space_prefix"))
    backend.pre_tokenizer = Sequence([*cuts, ByteLevel(add_prefix_space=prefix, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(vocabulary: _Vocabulary) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens = [_BLANK * len(token) if token and not token.strip(" ") else token for token in vocabulary.tokens]
    unknown = tokens[vocabulary.ids["unknown"]] if "unknown" in vocabulary.ids else None
    merges = vocabulary.merges or derive_merges(tokens, vocabulary.types, vocabulary.scores)
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = vocabulary.model == "llama" and vocabulary.found.get("add_space_prefix") is not False
    blanks = normalizers.Replace(" ", _BLANK)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_BLANK), blanks]) if prefix else blanks
    steps = [decoders.Replace(_BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


_BUILDERS = {"gpt2": _byte_level, "llama": _sentencepiece, "gemma4": _sentencepiece}


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
