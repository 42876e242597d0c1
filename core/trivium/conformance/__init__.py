"""The kit that judges a backend: `trivium conformance BACKEND`, `pytest --trivium-backend=NAME`, docs/support-matrix.md.

The kit itself is imported when a name of it is first used: pytest loads this package in every run where trivium is installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trivium.conformance.report import Check, Mismatch, Report, Row, Verdict

if TYPE_CHECKING:
    from trivium.conformance.kit import AREAS, collect_checks, open_lab, run_conformance

__all__ = ["AREAS", "Check", "Mismatch", "Report", "Row", "Verdict", "collect_checks", "open_lab", "run_conformance"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from trivium.conformance import kit

    return getattr(kit, name)
