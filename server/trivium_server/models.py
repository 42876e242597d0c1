"""The models behind the port: their names, and when they are loaded and given up."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

from trivium import AsyncLLM, SamplingParams, errors

from trivium_server.faults import Refusal, unavailable
from trivium_server.limits import MAX_PIXELS, characters
from trivium_server.splits import Split

_log = logging.getLogger("trivium.server")
_NOW = frozenset({"running", "waiting", "waiting_tokens", "pages", "free_pages"})
"""Fields of an engine's statistics that are no totals."""
_GOLDEN = (5**0.5 - 1) / 2
"""Its multiples, without their whole parts, lie evenly in [0, 1) however many are taken."""


@dataclass(frozen=True)
class Facts:
    """What is known of a model once it has been loaded. max_model_len: tokens of prompt and output together. size: bytes of its
    weights and of its KV cache. defaults: sampling parameters of requests that have none. max_characters: what a context of the
    longest tokens would hold. What is longer need not be cut into tokens, at seconds a megabyte, for anybody to know that it is too
    long. images: whether chats may show some. generates, embeds: whether the model makes tokens, and embeddings."""

    max_model_len: int
    max_characters: int
    architecture: str
    chat_template: str | None
    size: int
    defaults: SamplingParams
    images: bool
    generates: bool
    embeds: bool

    @classmethod
    def of(cls, llm: AsyncLLM) -> Facts:
        """Of a model that is loaded."""
        loaded, memory = llm.loaded, llm.loaded.session.memory()
        template, size = llm.tokenizer.chat_template, memory.weights + memory.kv
        tokens, longest = loaded.max_model_len, max(map(len, llm.tokenizer.tokens()))
        can = llm.takes_images, bool(loaded.traced.states), not llm.cross_encoder
        return cls(tokens, tokens * longest, loaded.architecture, template, size, llm.default_params(), *can)


@dataclass(eq=False)
class Slot:
    """A model that is loaded when it is wanted. load: loads it, in a thread. created: Unix seconds. users: calls that have it.
    waiting: calls that wait for it. used: when a call last took or left it, by the monotonic clock. keep: seconds for which it
    stays without calls, if a call has said so. past: statistics of its engines that were closed."""

    name: str
    load: Callable[[], AsyncLLM]
    created: int = field(default_factory=lambda: int(time.time()))
    llm: AsyncLLM | None = None
    facts: Facts | None = None
    users: int = 0
    waiting: int = 0
    used: float = 0.0
    keep: float | None = None
    loads: int = 0
    failed_loads: int = 0
    past: Any = None
    _leaving: bool = False
    _task: asyncio.Task[None] | None = None
    _begun: bool = False
    _timer: asyncio.TimerHandle | None = None
    _fault: Exception | None = None
    _retry_at: float = 0.0
    _left: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def usable(self) -> bool:
        """Whether a call may take it now."""
        return self.llm is not None and not self._leaving and self.llm.is_ready

    @property
    def is_loading(self) -> bool:
        """Whether it is being loaded, or waits for its turn."""
        return self._task is not None and not self._task.done()

    async def left(self) -> None:
        """Until a call has stopped to use it or to wait for it."""
        self._left.clear()
        await self._left.wait()

    async def stats(self) -> Any:
        """Of all its engines together; None: it was never loaded."""
        if self.llm is None:
            return self.past
        now = await self.llm.stats()
        return now if self.past is None else _sum(self.past, now)

    def refusal(self) -> Refusal:
        """Why it could not be loaded; what is not trivium's own error is for the log alone."""
        fault = self._fault
        why = str(fault) if isinstance(fault, errors.TriviumError) else f"{type(fault).__name__}; the log says more"
        return unavailable(f"{self.name} could not be loaded: {why}", self._retry_at - time.monotonic(), "model_unavailable")


def _sum(past: Any, now: Any) -> Any:
    totals = {f.name: getattr(past, f.name) for f in fields(now) if f.name not in _NOW}
    return replace(now, **{n: v + getattr(now, n) for n, v in totals.items() if isinstance(v, int | float)})


@dataclass(frozen=True)
class Served:
    """A loaded model as one call has it. name: by which the client knows it. version: the model's own. facts: of the
    model. charge: is told the tokens that the call has cost. max_pixels: of all images of a prompt."""

    name: str
    version: str
    llm: AsyncLLM
    facts: Facts
    charge: Callable[[int], None]
    max_pixels: int = MAX_PIXELS

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output together."""
        return self.facts.max_model_len

    def check_embeds(self) -> None:
        """Raises UnsupportedError for a cross-encoder."""
        if not self.facts.embeds:
            message = "this model scores pairs of texts and has no embeddings; use /v1/rerank or /v1/score"
            raise errors.UnsupportedError(message, param="model")

    def check_length(self, prompt: Any) -> None:
        """Raises ContextLengthError for a text, ids or messages that are longer than any that fit, even if they were cut."""
        outer = len(prompt) if isinstance(prompt, list) else 0
        most = self.facts.max_characters
        if outer > most or (outer := characters(prompt)) > most:
            can = f"{self.max_model_len} tokens are possible, and no more than {most} characters"
            raise errors.ContextLengthError(f"the prompt has {outer} tokens, messages or characters; {can}", param="prompt")


def _free(tokens: int) -> None:
    """The price where nobody pays."""


class Models:
    """By name; the first is the one for clients that name none. Names from clients are looked up here and nowhere else.

    A model is loaded in a thread, one at a time, at the start or when a call wants it; the calls wait meanwhile. Nobody unloads a
    model that a call has: where another needs its place, calls that come later wait until it is back.
    """

    def __init__(
        self, slots: Iterable[Slot], aliases: Iterable[tuple[str, str]] = (), splits: Iterable[Split] = (), *,
        idle_seconds: float | None = None, max_loaded: int | None = None, max_waiting: int | None = None, retry: float = 5.0,
    ) -> None:  # fmt: skip
        """aliases: (other name, name). idle_seconds: after which a model is unloaded; None: never. max_loaded: models at a time;
        the one that was used least recently goes. max_waiting: calls that may wait for one to be loaded. retry: seconds until a
        load that failed is tried again. Raises what split() raises."""
        self._slots = {slot.name: slot for slot in slots}
        self._aliases = dict(aliases)
        self._idle, self._cap, self._waiting, self._retry = idle_seconds, max_loaded, max_waiting, retry
        self.splits: dict[str, Split] = {}
        for split in splits:
            self.split(split)
        self._points = (n * _GOLDEN % 1 for n in itertools.count(1))
        self._turn = asyncio.Lock()
        self._retiring: set[asyncio.Task[None]] = set()
        self._started = False

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots.values())

    @property
    def names(self) -> dict[str, Slot]:
        """Every name that a client may use, and the model behind it."""
        return {name: self.find(name) for name in (*self._slots, *self._aliases, *self.splits)}

    def find(self, name: str | None) -> Slot:
        """The model of that name; of a split, that with the largest share. Raises ModelNotFoundError."""
        if name is None:
            return next(iter(self))
        split = self.splits.get(name)
        found = self._slots.get(self._aliases.get(name, name) if split is None else split.main)
        if found is None:
            known = ", ".join(self.names)
            raise errors.ModelNotFoundError(f"there is no model {name!r:.80} here; there are {known}", param="model")
        return found

    def choose(self, name: str | None, session: str) -> tuple[str, Slot]:
        """What a call gets: (the name that its answer has, the model). Of a split, a session has always the same version while the
        shares are the same; calls without one take turns, so that any number of them is divided as the weights say."""
        split = None if name is None else self.splits.get(name)
        if split is None:
            slot = self.find(name)
            return slot.name, slot
        return split.name, self._slots[split.version(split.point(session) if session else next(self._points))]

    def split(self, split: Split) -> None:
        """Adds a split, or changes that of its name. Raises InvalidRequestError or ModelNotFoundError."""
        if split.name in self._slots or split.name in self._aliases:
            raise errors.InvalidRequestError(f"{split.name} is the name of a model; a split needs its own", param="name")
        if unknown := split.weights.keys() - self._slots.keys():
            message = f"there is no model {min(unknown)!r:.80} to split {split.name} to; there are {', '.join(self._slots)}"
            raise errors.ModelNotFoundError(message, param="weights")
        self.splits[split.name] = split

    def unsplit(self, name: str) -> None:
        """Removes a split. Raises ModelNotFoundError."""
        if self.splits.pop(name, None) is None:
            raise errors.ModelNotFoundError(f"there is no split {name!r:.80}", param="name")

    @property
    def ready(self) -> bool:
        """Whether those that are loaded at the start have been, and no engine has stopped."""
        return self._started and all(slot.llm is None or slot.llm.is_ready for slot in self)

    async def start(self) -> None:
        """Loads the models, up to max_loaded of them. Raises what the first that can't be loaded raises."""
        for slot in list(self)[: self._cap]:
            try:
                await self._ready(slot, None)
            except Refusal:
                assert slot._fault is not None
                raise slot._fault from None
        self._started = True

    @contextlib.asynccontextmanager
    async def use(
        self, name: str | None, *, session: str = "", seconds: float | None = None, keep: float | None = None,
        charge: Callable[[int], None] = _free,
    ) -> AsyncIterator[Served]:  # fmt: skip
        """The model, loaded, for as long as the context lasts. session: see choose(). seconds: in which it must be there. keep: for
        which it then stays loaded without calls, math.inf for ever; None: as before. Raises ModelNotFoundError, DeadlineError,
        OverloadedError, or Refusal where it could not be loaded."""
        shown, slot = self.choose(name, session)
        await self._ready(slot, seconds)
        assert slot.llm is not None and slot.facts is not None
        if slot._timer is not None:
            slot._timer.cancel()
        slot.users += 1
        slot.used = time.monotonic()
        slot.keep = slot.keep if keep is None else keep
        try:
            yield Served(shown, slot.name, slot.llm, slot.facts, charge)
        finally:
            slot.users -= 1
            slot.used = time.monotonic()
            if not slot.users:
                slot._left.set()
                self._rest(slot)

    def expires(self, slot: Slot) -> float:
        """Seconds from now until it is unloaded if no call comes; math.inf: it stays."""
        keep = self._keep(slot)
        return keep if slot.users else keep + slot.used - time.monotonic()

    async def unload(self, slot: Slot) -> None:
        """Gives its memory back, once the calls that have it are done; the next call loads it again."""
        async with self._turn:
            await self._unload(slot)

    def close(self) -> None:
        """Gives their memory back, at the end."""
        for slot in self:
            if slot.llm is not None:
                slot.llm.close()

    def _keep(self, slot: Slot) -> float:
        keep = self._idle if slot.keep is None else slot.keep
        return math.inf if keep is None else keep

    async def _ready(self, slot: Slot, seconds: float | None) -> None:
        if slot.usable:
            return
        if self._waiting is not None and slot.waiting >= self._waiting:
            message = f"{slot.waiting} calls wait for {slot.name} to be loaded, and no more may"
            raise errors.OverloadedError(message, retry_after=self._retry)
        if not slot.is_loading and time.monotonic() < slot._retry_at:
            raise slot.refusal()
        slot.waiting += 1
        try:
            async with asyncio.timeout(seconds):
                while not slot.usable:
                    await asyncio.shield(self._loading(slot))
                    if slot._fault is not None:
                        raise slot.refusal()
        except TimeoutError:
            raise errors.DeadlineError(f"the request's timeout was over before {slot.name} was loaded") from None
        finally:
            slot.waiting -= 1
            slot._left.set()
            if slot._task is not None and not slot.waiting and not slot._begun:
                slot._task.cancel()
                slot._task = None

    def _loading(self, slot: Slot) -> asyncio.Task[None]:
        if slot._task is None or slot._task.done():
            slot._task = asyncio.ensure_future(self._load(slot))
        return slot._task

    async def _load(self, slot: Slot) -> None:
        async with self._turn:
            if slot.usable:
                return
            try:
                await self._make_room(slot)
                slot._begun = True
                slot.llm, slot.facts = await asyncio.to_thread(_loaded, slot)
                slot._fault, slot.used, slot.loads = None, time.monotonic(), slot.loads + 1
                if not slot.waiting:
                    self._rest(slot)
            except Exception as fault:
                if self._started:  # before, start() raises it
                    _log.error("%s could not be loaded: %s", slot.name, fault, exc_info=fault)
                slot._fault, slot._retry_at, slot.failed_loads = fault, time.monotonic() + self._retry, slot.failed_loads + 1
            finally:
                slot._begun = False

    async def _make_room(self, slot: Slot) -> None:
        """Unloads what is in the way: its own engine that has stopped, and the models that were used least recently."""
        if slot.llm is not None:
            await self._unload(slot)
        while self._cap is not None and len(loaded := [one for one in self if one.llm is not None]) >= self._cap:
            await self._unload(min(loaded, key=lambda one: (one.users > 0, one.used)))

    async def _unload(self, slot: Slot) -> None:
        """Whoever calls it has the turn. Those for whom it has just been loaded take it first, or they might never get it."""
        if slot.llm is None:
            return
        while slot.waiting and slot.usable:
            await slot.left()
        slot._leaving = True
        try:
            while slot.users:
                await slot.left()
            past = await slot.stats()
            slot.past = replace(past, **dict.fromkeys(_NOW, 0))
            llm, slot.llm, slot.keep = slot.llm, None, None
            await asyncio.to_thread(llm.close)
        finally:
            slot._leaving = False

    def _rest(self, slot: Slot) -> None:
        """Nobody has it now: its time begins."""
        if (keep := self._keep(slot)) < math.inf:
            slot._timer = asyncio.get_running_loop().call_later(keep, self._retire, slot, slot.used)

    def _retire(self, slot: Slot, used: float) -> None:
        task = asyncio.ensure_future(self._retired(slot, used))
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    async def _retired(self, slot: Slot, used: float) -> None:
        """used: when it was used last; if that is another time by now, it is not idle."""
        async with self._turn:
            if slot.used == used:
                try:
                    await self._unload(slot)
                except Exception as fault:
                    _log.error("%s was not unloaded in good order", slot.name, exc_info=fault)


def _loaded(slot: Slot) -> tuple[AsyncLLM, Facts]:
    llm = slot.load()
    try:
        return llm, Facts.of(llm)
    except BaseException:
        llm.close()
        raise
