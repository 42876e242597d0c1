"""Files and batches at rest: what is known of them in SQLite, bytes of files in a folder beside it.

Ids are made here. A client's id is only ever compared with those in the tables, and always together with its owner; the name that a
client gave a file is data like any other. Every method is synchronous and must run on one thread at a time.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec import Struct

from trivium_server.faults import Refusal, bad
from trivium_server.openai_types import Object, new_id

T = TypeVar("T")
KEPT = 30 * 86400
"""Seconds that a file is kept if its owner does not say otherwise, as OpenAI keeps those of batches."""
_OPEN = ("validating", "in_progress", "finalizing", "cancelling")
_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, purpose TEXT NOT NULL, bytes INTEGER NOT NULL, expires INTEGER NOT NULL,
    record BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS batches (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, status TEXT NOT NULL, input TEXT NOT NULL, kept INTEGER NOT NULL, record BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS lines (
    batch TEXT NOT NULL, number INTEGER NOT NULL, custom_id TEXT NOT NULL, start INTEGER NOT NULL, size INTEGER NOT NULL,
    ok INTEGER, answer BLOB, PRIMARY KEY (batch, number)
) WITHOUT ROWID;
"""


class FileObject(Struct, kw_only=True):
    """As clients see it."""

    id: str
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    object: str = "file"
    status: str = "processed"


class Counts(Struct):
    """failed: those in the error file, also for want of time."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchFault(Struct):
    """Why a batch failed; line: of the input file, from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchFaults(Struct):
    data: list[BatchFault]
    object: str = "list"


class Batch(Struct, kw_only=True):
    """As clients see it. status: validating, in_progress, finalizing, completed, failed, expired, cancelling or cancelled."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    status: str = "validating"
    object: str = "batch"
    errors: BatchFaults | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: Counts = msgspec.field(default_factory=Counts)
    metadata: Object | None = None

    def enter(self, status: str) -> None:
        """The next status, and since when."""
        self.status = status
        setattr(self, f"{status}_at", int(time.time()))


class Line(NamedTuple):
    """A request of a batch. number: from 1; start, size: where it is in the input file, in bytes."""

    number: int
    custom_id: str
    start: int
    size: int


_UNDONE = {
    "expired": ("batch_expired", "the completion window ended before this request was answered"),
    "cancelled": ("batch_cancelled", "the batch was cancelled before this request was answered"),
}


class Store:
    """One folder, for one process at a time."""

    def __init__(self, folder: Path) -> None:
        """Makes the folder if there is none. OSError or sqlite3.Error say why it can't be used."""
        self._files = folder / "files"
        self._files.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._db = sqlite3.connect(folder / "batches.sqlite3", isolation_level=None, check_same_thread=False, timeout=1.0)
        try:
            for pragma in ("locking_mode = EXCLUSIVE", "journal_mode = WAL", "synchronous = NORMAL"):
                self._db.execute(f"PRAGMA {pragma}")
            self._db.executescript(_SCHEMA)
            with self._transaction():
                known = {name for (name,) in self._db.execute("SELECT id FROM files")}
        except BaseException:
            self._db.close()
            raise
        kept = {path.name for path in self._files.iterdir()}
        for name in kept - known:  # what an upload or an output left behind that came to no end
            self.path(name).unlink()
        self._db.executemany("DELETE FROM files WHERE id = ?", [(id,) for id in known - kept])
        self.sweep()

    def close(self) -> None:
        """Nothing may be called afterwards."""
        self._db.close()

    def path(self, id: str) -> Path:
        """Where the bytes of a file are. id: one of new_id() or of a record, never a client's."""
        return self._files / id

    def sweep(self) -> None:
        """Removes the files whose time is over, apart from those that are being worked on."""
        old = f"SELECT id FROM files WHERE expires <= ? AND id NOT IN (SELECT input FROM batches WHERE status IN {_OPEN})"
        for (id,) in self._db.execute(old, [int(time.time())]).fetchall():
            self._drop(id)

    def used(self, owner: str) -> int:
        """Bytes of all files of an owner."""
        total: int = self._db.execute("SELECT coalesce(sum(bytes), 0) FROM files WHERE owner = ?", [owner]).fetchone()[0]
        return total

    def add_file(self, owner: str, file: FileObject) -> FileObject:
        """Its bytes lie at path(file.id)."""
        row = (file.id, owner, file.purpose, file.bytes, file.expires_at, msgspec.json.encode(file))
        self._db.execute("INSERT INTO files VALUES (?, ?, ?, ?, ?, ?)", row)
        return file

    def file(self, owner: str, id: str) -> FileObject:
        """Raises Refusal 404, also for what is another's."""
        found = "SELECT record FROM files WHERE id = ? AND owner = ? AND expires > ?"
        return self._one(FileObject, found, (id, owner, int(time.time())), f"there is no file {id!r:.80}")

    def files(self, owner: str, purpose: str | None, after: str | None, limit: int, ascending: bool) -> list[FileObject]:
        """Those after `after`, newest first if not ascending."""
        where, values = "AND expires > ?", [owner, int(time.time())]
        if purpose is not None:
            where, values = where + " AND purpose = ?", [*values, purpose]
        return self._page(FileObject, "files", where, values, after, limit, ascending)

    def delete_file(self, owner: str, id: str) -> None:
        """Raises Refusal: 404, or 400 while a batch reads it."""
        self.file(owner, id)
        if self._db.execute(f"SELECT 1 FROM batches WHERE input = ? AND status IN {_OPEN}", [id]).fetchone():
            raise bad(f"the file {id} is the input of a batch under way; cancel that first", code="file_in_use")
        self._drop(id)

    def add_batch(self, owner: str, batch: Batch, kept: int, most: int) -> Batch:
        """kept: seconds that its output is kept. most: batches under way that an owner may have. Raises Refusal."""
        if self.file(owner, batch.input_file_id).purpose != "batch":
            raise bad("the input file must have the purpose batch", "input_file_id")
        under_way = f"SELECT count(*) FROM batches WHERE owner = ? AND status IN {_OPEN}"
        if self._db.execute(under_way, [owner]).fetchone()[0] >= most:
            message = f"{most} batches of this key are under way, which is the limit; wait until one has ended"
            raise Refusal(429, "too_many_batches", message, headers={"retry-after": "60"})
        row = (batch.id, owner, batch.status, batch.input_file_id, kept, msgspec.json.encode(batch))
        self._db.execute("INSERT INTO batches VALUES (?, ?, ?, ?, ?, ?)", row)
        return batch

    def batch(self, owner: str, id: str) -> Batch:
        """Raises Refusal 404, also for what is another's."""
        found = "SELECT record FROM batches WHERE id = ? AND owner = ?"
        return self._one(Batch, found, (id, owner), f"there is no batch {id!r:.80}")

    def batches(self, owner: str, after: str | None, limit: int) -> list[Batch]:
        """Those after `after`, newest first."""
        return self._page(Batch, "batches", "", [owner], after, limit, False)

    def under_way(self) -> list[tuple[str, str]]:
        """(owner, id) of all batches that have not ended, oldest first."""
        return self._db.execute(f"SELECT owner, id FROM batches WHERE status IN {_OPEN} ORDER BY rowid").fetchall()

    def cancel(self, owner: str, id: str) -> Batch:
        """Raises Refusal: 404, or 400 if it has ended."""
        batch = self.batch(owner, id)
        if batch.status not in ("validating", "in_progress", "cancelling"):
            raise bad(f"the batch {id} can't be cancelled any more: it is {batch.status}", code="batch_ended")
        if batch.status != "cancelling":
            batch.enter("cancelling")
            self._save(batch)
        return batch

    def begin(self, owner: str, id: str, lines: Iterable[Line]) -> Batch:
        """The input is valid: its requests wait to be answered, unless the batch was cancelled meanwhile."""
        with self._transaction():
            batch = self.batch(owner, id)
            if batch.status == "validating":
                rows = [(id, line.number, line.custom_id, line.start, line.size) for line in lines]
                self._db.executemany("INSERT INTO lines (batch, number, custom_id, start, size) VALUES (?, ?, ?, ?, ?)", rows)
                batch.enter("in_progress")
                batch.request_counts = Counts(len(rows))
                self._save(batch)
        return batch

    def waiting(self, id: str, after: int, limit: int) -> list[Line]:
        """Requests without an answer, from the one after `after` on."""
        found = (
            "SELECT number, custom_id, start, size FROM lines WHERE batch = ? AND number > ? AND ok IS NULL ORDER BY number LIMIT ?"
        )
        return [Line(*row) for row in self._db.execute(found, [id, after, limit])]

    def answer(self, owner: str, id: str, number: int, ok: bool, answer: bytes) -> None:
        """A request has been answered, once and for all. answer: its line of the output or error file."""
        with self._transaction():
            self._db.execute("UPDATE lines SET ok = ?, answer = ? WHERE batch = ? AND number = ?", [ok, answer, id, number])
            batch = self.batch(owner, id)
            batch.request_counts.completed += ok
            batch.request_counts.failed += not ok
            self._save(batch)

    def fail(self, owner: str, id: str, faults: Sequence[BatchFault]) -> Batch:
        """The batch ends without output."""
        with self._transaction():
            batch = self.batch(owner, id)
            batch.enter("cancelled" if batch.status == "cancelling" else "failed")
            batch.errors = BatchFaults(list(faults))
            self._db.execute("DELETE FROM lines WHERE batch = ?", [id])
            self._save(batch)
        return batch

    def finalize(self, owner: str, id: str) -> None:
        """All has been answered."""
        batch = self.batch(owner, id)
        if batch.status == "in_progress":
            batch.enter("finalizing")
            self._save(batch)

    def finish(self, owner: str, id: str, status: str) -> Batch:
        """Writes the output and error files of what was answered. status: completed, expired or cancelled."""
        batch = self.batch(owner, id)
        status = "cancelled" if batch.status == "cancelling" else status
        kept: int = self._db.execute("SELECT kept FROM batches WHERE id = ?", [id]).fetchone()[0]
        code, message = _UNDONE.get(status, ("", ""))
        done = self._written(f"{id}_output.jsonl", self._answers(id, "ok = 1"), kept)
        undone = self._undone(id, code, message)
        failed = self._written(f"{id}_error.jsonl", (line for part in (self._answers(id, "ok = 0"), undone) for line in part), kept)
        with self._transaction():
            for file in (done, failed):
                if file is not None:
                    self.add_file(owner, file)
            counts = batch.request_counts
            counts.failed = counts.total - counts.completed
            batch.output_file_id, batch.error_file_id = (None if file is None else file.id for file in (done, failed))
            batch.enter(status)
            self._db.execute("DELETE FROM lines WHERE batch = ?", [id])
            self._save(batch)
        return batch

    def _answers(self, id: str, which: str) -> Iterator[bytes]:
        found = f"SELECT answer FROM lines WHERE batch = ? AND {which} ORDER BY number"
        return (row[0] for row in self._db.execute(found, [id]))

    def _undone(self, id: str, code: str, message: str) -> Iterator[bytes]:
        found = "SELECT custom_id FROM lines WHERE batch = ? AND ok IS NULL ORDER BY number"
        for (custom_id,) in self._db.execute(found, [id]):
            error = {"code": code, "message": message}
            yield msgspec.json.encode({"id": new_id("batch_req_"), "custom_id": custom_id, "response": None, "error": error})

    def _written(self, name: str, lines: Iterator[bytes], kept: int) -> FileObject | None:
        """A new file of these lines; None if there are none. It is on disk before anything refers to it."""
        first = next(lines, None)
        if first is None:
            return None
        id, now = new_id("file-"), int(time.time())
        with self.path(id).open("xb") as file:
            file.write(first + b"\n")
            file.writelines(line + b"\n" for line in lines)
            size = file.tell()
            file.flush()
            os.fsync(file.fileno())
        return FileObject(id=id, bytes=size, created_at=now, expires_at=now + kept, filename=name, purpose="batch_output")

    def _save(self, batch: Batch) -> None:
        values = [batch.status, msgspec.json.encode(batch), batch.id]
        self._db.execute("UPDATE batches SET status = ?, record = ? WHERE id = ?", values)

    def _drop(self, id: str) -> None:
        """The record first: a file without one is removed at the next start."""
        self._db.execute("DELETE FROM files WHERE id = ?", [id])
        self.path(id).unlink(missing_ok=True)

    def _one(self, kind: type[T], query: str, values: Sequence[Any], missing: str) -> T:
        row = self._db.execute(query, values).fetchone()
        if row is None:
            raise Refusal(404, "not_found", missing)
        return msgspec.json.decode(row[0], type=kind)

    def _page(
        self, kind: type[T], table: str, where: str, values: Sequence[Any], after: str | None, limit: int, ascending: bool
    ) -> list[T]:
        sign, order = (">", "ASC") if ascending else ("<", "DESC")
        if after is not None:
            where += f" AND rowid {sign} (SELECT rowid FROM {table} WHERE id = ? AND owner = ?)"
            values = [*values, after, values[0]]
        found = f"SELECT record FROM {table} WHERE owner = ? {where} ORDER BY rowid {order} LIMIT ?"
        return [msgspec.json.decode(row[0], type=kind) for row in self._db.execute(found, [*values, limit])]

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        """All of it or nothing."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")
