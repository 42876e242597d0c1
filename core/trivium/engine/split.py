"""Prompts on one backend, what follows them on another: two engines, each with the model's weights in its own resident format.

The engine that is asked is the one that decodes. The front, an engine too, computes prompts on a thread of its own, meanwhile. Once
every output of a request has its first token, the request itself changes engines: what the front has computed is exported in the
neutral page format, and imported by the step in which the request goes on. Each request belongs to one engine, and so to one
thread, at a time. Prefixes are cached (and kept in tiers) at the front; a sequence that is preempted later is computed again where
it is. Embeddings end at the front; so do requests that the other side has no room for.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, cast

from trivium.engine.config import EngineConfig
from trivium.engine.engine import Engine
from trivium.engine.loader import Loaded
from trivium.engine.migration import RequestState
from trivium.engine.outputs import RequestOutput
from trivium.engine.request import Request
from trivium.engine.runner import Stats
from trivium.errors import TriviumError, UnsupportedError

_NAME = "trivium-prefill"


class SplitEngine(Engine):
    """As Engine, for `model`, whose prompts `prefill`, the same model on another backend, computes. UnsupportedError if their pages
    mean something else."""

    def __init__(self, model: Loaded, prefill: Loaded, config: EngineConfig, **options: Any) -> None:
        meanings = [[m.layout.meaning(g) for g in range(len(m.kv_spec.groups))] for m in (model, prefill)]
        if meanings[0] != meanings[1] or model.vocab_size != prefill.vocab_size:
            raise UnsupportedError(f"{prefill.backend.name} and {model.backend.name} hold {model.name} in pages of other meaning")
        super().__init__(model, model.tokenizer, replace(config, kv_host_bytes=0, kv_disk_path=None), **options)
        seqs, tokens = prefill.max_num_seqs, prefill.max_num_batched_tokens
        own = replace(config, max_num_seqs=seqs, max_num_batched_tokens=tokens, speculative=None)
        # No step may be under way while pages are exported.
        waits = replace(prefill, capabilities=replace(prefill.capabilities, asynchronous=False))
        self.front = Engine(waits, model.tokenizer, own, clock=self._clock)
        self._ahead: dict[int, Request] = {}
        """Requests at the front, as far as this side has heard."""
        self._late: list[RequestOutput] = []
        self._news: queue.SimpleQueue[tuple[list[RequestOutput], list[Request]] | BaseException] = queue.SimpleQueue()
        self._thread = ThreadPoolExecutor(1, _NAME)
        self._left = self._come = 0
        """Requests that have left the front, written by its thread, and that have come over, written by this one."""
        self._due = False
        """Whether a step of the front stands in the queue of its thread, which alone asks."""

    def has_unfinished(self) -> bool:
        return bool(self._ahead or self._late) or super().has_unfinished()

    def step(self) -> list[RequestOutput]:
        """Runs one step of what is decoded, or waits for one of the front; returns the news of both sides."""
        self._listen(wait=not self._late and not super().has_unfinished() and bool(self._ahead))
        made = super().step() if super().has_unfinished() else []
        outputs, self._late = self._late + made, []
        return outputs

    def abort(self, request_id: int) -> RequestOutput | None:
        """As Engine.abort; with news that have not been handed out yet, even if these say that it has ended."""
        last = self._ask(self.front.abort, request_id) if request_id in self._ahead else None
        self._listen()
        last = last or super().abort(request_id)
        self._ahead.pop(request_id, None)
        news: list[RequestOutput] = [o for o in (*self._late, last) if o is not None and o.request_id == request_id]
        self._late = [output for output in self._late if output.request_id != request_id]
        for later in news[1:]:
            news[0].extend(later)
        return news[0] if news else None

    def export_request(self, request_id: int, **options: Any) -> RequestState:
        """As Engine.export_request, once the front has done its part."""
        while request_id in self._ahead:
            self._listen(wait=True)
        return super().export_request(request_id, **options)

    def fail_all(self, fault: TriviumError) -> list[RequestOutput]:
        last = self._ask(self.front.fail_all, fault)
        self._listen()
        outputs, self._late = [*self._late, *last], []
        self._ahead.clear()
        return outputs + super().fail_all(fault)

    def snapshot(self) -> Stats:
        """Of both sides together; the front may be in the middle of a step."""
        front = self.front.snapshot()
        return Stats(**{name: value + getattr(front, name) for name, value in vars(super().snapshot()).items()})

    def check(self) -> None:
        super().check()
        self._ask(self.front.check)

    def close(self) -> None:
        """As Engine.close; the front's step is waited for, unless this is collected as garbage within that very step."""
        self._thread.shutdown(wait=not threading.current_thread().name.startswith(_NAME), cancel_futures=True)
        self.front.close()
        self.front.model = replace(self.front.model, session=cast(Any, None), executable=cast(Any, None), lora=None, images=None)
        super().close()

    @property
    def _queue(self) -> tuple[int, int]:
        waiting = [len(r.prompt_ids) for r in self._ahead.values() if r.clock.first_scheduled is None]
        return max(len(self._ahead) - max(self.front.scheduler.max_seqs, len(self._ahead) - len(waiting)), 0), sum(waiting)

    def _check(self, request: Request, patient: bool) -> None:
        can = self.front.model.capabilities
        request.params.of_each_beam().check_supported(can.sampling, self.front.model.backend.name, can.unsupported)
        self.front.scheduler.check_fits(len(request.prompt_ids))
        super()._check(request, patient)

    def _take(self, request: Request) -> int:
        if any(c.token_ids or c.seq.parcel for c in request.completions):
            return super()._take(request)
        self._count = request.id
        self._ahead[request.id] = request
        self._thread.submit(self._begin, request)
        return request.id

    def _listen(self, *, wait: bool = False) -> None:
        """News of the front. Requests that it is done with are at this side from now on."""
        with contextlib.suppress(queue.Empty):
            while True:
                news, wait = self._news.get(wait), False
                if isinstance(news, BaseException):
                    raise self._typed(news)
                for number in [request.id for request in news[1]] + [output.request_id for output in news[0] if output.finished]:
                    self._ahead.pop(number, None)
                for request in news[1]:
                    super()._take(request)
                self._come += len(news[1])
                self._late += news[0]

    def _ask(self, what: Callable[..., Any], *args: Any) -> Any:
        """What `what` returns at the front, between two of its steps."""
        return self._thread.submit(what, *args).result()

    def _begin(self, request: Request) -> None:
        self.front._take(request)
        if not self._due:
            self._due = True
            self._thread.submit(self._advance)

    def _advance(self) -> None:
        try:
            self._news.put(self._turn())
        except BaseException as fault:
            self._news.put(fault)
        self._due = self.front.has_unfinished()
        if self._due:
            self._thread.submit(self._advance)

    def _turn(self) -> tuple[list[RequestOutput], list[Request]]:
        """A step of the front, after which those that are done there leave. A fault ends what is there, and nothing else."""
        front, leaving = self.front, list[Request]()
        try:
            outputs = front.step()
        except BaseException as fault:
            outputs = front.fail_all(front._typed(fault))
        for request in list(front._requests.values()):
            try:
                if self._release(request):
                    leaving.append(request)
            except Exception as fault:
                outputs += front._report(front._end(request, "error", fault))
        return outputs, leaving

    def _release(self, request: Request) -> bool:
        """Takes a request out of the front, with what has been computed of it, if all its outputs run and have a token. Not while
        many wait at the other side: work goes on here, then."""
        front, began = self.front, self._clock()
        live = [c for c in request.completions if c.seq in front._completions]
        begun = all(c.seq.pending == 1 and c.seq.length > len(request.prompt_ids) for c in live)
        waiting = len(self.scheduler.waiting) + self._left - self._come
        if not begun or request.pool is not None or waiting >= self.scheduler.max_seqs:
            return False
        for completion, parcel in zip(live, [front.kv.pack(front.model.session, c.seq) for c in live]):
            front._retire(completion)
            completion.seq.parcel, completion.seq.keys = parcel, []
        del front._requests[request.id]
        request.clock.left = began
        self._left += 1
        return True
