"""What the kit found: rows with a status, and their sum."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

Status = Literal["passed", "failed", "skipped", "fallback", "unavailable"]
STATUSES: tuple[Status, ...] = get_args(Status)
"""passed and failed; skipped: does not apply to this backend; fallback: right, but run by the reference on the host;
unavailable: this machine lacks what was asked for."""


class Row(NamedTuple):
    """One judgement. `detail` says what was tried, or what went wrong."""

    area: str
    name: str
    status: Status
    detail: str = ""


class Verdict(NamedTuple):
    """What a check returns when nothing is wrong; it raises Mismatch (or anything else) when something is."""

    detail: str
    status: Status = "passed"


class Mismatch(AssertionError):
    """A backend did something else than the reference."""


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Steps that fail, some of them on purpose, are told of in rows and not also in the engine's log."""
    logger = logging.getLogger("trivium.engine.engine")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


class Check(NamedTuple):
    """One row to be made."""

    area: str
    name: str
    judge: Callable[[], Verdict]

    def run(self) -> Row:
        """The row; whatever the check raises becomes a failure, as the kit must judge any backend to the end."""
        try:
            with _quiet():
                verdict = self.judge()
        except Mismatch as e:
            return Row(self.area, self.name, "failed", str(e))
        except Exception as e:
            return Row(self.area, self.name, "failed", f"{type(e).__name__}: {e}")
        return Row(self.area, self.name, verdict.status, verdict.detail)


@dataclass(frozen=True)
class Report:
    """All rows of one backend. `options` are those it was opened with."""

    backend: str
    device: str
    rows: Sequence[Row]
    options: Mapping[str, Any] = field(default_factory=dict)

    def count(self, status: Status) -> int:
        """How many rows have this status."""
        return sum(row.status == status for row in self.rows)

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return self.count("failed") == 0

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values: backend, device, options, a count for each status, rows."""
        counts: dict[str, int] = {status: self.count(status) for status in STATUSES}
        rows = [row._asdict() for row in self.rows]
        return {"backend": self.backend, "device": self.device, "options": dict(self.options), **counts, "rows": rows}

    def __str__(self) -> str:
        """One line a row, what failed last, then the sums."""
        ordered = sorted(self.rows, key=lambda row: row.status == "failed")
        lines = [f"{row.status:11} {row.area:10} {row.name:32} {row.detail}".rstrip() for row in ordered]
        sums = ", ".join(f"{self.count(s)} {s}" for s in STATUSES if self.count(s))
        return "\n".join([*lines, f"{self.backend} on {self.device}: {sums}"])
