"""OpenAI: /v1/batches."""

from __future__ import annotations

import re
import time
from typing import Annotated

from msgspec import Meta, Struct

from trivium_server.batch_store import KEPT, Batch
from trivium_server.batches import ENDPOINTS, enabled, owner_of
from trivium_server.faults import bad
from trivium_server.http import Call, Route
from trivium_server.openai_files import Kept
from trivium_server.openai_types import new_id

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_LONGEST = 30 * 86400


class OutputExpiry(Struct, kw_only=True):
    anchor: Annotated[str, Meta(pattern="^created_at$")]
    seconds: Kept


class BatchRequest(Struct, kw_only=True):
    """completion_window: "24h", or a number of s, m, h or d up to 30 days; what is not answered by then has an error instead."""

    input_file_id: str
    endpoint: Annotated[str, Meta(extra_json_schema={"enum": [*ENDPOINTS]})]
    completion_window: Annotated[str, Meta(pattern="^[1-9][0-9]{0,6}[smhd]$")]
    metadata: dict[str, Annotated[str, Meta(max_length=512)]] | None = None
    output_expires_after: OutputExpiry | None = None


class BatchQuery(Struct, kw_only=True):
    """after: the id behind which the page begins."""

    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    after: str | None = None


class BatchList(Struct, kw_only=True):
    data: list[Batch]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: str = "list"


async def create(call: Call, body: BatchRequest) -> Batch:
    batches, owner = enabled(call), owner_of(call)
    if body.endpoint not in ENDPOINTS:
        raise bad(f"endpoint must be one of {', '.join(ENDPOINTS)}", "endpoint")
    if len(body.metadata or ()) > 16 or any(len(name) > 64 for name in body.metadata or ()):
        raise bad("metadata can have 16 names of up to 64 characters", "metadata")
    now, window = int(time.time()), _window(body.completion_window)
    batch = Batch(
        id=new_id("batch_"), endpoint=body.endpoint, input_file_id=body.input_file_id, completion_window=body.completion_window,
        created_at=now, expires_at=now + window, metadata=body.metadata,
    )  # fmt: skip
    kept = KEPT if body.output_expires_after is None else body.output_expires_after.seconds
    await batches.do(batches.store.add_batch, owner, batch, kept, call.app.settings.batch_max_open)
    batches.begin(owner, batch.id)
    return batch


def _window(text: str) -> int:
    """Seconds."""
    [[number, unit]] = re.findall(r"^(\d+)(.)$", text)
    seconds = int(number) * _SECONDS[unit]
    if seconds > _LONGEST:
        raise bad("completion_window can be up to 30d", "completion_window")
    return seconds


async def batches(call: Call, query: BatchQuery) -> BatchList:
    known = enabled(call)
    found = await known.do(known.store.batches, owner_of(call), query.after, query.limit + 1)
    page = found[: query.limit]
    first, last = (page[0].id, page[-1].id) if page else (None, None)
    return BatchList(data=page, has_more=len(found) > len(page), first_id=first, last_id=last)


async def batch(call: Call, body: None) -> Batch:
    known = enabled(call)
    return await known.do(known.store.batch, owner_of(call), call.rest)


async def cancel(call: Call, body: None) -> Batch:
    return await enabled(call).cancel(owner_of(call), call.rest)


ROUTES: tuple[Route, ...] = (
    Route("POST", "/v1/batches", create, "Begin a batch", BatchRequest, Batch),
    Route("GET", "/v1/batches", batches, "List the batches", BatchQuery, BatchList),
    Route("GET", "/v1/batches/{batch_id}", batch, "Describe a batch", None, Batch),
    Route("POST", "/v1/batches/{batch_id}/cancel", cancel, "Cancel a batch", None, Batch),
)
