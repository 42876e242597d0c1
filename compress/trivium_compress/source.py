"""What is compressed: a folder of safetensors, or a .gguf file, with what must be copied, and the names under which it is
stored."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from trivium.errors import InvalidRequestError, UnsupportedError
from trivium.models import arrange, build, count, describe
from trivium.ops import Constant, Program, Weight
from trivium.text import Tokenizer
from trivium.weights import Checkpoint, open_checkpoint
from trivium.weights.checkpoint import EMBEDDING, HEAD, canonical_name
from trivium.weights.formats import SAFETENSORS_TYPES, TensorFile
from trivium.weights.safetensors import find_tensors
from trivium_formats.gguf import GGUFFile, map_names

from trivium_compress.floats import FLOATS
from trivium_compress.stored import Stored
from trivium_compress.walk import LAYER, Rows

Array = npt.NDArray[Any]
COPIED = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "chat_template.jinja",
    "chat_template.json", "tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json", "LICENSE", "LICENSE.txt",
    "preprocessor_config.json", "processor_config.json",
)  # fmt: skip
"""Files of a folder that belong to the model beside its weights and config.json."""
_KINDS = {format: kind for kind, format in SAFETENSORS_TYPES.items()}


@dataclass(frozen=True)
class Source:
    """checkpoint: its tensors by canonical name, as they are stored; arranged: by the names that the family gives them. program:
    its constants name stored tensors wherever these are read as they are; made: the sources that the family makes of several, or
    otherwise. stored: canonical name -> (file, name there). extra: names of tensors in `gguf` that no model reads."""

    path: Path
    checkpoint: Checkpoint
    arranged: Checkpoint
    program: Program
    made: frozenset[str]
    stored: dict[str, tuple[TensorFile, str]]
    gguf: GGUFFile | None
    extra: tuple[str, ...]
    identity: dict[str, Any]

    @property
    def dtype(self) -> str:
        """The float type that new numbers are written in: that of the first projection."""
        floats = (w.format for w in map(self.checkpoint.tensor, self.stored) if len(w.shape) == 2 and w.format in FLOATS)
        return next(floats, "float32")

    def load(self, constant: Constant) -> Any:
        """What a Program's constant is: float32 of its shape; of the embedding's table, the rows that are asked for."""
        if constant.array is not None:
            return constant.array
        weight = (self.arranged if constant.source in self.made else self.checkpoint).tensor(constant.source)
        if constant.source == EMBEDDING and len(weight.shape) == 2:
            return Rows(lambda ids: weight.decoder(np.asarray(weight.data)[ids]).reshape(len(ids), -1))
        return (weight if constant.rows is None else weight.slice_rows(*constant.rows)).decode()

    def layers(self) -> dict[int, list[str]]:
        """Canonical names of the stored tensors by their layer; -1: those outside."""
        found: dict[int, list[str]] = {}
        for name in self.stored:
            match = LAYER.search(name)
            found.setdefault(int(match[1]) if match else -1, []).append(name)
        return found

    def copied(self, name: str) -> Stored:
        """A tensor as it is."""
        weight = self.checkpoint.tensor(name)
        return Stored(np.asarray(weight.data), weight.format if self.gguf is not None else _KINDS[weight.format])

    def file_name(self, name: str) -> str:
        """How the file calls a tensor."""
        return self.stored[name][1]

    def extras(self) -> Iterator[tuple[str, Stored]]:
        """Tensors that are copied because a file without them would be another model."""
        for name in self.extra:
            assert self.gguf is not None
            weight = self.gguf.weight(name, name)
            yield name, Stored(np.asarray(weight.data), weight.format)

    @property
    def tied(self) -> bool:
        return HEAD not in self.stored


def open_source(path: Path, window: int | None = None) -> Source:
    """Opens a model, with its Program for sequences of up to `window` tokens (None: as long as it can). UnsupportedError if its
    weights are of a published quantised format; InvalidRequestError if it can't read so many tokens."""
    checkpoint = open_checkpoint(path)
    if "quantization_config" in checkpoint.config:
        method = checkpoint.config["quantization_config"].get("quant_method")
        raise UnsupportedError(f"{path} is quantised by {method} already; take the checkpoint that it was made from")
    arranged = replace(checkpoint, tensors=arrange(checkpoint.config, checkpoint.tensors))
    positions = describe(checkpoint.config).max_positions
    if window is not None and window > positions:
        raise InvalidRequestError(f"windows of {window} tokens are longer than the model's {positions} positions", param="window")
    program, made = _by_stored_names(traced(checkpoint, window), checkpoint, arranged)
    gguf, extra, file = None, tuple[str, ...](), gguf_in(path)
    if file is not None:
        gguf = GGUFFile(file)
        stored: dict[str, tuple[TensorFile, str]] = {name: (gguf, at) for name, at in map_names(gguf).items()}
        extra = tuple(name for name in gguf.tensors if name not in {at for _, at in stored.values()})
    else:
        stored = {canonical_name(name): (file, name) for name, file in find_tensors(path).items()}
    files = sorted({file.path for file, _ in stored.values()})
    changed = {f.name: [f.stat().st_size, f.stat().st_mtime_ns] for f in files}
    return Source(
        path, checkpoint, arranged, program, made, stored, gguf, extra, {"source": checkpoint.fingerprint, "files": changed}
    )  # fmt: skip


def traced(checkpoint: Checkpoint, window: int | None = None) -> Program:
    """The Program as the loader reads it, for sequences of up to `window` tokens."""
    config = checkpoint.config
    if count(config, "type_vocab_size", 1) > 1 and config.get("sep_token_id") is None:
        config = {**config, "sep_token_id": Tokenizer.from_data(checkpoint.tokenizer_data()).separator_id}
    return build(config, max_model_len=window)


def _by_stored_names(program: Program, checkpoint: Checkpoint, arranged: Checkpoint) -> tuple[Program, frozenset[str]]:
    """The Program with its constants under the names of stored tensors; and the sources that are no stored tensor."""
    own = {id(make): name for name, make in checkpoint.tensors.items()}
    names = {source: own.get(id(make)) for source, make in arranged.tensors.items()}
    constants = tuple(replace(c, source=names.get(c.source) or c.source) for c in program.constants)
    made = {c.source for c in program.constants if c.array is None and names.get(c.source, "") is None}
    return replace(program, constants=constants), frozenset(made)


def is_gguf(path: Path) -> bool:
    """Whether a path is called as .gguf files are."""
    return path.suffix.lower() == ".gguf"


def gguf_in(path: Path) -> Path | None:
    """The .gguf file that a path is, or that a folder holds instead of safetensors; None: there is none."""
    if path.is_file():
        return path if is_gguf(path) else None
    if any(path.glob("*.safetensors")) or any(path.glob("*.safetensors.index.json")):
        return None
    return next(filter(is_gguf, path.glob("*")), None)


def check_new(output: Path, source: Path) -> None:
    """InvalidRequestError if there is something at `output`."""
    if output.exists():
        raise InvalidRequestError(f"{output} exists; give another output, or remove it", param="output")
    if output.resolve() == source.resolve():
        raise InvalidRequestError("the output can't be the source", param="output")


def float_kind(weight: Weight) -> str:
    """What a changed tensor is written as: its own float type, or float32 where it has none."""
    return weight.format if weight.format in FLOATS else "float32"
