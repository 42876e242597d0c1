"""The engine behind asyncio: one thread runs the steps, any number of tasks on any event loops add, stream and abort."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from typing import Any

from trivium.engine.engine import Engine
from trivium.engine.outputs import RequestOutput
from trivium.engine.runner import Stats
from trivium.errors import BackendError, ClosedError, TriviumError
from trivium.sampling import SamplingParams

MAX_FAILURES = 3
"""Steps in a row that may raise (which no fault of a request or of the device does) before the engine stops."""


class _Listener:
    """Where the news of one request go. What a slow reader has not fetched yet is one piece of news that grows by what is new."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.arrived = asyncio.Event()
        self._lock = threading.Lock()
        self._news: RequestOutput | None = None

    def put(self, output: RequestOutput) -> bool:
        """From the engine's thread; True: the reader must be woken."""
        with self._lock:
            if self._news is None:
                self._news = output
                return True
            self._news.extend(output)
            return False

    async def get(self) -> RequestOutput:
        await self.arrived.wait()
        self.arrived.clear()
        with self._lock:
            output, self._news = self._news, None
        assert output is not None
        return output


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

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken: neither closed nor stopped by a fault."""
        return self._fault is None

    async def stats(self) -> Stats:
        """Engine.snapshot(), between two steps."""
        return await self.call(lambda engine: engine.snapshot())  # type: ignore[no-any-return]

    async def stream(
        self, prompt_ids: Sequence[int], params: SamplingParams | None = None, *, announce: bool = False, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """News of one request as they come, the last with finished=True; `options` as in Engine.add_request. announce: before them
        comes one without outputs, as soon as the request is taken. A reader that lags gets what it missed in one piece. The request
        is aborted if the iterator is closed or its task is cancelled. Bad requests raise what Engine.add_request raises."""
        listener = _Listener()
        number: list[int] = []

        def add(engine: Engine) -> None:
            if self._fault is not None:
                raise self._fault.with_traceback(None)
            number.append(engine.add_request(prompt_ids, params, **{"stream": True, **options}))
            self._listeners[number[0]] = listener

        try:
            if params is not None and params.structured_outputs is not None:
                await asyncio.to_thread(self._engine.prepare, params)
            await self.call(add)
            if announce:
                yield RequestOutput(number[0], list(prompt_ids), [], finished=False)
            while True:
                output = await listener.get()
                yield output
                if output.finished:
                    number.clear()
                    return
        finally:
            self._commands.put(lambda: self._leave(number))

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams | None = None, **options: Any) -> RequestOutput:
        """The whole output of one request; aborted if the task is cancelled."""
        outputs = [output async for output in self.stream(prompt_ids, params, **{"stream": False, **options})]
        return outputs[-1]

    async def abort(self, request_id: int) -> bool:
        """Ends a request by the id in its outputs: its reader gets what is there (finish_reason "abort"). False: it had ended."""
        return await self.call(lambda engine: self._abort(request_id))  # type: ignore[no-any-return]

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

    def _abort(self, number: int) -> bool:
        """On the engine's thread."""
        output = self._engine.abort(number)
        self._deliver([] if output is None else [output])
        return output is not None

    def _leave(self, numbers: Iterable[int]) -> None:
        """On the engine's thread: nobody reads these any more. Empty if the request never came in or has ended."""
        for number in numbers:
            self._listeners.pop(number, None)
            self._engine.abort(number)

    def _loop(self) -> None:
        while self._fault is None:
            if self._drain(block=not self._engine.has_unfinished()):
                self._stop(ClosedError("this model was closed; load it again"))
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
        except BaseException as fault:  # no signal reaches this thread: what looks like an interrupt is the backend's, too
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
        """Wakes every event loop once, however many of its tasks have news."""
        waking: dict[asyncio.AbstractEventLoop, dict[int, _Listener]] = {}
        for output in outputs:
            number = output.request_id
            listener = self._listeners.pop(number, None) if output.finished else self._listeners.get(number)
            if listener is not None and (listener.put(output) or listener.loop.is_closed()):
                waking.setdefault(listener.loop, {})[number] = listener
        for loop, listeners in waking.items():
            try:
                loop.call_soon_threadsafe(_wake, listeners.values())
            except RuntimeError:  # the loop was closed: nobody listens any more
                self._leave(listeners)


def _wake(listeners: Iterable[_Listener]) -> None:
    for listener in listeners:
        listener.arrived.set()


def _settle(future: Future[Any], work: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    except BaseException as fault:
        future.set_exception(fault)
