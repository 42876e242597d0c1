"""Batches under way: their requests are answered by the handlers of their endpoint, after everything that somebody waits for.

A batch is a task, and all of them share a number of seats, one after another, so that a long batch keeps no short one waiting.
What has been answered is on disk at once (see Store); what has not waits there, through a stop and a new start of the server.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ParamSpec, TypeVar

import msgspec
from msgspec import Meta, Struct
from trivium import errors

from trivium_server import openai_chat, openai_completions, openai_embeddings, openai_responses
from trivium_server.batch_store import Batch, BatchFault, Line, Store
from trivium_server.faults import Refusal, bad, openai_error, refusal
from trivium_server.http import Call, Route, decode, encode, told
from trivium_server.keys import Key
from trivium_server.openai_types import new_id

if TYPE_CHECKING:
    from trivium_server.app import App

ENDPOINTS: dict[str, Route] = {
    route.path: route
    for part in (openai_chat, openai_completions, openai_embeddings, openai_responses)
    for route in part.ROUTES
    if route.path.startswith("/v1/")
}
_MOST_FAULTS = 100
"""Of an input file that are told."""
_AGAIN = frozenset({429, 503})
"""Refusals that pass: the request waits and is tried again."""
P = ParamSpec("P")
T = TypeVar("T")
_log = logging.getLogger("trivium.server")


class Request(Struct, kw_only=True):
    """A line of an input file."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=512)]
    method: Annotated[str, Meta(pattern="^POST$")]
    url: str
    body: msgspec.Raw


def enabled(call: Call) -> Batches:
    """The server's batches. Raises Refusal if it has none."""
    if call.app.batches is None:
        message = "files and batches are off; the operator of the server turns them on with --batch-dir FOLDER"
        raise Refusal(404, "batches_off", message)
    return call.app.batches


def owner_of(call: Call) -> str:
    """Whose files and batches a call sees: those of its key; of a server without keys everybody's."""
    return "" if call.key is None else call.key.digest.hex()


class Batches:
    """Of one server."""

    def __init__(self, app: App, folder: Path) -> None:
        """Raises InvalidRequestError if the folder can't be used."""
        try:
            self.store = Store(folder)
        except (OSError, sqlite3.Error) as error:
            why = "another server uses it" if "locked" in str(error) else error
            raise errors.InvalidRequestError(f"--batch-dir {folder}: {why}", param="batch_dir") from error
        self._app = app
        self._thread = ThreadPoolExecutor(1, "trivium-batches")
        self._seats = asyncio.Semaphore(app.settings.batch_parallel)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        """By batch: what answers its requests."""
        self._cancelled: set[str] = set()
        """Of the batches that are worked on: those that may not begin to be answered any more."""

    async def do(self, what: Callable[P, T], *given: P.args, **named: P.kwargs) -> T:
        """Calls a method of the store, on the store's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(what, *given, **named))

    @property
    def under_way(self) -> int:
        """Batches that are worked on."""
        return len(self._tasks)

    async def start(self) -> None:
        """Goes on with what had not ended."""
        for owner, id in await self.do(self.store.under_way):
            self.begin(owner, id)

    def begin(self, owner: str, id: str) -> None:
        """Works on a batch of the store."""
        task = self._tasks[id] = asyncio.ensure_future(self._work(owner, id))
        task.add_done_callback(lambda _: self._forget(id))

    def _forget(self, id: str) -> None:
        del self._tasks[id]
        self._cancelled.discard(id)

    async def cancel(self, owner: str, id: str) -> Batch:
        """What runs is ended, what waits is not begun. Raises Refusal."""
        batch = await self.do(self.store.cancel, owner, id)
        if id in self._tasks:
            self._cancelled.add(id)
        if (running := self._running.get(id)) is not None:
            running.cancel()
        return batch

    async def stop(self) -> None:
        """What runs goes back to where it waited."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        """The end; nothing may be called afterwards."""
        await self.stop()
        self._thread.shutdown()
        self.store.close()

    async def _work(self, owner: str, id: str) -> None:
        """A batch, from whatever state to its end."""
        try:
            batch = await self.do(self.store.batch, owner, id)
            if batch.status == "validating":
                batch = await self._validated(owner, batch)
            end = await self._run(owner, batch) if batch.status == "in_progress" else "completed"
            if batch.status not in ("failed", "cancelled"):
                await self.do(self.store.finalize, owner, id)
                await self.do(self.store.finish, owner, id, end)
        except Exception as error:
            _log.error("a batch has stopped until the next start of the server", exc_info=error)

    async def _validated(self, owner: str, batch: Batch) -> Batch:
        settings, path = self._app.settings, self.store.path(batch.input_file_id)
        limits = settings.batch_max_lines, settings.max_body
        lines, faults = await asyncio.to_thread(check, path, batch.endpoint, *limits)
        if faults:
            return await self.do(self.store.fail, owner, batch.id, faults)
        return await self.do(self.store.begin, owner, batch.id, lines)

    async def _run(self, owner: str, batch: Batch) -> str:
        """Answers what waits; returns how that ended: completed, expired or cancelled."""
        if batch.id in self._cancelled:
            return "cancelled"
        running = self._running[batch.id] = asyncio.ensure_future(self._answer_all(owner, batch))
        try:
            await asyncio.wait({running}, timeout=max(0.0, batch.expires_at - time.time()))
            if not running.done():
                return "expired"
            if running.cancelled():
                return "cancelled"
            running.result()
            return "completed"
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            del self._running[batch.id]

    async def _answer_all(self, owner: str, batch: Batch) -> None:
        after, begun = 0, asyncio.Semaphore(self._app.settings.batch_parallel)
        async with asyncio.TaskGroup() as group:
            while lines := await self.do(self.store.waiting, batch.id, after, 100):
                for line in lines:
                    await begun.acquire()
                    task = group.create_task(self._answer(owner, batch, line))
                    task.add_done_callback(lambda _: begun.release())
                after = lines[-1].number

    async def _answer(self, owner: str, batch: Batch, line: Line) -> None:
        """One request. What may pass (a full queue, a model that is not there just now) is waited for, without a seat."""
        path = self.store.path(batch.input_file_id)
        call = Call(self._app, new_id("req_"), {}, self._key(owner), background=True)
        while True:
            try:
                async with self._seats:
                    raw = await asyncio.to_thread(_read, path, line)
                    status, body = 200, await self._reply(ENDPOINTS[batch.endpoint], call, owner, raw)
                break
            except Exception as error:
                fault = refusal(error)
                if fault.status not in _AGAIN:
                    status, body = fault.status, encode(openai_error(told(call, fault), call.request_id))
                    break
                await asyncio.sleep(float(fault.headers.get("retry-after", "1")))
        response = {"status_code": status, "request_id": call.request_id, "body": msgspec.Raw(body)}
        answer = encode({"id": new_id("batch_req_"), "custom_id": line.custom_id, "response": response, "error": None})
        await self.do(self.store.answer, owner, batch.id, line.number, status == 200, answer)

    async def _reply(self, route: Route, call: Call, owner: str, raw: bytes) -> bytes:
        if owner and call.key is None:
            raise Refusal(401, "invalid_api_key", "the API key of this batch is not known any more")
        body = decode(bytes(decode(raw, Request).body), route.body)
        if getattr(body, "stream", None):
            raise bad("a batch has no streams; leave stream out", "stream")
        async with call.held:
            return encode(await route.handler(call, body))

    def _key(self, owner: str) -> Key | None:
        return self._app.settings.keys.of_digest(bytes.fromhex(owner)) if owner else None


def _read(path: Path, line: Line) -> bytes:
    with path.open("rb") as file:
        file.seek(line.start)
        return file.read(line.size)


def check(path: Path, endpoint: str, most: int, longest: int) -> tuple[list[Line], list[BatchFault]]:
    """The requests of an input file, or what is wrong with it. most: requests; longest: bytes of one."""
    lines: list[Line] = []
    faults: list[BatchFault] = []
    known: dict[str, int] = {}
    with path.open("rb") as file:
        start, number = 0, 0
        while (raw := file.readline(longest + 1)) and len(faults) < _MOST_FAULTS:
            number += 1
            try:
                if len(raw) > longest:
                    raise bad(f"the line is longer than {longest} bytes", code="line_too_long")
                if raw.strip():
                    request = _checked(raw, endpoint)
                    if (first := known.setdefault(request.custom_id, number)) != number:
                        raise bad(
                            f"custom_id {request.custom_id!r:.80} is that of line {first}, too", "custom_id", "duplicate_custom_id"
                        )
                    lines.append(Line(number, request.custom_id, start, len(raw)))
            except Refusal as fault:
                faults.append(BatchFault(fault.code, fault.message, number, fault.param))
                if fault.code == "line_too_long":
                    break
            start += len(raw)
            if len(lines) > most:
                return [], [BatchFault("too_many_requests", f"the file has more than {most} requests", number)]
    if not lines and not faults:
        faults.append(BatchFault("empty_file", "the file has no requests"))
    return lines, faults


def _checked(raw: bytes, endpoint: str) -> Request:
    """Raises Refusal."""
    try:
        request: Request = decode(raw, Request, "the line")
    except Refusal as fault:
        raise bad(fault.message, fault.param, "invalid_request" if fault.param else "invalid_json_line") from None
    if request.url != endpoint:
        raise bad(f"url is {request.url!r:.80}, but the endpoint of the batch is {endpoint}", "url", "mismatched_url")
    if not bytes(request.body).startswith(b"{"):
        raise bad("body must be an object", "body")
    return request
