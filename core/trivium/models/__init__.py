"""Model families: a checkpoint's configuration -> a Program over the operator set. No file here knows a backend.

The families of this package have no privilege: those of plugins (see plugin/hooks.py) are built from the same names, `__all__`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from trivium.errors import CheckpointError, UnsupportedError
from trivium.extensions import blame, find, installed
from trivium.models import llama
from trivium.models.config import ModelInfo, RawConfig, count, flag, flatten, number, read_info, table
from trivium.models.decoder import Decoder
from trivium.models.media import Vision
from trivium.ops import Program
from trivium.weights.checkpoint import Tensors

__all__ = [
    "ARCHITECTURES", "Decoder", "Family", "ModelInfo", "RawConfig", "Vision", "arrange", "build", "count", "describe", "flag",
    "number", "read_info", "sight", "table",
]  # fmt: skip


class Family(NamedTuple):
    """`build(info, max_model_len)` traces the Program; `defaults`: what configuration files of the family may leave out;
    `read(architecture, configuration with defaults)`: the checked sizes, for a family that writes them under other keys;
    `arrange(configuration, tensors)`: the tensors as the Program names them, for a family whose checkpoints cut them otherwise;
    `vision(configuration, the checkpoint's folder)`: how it sees, None if it does not; `draft(info, max_model_len)`: as `build`,
    the Program of the head for multi-token prediction, see decoder.HIDDEN."""

    build: Callable[[ModelInfo, int | None], Program]
    defaults: RawConfig
    read: Callable[[str, RawConfig], ModelInfo] = read_info
    arrange: Callable[[RawConfig, Tensors], Tensors] = lambda config, tensors: tensors
    vision: Callable[[RawConfig, Path], Vision] | None = None
    draft: Callable[[ModelInfo, int | None], Program] | None = None


ARCHITECTURES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(llama.build_llama, llama.LLAMA_DEFAULTS),
    "Qwen2ForCausalLM": Family(llama.build_qwen2, llama.QWEN2_DEFAULTS),
    "Qwen3ForCausalLM": Family(llama.build_qwen3, llama.QWEN3_DEFAULTS),
}


def describe(config: RawConfig) -> ModelInfo:
    """What the configuration says about the model, checked.

    Raises UnsupportedError for an unknown architecture (with the nearest known one) and CheckpointError, which names the key,
    for a configuration that can't be true.
    """
    architecture, family = _family(config)
    return family.read(architecture, flatten(config, family.defaults))


def build(config: RawConfig, *, max_model_len: int | None = None, draft: bool = False) -> Program:
    """The Program of the model: output "logits"[rows, vocab_size] for the rows in the input "sample_rows", and "hidden"[pooled,
    hidden_size], what the output projection reads, for those in "pool_rows".

    `max_model_len`: the longest context that will be used, in tokens (default: what the model allows); frequency tables that
    depend on the length (LongRoPE, dynamic) are chosen by it. `draft`: the Program of its head for multi-token prediction, whose
    token t goes with the hidden state that the model made of the token before. Raises as `describe`.
    """
    name, family = _family(config)
    trace = family.draft if draft else family.build
    if trace is None:
        raise UnsupportedError(f"{name} has no head for multi-token prediction, or none that is supported", param="speculative")
    return trace(describe(config), max_model_len)


def arrange(config: RawConfig, tensors: Tensors) -> Tensors:
    """The checkpoint's tensors by the names of the Program, each made when it is called. Raises as `describe`."""
    return _family(config)[1].arrange(config, tensors)


def sight(config: RawConfig, folder: Path) -> Vision | None:
    """How the model sees; None if it does not. Raises as `describe`, and CheckpointError for what its image processor lacks."""
    make = _family(config)[1].vision
    return None if make is None else make(config, folder)


def _family(config: RawConfig) -> tuple[str, Family]:
    names = config.get("architectures")
    if not isinstance(names, list | tuple) or not names or not isinstance(names[0], str):
        raise CheckpointError(f"the configuration's 'architectures' must be a list of names, not {names!r}", param="architectures")
    if names[0] in ARCHITECTURES:
        return names[0], ARCHITECTURES[names[0]]
    family, what = find("model", names[0], Family)
    if family is not None:
        optional = (family.vision, family.draft)
        calls = [call and blame(what)(call) for call in (family.build, family.read, family.arrange, *optional)]
        return names[0], Family(calls[0], family.defaults, *calls[1:])
    import difflib

    known = [*ARCHITECTURES, *installed("model")]
    near = difflib.get_close_matches(names[0], known, 1, 0.75)
    hint = f"; did you mean {near[0]}?" if near else "."
    raise UnsupportedError(f"architecture {names[0]!r} is not supported{hint} Supported are {', '.join(known)}",
                           param="architectures")  # fmt: skip
