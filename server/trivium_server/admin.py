"""What the operator may change while the server runs: the shares of versions, and which models are loaded."""

from __future__ import annotations

import asyncio

from msgspec import Struct

from trivium_server.http import Call, Route
from trivium_server.splits import Split


class SplitBody(Struct, kw_only=True):
    """weights: percent of the calls by model, 100 together."""

    name: str
    weights: dict[str, float]


class SplitList(Struct, kw_only=True):
    data: list[SplitBody]


class ModelName(Struct, kw_only=True):
    model: str


class Loaded(Struct, kw_only=True):
    """loaded: names of all models that are."""

    loaded: list[str]


async def splits(call: Call, body: None) -> SplitList:
    return SplitList(data=[SplitBody(name=s.name, weights=dict(s.weights)) for s in call.app.models.splits.values()])


async def set_split(call: Call, body: SplitBody) -> SplitList:
    """Calls under way end on their version."""
    call.app.models.split(Split(body.name, body.weights))
    return await splits(call, None)


async def drop_split(call: Call, body: None) -> SplitList:
    call.app.models.unsplit(call.rest)
    return await splits(call, None)


async def load(call: Call, body: ModelName) -> Loaded:
    await call.use(call.app.models.find(body.model).name)
    return _loaded(call)


async def unload(call: Call, body: ModelName) -> Loaded:
    """Waits for the calls that have it."""
    async with asyncio.timeout(call.left(None)):
        await call.app.models.unload(call.app.models.find(body.model))
    return _loaded(call)


def _loaded(call: Call) -> Loaded:
    return Loaded(loaded=[slot.name for slot in call.app.models if slot.llm is not None])


ROUTES: tuple[Route, ...] = (
    Route("GET", "/admin/splits", splits, "List the splits", None, SplitList, scope="admin"),
    Route("POST", "/admin/splits", set_split, "Set the shares of a split", SplitBody, SplitList, scope="admin"),
    Route("DELETE", "/admin/splits/{name}", drop_split, "Remove a split", None, SplitList, scope="admin"),
    Route("POST", "/admin/load", load, "Load a model", ModelName, Loaded, scope="admin"),
    Route("POST", "/admin/unload", unload, "Unload a model", ModelName, Loaded, scope="admin"),
)
