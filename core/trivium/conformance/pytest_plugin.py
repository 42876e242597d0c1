"""`pytest --trivium-backend=NAME`: every check of the kit as a test.

For a plugin's own continuous integration. Options for Backend.open() are given as --trivium-option KEY=VALUE.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from trivium.conformance.report import Check, Mismatch
from trivium.errors import BackendUnavailableError, TriviumError


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("trivium")
    group.addoption("--trivium-backend", action="append", default=[], metavar="NAME", help="judge this backend; may be repeated")
    group.addoption("--trivium-option", action="append", default=[], metavar="KEY=VALUE", help="an option to open it with")


def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Adds the checks of the backends asked for to what was collected."""
    options = dict(_option(word) for word in config.getoption("--trivium-option"))
    for name in config.getoption("--trivium-backend"):
        items.extend(_items(session, name, options))


def _option(word: str) -> tuple[str, Any]:
    """KEY=VALUE, the value as JSON if it can be read so, else as text."""
    key, _, value = word.partition("=")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def _items(session: pytest.Session, name: str, options: dict[str, Any]) -> Iterator[pytest.Item]:
    from trivium.conformance.kit import collect_checks, open_lab

    try:
        lab = open_lab(name, options)
    except BackendUnavailableError as e:
        reason = str(e)
        yield ConformanceItem.from_parent(session, name=f"{name}:device", check=None, reason=reason)
        return
    except TriviumError as e:
        raise pytest.UsageError(f"--trivium-backend={name}: {e}") from e
    for check in collect_checks(lab):
        yield ConformanceItem.from_parent(session, name=f"{name}:{check.area}:{check.name}", check=check, reason="")


class ConformanceItem(pytest.Item):
    """One row of the report."""

    def __init__(self, *, check: Check | None, reason: str, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self._check = check
        self._reason = reason

    def runtest(self) -> None:
        if self._check is None:
            pytest.skip(f"unavailable: {self._reason}")
        row = self._check.run()
        if row.status == "failed":
            raise Mismatch(row.detail)
        if row.status == "skipped":
            pytest.skip(row.detail)
        self.user_properties.append((row.status, row.detail))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: object = None) -> str:
        return str(excinfo.value)

    def reportinfo(self) -> tuple[str, int | None, str]:
        return str(self.path), None, self.name
