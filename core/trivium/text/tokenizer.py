"""Text to token ids and back, for every kind of tokenizer a checkpoint may carry."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trivium.errors import CheckpointError, InvalidRequestError, TemplateError, UnsupportedError
from trivium.extensions import blame, expect, find

if TYPE_CHECKING:
    import tokenizers

    from trivium.text.chat import ChatTemplate

_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_TURN_ENDS = {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|return|>", "<|call|>", "<|endoftext|>"}


class Vocabulary(NamedTuple):
    """What is known of a tokenizer before it is built: ids of tokens and tokens of ids, added tokens by id as (text, special), the
    decoder as tokenizer.json says it, the largest id + 1, what tokenizer_config.json says, the ids that end a turn or a message.
    build: makes what encodes, and need not decode. check: raises what build() would."""

    token_id: Callable[[str], int | None]
    token: Callable[[int], str | None]
    added: Mapping[int, tuple[str, bool]]
    decoder: Mapping[str, Any]
    size: int
    build: Callable[[], tokenizers.Tokenizer]
    check: Callable[[], object]
    config: Mapping[str, Any]
    ends: Set[int] = frozenset()


class Tokenizer:
    """One model's tokenizer.

    `vocab_size` is the largest id + 1; `bos_id` is None where there is none; `eos_ids` are the ids that end an answer: the
    tokenizer's own end of sequence, turn and message, and special tokens that are known to end a turn; `special_ids` are the
    ids that `decode` hides by default.
    """

    def __init__(self, known: Vocabulary, template: str | None) -> None:
        """template: the default one, if not the one in the vocabulary's configuration."""
        self._known, self._config = known, (config := known.config)
        self.named_tokens = _named(config, known.token_id)
        bos, eos = (self.named_tokens.get(role) for role in ("bos_token", "eos_token"))
        self._bytes: dict[int, bytes] = {}
        self._compiled: dict[str, ChatTemplate] = {}
        self._templates = _templates(config.get("chat_template"), template)
        self._spelling = _Spelling(known.decoder)
        self._added = {index: text for index, (text, _) in known.added.items()}
        self.special_ids = frozenset(index for index, (_, special) in known.added.items() if special)
        self.vocab_size = known.size
        self.bos_id = known.token_id(bos) if bos else None
        self.separator_id = known.token_id(self.named_tokens.get("sep_token", "[SEP]"))
        separates = {"<|end|>"} if "<|return|>" in self._added.values() else set()  # the messages of one answer
        turns = {i for i in self.special_ids if self._added[i] in _TURN_ENDS - separates}
        self.eos_ids = frozenset(known.ends | turns | {i for i, text in self._added.items() if text == eos})
        self.strips_leading_space = self._spelling.strips
        self.chat_template = self._templates.get("default")

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Tokenizer:
        """A tokenizer from what `Checkpoint.tokenizer_data()` returns: kind "json", "plugin" or "vocabulary". What encodes is made
        when a text is first encoded, where the rest can be known without it; check() finds what is wrong with it.

        Raises CheckpointError for damaged data and UnsupportedError for a kind that is not known.
        """
        if data["kind"] == "vocabulary":
            return cls(data["read"](), data.get("chat_template"))
        config = data.get("config") or {}
        backend = _from_plugin(data["path"], config) if data["kind"] == "plugin" else _from_json(data["tokenizer_json"])
        return cls(_known(backend, config), data.get("chat_template"))

    def check(self) -> None:
        """Raises what encoding would, for whatever text, because of what the tokenizer is made from."""
        self._known.check()

    @cached_property
    def _backend(self) -> tokenizers.Tokenizer:
        from tokenizers.processors import TemplateProcessing

        backend, config = self._known.build(), self._config
        if "add_bos_token" in config or "add_eos_token" in config or backend.post_processor is None:
            bos, eos = (self.named_tokens.get(f"{end}_token") if config.get(f"add_{end}_token") else None for end in ("bos", "eos"))
            special = [(end, backend.token_to_id(end)) for end in (bos, eos) if end]
            backend.post_processor = TemplateProcessing(single=list(filter(None, (bos, "$A", eos))), special_tokens=special)
        return backend

    @cached_property
    def _adds_bos(self) -> bool:
        return self.bos_id is not None and self._backend.encode("").ids[:1] == [self.bos_id]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Special tokens written in the text become their ids, as with Hugging Face tokenizers.

        With `add_special_tokens`, BOS and EOS are put around it where the model wants them; a text that already begins with
        BOS gets no second one. InvalidRequestError for what is not Unicode text (a lone surrogate, bytes).
        """
        if not isinstance(text, str):
            raise InvalidRequestError(f"a prompt is text (str), not {type(text).__name__}", param="prompt")
        ids = self._encode(text, add_special_tokens=add_special_tokens)
        return ids[1:] if add_special_tokens and self._adds_bos and ids[:2] == [self.bos_id] * 2 else ids

    def encode_pair(self, first: str, second: str) -> list[int]:
        """Token ids of a query and a document as a cross-encoder reads them: by the chat template if it has these two roles, else
        with the special tokens that the tokenizer puts around pairs."""
        if self.chat_template is not None and {"query", "document"} <= self._chat_template(None, False).words:
            return self.encode_chat([{"role": "query", "content": first}, {"role": "document", "content": second}])
        return self._encode((first, second))

    def _encode(self, given: str | tuple[str, str], *, add_special_tokens: bool = True) -> list[int]:
        try:
            [found] = self._backend.encode_batch([given], add_special_tokens=add_special_tokens)  # of its calls the one without GIL
        except (UnicodeEncodeError, TypeError) as error:
            text = "".join(given)
            place = next((i for i, char in enumerate(text) if "\ud800" <= char <= "\udfff"), 0)
            message = f"the text is not valid Unicode: character {place} is half of a surrogate pair ({text[place]!a}); replace it"
            raise InvalidRequestError(message, param="prompt") from error
        ids: list[int] = found.ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`, nothing added between tokens; bytes that form no character become U+FFFD."""
        stream = Detokenizer(self, skip_special_tokens=skip_special_tokens)
        return stream.push(*ids) + stream.finish()

    def tokens(self) -> dict[str, int]:
        """Every token as the vocabulary spells it, with its id."""
        return self._backend.get_vocab()

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes that a token stands for, a leading blank included; b"" for an id without a token."""
        known = self._bytes.get(token_id)
        if known is None:
            if not 0 <= token_id < self.vocab_size:
                raise InvalidRequestError(f"token id {token_id} is outside the vocabulary; ids are 0 to {self.vocab_size - 1}")
            text = self._known.token(int(token_id)) or ""
            known = self._bytes[token_id] = self._spelling.spell(text, added=token_id in self._added)
        return known

    def token_text(self, token_id: int) -> str:
        """Readable form of one token alone; U+FFFD for bytes that are no whole character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True, template: str | None = None, **kwargs: Any,
    ) -> str:  # fmt: skip
        """The prompt text that the chat template makes of `messages`.

        `template` is Jinja source, or the name of one of the model's own templates; by default the model's, its "tool_use"
        one when there are tools. `kwargs` are handed to the template. Raises TemplateError and InvalidRequestError.
        """
        from trivium.text.chat import plain

        own = {"tools": None if tools is None else list(tools), "add_generation_prompt": add_generation_prompt}
        variables = plain({**self.named_tokens, "documents": None, **kwargs, **own}, "template arguments")
        return self._chat_template(template, bool(tools)).render(messages, variables)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> list[int]:
        """Token ids of `render_chat(messages, **kwargs)`; BOS is the template's business, so none is added."""
        return self.encode(self.render_chat(messages, **kwargs), add_special_tokens=False)

    def template_source(self, template: str | None, with_tools: bool) -> str | None:
        """The Jinja source that `render_chat` uses; None where there is none."""
        name = "tool_use" if with_tools and "tool_use" in self._templates else "default"
        return self._templates.get(template or name, template)

    def special_ids_in(self, texts: Iterable[str]) -> frozenset[int]:
        """Ids of the special tokens that occur in one of `texts`."""
        return frozenset(i for i in self.special_ids if any(self._added[i] in text for text in texts))

    def _chat_template(self, template: str | None, with_tools: bool) -> ChatTemplate:
        from trivium.text.chat import ChatTemplate

        source = self.template_source(template, with_tools)
        if source is None:
            message = "the model has no chat template, perhaps it is not made for chat"
            raise TemplateError(f"{message}: generate from plain text, or pass a template", param="chat_template")
        if source not in self._compiled:
            self._compiled = dict([*self._compiled.items(), (source, ChatTemplate(source))][-8:])
        return self._compiled[source]


class Detokenizer:
    """Incremental decoding of one sequence: all that `push` and `finish` return, joined, is `Tokenizer.decode` of all ids.

    Work per token depends on that token only. Bytes that can still become a character are held; bytes that never can
    become U+FFFD, once for each maximal broken piece (Unicode standard, 3.9, as Python's `errors="replace"`).
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._hidden: Set[int] = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = tokenizer.strips_leading_space

    def show(self, ids: Set[int]) -> None:
        """Special tokens that are not to be hidden: markers that a later stage must see."""
        self._hidden -= ids

    def push(self, *token_ids: int) -> str:
        """Text that is complete with these tokens; "" while a character is unfinished or the tokens are hidden."""
        shown = [self._tokenizer.token_bytes(token_id) for token_id in token_ids if token_id not in self._hidden]
        return self._trim(self._utf8.decode(b"".join(shown)))

    def finish(self) -> str:
        """The rest: U+FFFD if the sequence ends inside a character, else ""."""
        return self._trim(self._utf8.decode(b"", final=True))

    def _trim(self, text: str) -> str:
        if text and self._at_start:
            self._at_start = False
            return text.removeprefix(" ")
        return text


def _from_json(text: str) -> tokenizers.Tokenizer:
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the package raises plain Exception
        raise CheckpointError(f"tokenizer.json can't be read: {error}") from error


def _from_plugin(folder: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    import tokenizers

    build, what = find("tokenizer", config["tokenizer_class"])
    with blame(what):
        built: tokenizers.Tokenizer = expect(tokenizers.Tokenizer, build(folder, config), what)
    return built


def _known(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> Vocabulary:
    backend.no_truncation()
    backend.no_padding()
    _add_configured_tokens(backend, config, _named(config, backend.token_to_id))
    decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {}
    added = {index: (token.content, token.special) for index, token in backend.get_added_tokens_decoder().items()}
    size = max(backend.get_vocab().values(), default=-1) + 1
    return Vocabulary(backend.token_to_id, backend.id_to_token, added, decoder, size, lambda: backend, lambda: None, config)


def _named(config: Mapping[str, Any], token_id: Callable[[str], int | None]) -> dict[str, str]:
    """The tokens that have a role, by role; of those that there are."""
    tokens = {role: token for role in _ROLES if (token := _content(config.get(role)))}
    return {role: token for role, token in tokens.items() if token_id(token) is not None}


def _templates(configured: Any, default: str | None) -> dict[str, str]:
    """Chat templates by name, from one template or a list of {"name", "template"}, and the one that is the default anyway."""
    listed = configured if isinstance(configured, list) else [{"name": "default", "template": configured}]
    named = {entry.get("name"): entry.get("template") for entry in listed if isinstance(entry, Mapping)}
    named |= {"default": default} if default else {}
    return {name: text for name, text in named.items() if isinstance(name, str) and isinstance(text, str)}


def _content(token: Any) -> str | None:
    return token.get("content") if isinstance(token, Mapping) else token


def _add_configured_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any], named: Mapping[str, str]) -> None:
    """Added and special tokens that only tokenizer_config.json names; such without an id in the vocabulary stay unknown."""
    from tokenizers import AddedToken

    lists = config.get("additional_special_tokens") or (), config.get("extra_special_tokens") or ()
    extra = [token for tokens in lists for token in (tokens.values() if isinstance(tokens, Mapping) else tokens)]
    special: dict[str, Any] = {"special": True, "normalized": False}
    wanted = {content: special for token in [*named.values(), *extra] if (content := _content(token))}
    fields = ("special", "normalized", "lstrip", "rstrip", "single_word")
    for entry in config.get("added_tokens_decoder", {}).values():
        wanted[entry["content"]] = {key: entry[key] for key in fields if key in entry}
    present = {token.content: token.special for token in backend.get_added_tokens_decoder().values()}
    new = [(text, how) for text, how in wanted.items() if text not in present or how.get("special", False) > present[text]]
    backend.add_tokens([AddedToken(text, **how) for text, how in new if backend.token_to_id(text) is not None])


class _Spelling:
    """How a tokenizer writes bytes as token text, read from its decoder."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        steps: list[dict[str, Any]] = state.get("decoders", [state] if state else [])
        kinds = {step["type"] for step in steps}
        unknown = kinds - {"ByteLevel", "Replace", "ByteFallback", "Fuse", "Strip", "Metaspace", "WordPiece"}
        if unknown or not kinds:
            message = f"the tokenizer's decoder ({', '.join(sorted(kinds)) or 'none'}) is not supported"
            raise UnsupportedError(f"{message}; supported are byte-level, SentencePiece-like and WordPiece ones")
        self._bytes = _byte_alphabet() if "ByteLevel" in kinds else None
        self._fallback = "ByteFallback" in kinds
        self._joiner = next((step["prefix"] for step in steps if step["type"] == "WordPiece"), None)
        self._replace = [(step["pattern"]["String"], step["content"]) for step in steps if step["type"] == "Replace"]
        blanks = [step for step in steps if step["type"] == "Metaspace"]
        self._replace += [(step["replacement"], " ") for step in blanks]
        self.strips = any(step["type"] == "Strip" and step["start"] > 0 for step in steps)
        self.strips |= any(step.get("prepend_scheme", "always") != "never" for step in blanks) or self._joiner is not None

    def spell(self, token: str, *, added: bool) -> bytes:
        if self._bytes is not None:
            whole = not added and all(char in self._bytes for char in token)
            return bytes(self._bytes[char] for char in token) if whole else token.encode()
        if self._fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        if self._joiner is not None:
            token = token.removeprefix(self._joiner) if token.startswith(self._joiner) else f" {token}"
        for old, new in self._replace:
            token = token.replace(old, new)
        return token.encode()


def _byte_alphabet() -> dict[str, int]:
    """The printable stand-ins of byte-level BPE (GPT-2): printable Latin-1 stands for itself, the rest for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(rest)}
