"""Tiny ModelSlim folders, written number by number as the tool's description of its output says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from quantised_files import is_projection
from tiny_checkpoints import make_checkpoint, make_weights, tiny_config, write_safetensors
from weight_files import safetensors_bytes

DESCRIPTION = "quant_model_description.json"
Stored = dict[str, Any]


def stored_matrix(kind: str, array: np.ndarray, bias: np.ndarray | None, rng: np.random.Generator, **how: Any) -> Stored:
    """The tensors of one matrix of 8 bits, each number by itself."""
    out, columns = array.shape
    whole, scale = np.zeros((out, columns), np.int8), (np.abs(array).max(axis=1) / 127).astype(np.float32)
    offsets = rng.integers(-3, 4, out).astype(np.float32) if how.get("asymmetric") else np.zeros(out, np.float32)
    for i in range(out):
        for j in range(columns):
            whole[i, j] = min(max(round(float(array[i, j] / scale[i])) + int(offsets[i]), -128), 127)
    stored: Stored = {"weight": whole, "weight_scale": scale[:, None], "weight_offset": offsets[:, None]}
    if kind in ("W8A8", "W8A8S", "W8A8_MIX"):
        step, shift = np.float32(how.get("step", 0.03)), how.get("shift", 5)
        product = (step * scale).astype(np.float32)
        own = [0.0 if bias is None else float(bias[i]) for i in range(out)]
        sums = [sum(int(n) for n in row) for row in whole]
        stored["quant_bias"] = np.array([round(own[i] / float(product[i])) - shift * sums[i] for i in range(out)], np.int32)
        stored["input_scale"], stored["input_offset"] = np.array([step]), np.array([shift], np.float32)
        stored["deq_scale"] = product.view(np.int32).astype(np.int64) if how.get("half") else product
    if how.get("only_products"):
        del stored["weight_scale"], stored["weight_offset"]
    return stored


def meant_by(stored: Stored) -> np.ndarray:
    """What a matrix' tensors stand for, row by row."""
    whole = stored["weight"].astype(np.float32)
    if "weight_scale" in stored:
        return np.stack([s * (row - o) for row, s, o in zip(whole, stored["weight_scale"][:, 0], stored["weight_offset"][:, 0])])
    product = stored["deq_scale"]
    product = product.astype(np.int32).view(np.float32) if product.dtype == np.int64 else product
    return np.stack([row * (p / stored["input_scale"][0]) for row, p in zip(whole, product)])


def meant_bias(stored: Stored) -> np.ndarray:
    """The bias that is left in quant_bias."""
    product = stored["deq_scale"]
    product = product.astype(np.int32).view(np.float32) if product.dtype == np.int64 else product
    shift, rows = int(stored["input_offset"][0]), stored["weight"].tolist()
    return np.array([(int(q) + shift * sum(row)) * float(p) for q, row, p in zip(stored["quant_bias"], rows, product)], np.float32)


def modelslim_pair(folder: Path, kind: str, family: str = "llama", **how: Any) -> tuple[Path, Path, dict[str, np.ndarray], Any]:
    """A ModelSlim folder, the float32 checkpoint of the same numbers, these by name, and the stored tensors of each matrix. how:
    "sizes" of the model, "steps": input scales by the module's name, and what stored_matrix takes."""
    sizes = how.pop("sizes", {})
    quantised, plain = make_checkpoint(folder / "quantised", family, **sizes), make_checkpoint(folder / "plain", family, **sizes)
    rng, tensors, matrices, description = np.random.default_rng(7), {}, {}, {"model_quant_type": kind, "version": "1.0.0"}
    meant = make_weights(tiny_config(family, **sizes))
    for name in [n for n in meant if is_projection(n)]:
        stem = name.removesuffix(".weight")
        bias = meant.get(f"{stem}.bias")
        own = {**how, "step": how["steps"][stem.rpartition(".")[2]]} if "steps" in how else how
        matrices[stem] = stored_matrix(kind, meant[name], bias, rng, **own)
        meant[name] = meant_by(matrices[stem])
        if bias is not None and "quant_bias" in matrices[stem] and not how.get("keep_bias"):
            meant[f"{stem}.bias"] = meant_bias(matrices[stem])
        for part, tensor in matrices[stem].items():
            tensors[f"{stem}.{part}"], description[f"{stem}.{part}"] = tensor, kind
    hidden = {f"{stem}.bias" for stem, parts in matrices.items() if "quant_bias" in parts and not how.get("keep_bias")}
    for name in meant:
        if name.removesuffix(".weight") not in matrices and name not in hidden:
            tensors[name], description[name] = meant[name], "FLOAT"
    (quantised / "model.safetensors").unlink()
    (quantised / "quant_model_weight.safetensors").write_bytes(safetensors_bytes(tensors))
    (quantised / DESCRIPTION).write_text(json.dumps({**description, "metadata": {}, "optional": {}}))
    write_safetensors(plain / "model.safetensors", meant)
    return quantised, plain, meant, matrices
