"""`truncate_prompt_tokens` of texts that are embedded or compared: the last tokens of each are kept, as vLLM documents it.

Source: the field of this name in vLLM's PoolingParams. The special tokens that the model wants around a text, or between the texts
of a pair, are not cut off, since it pools at them; they count.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import Meta
from trivium import AsyncLLM

from trivium_server.faults import Refusal, bad
from trivium_server.models import Served

FIELD = "truncate_prompt_tokens"
Truncation = Annotated[int, Meta(ge=-1)] | None
"""Tokens of each prompt at most; -1: as many as the model can read; None: what is too long is refused."""


async def truncated(served: Served, prompts: Sequence[Any], keep: int | None) -> Sequence[Any]:
    """The prompts (texts, ids, or pairs of texts), those that have more than `keep` tokens as the ids that are left of them. Raises
    Refusal for a number that is not possible, and where not even one token of a text would stay; without `keep`, ContextLengthError
    for what is longer than any that fit."""
    if keep is None:
        for prompt in prompts:
            served.check_length(prompt)
        return prompts
    if keep == 0 or keep > served.max_model_len:
        raise bad(f"{FIELD} must be -1 or from 1 to {served.max_model_len}, which is what the model can read, not {keep}", FIELD)
    most = served.max_model_len if keep == -1 else keep
    ends = [_end(served, prompt) for prompt in prompts]
    return await asyncio.to_thread(lambda: [_cut(served.llm, prompt, most) for prompt in ends])


def _end(served: Served, prompt: Any) -> Any:
    """Of a text as much as can matter, so that nobody need cut megabytes into tokens: twice what the longest tokens would fill,
    since the first ones of what is left may be others than those of the whole."""
    if isinstance(prompt, tuple):
        served.check_length(prompt[0])
        return prompt[0], _end(served, prompt[1])
    return prompt[-2 * served.facts.max_characters :]


def _cut(llm: AsyncLLM, prompt: Any, most: int) -> list[int]:
    ids = llm.encode(prompt)
    if len(ids) <= most:
        return ids
    if isinstance(prompt, tuple):
        return _cut_pair(llm, prompt, ids, most)
    return _cut_text(llm, prompt, ids, most) if isinstance(prompt, str) else ids[-most:]


def _cut_text(llm: AsyncLLM, text: str, ids: list[int], most: int) -> list[int]:
    """Special tokens before and after stay."""
    around, content = llm.tokenizer.encode(""), llm.tokenizer.encode(text, add_special_tokens=False)
    before = next((i for i in range(len(around) + 1) if around[:i] + content + around[i:] == ids), None)
    if before is None:  # the text has them itself
        return ids[-most:]
    room = most - len(around)
    if room < 1:
        raise _no_room(most, f"the {len(around)} special tokens that the model wants")
    return around[:before] + content[-room:] + around[before:]


def _cut_pair(llm: AsyncLLM, pair: tuple[str, str], ids: list[int], most: int) -> list[int]:
    """The query stays, and the document loses what is too much: as text, since the two are put together in the model's own way."""
    query, document = pair
    left = llm.tokenizer.encode(document, add_special_tokens=False)
    while len(ids) > most:
        left = left[len(ids) - most :]
        if not left:
            raise _no_room(most, "the query and what the model wants around it")
        ids = llm.encode((query, llm.tokenizer.decode(left)))  # type: ignore[arg-type]
    return ids


def _no_room(most: int, what: str) -> Refusal:
    return bad(f"{most} tokens leave no room for the text beside {what}", FIELD)
