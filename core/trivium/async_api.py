"""AsyncLLM: a loaded model for asyncio. Apart from LLM, since asyncio takes a sixth of a short run's start."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Sequence
from typing import Any, Unpack

from trivium.api import Chats, Message, Opened, Options, Params, Prompt, Prompts, Request, ToolChoice, Tools, checked, with_options
from trivium.engine import PoolingParams, RequestOutput, Stats
from trivium.engine.adapters import enabled
from trivium.engine.async_engine import AsyncEngine
from trivium.engine.pooling import likelihood, relevance
from trivium.sampling import SamplingParams


class AsyncLLM(Opened, contextlib.AbstractAsyncContextManager["AsyncLLM"]):
    """A loaded model for asyncio: its engine steps in a thread of its own, requests come and go, and their texts are cut into
    tokens in further threads, so that a long one keeps nobody waiting. An async context manager."""

    def _start(self, opened: contextlib.ExitStack) -> None:
        self.async_engine = AsyncEngine(self.engine)
        opened.callback(self.async_engine.close)

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    async def load_adapter(self, name: str, path: str | os.PathLike[str]) -> None:
        """As LLM.load_adapter."""
        adapter = await asyncio.to_thread(enabled(self.loaded.lora).read, path)
        await self.async_engine.call(lambda engine: engine.load_adapter(name, adapter))

    async def unload_adapter(self, name: str) -> None:
        """As LLM.unload_adapter."""
        await self.async_engine.call(lambda engine: engine.unload_adapter(name))

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken: neither closed nor stopped by a fault."""
        return self.async_engine.is_ready

    async def stats(self) -> Stats:
        """Totals so far, and what runs, waits and is free now."""
        return await self.async_engine.stats()

    async def abort(self, request_id: int) -> bool:
        """Ends a request by the id in its outputs: its reader gets what is there (finish_reason "abort"). False: it had ended."""
        return await self.async_engine.abort(request_id)

    async def generate(self, prompts: Prompts, sampling_params: Params = None, **options: Unpack[Options]) -> list[RequestOutput]:
        """As LLM.generate; cancelling the task aborts the requests."""
        return await self._complete(await asyncio.to_thread(self._prompts, prompts, sampling_params, options))

    async def chat(
        self, messages: Chats, sampling_params: Params = None, *, tools: Tools = None, tool_choice: ToolChoice = None, **more: Any
    ) -> list[RequestOutput]:
        """As LLM.chat."""
        return await self._complete(await asyncio.to_thread(self._chats, messages, sampling_params, tools, tool_choice, more))

    async def stream(
        self, prompt: Prompt | Sequence[Message], sampling_params: SamplingParams | None = None, *, tools: Tools = None,
        tool_choice: ToolChoice = None, announce: bool = False, **more: Any,
    ) -> AsyncIterator[RequestOutput]:  # fmt: skip
        """As LLM.stream; closing the iterator or cancelling its task aborts the request. announce: the first piece of news has no
        outputs and comes as soon as the request is taken, so that whoever answers for it knows that it was not refused."""
        request = await asyncio.to_thread(self._request, prompt, sampling_params, tools, tool_choice, more)
        options = {"announce": announce, **request.options}
        async with contextlib.aclosing(self.async_engine.stream(request.ids, request.params, **options)) as news:
            async for output in news:
                yield output
                if output.error is not None:
                    raise output.error

    async def embed(
        self, prompts: Prompts, pooling_params: PoolingParams | None = None, **options: Unpack[Options]
    ) -> list[RequestOutput]:
        """As LLM.embed."""
        return await self._complete(await asyncio.to_thread(self._pooled, prompts, pooling_params, options))

    async def score(self, pairs: Sequence[tuple[str, str]], **options: Unpack[Options]) -> list[float]:
        """As LLM.score."""
        return [relevance(output) for output in await self._complete(await asyncio.to_thread(self._judged, pairs, options))]

    async def loglikelihood(self, pairs: Sequence[tuple[str, str]], **options: Unpack[Options]) -> list[tuple[float, bool]]:
        """As LLM.loglikelihood."""
        requests = with_options([self._scored(pair) for pair in pairs], options)
        return [likelihood(output) for output in await self._complete(requests)]

    async def _complete(self, requests: Sequence[Request]) -> list[RequestOutput]:
        tasks = [asyncio.ensure_future(self.async_engine.generate(r.ids, r.params, **r.options)) for r in requests]
        try:
            return checked(list(await asyncio.gather(*tasks)))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # what a refused one's siblings had is free by then
