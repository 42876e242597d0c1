"""Programs, batches, pages and samples as plain data, a JSON value and numpy arrays, for another process to build again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trivium.ops import (
    Batch, Group, KVSpec, LatentKV, PagedKV, Pages, Program, Recurrent, Sampled, SampleInputs, StateSpec, Value, new_builder,
)  # fmt: skip

Array = npt.NDArray[Any]
_SPECS = {kind.__name__: kind for kind in (PagedKV, LatentKV, Recurrent)}


class Message(NamedTuple):
    """What goes from process to process."""

    head: dict[str, Any]
    arrays: Sequence[Array] = ()


NOTHING = Message({"do": "nothing"})
"""To a rank that a request does not concern."""


def _state_data(spec: StateSpec) -> list[Any]:
    return [type(spec).__name__, {f.name: getattr(spec, f.name) for f in fields(spec)}]


def _state_of(data: Sequence[Any]) -> StateSpec:
    made: StateSpec = _SPECS[data[0]](**_tuples(data[1]))
    return made


def _tuples(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes as they were: JSON has lists in place of tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in attrs.items()}


def spec_data(spec: KVSpec) -> list[Any]:
    """A KVSpec as JSON."""
    return [spec.page_size, spec.dtype, [[_state_data(g.spec), list(g.states)] for g in spec.groups]]


def spec_of(data: Sequence[Any]) -> KVSpec:
    """The KVSpec again."""
    groups = (Group(_state_of(state), tuple(states)) for state, states in data[2])
    return KVSpec(data[0], data[1], tuple(groups))


def program_message(program: Program) -> Message:
    """A Program without fused calls."""
    arrays: list[Array] = []
    number: dict[Value, int] = {}
    for value in (*program.inputs, *(c.value for c in program.constants), *(s.value for s in program.states)):
        number[value] = len(number)
    constants = []
    for constant in program.constants:
        if constant.array is not None:
            arrays.append(constant.array)
        constants.append([constant.value.name, list(constant.value.shape), constant.array is not None])
    calls = []
    for call in program.calls:
        calls.append([call.name, [None if v is None else number[v] for v in call.args], dict(call.attrs)])
        for value in call.results:
            number[value] = len(number)
    head = {
        "inputs": [v.name for v in program.inputs], "constants": constants, "calls": calls, "vocab_size": program.vocab_size,
        "states": [[s.value.name, _state_data(s.spec)] for s in program.states],
        "outputs": {name: number[v] for name, v in program.outputs.items()},
    }  # fmt: skip
    return Message(head, arrays)


def program_of(message: Message) -> Program:
    """The Program again; ProgramError if it is none."""
    head, arrays = message.head, iter(message.arrays)
    b = new_builder()
    values: list[Value] = [b.input(name) for name in head["inputs"]]
    values += [b.array(name, next(arrays)) if own else b.weight(name, tuple(shape)) for name, shape, own in head["constants"]]
    values += [b.state(name, _state_of(spec)) for name, spec in head["states"]]
    for name, args, attrs in head["calls"]:
        made = b.call(name, *(None if i is None else values[i] for i in args), **_tuples(attrs))
        values += made if isinstance(made, tuple) else (made,)
    return b.finish({name: values[i] for name, i in head["outputs"].items()}, vocab_size=head["vocab_size"])


def _record(thing: Any) -> tuple[dict[str, Any], list[Array]]:
    """The fields of a dataclass or NamedTuple: None, numbers, and arrays."""
    names = [f.name for f in fields(thing)] if hasattr(thing, "__dataclass_fields__") else list(thing._fields)
    head: dict[str, Any] = {}
    arrays: list[Array] = []
    for name in names:
        value = getattr(thing, name)
        if isinstance(value, np.ndarray):
            arrays.append(value)
            head[name] = True
        else:
            head[name] = value
    return head, arrays


def _fields_of(head: Mapping[str, Any], arrays: Any) -> dict[str, Any]:
    return {name: next(arrays) if value is True else value for name, value in head.items()}


def batch_message(batch: Batch) -> Message:
    """A Batch with its SampleInputs."""
    sampling, more = _record(batch.sampling)
    names = [f.name for f in fields(batch) if f.name != "sampling"]
    return Message({"do": "run", "names": names, "sampling": sampling}, [*(getattr(batch, name) for name in names), *more])


def batch_of(message: Message) -> Batch:
    """The Batch again."""
    arrays = iter(message.arrays)
    own = {name: next(arrays) for name in message.head["names"]}
    return Batch(sampling=SampleInputs(**_fields_of(message.head["sampling"], arrays)), **own)


def sampled_message(sampled: Sampled) -> Message:
    """What was sampled."""
    head, arrays = _record(sampled)
    return Message({"sampled": head}, arrays)


def sampled_of(message: Message) -> Sampled:
    """The same again."""
    return Sampled(**_fields_of(message.head["sampled"], iter(message.arrays)))


def page_arrays(pages: Pages) -> list[Array]:
    """The arrays of pages, layer after layer."""
    return [np.asarray(tensor) for layer in pages.tensors for tensor in layer]


def pages_of(spec: KVSpec, group: int, arrays: Sequence[Array]) -> Pages:
    """Pages of a group from their arrays."""
    which = spec.groups[group]
    each = len(arrays) // len(which.states)
    layers = tuple(tuple(arrays[i : i + each]) for i in range(0, len(arrays), each))
    return Pages(which, spec.page_size, spec.dtype, layers)
