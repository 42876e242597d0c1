"""OpenAI: /v1/files, for the input and output of batches."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator
from typing import Annotated, Any

from msgspec import Meta, Struct, field
from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from trivium_server.batch_store import KEPT, FileObject
from trivium_server.batches import Batches, enabled, owner_of
from trivium_server.faults import Refusal, bad
from trivium_server.http import Call, Download, Route
from trivium_server.openai_types import new_id

_LONGEST_FIELD, _MOST_PARTS, _LONGEST_NAME = 1000, 16, 255
Kept = Annotated[int, Meta(ge=3600, le=KEPT)]


class Upload(Struct, kw_only=True):
    """A multipart form. purpose: batch; file: lines of JSON. It is removed after 30 days, or `seconds` after its creation."""

    file: Annotated[str, Meta(extra_json_schema={"format": "binary"})]
    purpose: Annotated[str, Meta(extra_json_schema={"const": "batch"})]
    anchor: Annotated[str, Meta(extra_json_schema={"const": "created_at"})] = field(
        default="created_at", name="expires_after[anchor]"
    )
    seconds: Kept = field(default=KEPT, name="expires_after[seconds]")


class FileQuery(Struct, kw_only=True):
    """after: the id behind which the page begins."""

    limit: Annotated[int, Meta(ge=1, le=10_000)] = 10_000
    after: str | None = None
    purpose: str | None = None
    order: Annotated[str, Meta(pattern="^(asc|desc)$")] = "desc"


class FileList(Struct, kw_only=True):
    data: list[FileObject]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: str = "list"


class Deleted(Struct, kw_only=True):
    id: str
    object: str = "file"
    deleted: bool = True


class _Form:
    """Takes a multipart body piece by piece: the file goes to disk, the fields stay here."""

    def __init__(self, content_type: bytes, target: Any) -> None:
        kind, options = parse_options_header(content_type.decode("latin-1"))
        if kind != b"multipart/form-data" or not options.get(b"boundary"):
            raise bad("the body must be multipart/form-data, with a file and its purpose")
        self.fields: dict[str, str] = {}
        self.name: str | None = None
        """What the client calls the file; None as long as there was none."""
        self.ended = False
        self._target, self._parts = target, 0
        self._header, self._value, self._disposition = b"", b"", b""
        self._field: str | None = None
        self._parser = MultipartParser(options[b"boundary"], {
            "on_part_begin": self._begin, "on_header_field": self._more_header, "on_header_value": self._more_value,
            "on_header_end": self._end_header, "on_headers_finished": self._open, "on_part_data": self._data, "on_end": self._end,
        })  # fmt: skip

    def feed(self, piece: bytes) -> None:
        """Raises Refusal."""
        try:
            self._parser.write(piece)
        except FormParserError as error:
            raise bad(f"the body is not valid multipart/form-data: {error}") from None

    def finish(self) -> None:
        """All has arrived, and is on disk. Raises Refusal if that was not all."""
        self._target.flush()
        os.fsync(self._target.fileno())
        if not self.ended:
            raise bad("the body breaks off before its last boundary")
        if self.name is None:
            raise bad("there is no part called file", "file")

    def _begin(self) -> None:
        self._parts += 1
        if self._parts > _MOST_PARTS:
            raise bad(f"the body has more than {_MOST_PARTS} parts")
        self._disposition = b""

    def _more_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _more_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._value
        self._header, self._value = b"", b""

    def _open(self) -> None:
        _, options = parse_options_header(self._disposition.decode("latin-1"))
        name = options.get(b"name", b"").decode("utf-8", "replace")
        self._field = None if name == "file" else name
        if self._field is not None:
            self.fields[name] = ""
        elif self.name is not None:
            raise bad("there are two parts called file", "file")
        else:
            self.name = options.get(b"filename", b"file").decode("utf-8", "replace")[:_LONGEST_NAME]

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._field is None:
            self._target.write(data[start:end])
        elif len(self.fields[self._field]) + end - start > _LONGEST_FIELD:
            raise bad(f"{self._field:.80} is longer than {_LONGEST_FIELD} bytes", self._field[:80])
        else:
            self.fields[self._field] += data[start:end].decode("utf-8", "replace")

    def _end(self) -> None:
        self.ended = True


async def upload(call: Call, pieces: AsyncGenerator[bytes, None]) -> FileObject:
    batches, owner = enabled(call), owner_of(call)
    most = call.app.settings.batch_storage
    if await batches.do(batches.store.used, owner) >= most:
        raise Refusal(413, "storage_full", f"the files of this key fill the {most} bytes that they may have; delete some")
    id, now = new_id("file-"), int(time.time())
    path = batches.store.path(id)
    try:
        with path.open("xb") as target:
            form = _Form(call.headers.get(b"content-type", b""), target)
            async for piece in pieces:
                await asyncio.to_thread(form.feed, piece)
            await asyncio.to_thread(form.finish)
        file = FileObject(
            id=id, bytes=path.stat().st_size, created_at=now, expires_at=now + _kept(form.fields), filename=form.name or "",
            purpose=form.fields.get("purpose", ""),
        )  # fmt: skip
        if file.purpose != "batch":
            raise bad(f"purpose must be batch, not {file.purpose!r:.80}; files serve nothing else here", "purpose")
        await batches.do(batches.store.sweep)
        return await batches.do(batches.store.add_file, owner, file)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _kept(fields: dict[str, str]) -> int:
    """Seconds."""
    anchor, text = fields.get("expires_after[anchor]", "created_at"), fields.get("expires_after[seconds]", str(KEPT))
    if anchor != "created_at" or not text.isdecimal() or not 3600 <= int(text) <= KEPT:
        raise bad(f"expires_after must have the anchor created_at and from 3600 to {KEPT} seconds", "expires_after")
    return int(text)


async def files(call: Call, query: FileQuery) -> FileList:
    batches = enabled(call)
    asked = (owner_of(call), query.purpose, query.after, query.limit + 1, query.order == "asc")
    found = await batches.do(batches.store.files, *asked)
    page = found[: query.limit]
    first, last = (page[0].id, page[-1].id) if page else (None, None)
    return FileList(data=page, has_more=len(found) > len(page), first_id=first, last_id=last)


async def _found(call: Call) -> tuple[Batches, FileObject]:
    batches = enabled(call)
    return batches, await batches.do(batches.store.file, owner_of(call), call.rest)


async def file(call: Call, body: None) -> FileObject:
    return (await _found(call))[1]


async def content(call: Call, body: None) -> Download:
    batches, found = await _found(call)
    return Download(batches.store.path(found.id))


async def delete(call: Call, body: None) -> Deleted:
    batches = enabled(call)
    await batches.do(batches.store.delete_file, owner_of(call), call.rest)
    return Deleted(id=call.rest)


ROUTES: tuple[Route, ...] = (
    Route("POST", "/v1/files", upload, "Upload the input of a batch", Upload, FileObject, upload=True),
    Route("GET", "/v1/files", files, "List the files", FileQuery, FileList),
    Route("GET", "/v1/files/{file_id}", file, "Describe a file", None, FileObject),
    Route("GET", "/v1/files/{file_id}/content", content, "Bytes of a file", None, "application/octet-stream"),
    Route("DELETE", "/v1/files/{file_id}", delete, "Delete a file", None, Deleted),
)
