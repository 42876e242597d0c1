"""A tokenizer from the metadata of a GGUF file (keys `tokenizer.ggml.*`, GGUF specification)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from trivium.errors import CheckpointError, UnsupportedError
from trivium.text.pretokenizers import WHOLE_WORDS_FIRST, splits

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BLANK = "\u2581"  # how SentencePiece writes a space
_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding", "sep_token": "seperator"}
_ENDS = ("eos", "eot", "eom")
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # values of `tokenizer.ggml.token_type`
_Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Vocabulary:
    """The metadata, checked: tokens and their types have equal length, ids lie inside."""

    model: str
    pre: str
    tokens: list[str]
    types: list[int]
    scores: Sequence[float]
    merges: list[tuple[str, str]]
    ids: dict[str, int]
    flags: dict[str, bool | None]

    def named(self) -> dict[str, str]:
        """Texts of the tokens that chat templates know by name, e.g. bos_token."""
        return {role: self.tokens[self.ids[key]] for role, key in _ROLES.items() if key in self.ids}

    def end_ids(self) -> set[int]:
        """End of sequence, of turn and of message."""
        return {self.ids[key] for key in _ENDS if key in self.ids}

    def adds(self, which: str) -> bool:
        """Whether a prompt gets the token `which` ("bos", "eos"): as the file says, else as its kind of vocabulary does."""
        by_kind = which == "bos" and (self.model == "llama" or self.pre in WHOLE_WORDS_FIRST)
        flag = self.flags[f"add_{which}_token"]
        return which in self.ids and (by_kind if flag is None else flag)


def read_vocabulary(metadata: Mapping[str, Any]) -> Vocabulary:
    """Check the metadata; CheckpointError for what can't be true, UnsupportedError for kinds that generate no text."""
    model = str(metadata.get("tokenizer.ggml.model", ""))
    if model not in _BUILDERS:
        known = ", ".join(_BUILDERS)
        raise UnsupportedError(f"the file's tokenizer is of kind {model!r} (tokenizer.ggml.model); supported are {known}")
    tokens = [str(token) for token in metadata.get("tokenizer.ggml.tokens", ())]
    types = [int(kind) for kind in metadata.get("tokenizer.ggml.token_type", ())] or [_NORMAL] * len(tokens)
    scores = metadata.get("tokenizer.ggml.scores", [0.0] * len(tokens))
    if not tokens or len(types) != len(tokens) or len(scores) != len(tokens):
        counts = f"{len(tokens)} tokens, {len(types)} types and {len(scores)} scores"
        raise CheckpointError(f"the file's tokenizer has {counts}; they must be equally many, and some")
    keys = ("bos", "eos", "eot", "eom", "unknown", "padding", "seperator")
    ids = {key: int(metadata[name]) for key in keys if (name := f"tokenizer.ggml.{key}_token_id") in metadata}
    flags = {key: metadata.get(f"tokenizer.ggml.{key}") for key in ("add_bos_token", "add_eos_token", "add_space_prefix")}
    for key, token_id in ids.items():
        if not 0 <= token_id < len(tokens):
            raise CheckpointError(f"the file's tokenizer says {key} is token {token_id}, but has {len(tokens)} tokens")
    pre = str(metadata.get("tokenizer.ggml.pre", "default"))
    return Vocabulary(model, pre, tokens, types, scores, _read_merges(metadata), ids, flags)


def _read_merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    merges = []
    for index, merge in enumerate(metadata.get("tokenizer.ggml.merges", ())):
        left, _, right = merge.partition(" ")
        if not left or not right or " " in right:
            raise CheckpointError(f"merge {index} of the file's tokenizer is {merge!r}; expected are two parts and a blank between")
        merges.append((left, right))
    return merges


def build(vocabulary: Vocabulary) -> Tokenizer:
    """The tokenizer, with its control tokens special, its user-defined tokens added, and BOS/EOS as the file says."""
    from tokenizers import AddedToken

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
    bos, eos = (vocabulary.tokens[vocabulary.ids[which]] if vocabulary.adds(which) else None for which in ("bos", "eos"))
    backend.post_processor = surround(backend, bos, eos)
    return backend


def surround(backend: Tokenizer, bos: str | None, eos: str | None) -> Any:
    """A post-processor that puts `bos` before and `eos` after an encoded text, where they are given."""
    from tokenizers.processors import TemplateProcessing

    ends = [token for token in (bos, eos) if token is not None]
    parts = ([bos] if bos else []) + ["$A"] + ([eos] if eos else [])
    return TemplateProcessing(single=parts, special_tokens=[(token, backend.token_to_id(token)) for token in ends])


def _byte_level(vocabulary: Vocabulary) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

    vocab = {token: index for index, token in enumerate(vocabulary.tokens)}
    cuts = [Split(Regex(pattern), behavior="isolated") for pattern in splits(vocabulary.pre)]
    backend = Tokenizer(BPE(vocab=vocab, merges=vocabulary.merges, ignore_merges=vocabulary.pre in WHOLE_WORDS_FIRST))
    prefix = bool(vocabulary.flags["add_space_prefix"])
    backend.pre_tokenizer = Sequence([*cuts, ByteLevel(add_prefix_space=prefix, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(vocabulary: Vocabulary) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, normalizers
    from tokenizers.models import BPE

    tokens = [_BLANK * len(token) if token and not token.strip(" ") else token for token in vocabulary.tokens]
    unknown = tokens[vocabulary.ids["unknown"]] if "unknown" in vocabulary.ids else None
    merges = vocabulary.merges or derive_merges(tokens, vocabulary.types, vocabulary.scores)
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = vocabulary.model == "llama" and vocabulary.flags["add_space_prefix"] is not False
    blanks = normalizers.Replace(" ", _BLANK)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_BLANK), blanks]) if prefix else blanks
    steps = [decoders.Replace(_BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


_BUILDERS = {"gpt2": _byte_level, "llama": _sentencepiece, "gemma4": _sentencepiece}


def derive_merges(tokens: list[str], types: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Merges that give a BPE model the ids of SentencePiece, which joins the neighbours whose union scores best.

    A token yields one merge for each way to cut it into two tokens; best score first, user-defined tokens before all, as
    SentencePiece takes those whole; cuts of one token by longest left part. A quarter of a million tokens have more than a
    million cuts, so all are looked up at once, by 64-bit hashes of substrings.
    """
    kinds = np.asarray(types)
    usable = np.flatnonzero((kinds == _NORMAL) | (kinds == _USER_DEFINED))
    user_defined = kinds[usable] == _USER_DEFINED
    worst_first = usable[np.lexsort((usable, -np.asarray(scores, np.float64)[usable], ~user_defined))][::-1]
    pieces = np.array([token for index in worst_first.tolist() if (token := tokens[index])], object)
    lengths = np.fromiter(map(len, pieces), np.int64, len(pieces))
    ends = np.cumsum(lengths)
    starts = ends - lengths
    hashes = _substring_hasher("".join(pieces))
    find = _finder(hashes(starts, ends))
    owner = np.repeat(np.arange(len(pieces)), lengths)
    cuts = np.arange(len(owner))
    owner, cuts = owner[cuts != starts[owner]], cuts[cuts != starts[owner]]
    left = find(hashes(starts[owner], cuts))
    owner, cuts, left = owner[left >= 0], cuts[left >= 0], left[left >= 0]
    right = find(hashes(cuts, ends[owner]))
    both = np.flatnonzero(right >= 0)[::-1]
    return list(zip(pieces[left[both]].tolist(), pieces[right[both]].tolist()))


def _substring_hasher(text: str) -> Callable[[_Array, _Array], _Array]:
    """f(starts, ends) -> uint64 hashes of text[start:end]: the sum of code * base^position, divided by base^start."""
    base = 0x9E3779B97F4A7C15  # odd, so it has an inverse modulo 2^64
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.uint64)
    codes = (codes + np.uint64(1)) * np.uint64(0xD6E8FEB86659FD93)
    codes ^= codes >> np.uint64(32)
    powers = np.cumprod(np.full(len(codes), base, np.uint64))
    inverse = np.cumprod(np.append(np.uint64(1), np.full(len(codes), pow(base, -1, 2**64), np.uint64)))
    sums = np.append(np.uint64(0), np.cumsum(codes * powers))
    return lambda starts, ends: (sums[ends] - sums[starts]) * inverse[starts]


def _finder(known: _Array) -> Callable[[_Array], _Array]:
    """f(hashes) -> index of each in `known`, or -1."""
    order = np.argsort(known)
    ordered = known[order]

    def find(hashes: _Array) -> _Array:
        at = np.minimum(np.searchsorted(ordered, hashes), len(ordered) - 1)
        return np.where(ordered[at] == hashes, order[at], -1)

    return find
