"""Tiny checkpoints in published quantised formats, beside the float32 model that their numbers stand for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from installed_backends import exact
from tiny_checkpoints import make_checkpoint, make_weights, tiny_config, write_safetensors
from trivium import LLM, SamplingParams
from trivium.weights import Checkpoint, open_checkpoint
from weight_files import safetensors_bytes

Store = Callable[[str, np.ndarray, np.random.Generator], "tuple[Mapping[str, Any], np.ndarray]"]
"""(stem of a projection, its weights, randomness) -> its tensors by the part of the name after the stem, each an array or (bit
patterns, safetensors dtype), and the float32 weights that they stand for."""


def is_projection(name: str) -> bool:
    return name.endswith("_proj.weight")


def quantised_pair(
    folder: Path, quantisation: Mapping[str, Any], store: Store, family: str = "llama", **sizes: Any
) -> tuple[Path, Path, dict[str, np.ndarray]]:
    """A checkpoint whose projections are stored by `store`, the float32 checkpoint of the same numbers, and these by name."""
    quantised = make_checkpoint(folder / "quantised", family, **sizes, quantization_config=dict(quantisation))
    plain = make_checkpoint(folder / "plain", family, **sizes)
    rng, stored, dtypes = np.random.default_rng(7), {}, {}
    meant = make_weights(tiny_config(family, **sizes))
    for name, array in list(meant.items()):
        stem = name.removesuffix(".weight")
        parts, meant[name] = store(stem, array, rng) if is_projection(name) else ({"weight": array}, array)
        for part, tensor in parts.items():
            if isinstance(tensor, tuple):
                tensor, dtypes[f"{stem}.{part}"] = tensor
            stored[f"{stem}.{part}"] = np.ascontiguousarray(tensor)
    (quantised / "model.safetensors").write_bytes(safetensors_bytes(stored, dtypes=dtypes))
    write_safetensors(plain / "model.safetensors", meant)
    return quantised, plain, meant


IN_PARTS = ("awq", "gptq_4", "w4a16", "w8a16", "w8a8", "fp8", "w8a8_fp8")


def check_parts(weight: Any, array: np.ndarray) -> None:
    """What a joined weight says it is stored as has the numbers of `array`; those of 4 bits also by rows."""
    parts = weight.parts()
    assert (parts is not None) == (weight.format in IN_PARTS) == weight.in_parts
    if parts is not None and "zeros" in parts:
        np.testing.assert_array_equal(_numbers_of_groups(parts), array)
        np.testing.assert_array_equal(_numbers_of_groups(weight.slice_rows(3, 17).slice_rows(2, 9).parts()), array[5:12])
    elif parts is not None:
        down, across = parts["block"]
        meant = np.empty_like(array)
        for row, column in np.ndindex(array.shape):
            bits = int(parts["codes"][row, column])
            if parts["codes"].dtype == np.int8:
                meant[row, column] = np.float32(bits) * parts["scales"][row // down, column // across]
                continue
            exponent, fraction = bits >> 3 & 15, bits & 7
            size = (8 + fraction) * 2.0 ** (exponent - 10) if exponent else fraction * 2.0**-9
            meant[row, column] = np.float32(-size if bits >> 7 else size) * parts["scales"][row // down, column // across]
        np.testing.assert_array_equal(meant, array)


def _numbers_of_groups(parts: Mapping[str, Any]) -> np.ndarray:
    codes, scales, zeros = (np.asarray(parts[name]) for name in ("codes", "scales", "zeros"))
    size = codes.shape[1] // scales.shape[1]
    whole = codes.astype(np.float32) - zeros.astype(np.float32).repeat(size, axis=1)
    numbers = whole * scales.repeat(size, axis=1)
    found = np.empty_like(numbers)
    found[:, slice(None) if parts["order"] is None else parts["order"]] = numbers
    return found


def check_numbers(folder: Path, meant: Mapping[str, np.ndarray], format: str) -> Checkpoint:
    """Every tensor of the checkpoint is `meant`, bit for bit, whole and by rows; projections are of `format`, and opening reads
    none of their numbers."""
    checkpoint = open_checkpoint(folder)
    for name, array in meant.items():
        weight = checkpoint.tensor(name)
        assert weight.shape == array.shape
        np.testing.assert_array_equal(weight.decode(), array, err_msg=name)
        if is_projection(name):
            assert (weight.format, bool(weight.origin)) == (format, True)
            check_parts(weight, array)
            for start, stop in ((0, 1), (5, 19), (3, array.shape[0])):
                part = weight.slice_rows(start, stop)
                np.testing.assert_array_equal(part.decode(), array[start:stop], err_msg=name)
                np.testing.assert_array_equal(part.slice_rows(0, 1).decode(), array[start : start + 1], err_msg=name)
                assert part.nbytes < weight.nbytes or part.shape == weight.shape
    return checkpoint


def rewrite(folder: Path, change: Callable[[dict[str, Any], dict[str, np.ndarray]], None]) -> Path:
    """The checkpoint after `change(config, tensors of one projection)`, which get no plainer name than in the file."""
    config = json.loads((folder / "config.json").read_text())
    data = (folder / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    kinds = {"I32": "<i4", "I64": "<i8", "F16": "<f2", "F32": "<f4", "U8": "u1", "I8": "i1", "F8_E4M3": "u1", "BF16": "<u2"}
    entries = {n: (e["dtype"], e["shape"], e["data_offsets"]) for n, e in header.items() if n != "__metadata__"}
    tensors = {n: np.frombuffer(body[a:b], kinds[d]).reshape(s).copy() for n, (d, s, (a, b)) in entries.items()}
    change(config, tensors)
    dtypes = {n: entries[n][0] for n in tensors if n in entries and tensors[n].dtype == kinds[entries[n][0]]}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors, dtypes=dtypes))
    return folder


def answers(folder: Path, backend: str) -> list[Any]:
    """Greedy tokens and the best logprobs of prompt and answer, computed in float32."""
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=4, prompt_logprobs=2)
    prompts = [[(31 * i + 7 * n) % 250 for i in range(n)] for n in (17, 3)]
    with LLM(str(folder), backend, progress=False, num_kv_blocks=40, **exact(backend)) as llm:
        return [
            (list(o.outputs[0].token_ids), o.outputs[0].logprobs, o.prompt_logprobs) for o in llm.generate(prompts, params)
        ]  # fmt: skip
