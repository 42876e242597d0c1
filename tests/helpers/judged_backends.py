"""Numpy backends for the kit to judge: the reference with other kernels, another session or other capabilities."""

from __future__ import annotations

import dataclasses

from trivium.conformance import collect_checks
from trivium.conformance.lab import Lab
from trivium.ops.patterns import run_pattern
from trivium.plugin import EagerExecutable, Kernel
from trivium_reference.plugin import ReferenceBackend, ReferenceSession


def kernel(name, fn):
    """A kernel that computes an operator by `fn(*args, **attrs)`."""
    return Kernel(name, lambda session, args, attrs: fn(*args, **attrs), f"test {name}", priority=1)


def fused(pattern, fn=None):
    run = fn or (lambda args, attrs: run_pattern(pattern, args, attrs))
    return Kernel(pattern, lambda session, args, attrs: run(args, attrs), f"fused {pattern.name}")


class Session(ReferenceSession):
    """The reference's session over other kernels."""

    def compile(self, program, weights):
        return EagerExecutable(self, program, weights, self._kernels, self._spec, backend="test", strict=self._strict)


class Backend(ReferenceBackend):
    name = "test"

    def __init__(self, extra=(), without=(), session=Session, **capabilities):
        self._extra, self._without, self._session, self._changes = extra, without, session, capabilities

    def capabilities(self, device):
        return dataclasses.replace(super().capabilities(device), **self._changes)

    def kernels(self, device):
        return [*self._extra, *(k for k in super().kernels(device) if k.op not in self._without)]

    def open(self, device, options):
        return self._session(self.kernels(device), strict=False)


def judge(backend, *areas, only=""):
    """{(area, name): row} of some areas, of the checks with `only` in their names."""
    device = backend.probe().devices[0]
    lab = Lab(backend, device, backend.capabilities(device), backend.kernels(device))
    return {(c.area, c.name): c.run() for c in collect_checks(lab, areas) if only in c.name}


def failed(rows):
    return {name for (_, name), row in rows.items() if row.status == "failed"}
