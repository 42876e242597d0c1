"""LoRA adapters as PEFT saves them, and the same models with the adapter merged into their weights; numpy only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from tiny_checkpoints import make_checkpoint, make_weights, read_safetensors, tiny_config, write_safetensors

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EVERY = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")


def adapter_tensors(
    family: str, modules: Any = EVERY, rank: int = 4, seed: int = 1, sizes: dict[str, Any] | None = None
) -> dict[str, np.ndarray]:
    """lora_A and lora_B by PEFT's names, for the projections of `family`'s tiny model that `modules` names. sizes: what the model's
    configuration has otherwise."""
    rng, tensors = np.random.default_rng(seed), {}
    for name, weight in sorted(make_weights(tiny_config(family, **(sizes or {}))).items()):
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in modules:
            out, n_in = weight.shape
            stem = f"base_model.model.{module}"
            tensors[f"{stem}.lora_A.weight"] = (rng.standard_normal((rank, n_in)) * n_in**-0.5).astype(np.float32)
            tensors[f"{stem}.lora_B.weight"] = (rng.standard_normal((out, rank)) * rank**-0.5).astype(np.float32)
    return tensors


def adapter_config(modules: Any = EVERY, rank: int = 4, **fields: Any) -> dict[str, Any]:
    """The configuration with the fields that PEFT 0.18 writes."""
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "../../x", "r": rank, "lora_alpha": 2 * rank,
        "lora_dropout": 0.05, "target_modules": list(modules), "bias": "none", "fan_in_fan_out": False, "modules_to_save": None,
        "init_lora_weights": True, "inference_mode": True, "rank_pattern": {}, "alpha_pattern": {}, "use_dora": False,
        "use_rslora": False, "layers_to_transform": None, "layers_pattern": None, "layer_replication": None, "lora_bias": False,
        **fields,
    }  # fmt: skip


def write_adapter(folder: Path, tensors: dict[str, np.ndarray], config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    write_safetensors(folder / "adapter_model.safetensors", tensors)
    return folder


def make_adapter(
    folder: Path,
    family: str,
    modules: Any = EVERY,
    rank: int = 4,
    seed: int = 1,
    sizes: dict[str, Any] | None = None,
    **config: Any,
) -> Path:
    """Writes one and returns its folder."""
    return write_adapter(folder, adapter_tensors(family, modules, rank, seed, sizes), adapter_config(modules, rank, **config))


def make_merged(folder: Path, family: str, adapter: Path, scale: float) -> Path:
    """The tiny model with weights W + scale * B A."""
    weights, tensors = make_weights(tiny_config(family)), read_safetensors(adapter / "adapter_model.safetensors")
    make_checkpoint(folder, family)
    for name in tensors:
        if name.endswith("lora_A.weight"):
            stem = name.removesuffix(".lora_A.weight")
            delta = tensors[f"{stem}.lora_B.weight"].astype(np.float64) @ tensors[name].astype(np.float64) * scale
            weights[stem.removeprefix("base_model.model.") + ".weight"] += delta.astype(np.float32)
    write_safetensors(folder / "model.safetensors", weights, {"format": "pt"})
    return folder
