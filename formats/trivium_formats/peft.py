"""LoRA adapters as PEFT saves them: a folder with adapter_config.json and adapter_model.safetensors.

A module's output gains scale * B(A x) with scale = lora_alpha / r, or lora_alpha / sqrt(r) with use_rslora (Kalajdzievski 2023,
"Rank Stabilization"). Only safetensors are read.

Source: the PEFT library's files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from trivium.errors import CheckpointError, InvalidRequestError, UnsupportedError
from trivium.plugin import hookimpl
from trivium.plugin.hooks import AdapterParts, AdapterReader
from trivium.weights.safetensors import SafetensorsFile, parse_json

from trivium_formats.lazy import FLOATS, Floats

if TYPE_CHECKING:
    from trivium.models.lora import Target

MAX_CONFIG = 1 << 20
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",), "bias": ("none",), "modules_to_save": (None, []), "use_dora": (False,), "lora_bias": (False,),
    "use_qalora": (False,), "fan_in_fan_out": (False,), "rank_pattern": ({}, None), "alpha_pattern": ({}, None),
    "layer_replication": (None, []), "trainable_token_indices": (None, []), "target_parameters": (None, []),
    "alora_invocation_tokens": (None, []), "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),
}  # fmt: skip
"""What a configuration may say, where anything else would need more than scale * B(A x) on the base model's own weights."""


def read(folder: Path, targets: Sequence[Target], rank: int, head_dim: int) -> AdapterParts:
    """See hooks.AdapterReader. InvalidRequestError for a rank over the limit, CheckpointError for what is damaged or not for this
    model, UnsupportedError for other kinds of adapters."""
    config = _read_config(folder / "adapter_config.json")
    r, scale = _scale(config, folder, rank)
    file = SafetensorsFile(_regular(folder / "adapter_model.safetensors"))
    _check_tensors(file, targets, r)
    _check_modules(config.get("target_modules"), file)
    parts: dict[tuple[str, tuple[int, int] | None], tuple[Floats, Floats]] = {}
    for target in targets:
        if _tensor(target, "A") in file.tensors:
            a, b = (file.weight(_tensor(target, part), target.module).decode() for part in "AB")
            with np.errstate(over="ignore"):
                b = _in_order(target, b[slice(*(target.rows or (None,)))] * np.float32(scale), head_dim)
            parts[target[:2]] = np.array(a), np.ascontiguousarray(b.T)
    return parts


def _scale(config: Mapping[str, Any], folder: Path, rank: int) -> tuple[int, float]:
    r, alpha, root = cast(tuple[Any, Any, Any], (config.get("r"), config.get("lora_alpha"), config.get("use_rslora", False)))
    counts = type(r) is int and r > 0 and type(alpha) in (int, float) and abs(alpha) < 1e9
    if not counts or type(root) is not bool:
        message = f"{folder}: r {r!r}, lora_alpha {alpha!r} and use_rslora {root!r} must be a count, a number and true or false"
        raise CheckpointError(message)
    if r > rank:
        message = f"{folder} has rank {r}, which is over max_lora_rank {rank}; load the model with a higher one"
        raise InvalidRequestError(message, param="max_lora_rank")
    return r, alpha / (math.sqrt(r) if root else r)


def _check_tensors(file: SafetensorsFile, targets: Sequence[Target], r: int) -> None:
    """Refuses a file that is not made of A float32[r, in] and B float32[out, r] of modules that the model has."""
    shapes: dict[str, tuple[int, int]] = {}
    for target in targets:
        a, b = _tensor(target, "A"), _tensor(target, "B")
        shapes[a], shapes[b] = (r, int(target.a.shape[-1])), (shapes.get(b, (0, r))[0] + int(target.b.shape[-1]), r)
    for name, info in file.tensors.items():
        if name not in shapes:
            kinds = ", ".join(sorted({target.module.rpartition(".")[2] for target in targets}))
            raise UnsupportedError(f"{file.path}: {name!r:.200} is for no layer of this model; {kinds} can have adapters")
        if info.shape != shapes[name] or info.format not in FLOATS:
            raise CheckpointError(f"{file.path}: {name} is {info.format}{list(info.shape)}, not {list(shapes[name])} floats")
        stem, part = name.removesuffix(".weight")[:-1], name.removesuffix(".weight")[-1]
        if f"{stem}{'B' if part == 'A' else 'A'}.weight" not in file.tensors:
            raise CheckpointError(f"{file.path}: {name} stands alone; lora_A and lora_B are both needed")
    if not file.tensors:
        raise CheckpointError(f"{file.path} has no tensors")


def _in_order(target: Target, b: Floats, head_dim: int) -> Floats:
    """B's rows in the order of the checkpoint's: in an interleaved one, pairs that are rotated together lie side by side."""
    if not head_dim or not target.module.endswith(("q_proj", "k_proj")):
        return b
    return b.reshape(-1, 2, head_dim // 2, b.shape[1]).swapaxes(1, 2).reshape(b.shape)


def _tensor(target: Target, part: str) -> str:
    """PEFT's name of a target's A or B."""
    return f"base_model.model.{target.module}.lora_{part}.weight"


def _regular(path: Path) -> Path:
    """`path`, which must be a file; CheckpointError if it isn't."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: PEFT saves an adapter as a folder with its configuration and safetensors")
    return path


def _read_config(path: Path) -> Mapping[str, Any]:
    size = _regular(path).stat().st_size
    if size > MAX_CONFIG:
        raise CheckpointError(f"{path} has {size} bytes; at most {MAX_CONFIG} are read")
    config = parse_json(path.read_bytes(), str(path))
    for name, neutral in _NEUTRAL.items():
        if (value := config.get(name, None if name == "peft_type" else neutral[0])) not in neutral:
            raise UnsupportedError(f"{path}: {name} is {value!r:.80}, and only {neutral[0]!r} can be used", param=name)
    return config


def _check_modules(names: Any, file: SafetensorsFile) -> None:
    """Every module that the configuration lists must be there (a single string is a pattern, which says nothing)."""
    for name in names if isinstance(names, list) else ():
        if not any(tensor.endswith(f".{name}.lora_A.weight") for tensor in file.tensors):
            raise CheckpointError(f"{file.path}: target_modules lists {name!r:.80}, which has no lora_A and lora_B in it")


@hookimpl
def trivium_adapter_format() -> AdapterReader:
    return read
