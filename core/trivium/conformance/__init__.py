"""The kit that judges a backend: `trivium conformance BACKEND`, `pytest --trivium-backend=NAME`, docs/support-matrix.md."""

from __future__ import annotations

from trivium.conformance.kit import AREAS, collect_checks, open_lab, run_conformance
from trivium.conformance.report import Check, Mismatch, Report, Row, Verdict

__all__ = ["AREAS", "Check", "Mismatch", "Report", "Row", "Verdict", "collect_checks", "open_lab", "run_conformance"]
