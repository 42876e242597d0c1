"""A device whose run() returns at once, for tests of the engine: steps are computed in turn, as late as possible, while a simulated
clock says when each would begin and end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from fake_model import Clock, fake_model
from trivium.ops import Batch, SampleInputs, Sampled

Hook = Callable[[str, Batch], None]


@dataclass(eq=False)
class AsyncStep:
    device: AsyncDevice
    batch: Batch
    end: float
    sampled: Sampled | None = None

    def tokens(self) -> Sampled:
        self.device.clock.now = max(self.device.clock.now, self.end)
        self.device.events.append("tokens")
        self.device.compute(self)
        self.device.hook("tokens", self.batch)
        assert self.sampled is not None
        return self.sampled


@dataclass(eq=False)
class AsyncDevice:
    """Wraps the FakeExecutable of a model. Every step takes `seconds`; `idle` lists how long the device waited for each.
    `hook(point, batch)` is called at "run" and "tokens" and may raise."""

    model: Any
    clock: Clock
    seconds: float = 1.0
    hook: Hook = lambda point, batch: None
    idle: list[float] = field(default_factory=list)
    events: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.inner, self.model.executable = self.model.executable, self
        self.model.capabilities = replace(self.model.capabilities, asynchronous=True)
        self._queue: list[AsyncStep] = []
        self._free_at = 0.0

    @property
    def violations(self) -> list[str]:
        return self.inner.violations  # type: ignore[no-any-return]

    def run(self, batch: Batch) -> AsyncStep:
        batch = own_copy(batch)
        try:
            self.hook("run", batch)
        except BaseException:
            for step in list(self._queue):
                self.compute(step)
            self.inner._spoil(batch)
            raise
        start = max(self.clock.now, self._free_at)
        self.idle.append(start - self._free_at)
        self._free_at = start + self.seconds
        self.events.append("run")
        self._queue.append(AsyncStep(self, batch, self._free_at))
        return self._queue[-1]

    def compute(self, step: AsyncStep) -> None:
        """Computes everything up to this step, in the order of run()."""
        while step in self._queue:
            first = self._queue.pop(0)
            first.sampled = self.inner.run(first.batch).tokens()


def own_copy(batch: Batch) -> Batch:
    """The arrays of a batch belong to the engine once run() has returned."""

    def copies(of: Batch | SampleInputs) -> dict[str, Any]:
        found = {f.name: getattr(of, f.name) for f in fields(of)}
        return {name: value.copy() if isinstance(value, np.ndarray) else value for name, value in found.items()}

    return Batch(**copies(batch) | {"sampling": SampleInputs(**copies(batch.sampling))})


def async_model(*args: Any, clock: Clock | None = None, seconds: float = 1.0, **options: Any) -> Any:
    """fake_model() on such a device, which is its `executable`."""
    model = fake_model(*args, **options)
    AsyncDevice(model, clock or Clock(), seconds)
    return model
