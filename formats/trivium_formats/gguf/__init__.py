"""GGUF: a model in one file, of the entry point `gguf` in the group `trivium.checkpoints`. What its tensors and keys mean is said
by the entry points of the group `trivium.gguf_models`, one an architecture."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from trivium.errors import CheckpointError
from trivium.plugin import hookimpl
from trivium.plugin.hooks import CheckpointReader
from trivium.weights.checkpoint import Checkpoint, Json

from trivium_formats.gguf.file import GGUFFile
from trivium_formats.gguf.models import (
    LAYER, OUTER, Change, Config, Floats, GGUFModel, Keys, Writing, map_names, read_config, token_ids,
)  # fmt: skip
from trivium_formats.gguf.tokenizer import describe_vocabulary, read_vocabulary

__all__ = [
    "LAYER", "OUTER", "Change", "Config", "Floats", "GGUFFile", "GGUFModel", "Keys", "Writing", "describe_vocabulary",
    "map_names", "open_file", "read_vocabulary",
]  # fmt: skip


def open_file(path: Path) -> Checkpoint:
    """The model in a .gguf file. CheckpointError for what is damaged, UnsupportedError for what can't be read here."""
    file = GGUFFile(path)
    tensors = {name: partial(file.weight, stored, name) for name, stored in map_names(file).items()}
    return Checkpoint(path, read_config(file), token_ids(file), file.fingerprint, tensors, partial(_tokenizer, file))


def _tokenizer(file: GGUFFile) -> Json:
    metadata = {key: value for key, value in file.metadata.items() if key.startswith("tokenizer.")}
    if "tokenizer.ggml.tokens" not in metadata:
        raise CheckpointError(f"{file.path}: the file has no tokenizer")
    template = metadata.get("tokenizer.chat_template")
    return {"kind": "vocabulary", "read": partial(read_vocabulary, metadata), "chat_template": template}


@hookimpl
def trivium_checkpoint() -> CheckpointReader:
    return open_file
