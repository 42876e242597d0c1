"""The engine behind asyncio: one thread runs the steps, any number of tasks add, stream and abort."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from typing import Any, NamedTuple

from trivium.engine.engine import Engine
from trivium.engine.outputs import RequestOutput
from trivium.errors import BackendError, TriviumError
from trivium.sampling import SamplingParams

Options = dict[str, Any]
"""Further arguments of Engine.add_request."""
MAX_FAILURES = 3
"""Steps in a row that may raise (which no fault of a request or of the device does) before the engine stops."""


class _Listener(NamedTuple):
    """Where the news of one request go."""

    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue[RequestOutput]

    def send(self, output: RequestOutput) -> None:
        try:
            self.loop.call_soon_threadsafe(self.queue.put_nowait, output)
        except RuntimeError:
            return  # the loop was closed: nobody listens any more


class AsyncEngine(AbstractAsyncContextManager["AsyncEngine"]):
    """Owns an Engine, which nobody else may call from then on. Close it, or use it as an async context manager."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._listeners: dict[int, _Listener] = {}
        self._fault: TriviumError | None = None
        self._failures = 0
        self._stopped = False
        self._thread = threading.Thread(target=self._loop, name="trivium-engine", daemon=True)
        self._thread.start()

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    def stream(
        self, prompt_ids: Sequence[int], params: SamplingParams | None = None, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """News of one request as they come, the last with finished=True; `options` as in Engine.add_request. The request is
        aborted if the iterator is closed or its task is cancelled. Bad requests raise what Engine.add_request raises."""
        return self._listen(prompt_ids, params, {"stream": True, **options})

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams | None = None, **options: Any) -> RequestOutput:
        """The whole output of one request; aborted if the task is cancelled."""
        outputs = [output async for output in self._listen(prompt_ids, params, options)]
        return outputs[-1]

    def close(self) -> None:
        """Ends every request (finish_reason "error") and the thread."""
        self._commands.put(None)
        if threading.current_thread() is not self._thread:  # it is where the owner is collected as garbage by this very thread
            self._thread.join()

    async def call(self, what: Callable[[Engine], Any]) -> Any:
        """Runs `what` between two steps, on the engine's thread, and returns its result."""
        future: Future[Any] = Future()
        self._commands.put(lambda: _settle(future, lambda: what(self._engine)))
        if self._stopped:
            self._drain(block=False)
        return await asyncio.wrap_future(future)

    async def _listen(
        self, ids: Sequence[int], params: SamplingParams | None, options: Options
    ) -> AsyncGenerator[RequestOutput, None]:
        listener = _Listener(asyncio.get_running_loop(), asyncio.Queue())
        number: list[int] = []

        def add(engine: Engine) -> None:
            if self._fault is not None:
                raise self._fault
            number.append(engine.add_request(ids, params, **options))
            self._listeners[number[0]] = listener

        try:
            if params is not None and params.structured_outputs is not None:
                await asyncio.to_thread(self._engine.prepare, params)
            await self.call(add)
            while True:
                output = await listener.queue.get()
                yield output
                if output.finished:
                    number.clear()
                    return
        finally:
            self._commands.put(lambda: self._abort(number))

    def _abort(self, number: list[int]) -> None:
        """On the engine's thread. `number` is empty if the request never came in or has ended."""
        for n in number:
            self._listeners.pop(n, None)
            self._engine.abort(n)

    def _loop(self) -> None:
        while self._fault is None:
            if self._drain(block=not self._engine.has_unfinished()):
                self._stop(BackendError("the engine was closed"))
            elif self._engine.has_unfinished():
                self._step()
        self._stopped = True  # from here on, whoever puts a command runs it: nothing is left unanswered
        self._drain(block=False)

    def _drain(self, *, block: bool) -> bool:
        """Runs the commands that wait; True: the engine is to close."""
        try:
            while True:
                command = self._commands.get(block)
                if command is None:
                    return True
                command()
                block = False
        except queue.Empty:
            return False

    def _step(self) -> None:
        try:
            outputs = self._engine.step()
        except Exception as fault:
            self._failures += 1
            if self._failures >= MAX_FAILURES:
                reason = f"{type(fault).__name__}: {fault}"
                self._stop(BackendError(f"the engine has stopped after {self._failures} failed steps: {reason}"))
        else:
            self._failures = 0
            self._deliver(outputs)

    def _stop(self, fault: TriviumError) -> None:
        self._fault = fault
        self._deliver(self._engine.fail_all(fault))

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            if (listener := self._listeners.get(output.request_id)) is not None:
                listener.send(output)
            if output.finished:
                self._listeners.pop(output.request_id, None)


def _settle(future: Future[Any], work: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    except BaseException as fault:
        future.set_exception(fault)
