"""The ASGI application: lets calls in or refuses them, finds their route, and ends in good order."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trivium_server import (
    admin, anthropic, dashboard, ollama, openai_batches, openai_chat, openai_completions, openai_embeddings, openai_files,
    openai_responses, rerank, service,
)  # fmt: skip
from trivium_server.batches import Batches
from trivium_server.faults import (
    ErrorShape,
    Refusal,
    anthropic_error,
    anthropic_status,
    ollama_error,
    openai_error,
    refusal,
    unavailable,
)
from trivium_server.http import Call, Exchange, Gone, Receive, Route, Send, answer, encode, too_large
from trivium_server.keys import Account, Key
from trivium_server.meters import Meters
from trivium_server.models import Models
from trivium_server.moderation import Moderation
from trivium_server.recent import Recent
from trivium_server.settings import Settings

if TYPE_CHECKING:
    from trivium_server.tracing import Tracing

ROUTES: tuple[Route, ...] = (
    *openai_chat.ROUTES, *openai_completions.ROUTES, *openai_embeddings.ROUTES, *openai_responses.ROUTES, *openai_files.ROUTES,
    *openai_batches.ROUTES, *anthropic.ROUTES, *ollama.ROUTES, *rerank.ROUTES, *service.ROUTES, *dashboard.ROUTES, *admin.ROUTES,
)  # fmt: skip
_LONGEST_ID = 128
_ALLOWED = (
    "authorization, x-api-key, content-type, x-request-id, x-session-id, x-request-timeout, x-priority, anthropic-version, "
    "anthropic-beta"
)


def shape_of(path: str) -> ErrorShape:
    """The error object that clients of a path understand, whether there is such a path or not."""
    if path.startswith("/v1/messages"):
        return anthropic_error
    return ollama_error if path.startswith("/api/") else openai_error


class App:
    """Answers for `models`."""

    def __init__(self, models: Models, settings: Settings | None = None) -> None:
        self.models = models
        self.settings = settings or Settings()
        self.meters = Meters(models, aliases=self.settings.vllm_metrics, keys=self.settings.key_metrics)
        self.moderation = Moderation(self.settings.moderation)
        self.recent = Recent()
        self.meters.watchers.append(self.recent.add)
        self.tracing: Tracing | None = None
        self.draining = False
        self.active = 0
        """Calls under way, apart from those that only ask how the server is."""
        self._accounts: dict[Key, Account] = {}
        self._idle = asyncio.Event()
        self.batches = None if self.settings.batch_dir is None else Batches(self, self.settings.batch_dir)
        self._exact: dict[str, dict[str, Route]] = {}
        self._named: dict[tuple[str, str], dict[str, Route]] = {}
        for route in sorted(ROUTES, key=lambda route: -len(route.path.partition("}")[2])):  # the longest end is tried first
            head, is_open, end = route.path.partition("{")
            at = self._named.setdefault((head, end.partition("}")[2]), {}) if is_open else self._exact.setdefault(head, {})
            at[route.method] = route

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        if scope["type"] != "http":
            raise RuntimeError(f"only HTTP is spoken here, not {scope['type']}")
        headers = dict(scope["headers"])
        if self.tracing is not None:
            self.tracing.enter(headers)
        call = Call(self, request_id(headers.get(b"x-request-id", b"")), headers, reply=self._cors(headers))
        call.reply["x-request-id"] = call.request_id
        exchange = Exchange(receive, send, call.reply)
        shape = shape_of(scope["path"])
        if shape is anthropic_error:
            exchange.headers["request-id"] = call.request_id  # where Anthropic's client looks for it
        try:
            await self._admit(scope, call, exchange)
        except Gone:
            pass
        except Exception as error:
            await self._refuse(exchange, shape, refusal(error), call.request_id)

    def trace(self, tracing: Tracing) -> None:
        """Makes spans of what ends from now on."""
        self.tracing = tracing
        self.meters.watchers.append(tracing.add)

    async def _live(self, receive: Receive, send: Send) -> None:
        """From the server's start to its end."""
        watching = asyncio.ensure_future(dashboard.watch(self.recent, self.meters))
        while (await receive())["type"] == "lifespan.startup":
            if self.batches is not None:
                await self.batches.start()
            await send({"type": "lifespan.startup.complete"})
        if self.batches is not None:
            await self.batches.close()
        watching.cancel()
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)
        await send({"type": "lifespan.shutdown.complete"})

    async def drain(self, seconds: float) -> None:
        """Takes nothing new, and waits up to `seconds` for what runs. Requests of batches go back to where they waited."""
        self.draining = True
        if self.batches is not None:
            await self.batches.stop()
        if self.active:
            self._idle.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), seconds)

    async def _admit(self, scope: Mapping[str, Any], call: Call, exchange: Exchange) -> None:
        method, headers = scope["method"], call.headers
        allowed = "access-control-allow-origin" in exchange.headers
        if method == "OPTIONS" and b"access-control-request-method" in headers and allowed:
            preflight = {"access-control-allow-methods": "GET, POST, DELETE, HEAD", "access-control-allow-headers": _ALLOWED}
            await exchange.reply(b"", status=200, headers={**preflight, "access-control-max-age": "600"})
            return
        if sum(len(name) + len(value) for name, value in scope["headers"]) > self.settings.max_headers:
            raise Refusal(431, "headers_too_large", f"the headers are larger than {self.settings.max_headers} bytes")
        methods, rest = self._methods(scope["path"])
        route = methods.get("GET" if method == "HEAD" else method)
        key = None if route is not None and route.public else self._key(headers)
        if not methods:
            raise Refusal(404, "no_route", f"there is nothing at {scope['path']:.100}; /openapi.json lists what there is")
        if route is None:
            names = ", ".join(sorted(methods))
            raise Refusal(405, "no_method", f"{method} is not possible here, only {names}", headers={"allow": names})
        if not route.public:
            self._check_scope(route, key)
        call = replace(call, key=key, rest=rest, query=scope.get("query_string", b""))
        if route.open:
            await answer(route, call, exchange, b"")
            return
        if self.draining:
            raise unavailable("the server is about to stop; ask another one")
        async with self._within_limits(route, call):
            await self._answer(route, call, exchange)

    def charge(self, key: Key | None, tokens: int) -> None:
        """A call with this key has cost so many tokens."""
        if key is not None:
            self._account(key).charge(tokens)
            self.meters.charged(key.name, tokens)

    def _account(self, key: Key) -> Account:
        if key not in self._accounts:
            self._accounts[key] = Account(key)
        return self._accounts[key]

    @contextlib.asynccontextmanager
    async def _within_limits(self, route: Route, call: Call) -> AsyncIterator[None]:
        """Limits are for what makes work: what is sent to routes of inference. Raises Refusal."""
        if call.key is None or (route.method, route.scope) != ("POST", "inference"):
            yield
            return
        account = self._account(call.key)
        await account.room()
        with contextlib.ExitStack() as entered:
            try:
                entered.enter_context(account.entered())
            finally:
                call.reply.update(account.headers())
            self.meters.asked(call.key.name)
            yield

    async def _answer(self, route: Route, call: Call, exchange: Exchange) -> None:
        self.active += 1
        try:
            limit, seconds = self.settings.max_body, self.settings.body_timeout
            if route.upload:
                limit, seconds = self.settings.max_upload, seconds * max(1.0, self.settings.max_upload / limit)
            if int(call.headers.get(b"content-length", b"0") or 0) > limit:
                raise too_large(limit)
            if route.upload:
                await answer(route, call, exchange, exchange.pieces(limit, seconds))
                return
            body = await exchange.body(limit, seconds)
            await exchange.unless_gone(answer(route, call, exchange, body))
        finally:
            self.active -= 1
            if not self.active:
                self._idle.set()

    def _methods(self, path: str) -> tuple[Mapping[str, Route], str]:
        """The routes at a path by method, and what stands for the name in theirs."""
        found = self._exact.get(path)
        if found is not None:
            return found, ""
        for (head, end), routes in self._named.items():
            if path.startswith(head) and path.endswith(end) and len(path) > len(head) + len(end):
                return routes, path[len(head) : len(path) - len(end)]
        return {}, ""

    def _key(self, headers: Mapping[bytes, bytes]) -> Key | None:
        """The key that came with the call, if keys are wanted. Raises Refusal."""
        keys = self.settings.keys
        if not keys:
            return None
        kind, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        bearer = bearer if kind.lower() == b"bearer" else b""
        given = [text.strip() for text in (bearer, headers.get(b"x-api-key", b"")) if text.strip()]
        for text in given:
            if (found := keys.find(text)) is not None:
                return found
        why = "is not known here" if given else "is missing: give it as Authorization: Bearer KEY or as x-api-key"
        raise Refusal(401, "invalid_api_key", f"the API key {why}", headers={"www-authenticate": "Bearer"})

    def _check_scope(self, route: Route, key: Key | None) -> None:
        """Raises Refusal. A server without keys is open, but not to admin."""
        if key is None and route.scope == "admin":
            raise Refusal(403, "missing_scope", "this needs a key with the scope admin, and the server was started without keys")
        if key is not None and route.scope is not None and route.scope not in key.scopes:
            has = ", ".join(sorted(key.scopes))
            raise Refusal(403, "missing_scope", f"this needs a key with the scope {route.scope}; this one has {has}")

    def _cors(self, headers: Mapping[bytes, bytes]) -> dict[str, str]:
        origin = headers.get(b"origin", b"").decode("latin-1")
        if origin and (origin in self.settings.origins or "*" in self.settings.origins):
            shown = "x-request-id, request-id, retry-after, x-model-version"
            return {"access-control-allow-origin": origin, "vary": "origin", "access-control-expose-headers": shown}
        return {}

    async def _refuse(self, exchange: Exchange, shape: ErrorShape, fault: Refusal, request_id: str) -> None:
        self.meters.refused(fault.code)
        if shape is anthropic_error:
            fault = anthropic_status(fault)
        if not exchange.started:
            await exchange.reply(encode(shape(fault, request_id)), status=fault.status, headers=fault.headers)


def request_id(given: bytes) -> str:
    """The client's own, as far as it is printable and not too long; else a new one. It is for people to find their call again."""
    text = "".join(chr(byte) for byte in given[:_LONGEST_ID] if 32 < byte < 127)
    return text or secrets.token_hex(16)
