"""A request under way as a value: taken out of one engine, carried as bytes, and continued by another, whatever backend, page size
or KV dtype that one has.

What is carried is what can't be made again: tokens, parameters, seed, logprobs, times, and, if wanted, the cache of all computed
tokens in the neutral page format. Texts, penalties, stops and grammars follow from the tokens and are rebuilt by replaying them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from trivium.engine.executor import Model
from trivium.engine.outputs import Clock, Logprob, TokenLogprobs
from trivium.engine.request import Completion, Request
from trivium.errors import PageFormatError, UnsupportedError
from trivium.kv import KVCache, Layout, Parcel, root_key
from trivium.kv.neutral import Arrays, pack, unpack
from trivium.ops import Span
from trivium.plugin.contract import Session
from trivium.sampling import SamplingParams, check_ids, fresh_seed
from trivium.sched import Sequence as Stream
from trivium.text import Tokenizer
from trivium.text.reader import Reader

_TIMES = ("arrival", "deadline", "first_scheduled", "prefill_done", "first_token", "last_token", "left")


@dataclass(frozen=True)
class RequestState:
    """header: JSON data. arrays: logprobs and pages. Whether they make sense is checked by Engine.import_request()."""

    header: Mapping[str, Any]
    arrays: Arrays

    def to_bytes(self) -> bytes:
        """A record of the neutral format, see kv.neutral."""
        return pack(self.header, self.arrays)

    @staticmethod
    def from_bytes(data: bytes) -> RequestState:
        """Raises PageFormatError if the record is damaged."""
        return RequestState(*unpack(data))


def export_state(request: Request, layout: Layout, kv: KVCache, session: Session | None, now: float) -> RequestState:
    """What import_state() needs; without a session no pages. UnsupportedError for what does not move."""
    if request.beams is not None or request.pool is not None:
        raise UnsupportedError(f"request {request.id} can't be moved: beam searches and embeddings stay until they end")
    arrays: dict[str, tuple[str, Any]] = {}
    _put_logprobs(arrays, "prompt", request.prompt_logprobs)
    for c in request.completions:
        arrays[f"{c.index}.tokens"] = "int32", np.array(c.token_ids, np.int32)
        _put_logprobs(arrays, f"{c.index}", c.logprobs or [])
    tiles = {span.tile.digest: span.tile for span in request.media}
    arrays.update({f"tile.{i}": ("uint8", tile.data) for i, tile in enumerate(tiles.values())})
    clock, own = asdict(request.clock), request.completions[0].seq
    header = {
        "params": asdict(request.params), "max_tokens": request.max_tokens, "seed": request.seed, "priority": own.order[0],
        "salt": request.salt, "adapter": request.adapter, "adapter_fingerprint": getattr(own.adapter, "fingerprint", None),
        "stream": request.stream, "client_id": request.client_id, "started": request.started,
        "reader": request.reader and request.reader.to_json(), "prompt": request.prompt_ids,
        "clock": {k: v if k not in _TIMES or v is None else v - now for k, v in clock.items()},
        "last_tokens": [None if c.last_token is None else c.last_token - now for c in request.completions],
        "groups": [layout.describe(g) for g in range(len(layout.spec.groups))],
        "media": [(span.start, span.stop, span.row, list(tiles).index(span.tile.digest)) for span in request.media],
        "pages": [None if session is None else _put_pages(arrays, c, kv, session) for c in request.completions],
    }  # fmt: skip
    return RequestState(header, arrays)


def _put_logprobs(arrays: dict[str, tuple[str, Any]], name: str, rows: Sequence[TokenLogprobs | None]) -> None:
    """Row after row: how many entries it has, then their ids, ranks and values."""
    entries = [(token, entry) for row in rows for token, entry in (row or {}).items()]
    arrays[f"{name}.counts"] = "int32", np.array([len(row or {}) for row in rows], np.int32)
    arrays[f"{name}.ids"] = "int32", np.array([token for token, _ in entries], np.int32)
    arrays[f"{name}.ranks"] = "int32", np.array([entry.rank for _, entry in entries], np.int32)
    arrays[f"{name}.values"] = "float32", np.array([entry.logprob for _, entry in entries], np.float32)


def _put_pages(arrays: dict[str, tuple[str, Any]], completion: Completion, kv: KVCache, session: Session) -> dict[str, Any] | None:
    parcel = kv.pack(session, completion.seq)
    if parcel is None or completion.finish_reason is not None:
        return None
    for g, (_, parts) in enumerate(parcel.parts):
        arrays.update({f"{completion.index}.pages.{g}.{i}": part for i, part in enumerate(parts)})
    return {"computed": parcel.computed, "first": [first for first, _ in parcel.parts]}


def import_state(state: RequestState, build: Callable[..., Request], model: Model, tokenizer: Tokenizer, now: float) -> Request:
    """The request, ready to be scheduled. `build` makes and checks a new one (Intake.request). Raises
    PageFormatError for what makes no sense or belongs to another model, what `build` raises, and anything that a stranger's data
    trips over."""
    layout, vocab = model.layout, model.vocab_size
    said, arrays = state.header, state.arrays
    _expect(len(said["groups"]) == len(layout.spec.groups), "the model has other groups of layers")
    for g, group in enumerate(said["groups"]):
        mine = layout.meaning(g)
        _expect(mine == {name: group.get(name) for name in mine}, f"group {g} means something else here: another model?")
    params = dict(said["params"])
    if params.get("logit_bias") is not None:
        params["logit_bias"] = {int(token): bias for token, bias in params["logit_bias"].items()}
    rows = list(_logprobs(arrays, "prompt", vocab, tokenizer))
    request = build(
        said["prompt"], SamplingParams(**{**params, "max_tokens": said["max_tokens"]}), said["client_id"], said["priority"],
        said["salt"], None, rows.count(None), said["adapter"], said["seed"], _media(said.get("media", ()), arrays, model),
    )  # fmt: skip
    if said["reader"] is not None:
        request.read_with(Reader.from_json(said["reader"], tokenizer))
    first, count = request.completions[0].seq, len(request.completions)
    request.prompt_logprobs[:] = rows
    first.scored = len(rows) - 1
    same = said["adapter_fingerprint"] == getattr(first.adapter, "fingerprint", None)
    _expect(same, f"the adapter {said['adapter']!r} has other numbers here")
    _expect(first.scored <= first.score_end and said["started"] in (1, count), "it is not as far as it says")
    request.started, request.stream = said["started"], said["stream"] is True
    first.fork_at = first.fork_at if request.started < count else 0
    for completion, last, pages in zip(request.completions, said["last_tokens"], said["pages"], strict=True):
        _replay(request, completion, arrays, vocab, tokenizer)
        completion.last_token = None if last is None else _number(last) + now
        if pages is not None and completion.finish_reason is None:
            completion.seq.root = root_key(layout.fingerprint, "", request.salt, str(fresh_seed()))  # nobody else is to find them
            completion.seq.parcel = _parcel(completion.seq, pages, arrays, completion.index, layout)
    request.clock = Clock(**{name: _clock(name, said["clock"][name], now) for name in vars(request.clock)})
    _expect(not request.finished, "nothing of it is left to do")
    return request


def _media(said: Any, arrays: Arrays, model: Model) -> list[Span]:
    if not said or model.images is None:
        _expect(not said, "it has images, and the model takes text only")
        return []
    read, each = model.images.vision.tile, model.images.vision.tokens
    tiles = [read(arrays[f"tile.{i}"][1]) for i in range(1 + max(number for *_, number in said))]
    good = all(type(n) is int and n >= 0 for one in said for n in one) and all(row + b - a <= each for a, b, row, _ in said)
    _expect(good, "its images don't fit their places")
    return [Span(start, stop, tiles[number], row) for start, stop, row, number in said]


def _replay(request: Request, completion: Completion, arrays: Arrays, vocab: int, tokenizer: Tokenizer) -> None:
    tokens = arrays[f"{completion.index}.tokens"][1].tolist()
    rows = list(_logprobs(arrays, str(completion.index), vocab, tokenizer)) or [None] * len(tokens)
    check_ids("the output so far", tokens, vocab)
    for token, row in zip(tokens, rows, strict=True):
        _expect(completion.finish_reason is None and (row is not None) == (completion.logprobs is not None), "it has ended before")
        completion.grow([token], [])
        completion.accept(token, row, 0.0)
    if request.stream:
        completion.output()  # the client has all of this


def _logprobs(arrays: Arrays, name: str, vocab: int, tokenizer: Tokenizer) -> Iterator[TokenLogprobs | None]:
    counts, ids, ranks, values = (arrays[f"{name}.{part}"][1].tolist() for part in ("counts", "ids", "ranks", "values"))
    check_ids("logprobs", ids, vocab)
    entries = zip(ids, map(Logprob, values, ranks, map(tokenizer.token_text, ids), map(tokenizer.token_bytes, ids)), strict=True)
    _expect(min(counts, default=0) >= 0 and sum(counts) == len(ids), "its logprobs don't add up")
    for count in counts:
        yield dict(next(entries) for _ in range(count)) if count else None


def _parcel(seq: Stream, said: Any, arrays: Arrays, index: int, layout: Layout) -> Parcel:
    computed, parts = said["computed"], []
    _expect(type(computed) is int and 0 < computed < seq.length, "its pages cover more than its tokens")
    for g, first in enumerate(said["first"]):
        spec = layout.spec.groups[g].spec
        latest = 0 if spec.window is None else max(computed - spec.window + 1, 0)
        _expect(type(first) is int and 0 <= first <= latest, f"group {g} lacks tokens that will be read")
        found = []
        for i, shape in enumerate(layout.shapes(g, computed - first).values()):
            dtype, array = arrays[f"{index}.pages.{g}.{i}"]
            _expect(array.shape == shape and dtype not in ("int32", "uint8"), f"a page of group {g} has another shape or type")
            found.append((dtype, array))
        parts.append((first, tuple(found)))
    _expect(len(parts) == len(layout.spec.groups), "pages of some groups are missing")
    return Parcel(computed, tuple(parts))


def _clock(name: str, value: Any, now: float) -> Any:
    if name in _TIMES:
        return None if value is None and name != "arrival" else _number(value) + now
    if name == "restored_tokens":
        return int(value[0]), int(value[1])
    if name == "gaps":
        return [_number(gap) for gap in value]
    return {} if name == "_waiting_since" else type(getattr(Clock(0.0), name))(_number(value))


def _number(value: Any) -> float:
    _expect(isinstance(value, int | float) and math.isfinite(value), f"{value!r} is no time")
    return float(value)


def _expect(good: bool, message: str) -> None:
    if not good:
        raise PageFormatError(f"the state of the request can't be continued here: {message}")
