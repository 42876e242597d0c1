"""Finding backends through entry points; a faulty plugin is reported with its reason and harms no other."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import threading
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

from trivium.errors import BackendNotFoundError, BackendUnavailableError, PluginError, TriviumError
from trivium.extensions import Extension, installed
from trivium.plugin.contract import API_VERSION, Backend, Device, Probe

OLDEST_API_VERSION = max(1, API_VERSION - 1)
_LACKS = "embeddings, adapters and later sampling parameters are refused on it, and it captures no graphs"
"""What a plugin of the oldest version can't do: it is never shown what is new."""
PROBE_SECONDS = 60.0
"""A probe that takes longer is given up."""


class Status(NamedTuple):
    """One installed plugin as `trivium backends` shows it. `reason` says why there are no devices ("" if there are)."""

    name: str
    distribution: str
    version: str
    devices: tuple[Device, ...]
    reason: str

    def to_json(self) -> dict[str, Any]:
        """The status as plain JSON values."""
        plain = [{**vars(d), "details": dict(d.details)} for d in self.devices]
        devices = json.loads(json.dumps(plain, default=str, skipkeys=True))
        return {**self._asdict(), "devices": devices, "available": bool(self.devices)}


class Plugin(Extension):
    """An entry point of the group `trivium`."""

    def load(self) -> Backend:
        """Imports the plugin and checks its Backend against the contract; raises PluginError with the reason."""
        return _checked(self, super().load())

    def status(self) -> Status:
        """Loads and probes; never raises."""
        try:
            backend = self.load()
        except TriviumError as e:
            return Status(self.name, " and ".join(self.distributions), "", (), str(e))
        probe = safe_probe(backend)
        return Status(self.name, self.distributions[0], backend.version, probe.devices, probe.reason)


def _checked(plugin: Plugin, backend: Any) -> Backend:
    where = str(plugin)
    version = getattr(backend, "api_version", None)
    accepted = " and ".join(map(str, range(OLDEST_API_VERSION, API_VERSION + 1)))
    if type(version) is not int or not OLDEST_API_VERSION <= version <= API_VERSION:
        raise PluginError(f"{where} was written for plugin API version {version}; this trivium accepts {accepted}")
    if not isinstance(backend, Backend):
        raise PluginError(f"{where} returned a {type(backend).__name__}, not a trivium.plugin.Backend")
    if backend.name != plugin.name:
        raise PluginError(f"{where} calls its backend {backend.name!r}; the entry point's name and the backend's must be equal")
    if plugin.name == "auto" or not re.fullmatch("[a-z0-9_.-]+", plugin.name):
        raise PluginError(f"{where}: a backend's name is lower case without blanks and colons, and not 'auto'")
    if type(backend.priority) is not int or not isinstance(getattr(backend, "version", None), str):
        raise PluginError(f"{where}: priority must be an int and version a string")
    if version < API_VERSION:
        message = f"{where} was written for plugin API version {version}, which the next release of trivium refuses; until its "
        warnings.warn(f"{message}maintainers move it to version {API_VERSION}, {_LACKS}", DeprecationWarning, stacklevel=2)
    return backend


def safe_probe(backend: Backend) -> Probe:
    """backend.probe(), with what the contract forbids (an exception, a hang, something else than a Probe) turned into a reason."""
    found: list[Probe] = []
    thread = threading.Thread(target=lambda: found.append(_probe(backend)), daemon=True)
    with contextlib.redirect_stdout(sys.stderr):
        thread.start()
        thread.join(PROBE_SECONDS)
    return found[0] if found else Probe((), f"probe() has not answered for {PROBE_SECONDS:g} seconds")


def _probe(backend: Backend) -> Probe:
    try:
        probe = backend.probe()
        if not isinstance(probe, Probe) or not all(isinstance(d, Device) for d in probe.devices):
            return Probe((), f"probe() returned {probe!r}, not a Probe of Devices")
        return probe if probe.devices else Probe((), probe.reason or "it does not say why")
    except BaseException as e:
        return Probe((), f"probe failed: {type(e).__name__}: {e}")


def find_plugins() -> dict[str, Plugin]:
    """All installed plugins by name; imports none of them."""
    return {name: Plugin("backend", name, found.entry_points) for name, found in installed("backend").items()}


def find_backends() -> list[Status]:
    """The state of every installed plugin, available or not."""
    return [plugin.status() for plugin in find_plugins().values()]


def resolve(name: str = "auto") -> tuple[Backend, Device]:
    """The backend and device for a user's word: "auto", "cpu", "cpu:0" (index), "chip:name" (device name) or "chip:kind" (what
    stands before a colon in names like "kind:1": the first such device).

    "auto" takes the available backend of the highest priority. A backend asked for by name is never replaced by another:
    BackendNotFoundError for an unknown name, BackendUnavailableError (with its own reason) for one without devices.
    """
    if name == "auto":
        return _best()
    base, _, wanted = name.partition(":")
    plugin = find_plugins().get(base)
    if plugin is None:
        raise BackendNotFoundError(_unknown(base, list(find_plugins())), param="backend")
    backend = plugin.load()
    probe = safe_probe(backend)
    if not probe.devices:
        raise BackendUnavailableError(f"backend {base!r} has no device here: {probe.reason}", param="backend")
    return backend, _pick(base, probe.devices, wanted)


def _best() -> tuple[Backend, Device]:
    loaded, reasons = [], []
    for plugin in find_plugins().values():
        try:
            loaded.append(plugin.load())
        except TriviumError as e:
            reasons.append(str(e))
    for backend in sorted(loaded, key=lambda b: -b.priority):
        probe = safe_probe(backend)
        if probe.devices:
            return backend, probe.devices[0]
        reasons.append(f"{backend.name}: {probe.reason}")
    raise BackendUnavailableError("no backend has a device here: " + "; ".join(reasons or ["none is installed"]))


def _pick(base: str, devices: Sequence[Device], wanted: str) -> Device:
    if not wanted:
        return devices[0]
    for device in devices:
        if wanted in (str(device.index), device.name, device.name.partition(":")[0]):
            return device
    known = ", ".join(f"{base}:{d.index} ({d.name})" for d in devices)
    raise BackendNotFoundError(f"backend {base!r} has no device {wanted!r}; there is {known}", param="backend")


def _unknown(name: str, known: list[str]) -> str:
    import difflib

    near = difflib.get_close_matches(name.lower(), known, 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"no backend is called {name!r}{hint} (installed: auto, {', '.join(known)})"
