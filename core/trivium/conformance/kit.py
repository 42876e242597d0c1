"""The whole judgement of one backend."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from trivium.conformance import formats, fusions, models, operators, pages, rules, sampler, serving
from trivium.conformance.lab import Lab
from trivium.conformance.report import Check, Report, Row
from trivium.errors import BackendUnavailableError, InvalidRequestError
from trivium.extensions import blame
from trivium.plugin import resolve
from trivium.plugin.guard import capabilities_of, kernels_of

AREAS: Mapping[str, Callable[[Lab], Iterator[Check]]] = {
    "rules": rules.checks,
    "operators": operators.checks,
    "fusions": fusions.checks,
    "formats": formats.checks,
    "pages": pages.checks,
    "sampler": sampler.checks,
    "models": models.checks,
    "serving": serving.checks,
}
"""The areas in the order in which they are judged."""


def open_lab(name: str, options: Mapping[str, Any] | None = None) -> Lab:
    """The backend on the bench. Raises BackendNotFoundError for an unknown name, BackendUnavailableError where this machine lacks
    the device or what the options ask for, InvalidRequestError for an option that the backend does not know, PluginError for a
    backend that can't be judged."""
    backend, device = resolve(name)
    lab = Lab(backend, device, capabilities_of(backend, device), kernels_of(backend, device), dict(options or {}))
    with blame(f"backend {backend.name!r}: open() and close()"), lab.session():
        return lab


def collect_checks(lab: Lab, areas: Collection[str] | None = None) -> Iterator[Check]:
    """Every check of the areas (default: all); InvalidRequestError for an unknown area."""
    unknown = set(areas or ()) - set(AREAS)
    if unknown:
        raise InvalidRequestError(f"no area is called {', '.join(sorted(unknown))}; there are {', '.join(AREAS)}", param="area")
    for area, checks in AREAS.items():
        if areas is None or area in areas:
            yield from checks(lab)


def run_conformance(
    name: str,
    options: Mapping[str, Any] | None = None,
    *,
    areas: Collection[str] | None = None,
    progress: Callable[[Row], None] = lambda row: None,
) -> Report:
    """Judges a backend ("cpu", "reference", ...), opened with `options`; `progress` hears of each row.

    A device or instruction set that this machine lacks gives one row, "unavailable". Raises as open_lab otherwise.
    """
    try:
        lab = open_lab(name, options)
    except BackendUnavailableError as e:
        row = Row("device", name, "unavailable", str(e))
        progress(row)
        return Report(name, "none", (row,), options or {})
    rows = []
    for check in collect_checks(lab, areas):
        rows.append(check.run())
        progress(rows[-1])
    return Report(lab.backend.name, lab.device.name, tuple(rows), options or {})
