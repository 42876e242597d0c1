"""LoRA adapters: PEFT folders read and checked, and which of them stand in the model's slots.

Source of the format: the PEFT library's adapter_config.json and adapter_model.safetensors. A module's output gains
scale * B(A x) with scale = lora_alpha / r, or lora_alpha / sqrt(r) with use_rslora (Kalajdzievski 2023, "Rank Stabilization").
"""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from os import PathLike
from pathlib import Path
from typing import Any, cast

import numpy as np

from trivium.errors import CheckpointError, InvalidRequestError, UnsupportedError
from trivium.models.lora import Target
from trivium.ops.batch import F32, I32
from trivium.plugin.contract import Session, Tensor
from trivium.weights.safetensors import SafetensorsFile, parse_json

MAX_CONFIG = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_FLOATS = ("float32", "float16", "bfloat16")
_NOTHING = np.zeros((0, 1), np.float32)
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",), "bias": ("none",), "modules_to_save": (None, []), "use_dora": (False,), "lora_bias": (False,),
    "use_qalora": (False,), "fan_in_fan_out": (False,), "rank_pattern": ({}, None), "alpha_pattern": ({}, None),
    "layer_replication": (None, []), "trainable_token_indices": (None, []), "target_parameters": (None, []),
    "alora_invocation_tokens": (None, []), "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),
}  # fmt: skip
"""What a configuration may say, where anything else would need more than scale * B(A x) on the base model's own weights."""


@dataclass(frozen=True, eq=False)
class Adapter:
    """One adapter in the host's memory. parts: by a target's module and rows, as other devices have other constants for it, a
    float32[r, in] and b float32[r, out], the scale in b. fingerprint: of all numbers; prefix pages are shared only between equal
    ones."""

    parts: Mapping[tuple[str, tuple[int, int] | None], tuple[F32, F32]]
    fingerprint: str


Placed = Mapping[Target, tuple[Tensor, Tensor]]
"""Each target's two constants on the device."""


class Adapters:
    """The adapters of one loaded model, by name, and its slots. More can be known than there are slots: those used least recently
    make way. `head_dim`: of queries and keys whose rows the checkpoint stores in interleaved order, 0: it doesn't."""

    def __init__(self, session: Session, placed: Placed, slots: int, rank: int, head_dim: int = 0) -> None:
        self.slots = slots
        self._session = session
        self._placed = placed
        self._rank = rank
        self._head_dim = head_dim
        self._known: dict[str, Adapter] = {}
        self._free = list(range(slots))
        self._resident: OrderedDict[Adapter, int] = OrderedDict()

    @property
    def names(self) -> tuple[str, ...]:
        """Names that requests may give, in the order of loading."""
        return tuple(self._known)

    def get(self, name: str) -> Adapter:
        """The adapter called `name`; InvalidRequestError if there is none."""
        if not isinstance(name, str) or name not in self._known:
            known = ", ".join(self._known) or "none"
            raise InvalidRequestError(f"no adapter is called {name!r:.80}; loaded are: {known}", param="adapter")
        return self._known[name]

    def add(self, name: str, adapter: Adapter) -> None:
        """Makes an adapter known."""
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            message = f"an adapter's name has letters, digits, '.', '_' and '-', 128 at most, not {name!r:.160}"
            raise InvalidRequestError(message, param="name")
        if name in self._known:
            raise InvalidRequestError(f"an adapter is called {name!r} already; unload it first", param="name")
        self._known[name] = adapter

    def remove(self, name: str, in_use: Collection[Adapter | None]) -> None:
        """Forgets a name. Those who use the adapter keep it; its slot is free, or the next to be given away."""
        adapter = self.get(name)
        del self._known[name]
        if adapter in self._resident:
            self._resident.move_to_end(adapter, last=False)
            if adapter not in in_use:
                self._free.append(self._resident.pop(adapter))

    def place(self, wanted: Sequence[Adapter | None], held: Collection[Adapter | None]) -> I32:
        """int32[len(wanted)], the slot of each, -1 for None; those that have none are written to the device, never over one of
        `held`. Not while a step runs."""
        for adapter in dict.fromkeys(adapter for adapter in wanted if adapter is not None):
            if adapter not in self._resident:
                victim = None if self._free else next(a for a in self._resident if a not in held)
                slot = self._free.pop() if victim is None else self._resident.pop(victim)
                self._free.append(slot)
                self._write(adapter, slot)
                self._resident[adapter] = self._free.pop()
            self._resident.move_to_end(adapter)
        return np.array([-1 if adapter is None else self._resident[adapter] for adapter in wanted], np.int32)

    def read(self, path: str | PathLike[str]) -> Adapter:
        """Reads a PEFT folder. Raises InvalidRequestError (no such folder, or a rank over the limit), CheckpointError (damaged, or
        not for this model) or UnsupportedError; nothing on the device changes."""
        try:
            folder = Path(path)
            found = path != "" and folder.is_dir()
        except (TypeError, ValueError):  # another type; a zero byte
            found = False
        if not found:
            raise InvalidRequestError(f"an adapter is a folder on this machine, which {path!r:.200} is not", param="path")
        config = _read_config(folder / "adapter_config.json")
        r, scale = self._scale(config, folder)
        file = SafetensorsFile(_regular(folder / "adapter_model.safetensors"))
        self._check_tensors(file, r)
        _check_modules(config.get("target_modules"), file)
        parts: dict[tuple[str, tuple[int, int] | None], tuple[F32, F32]] = {}
        digest = blake2b(digest_size=32)
        for target in self._placed:
            if _tensor(target, "A") in file.tensors:
                a, b = (file.weight(_tensor(target, part), target.module).decode() for part in "AB")
                with np.errstate(over="ignore"):
                    b = self._in_order(target, b[slice(*(target.rows or (None,)))] * np.float32(scale))
                parts[target[:2]] = np.array(a), np.ascontiguousarray(b.T)
                if not all(np.isfinite(x).all() for x in parts[target[:2]]):
                    raise CheckpointError(f"{folder}: {target.module} has numbers that are not finite")
                digest.update(target.a.name.encode() + b"".join(x.tobytes() for x in parts[target[:2]]))
        return Adapter(parts, digest.hexdigest())

    def _scale(self, config: Mapping[str, Any], folder: Path) -> tuple[int, float]:
        r, alpha, root = cast(tuple[Any, Any, Any], (config.get("r"), config.get("lora_alpha"), config.get("use_rslora", False)))
        counts = type(r) is int and r > 0 and type(alpha) in (int, float) and abs(alpha) < 1e9
        if not counts or type(root) is not bool:
            message = f"{folder}: r {r!r}, lora_alpha {alpha!r} and use_rslora {root!r} must be a count, a number and true or false"
            raise CheckpointError(message)
        if r > self._rank:
            message = f"{folder} has rank {r}, which is over max_lora_rank {self._rank}; load the model with a higher one"
            raise InvalidRequestError(message, param="max_lora_rank")
        return r, alpha / (math.sqrt(r) if root else r)

    def _check_tensors(self, file: SafetensorsFile, r: int) -> None:
        """Refuses a file that is not made of A float32[r, in] and B float32[out, r] of modules that the model has."""
        shapes: dict[str, tuple[int, int]] = {}
        for target in self._placed:
            a, b = _tensor(target, "A"), _tensor(target, "B")
            shapes[a], shapes[b] = (r, int(target.a.shape[-1])), (shapes.get(b, (0, r))[0] + int(target.b.shape[-1]), r)
        for name, info in file.tensors.items():
            if name not in shapes:
                kinds = ", ".join(sorted({target.module.rpartition(".")[2] for target in self._placed}))
                raise UnsupportedError(f"{file.path}: {name!r:.200} is for no layer of this model; {kinds} can have adapters")
            if info.shape != shapes[name] or info.format not in _FLOATS:
                raise CheckpointError(f"{file.path}: {name} is {info.format}{list(info.shape)}, not {list(shapes[name])} floats")
            stem, part = name.removesuffix(".weight")[:-1], name.removesuffix(".weight")[-1]
            if f"{stem}{'B' if part == 'A' else 'A'}.weight" not in file.tensors:
                raise CheckpointError(f"{file.path}: {name} stands alone; lora_A and lora_B are both needed")
        if not file.tensors:
            raise CheckpointError(f"{file.path} has no tensors")

    def _in_order(self, target: Target, b: F32) -> F32:
        """B's rows in the order of the checkpoint's: in an interleaved one, pairs that are rotated together lie side by side."""
        if not self._head_dim or not target.module.endswith(("q_proj", "k_proj")):
            return b
        return b.reshape(-1, 2, self._head_dim // 2, b.shape[1]).swapaxes(1, 2).reshape(b.shape)

    def _write(self, adapter: Adapter, slot: int) -> None:
        for target, tensors in self._placed.items():
            for value, tensor, array in zip((target.a, target.b), tensors, adapter.parts.get(target[:2], (_NOTHING, _NOTHING))):
                whole = np.zeros(tuple(map(int, value.shape[1:])), np.float32)
                whole[: len(array)] = array
                self._session.assign(tensor, slot, whole)


def enabled(lora: Adapters | None) -> Adapters:
    """A model's adapters; UnsupportedError if it was loaded without."""
    if lora is None:
        raise UnsupportedError("this model was loaded without adapters; load it with enable_lora=True", param="enable_lora")
    return lora


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
