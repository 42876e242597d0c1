"""What the contract demands beyond numbers: capabilities that make sense, options, probing, and the core left as it was."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import subprocess
import sys
import types
import warnings
from collections.abc import Iterator, Mapping
from types import MappingProxyType

import trivium
from trivium.conformance.lab import Lab
from trivium.conformance.report import Check, Mismatch, Verdict
from trivium.errors import InvalidRequestError
from trivium.ops import OPERATORS
from trivium.plugin import HostFallbackWarning, Probe
from trivium.sampling import SamplingParams

_UNTOUCHED = """
import sys
from trivium.conformance.rules import import_all, patches, snapshot
import_all()
before = snapshot()
from trivium.conformance.kit import collect_checks, open_lab
lab = open_lab(sys.argv[1])
[check for check in collect_checks(lab, ["operators"]) if check.name == "add"][0].run()
print(" ".join(patches(before, snapshot())))
"""
_Place = tuple[str, ...]


def import_all() -> None:
    """Every module of trivium, so that whatever is imported later is somebody's own."""
    for module in pkgutil.walk_packages(trivium.__path__, "trivium."):
        if "template" not in module.name and not module.name.endswith(("__main__", "pytest_plugin", "matrix")):
            importlib.import_module(module.name)


def snapshot() -> dict[_Place, object]:
    """What trivium's modules, their classes and their tables hold, and the code and defaults of every function in them."""
    found: dict[_Place, object] = {}
    for name, module in list(sys.modules.items()):
        if name == "trivium" or name.startswith("trivium."):
            for key, value in vars(module).items():
                if not key.startswith("__") and not isinstance(value, types.ModuleType):
                    found.update(_inside((name, key), value, name))
    return found


def _inside(place: _Place, value: object, home: str) -> Iterator[tuple[_Place, object]]:
    yield place, value
    if isinstance(value, type) and value.__module__ == home:
        for key, member in vars(value).items():
            if not key.startswith("_abc_") and key not in ("__dict__", "__weakref__", "__doc__", "__slotnames__"):
                yield from _inside((*place, key), member, "")
    elif isinstance(value, dict | MappingProxyType) and len(place) == 2:
        yield from (((*place, repr(key)), entry) for key, entry in value.items())
    elif isinstance(function := getattr(value, "__func__", value), types.FunctionType):
        yield (*place, "__code__"), function.__code__
        yield (*place, "__defaults__"), function.__defaults__


def patches(before: Mapping[_Place, object], after: Mapping[_Place, object]) -> list[str]:
    """The places that hold something else, that are gone or that are new."""
    missing = object()
    return [".".join(p) for p in {**before, **after} if before.get(p, missing) is not after.get(p, missing)]


def checks(lab: Lab) -> Iterator[Check]:
    """One check a rule."""
    yield Check("rules", "capabilities", lambda: judge_capabilities(lab))
    yield Check("rules", "probe", lambda: judge_probe(lab))
    yield Check("rules", "unknown option", lambda: judge_option(lab))
    yield Check("rules", "the core is not patched", lambda: judge_core(lab.backend.name))


def judge_capabilities(lab: Lab) -> Verdict:
    """Every list has an entry, float32 is a weight format, no activation dtype is both possible and not, and names are known."""
    can = lab.capabilities
    formats = [f.name for f in can.weight_formats]
    for name, values in (("dtypes", can.dtypes), ("kv_dtypes", can.kv_dtypes), ("page_sizes", can.page_sizes)):
        if not values or len(set(values)) != len(values):
            raise Mismatch(f"{name} is {values}: it must list something, each once")
    if "float32" not in formats or len(set(formats)) != len(formats):
        raise Mismatch(f"weight_formats are {formats}: float32 must be among them, each name once")
    for dtype in can.dtypes:
        if not lab.kv_dtypes(dtype):
            raise Mismatch(f"no one of kv_dtypes goes with {dtype}: {can.kv_refused(dtype, can.kv_dtypes[0])}")
    if can.graph_capture and can.max_graphs < can.graph_cost(1):
        raise Mismatch(f"max_graphs is {can.max_graphs}: with graph_capture it must allow for one batch size at least")
    both = set(can.unsupported) & set(can.dtypes)
    if both:
        raise Mismatch(f"{', '.join(sorted(both))} is both possible and unsupported")
    unknown = sorted((can.sampling or frozenset()) - {f.name for f in dataclasses.fields(SamplingParams)})
    unknown += sorted({k.op for k in lab.kernels if isinstance(k.op, str)} - set(OPERATORS))
    if unknown:
        raise Mismatch(f"{', '.join(unknown)}: no sampling parameter or operator is called so")
    return Verdict(f"activations {', '.join(can.dtypes)}; KV {', '.join(can.kv_dtypes)}")


def _named(probe: Probe) -> list[tuple[int, str]]:
    return [(d.index, d.name) for d in probe.devices]


def judge_probe(lab: Lab) -> Verdict:
    """Twice the same devices."""
    first, second = lab.backend.probe(), lab.backend.probe()
    if not isinstance(first, Probe) or _named(first) != _named(second):
        raise Mismatch(f"two probes differ: {first}, {second}")
    return Verdict(", ".join(f"{d.index}: {d.name}" for d in first.devices))


def judge_option(lab: Lab) -> Verdict:
    """An option that the backend does not know is refused by its name."""
    name = "no_such_option"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", HostFallbackWarning)
            lab.backend.open(lab.device, {name: 1}).close()
    except InvalidRequestError as e:
        if name not in str(e):
            raise Mismatch(f"the refusal does not name the option: {e}") from e
        return Verdict(str(e))
    raise Mismatch(f"the option {name} was accepted")


def judge_core(name: str) -> Verdict:
    """Loading and opening the plugin and running a step on it, in a process of its own, changes nothing in trivium's modules,
    classes, tables and functions."""
    done = subprocess.run([sys.executable, "-c", _UNTOUCHED, name], capture_output=True, text=True, check=False)
    if done.returncode:
        raise Mismatch(f"could not be loaded in a process of its own: {done.stderr.strip().splitlines()[-1:]}")
    if done.stdout.strip():
        raise Mismatch(f"the plugin changed {done.stdout.strip()}")
    return Verdict("loaded, opened and run in a process of its own")
