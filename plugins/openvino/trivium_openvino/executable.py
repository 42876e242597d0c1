"""A compiled Program: its OpenVINO models, and the host calls between them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import openvino as ov

from trivium.errors import BackendError, UnsupportedError
from trivium.ops import OPERATORS, Batch, Call, Sampled, SampleInputs, Value
from trivium.plugin import Executable, Step, run_on_host
from trivium_openvino.lowering import Array, Feed, Fixed, Lowering, Part

SAMPLE = OPERATORS["sample"]
_FIELDS = tuple(f.name for f in dataclasses.fields(SampleInputs))


class Input(NamedTuple):
    """A step's input of a model: its number, and what it is made of."""

    index: int
    make: Callable[[Batch, Mapping[Value, Array]], Array]


class Model(NamedTuple):
    """A part's compiled model with a request of its own. held: the memory of each input, kept as long as its shape stays."""

    request: Any
    inputs: tuple[Input, ...]
    given: tuple[Value, ...]
    held: dict[int, Array]

    def start(self, batch: Batch, values: Mapping[Value, Array]) -> None:
        """Copies the inputs and starts the model."""
        for index, make in self.inputs:
            array, held = make(batch, values), self.held.get(index)
            if held is not None and held.shape == array.shape:
                held[...] = array
            else:
                self.held[index] = held = np.array(array, order="C")
                self.request.set_input_tensor(index, _tensor(held))
        self.request.start_async()

    def results(self) -> dict[Value, Array]:
        """Views of what it made, for as long as it does not run again."""
        return {v: self.request.get_output_tensor(i).data for i, v in enumerate(self.given)}


class OvStep(Step):
    """A step that was started. What it made is read before the next one is started."""

    def __init__(self, executable: OvExecutable, sampling: SampleInputs) -> None:
        self._executable = executable
        self._sampling: SampleInputs | None = sampling
        self._values: dict[Value, Array] | None = None
        self._sampled = Sampled(np.zeros(0, np.int32))
        self._fault: BackendError | None = None

    def finish(self, values: Callable[[], dict[Value, Array]]) -> None:
        """Takes over the results and chooses the tokens; a fault is kept for tokens() and output()."""
        try:
            self._values = values()
            self._sampled = self._executable.draw(self._values, self._sampling)
        except Exception as e:
            self._fault = BackendError(f"backend 'openvino': the step failed: {type(e).__name__}: {e}")
            self._fault.__cause__ = e
        self._sampling = None

    def land(self) -> None:
        """Waits for it."""
        self._executable.land(self)

    def tokens(self) -> Sampled:
        if self._sampling is not None:
            self._executable.owner.settle()
        if self._fault is not None:
            raise self._fault
        return self._sampled

    def output(self, name: str) -> npt.NDArray[np.float32]:
        self.tokens()
        outputs = self._executable.program.outputs
        if name not in outputs:
            raise UnsupportedError(f"this Program has no output {name!r}; it has {', '.join(outputs)}")
        if self._executable.last is not self or self._values is None:
            raise BackendError(f"the output {name!r} of a step must be read before the next step runs")
        return np.array(self._values[outputs[name]])


class OvExecutable(Executable):
    """Runs a Program's parts. A Program of one model is started and waited for when its tokens are asked for."""

    def __init__(self, owner: Any, low: Lowering) -> None:
        self.owner, self.program, self._low = owner, low.program, low
        self._parts = [self._ready(part) if isinstance(part, Part) else part for part in low.parts]
        self._whole = self._parts[0] if len(self._parts) == 1 and isinstance(self._parts[0], Model) else None
        self.last: OvStep | None = None

    def _ready(self, part: Part) -> Model:
        compiled = self.owner.compiled(part.model())
        request = compiled.create_infer_request()
        first = len(part.feeds)
        for i, fixed in enumerate(part.fixed):
            _check(compiled.inputs[first + i], fixed)
            request.set_input_tensor(first + i, ov.Tensor(fixed.array, list(fixed.array.shape), fixed.type))
        inputs = [Input(i, _of_batch(feed)) for i, feed in enumerate(part.feeds.values())]
        inputs += [Input(i, _of_values(value)) for i, value in enumerate(part.taken, first + len(part.fixed))]
        return Model(request, tuple(inputs), tuple(part.given), {})

    @property
    def models(self) -> int:
        """How many OpenVINO models the Program became."""
        return sum(isinstance(part, Model) for part in self._parts)

    def run(self, batch: Batch) -> OvStep:
        self.owner.settle()
        self.last = step = OvStep(self, _copied(batch.sampling))
        if self._whole is not None:
            self._whole.start(batch, {})
            self.owner.flying = step
        else:
            step.finish(lambda: self._run_parts(batch))
        return step

    def land(self, step: OvStep) -> None:
        """Waits for the one model of a step that was started."""
        model = self._whole
        assert model is not None

        def values() -> dict[Value, Array]:
            model.request.wait()
            return model.results()

        step.finish(values)

    def draw(self, values: Mapping[Value, Array], sampling: SampleInputs | None) -> Sampled:
        """Tokens of the rows to sample, by the reference: the logits are on the host."""
        logits = self.program.outputs.get("logits")
        if logits is None or sampling is None:
            return Sampled(np.zeros(0, np.int32))
        sampled: Sampled = SAMPLE(values[logits], sampling, vocab_size=self.program.vocab_size or int(logits.shape[-1]))
        return sampled

    def _run_parts(self, batch: Batch) -> dict[Value, Array]:
        values: dict[Value, Array] = {}
        for part in self._parts:
            if isinstance(part, Model):
                part.start(batch, values)
                part.request.wait()
                values.update(part.results())
            else:
                self._run_on_host(part, batch, values)
        return values

    def _run_on_host(self, call: Call, batch: Batch, values: dict[Value, Array]) -> None:
        low = self._low
        args = [None if v is None or v.kind == "state" else self._argument(v, batch, values) for v in call.args]
        state = next((low.state_of[v] for v in call.args if v is not None and v.kind == "state"), -1)
        results = run_on_host(self.owner, low.spec, call, args, batch, state)
        values.update((v, r) for v, r in zip(call.results, results, strict=True) if r is not None)

    def _argument(self, value: Value, batch: Batch, values: Mapping[Value, Array]) -> Any:
        if value.kind == "constant":
            return self._low.weights[value]
        return np.array(getattr(batch, value.name)) if value.kind == "input" else values[value]


def _of_batch(feed: Feed) -> Callable[[Batch, Mapping[Value, Array]], Array]:
    return lambda batch, values: feed.make(batch)


def _of_values(value: Value) -> Callable[[Batch, Mapping[Value, Array]], Array]:
    return lambda batch, values: values[value]


def _tensor(array: Array) -> ov.Tensor:
    return ov.Tensor(array, shared_memory=True) if array.size else ov.Tensor(array.dtype, ov.Shape(list(array.shape)))


def _copied(sampling: SampleInputs) -> SampleInputs:
    """Its arrays are the core's again when run() has returned."""
    parts = (getattr(sampling, name) for name in _FIELDS)
    return SampleInputs(*(v.copy() if isinstance(v, np.ndarray) else v for v in parts))


def _check(port: Any, fixed: Fixed) -> None:
    """The layout of pages was chosen before the model was compiled: it must be the one that the model wants."""
    want = [d.get_length() if d.is_static else n for d, n in zip(port.get_partial_shape(), fixed.array.shape, strict=True)]
    if port.get_element_type() != fixed.type or want != list(fixed.array.shape):
        got = f"{fixed.type.get_type_name()}{list(fixed.array.shape)}"
        raise UnsupportedError(
            f"OpenVINO wants pages as {port.get_element_type().get_type_name()}{want} for this model on this device; this plugin "
            f"keeps them as {got}: choose another kv_dtype or dtype"
        )
