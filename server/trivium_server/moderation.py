"""What plugins have to say about a request before anything is made for it, and about what is made before anybody reads it.

A moderator is asked for by name (`--moderation NAME`): an entry point in the group `trivium.moderations` whose object has the hook
`trivium_moderation()`, which returns a Moderator. One that fails ends the request: nothing passes that was not judged.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from trivium import CompletionOutput, RequestOutput, errors
from trivium.extensions import blame, expect, find, installed

from trivium_server.faults import bad

if TYPE_CHECKING:
    from trivium_server.http import Call
    from trivium_server.work import Work

FILTERED = "content_filter"
"""The finish reason of an output that a moderator has ended, and the code of a request that one has refused."""


@dataclass(frozen=True)
class Asked:
    """A request. key: what the server calls its API key (never the key itself); None if there are no keys. model: the name that
    clients know it by. messages: of a chat, as the model's template gets them. prompts: texts to be continued, if it is no chat."""

    request_id: str
    key: str | None
    model: str
    messages: Sequence[Mapping[str, Any]] = ()
    prompts: Sequence[str] = ()


class Moderator:
    """Judges. Both methods run on the server's event loop, once for a request and once for every piece of its output: what takes
    long belongs into a thread or a service. What they raise is logged and ends the request, so it should quote nobody."""

    async def before(self, asked: Asked) -> str | None:
        """Why the request is refused, in words for the client; None: it is not."""
        return None

    async def after(self, asked: Asked, text: str, final: bool) -> str | None:
        """Why an output ends here, without its last piece; None: it goes on. text: all that it says so far, as the model wrote it,
        reasoning and tool calls included. final: it is whole; of an answer that is not streamed this is the only call."""
        return None


class Moderation:
    """The moderators of a server, in their order; the first that objects decides."""

    def __init__(self, names: Iterable[str]) -> None:
        """Raises InvalidRequestError or PluginError."""
        self._all: list[tuple[Moderator, str]] = []
        for name in names:
            found, what = find("moderation", name, Moderator)
            if found is None:
                known = ", ".join(installed("moderation")) or "none"
                message = f"there is no moderation {name!r}; installed are: {known}"
                raise errors.InvalidRequestError(message, param="moderation")
            self._all.append((found, what))

    async def whole(self, call: Call, work: Work) -> list[RequestOutput]:
        """As Work.whole(); an output that is objected to is empty. Raises Refusal."""
        if not self._all:
            return await work.whole(call.app.meters)
        asked = await self._before(call, work)
        outputs = await work.whole(call.app.meters)
        for output in outputs:
            kept = [one if await self._passes(call, asked, one.text, True) else emptied(one) for one in output.outputs]
            output.outputs = kept
        return outputs

    def stream(self, call: Call, work: Work) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """As Work.stream(); an output that is objected to ends there. Its first step raises Refusal."""
        return self._judged(call, work) if self._all else work.stream(call.app.meters)

    async def _judged(self, call: Call, work: Work) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        asked = await self._before(call, work)
        said: dict[tuple[int, int], str] = defaultdict(str)
        ended: dict[int, set[int]] = defaultdict(set)
        async with contextlib.aclosing(work.stream(call.app.meters)) as news:
            async for number, output in news:
                output.outputs = [one for one in output.outputs if one.index not in ended[number]]
                for place, one in enumerate(output.outputs):
                    said[number, one.index] += one.text
                    if not await self._passes(call, asked, said[number, one.index], one.finish_reason is not None):
                        output.outputs[place] = one = emptied(one)
                    if one.finish_reason is not None:
                        ended[number].add(one.index)
                if len(ended[number]) == work.params.n and not output.finished:
                    await work.served.llm.abort(output.request_id)
                yield number, output

    async def _before(self, call: Call, work: Work) -> Asked:
        decode = work.served.llm.tokenizer.decode
        texts = [] if work.chat else [p if isinstance(p, str) else decode(p, skip_special_tokens=False) for p in work.prompts]
        key = None if call.key is None else call.key.name
        asked = Asked(call.request_id, key, work.served.name, work.prompts[0] if work.chat else (), texts)
        for moderator, what in self._all:
            with blame(what):
                why = expect(str | None, await moderator.before(asked), f"{what}: before()")
            if why is not None:
                raise bad(why, "messages" if work.chat else "prompt", FILTERED)
        return asked

    async def _passes(self, call: Call, asked: Asked, text: str, final: bool) -> bool:
        for moderator, what in self._all:
            with blame(what):
                why = expect(str | None, await moderator.after(asked, text, final), f"{what}: after()")
            if why is not None:
                call.app.meters.refused(FILTERED)
                return False
        return True


def emptied(output: CompletionOutput) -> CompletionOutput:
    """The end of an output that says nothing (more)."""
    nothing = None if output.events is None else output.events[:0]
    return replace(output, text="", finish_reason=FILTERED, stop_reason=None, logprobs=None, events=nothing)
