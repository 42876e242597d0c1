"""Plugins that break the contract in one place each: the day-one chip with a piece of it replaced."""

from __future__ import annotations

SOURCE = """
import dataclasses, sys, threading, time
from day_one_chip import ChipSession, DayOne
from trivium.ops import Pattern
from trivium.plugin import Device, Executable, Kernel, Probe, Step, WeightFormat, hookimpl

class Later(Step):
    def __init__(self, step): self.step = step
    def output(self, name): return self.step.output(name)
    def tokens(self):
        s = self.step.tokens()
        return {tokens}

class Counting(Executable):
    def __init__(self, inner): self.inner, self.steps = inner, 0
    def run(self, batch):
        self.steps += 1
        {run}
        return Later(self.inner.run(batch))

class Chip(ChipSession):
    def compile(self, program, weights): return Counting(super().compile(program, weights))
    {session}

class Faulty(DayOne):
    name = {name!r}
    def capabilities(self, device): return dataclasses.replace(super().capabilities(device), {capabilities})
    def open(self, device, options):
        super().open(device, options)
        return Chip(self.kernels(device), options)
    {backend}

@hookimpl
def trivium_backend(): return Faulty()
"""


def faulty(
    name: str = "badchip",
    *,
    backend: str = "pass",
    session: str = "pass",
    run: str = "pass",
    tokens: str = "s",
    capabilities: str = "",
) -> str:
    """Source of a plugin. `backend`, `session`: members; `run`: statements before a step; `tokens`: what becomes of Sampled s;
    `capabilities`: fields."""
    return SOURCE.format(name=name, backend=backend, session=session, run=run, tokens=tokens, capabilities=capabilities)
