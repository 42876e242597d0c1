"""Texts and chats as windows of token ids."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from trivium.errors import InvalidRequestError
from trivium.text import Tokenizer

Ids = npt.NDArray[np.int32]
MAX_BYTES = 32 << 20
"""Largest file that is read: some eight million tokens, far more than anyone waits for."""


class Window(NamedTuple):
    """One sequence, whose tokens from `first` on are to be foretold from those before them. `prompt`: the messages, or the text,
    that an answer may be made to."""

    ids: Ids
    first: int
    prompt: Any = None


def read_text(path: Path, param: str) -> str:
    """A UTF-8 file, without the byte order mark that some editors put first; InvalidRequestError if it can't be read, is empty, or
    too large."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise InvalidRequestError(f"{path} has {path.stat().st_size} bytes; at most {MAX_BYTES} are read", param=param)
        text = path.read_text("utf-8-sig")
    except UnicodeDecodeError:
        raise InvalidRequestError(f"{path} is not UTF-8 text", param=param) from None
    except OSError as e:
        raise InvalidRequestError(f"{path} can't be read: {e.strerror or e}", param=param) from None
    if not text.strip():
        raise InvalidRequestError(f"{path} is empty", param=param)
    return text


def cut(tokenizer: Tokenizer, text: str, window: int, *, least: int = 2) -> list[Ids]:
    """Windows of `window` tokens one after the other, each with the special tokens before it that the model wants before a text;
    the last may be shorter, down to `least`."""
    whole, body = tokenizer.encode(text), tokenizer.encode(text, add_special_tokens=False)
    before = whole[: len(whole) - len(body)] if whole[len(whole) - len(body) :] == body else []
    step = window - len(before)
    if step < 1:
        raise InvalidRequestError(f"a window of {window} tokens has no room beside the special ones", param="window")
    parts = ([*before, *body[at : at + step]] for at in range(0, len(body), step))
    return [np.array(ids, np.int32) for ids in parts if len(ids) >= min(least, window)]


def spread(windows: Sequence[Ids], most: int) -> list[Ids]:
    """At most so many of them, evenly from the whole text."""
    if len(windows) <= most:
        return list(windows)
    return [windows[i * len(windows) // most] for i in range(most)]


def of_text(tokenizer: Tokenizer, path: Path, window: int, context: int) -> list[Window]:
    """What is to be foretold of a text: in each window the tokens after the first `context`."""
    text = read_text(path, "text")
    found = [Window(ids, context, ids[: context + 1].tolist()) for ids in cut(tokenizer, text, window, least=context + 1)]
    if not found:
        count = len(tokenizer.encode(text))
        message = f"{path} has {count} tokens; more than {context}, which only give context, are needed: give a lower context"
        raise InvalidRequestError(message, param="text")
    return found


def of_chats(tokenizer: Tokenizer, path: Path, longest: int) -> list[Window]:
    """What is to be foretold of chats, one a line: {"messages": [...]} or a list of messages. Where a chat ends with an answer, its
    tokens; else all. Chats of more than `longest` tokens are cut off behind."""
    found = [_of_chat(tokenizer, messages, f"{path}, line {i}") for i, messages in _chats(path)]
    cut_off = (Window(w.ids[:longest], w.first, w.prompt) for w in found)
    kept = [w for w in cut_off if len(w.ids) > w.first]
    if not kept:
        raise InvalidRequestError(f"{path}: no chat has anything to foretell within {longest} tokens", param="chats")
    return kept


def _chats(path: Path) -> list[tuple[int, list[Mapping[str, Any]]]]:
    found = []
    for i, line in enumerate(read_text(path, "chats").split("\n"), 1):  # JSON's strings may hold what else ends a line elsewhere
        if not line.strip():
            continue
        try:
            chat = json.loads(line)
        except (ValueError, RecursionError) as e:
            raise InvalidRequestError(f"{path}, line {i} is not JSON: {e}", param="chats") from None
        messages = chat.get("messages") if isinstance(chat, dict) else chat
        if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
            raise InvalidRequestError(f'{path}, line {i} is neither {{"messages": [...]}} nor a list of messages', param="chats")
        found.append((i, messages))
    return found


def _of_chat(tokenizer: Tokenizer, messages: list[Mapping[str, Any]], where: str) -> Window:
    try:
        whole = tokenizer.encode_chat(messages, add_generation_prompt=False)
        answered = messages[-1].get("role") == "assistant"
        asked = messages[:-1] if answered else messages
        before = tokenizer.encode_chat(asked, add_generation_prompt=True) if asked else []
    except InvalidRequestError as e:
        raise InvalidRequestError(f"{where}: {e}", param="chats") from e
    first = len(before) if answered and before and whole[: len(before)] == before else 1
    return Window(np.array(whole, np.int32), first, asked or None)
