"""What both ways between a folder of safetensors and a .gguf file have in common: whose mapping is known, the numbers of a tensor
under other rows, and whether what was written is read as the same model."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from trivium.errors import UnsupportedError
from trivium.extensions import find, installed
from trivium.models import build, describe
from trivium.ops import Program
from trivium.text import Tokenizer
from trivium.weights import Checkpoint
from trivium_formats.gguf import Change, Config, GGUFModel

from trivium_compress.floats import bits

Array = npt.NDArray[Any]
SOURCE = "trivium.source"
"""The key that says which checkpoint something was made of."""
_STEP = 1 << 22
"""Numbers that are decoded at a time."""
_PROBE = "The 3 quick  foxes\n\n\tdon't jump over 1234 dogs: Ünïcödé 中文 мир 😀 def f(x): return x\n"


def writers() -> dict[str, GGUFModel]:
    """The architectures of .gguf files whose mapping is known both ways, by the name that files have."""
    found: dict[str, GGUFModel] = {name: find("gguf_model", name, GGUFModel)[0] for name in installed("gguf_model")}
    return {name: model for name, model in found.items() if model.writing is not None}


def class_of(checkpoint: Checkpoint) -> str:
    """The model's class as config.json names it."""
    return str((checkpoint.config.get("architectures") or [None])[0])


def flat(checkpoint: Checkpoint) -> Config:
    """The configuration with what it leaves to its family."""
    info = describe(checkpoint.config)
    return {**info.config, "head_dim": info.head_dim, "num_hidden_layers": info.layers}


def converted(checkpoint: Checkpoint, tensor: str, kind: str, config: Config, change: Change | None) -> Array:
    """A tensor's numbers after `change`, as they are written in the float format `kind`; float32 only of some rows at a time, which
    are whole heads."""
    weight = checkpoint.tensor(tensor)
    written = np.empty(weight.shape, bits(np.zeros(0, np.float32), kind).dtype)
    heads = max(_STEP // max(int(np.prod(weight.shape[1:])) * config["head_dim"], 1), 1)
    for start in range(0, weight.shape[0], heads * config["head_dim"]):
        stop = min(start + heads * config["head_dim"], weight.shape[0])
        numbers = weight.slice_rows(start, stop).decode()
        written[start:stop] = bits(numbers if change is None else change(tensor, numbers, config), kind)
    return written


def check_program(before: Config, after: Config, what: str) -> None:
    """UnsupportedError unless both configurations are read as the same Program. what: what was written, for the message."""
    programs = build(before), build(after)
    pairs = itertools.zip_longest(*map(_lines, programs), fillvalue="nothing")
    if differ := next((pair for pair in pairs if pair[0] != pair[1]), None):
        raise UnsupportedError(f"{what} would be another model: {differ[1]}, not {differ[0]}", param="output")
    mine, theirs = map(_arrays, programs)
    for name, array in mine.items():
        if name not in theirs or not np.allclose(array, theirs[name], rtol=1e-5, atol=0):
            raise UnsupportedError(f"{what} would be another model: {name} is otherwise", param="output")


def check_words(mine: Tokenizer, theirs: Tokenizer, what: str) -> None:
    """UnsupportedError unless both cut a text alike."""
    if mine.encode(_PROBE) != theirs.encode(_PROBE):
        raise UnsupportedError(f"{what} would cut texts into other tokens than this tokenizer does", param="output")


def _arrays(program: Program) -> Mapping[str, Array]:
    """Constants that the configuration decides."""
    return {constant.value.name: constant.array for constant in program.constants if constant.array is not None}


def _lines(program: Program) -> list[str]:
    """The printed Program, its numbers as exactly as a file's float32 has them."""
    return [re.sub(r"\d\.\d*(e-?\d+)?|\de-?\d+", lambda m: f"{float(m[0]):.6g}", line) for line in _printed(program)]


def _printed(program: Program) -> list[str]:
    """The Program's lines, every attribute written, also where it is as the operator has it anyway."""
    outputs = [f"{name} = {value}" for name, value in program.outputs.items()]
    states = [f"{state.value} {state.spec}" for state in program.states]
    calls = [f"{call.name}({', '.join(map(str, call.args))}) {dict(sorted(call.attrs.items()))}" for call in program.calls]
    return [*states, *calls, *outputs]
