"""The OpenAPI document: written from the routes and from the types that validate."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec
import trivium

from trivium_server.http import Route

_REF = "#/components/schemas/{name}"
_ERROR = {"description": "Refused; see error", "content": {"application/json": {"schema": {"type": "object"}}}}


def document(routes: Iterable[Route]) -> dict[str, Any]:
    """OpenAPI 3.1 of the routes."""
    known = list(routes)
    types = list(dict.fromkeys(t for route in known for t in (route.body, route.reply) if isinstance(t, type) and t is not dict))
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    refs = dict(zip(types, schemas, strict=True))
    paths: dict[str, Any] = {}
    for route in known:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, refs, components)
    schemes = {"bearer": {"type": "http", "scheme": "bearer"}, "key": {"type": "apiKey", "in": "header", "name": "x-api-key"}}
    return {
        "openapi": "3.1.0", "info": {"title": "trivium", "version": trivium.__version__}, "paths": paths,
        "components": {"schemas": components, "securitySchemes": schemes}, "security": [{"bearer": []}, {"key": []}],
    }  # fmt: skip


def _operation(route: Route, refs: dict[Any, Any], components: dict[str, Any]) -> dict[str, Any]:
    content = {route.reply: {}} if isinstance(route.reply, str) else {"application/json": {"schema": refs.get(route.reply, {})}}
    done: dict[str, Any] = {"description": "Done", "content": content}
    operation: dict[str, Any] = {
        "summary": route.summary, "operationId": f"{route.method.lower()}{re.sub(r'[^a-zA-Z0-9]+', '_', route.path)}",
        "responses": {str(route.status): done, "4XX": _ERROR, "5XX": _ERROR},
    }  # fmt: skip
    if route.body is not None and "stream" in {field.name for field in msgspec.structs.fields(route.body)}:
        done["content"]["application/x-ndjson" if route.path.startswith("/api/") else "text/event-stream"] = {}
    parameters: list[dict[str, Any]] = []
    if "{" in route.path:
        name = route.path.partition("{")[2].partition("}")[0]
        parameters.append({"name": name, "in": "path", "required": True, "schema": {"type": "string"}})
    if route.body is not None and route.method == "GET":
        asked = components[route.body.__name__]["properties"]
        parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in asked.items()]
    elif route.body is not None:
        media = "multipart/form-data" if route.upload else "application/json"
        operation["requestBody"] = {"required": True, "content": {media: {"schema": refs[route.body]}}}
    if parameters:
        operation["parameters"] = parameters
    if route.public:
        operation["security"] = []
    return operation
