"""ModelSlim's matrices of 8 bits for Ascend: W8A8, W8A8_DYNAMIC, W8A8_MIX, W8A16, each with a scale an output.

The folder's quant_model_description.json says of what kind each tensor is; "FLOAT" is as in the unquantised model. A matrix of 8
bits is STEM.weight int8[out, in] with STEM.weight_scale and STEM.weight_offset [out, 1]: weight = scale * (number - offset).
Products of the kind W8A8 (W8A8S: with many zeros) round their inputs alike for all tokens, by STEM.input_scale and
STEM.input_offset [1], and are (whole inputs · numbersᵀ + STEM.quant_bias int32[out]) * STEM.deq_scale[out]. deq_scale, the product
of both scales, is float32, or its bits in the lower half of int64; where there is no weight_scale, it and input_scale say it.
quant_bias is -input_offset * the sum of each row of numbers and the module's own bias over deq_scale, which is given as STEM.bias
where no tensor is called that. W8A8_MIX rounds inputs token by token in some steps and alike in others; here as a backend likes.

Source: msModelSlim's description of its output, and how vllm-ascend uses the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
from trivium.errors import CheckpointError, UnsupportedError
from trivium.ops import Weight

from trivium_formats.lazy import FLOATS, Decoded, Floats, Lazy, Parts
from trivium_formats.modules import Config, Hook, Module, Tensors, input_scale, numbers

STATIC = frozenset({"W8A8", "W8A8S"})
KINDS = (*sorted(STATIC), "W8A8_DYNAMIC", "W8A8_MIX", "W8A16")
_PARTS = ("weight", "weight_scale", "weight_offset", "input_scale", "input_offset", "deq_scale", "quant_bias")
_SCALES = ("weight_scale", "deq_scale")


def read(config: Config, tensors: Tensors) -> Tensors:
    """Raises UnsupportedError for other kinds (4 bits, 8-bit floats, rotations, norms with a bias for outliers), CheckpointError
    for tensors that don't fit together."""
    _check_norms(tensors)
    if isinstance(metadata := config.get("metadata"), dict) and metadata.get("quarot"):
        raise UnsupportedError("ModelSlim checkpoints that rotate activations on line (metadata.quarot) can't be read")
    joined = dict(tensors)
    for stem, kind in _matrices(config, tensors):
        names = {part: f"{stem}.{part}" for part in _PARTS}
        module = Module(stem, {part: joined.pop(name) for part, name in names.items() if name in tensors})
        joined[f"{stem}.weight"] = partial(_weight, module, kind)
        if kind in STATIC and f"{stem}.bias" not in tensors:
            joined[f"{stem}.bias"] = partial(_bias, module)
    return joined


def _matrices(config: Config, tensors: Tensors) -> Iterator[tuple[str, str]]:
    """Stem and kind of each matrix of 8 bits."""
    for name in tensors:
        stem, _, last = name.rpartition(".")
        kind = config.get(name, "FLOAT")
        if kind in KINDS and last == "weight":
            yield stem, kind
        elif last == "weight" and kind == "FLOAT":
            if scale := next((f"{stem}.{part}" for part in _SCALES if f"{stem}.{part}" in tensors), None):
                raise CheckpointError(f"there is {scale}, but ModelSlim's description does not say of what kind {name} is")
        elif last == "weight":
            raise UnsupportedError(f"{name} is {kind} in ModelSlim's description; FLOAT and {', '.join(KINDS)} can be read")


def _check_norms(tensors: Tensors) -> None:
    """Norms of a layer that have a bias though the last one has none are RMS norms that were shifted against outliers."""
    shifted = [name for name in tensors if ".layers." in name and name.endswith("norm.bias")]
    if shifted and "model.norm.weight" in tensors and "model.norm.bias" not in tensors:
        raise UnsupportedError(f"{shifted[0]}: RMS norms with a bias against outliers can't be read; quantise without it")


def _weight(module: Module, kind: str) -> Weight:
    codes = module.matrix("weight", ("int8",))
    out, columns = codes.shape
    scale, stored = _row_scales(module, out)
    offset = _rows(module, "weight_offset", out) if "weight_offset" in module.parts else None
    if offset is not None and not _column(offset).any():
        offset = None
    stored = (codes, *stored, *([] if offset is None else [offset]))

    def decode(start: int, stop: int) -> Floats:
        weights = np.array(numbers(codes, start, stop), np.float32)
        if offset is not None:
            weights -= _column(offset)[start:stop]
        weights *= scale()[start:stop]
        return weights

    def parts(start: int, stop: int) -> Parts:
        return {"codes": codes.data[start:stop], "scales": scale()[start:stop], "block": (1, columns)}

    inputs, how = input_scale(module, "input_offset") if kind in STATIC else None, f"modelslim {kind}"
    format = "modelslim" if offset is not None else "w8a16" if kind == "W8A16" else "w8a8"
    made = Decoded((out, columns), format, decode, stored, f"{how} {inputs}", None if offset is not None else parts)
    vars(made).update(inputs=inputs)
    return made


def _row_scales(module: Module, out: int) -> tuple[Callable[[], Floats], tuple[Weight, ...]]:
    """The function that gives the scales of rows, float32[out, 1], and the tensors that it reads."""
    if "weight_scale" in module.parts:
        own = _rows(module, "weight_scale", out)
        return partial(_column, own), (own,)
    product, inputs = _products(module, out), input_scale(module, "input_offset")
    return lambda: (_deq(product) / np.float32(inputs.scale))[:, None], (product, module.need("input_scale"))


def _rows(module: Module, part: str, out: int) -> Weight:
    """A tensor with one number a row."""
    weight = module.need(part, None, FLOATS)
    return weight if weight.shape == (out,) else module.need(part, (out, 1))


def _column(weight: Weight) -> Floats:
    return weight.decode().reshape(-1, 1)


def _products(module: Module, out: int) -> Weight:
    return module.need("deq_scale", (out,), ("int64", "float32"))


def _deq(weight: Weight) -> Floats:
    """deq_scale as float32[out]."""
    if weight.format == "float32":
        return weight.decode()
    return np.asarray((weight.data.reshape(-1) & 0xFFFFFFFF).astype(np.uint32).view(np.float32))


def _bias(module: Module) -> Weight:
    """What quant_bias has beyond the correction for input_offset, float32[out]."""
    codes = module.matrix("weight", ("int8",))
    out = codes.shape[0]
    product, whole = _products(module, out), module.need("quant_bias", (out,), ("int32",))
    offset = input_scale(module, "input_offset").offset

    def make() -> Floats:
        own = np.asarray(whole.data, np.int64) + offset * codes.data.sum(axis=1, dtype=np.int64)
        return np.asarray(own * _deq(product).astype(np.float64), np.float32)

    origins = [w.origin for w in (codes, product, whole)]
    origin = f"modelslim bias {offset} of {' and '.join(origins)}" if all(origins) else ""
    return Lazy("", (out,), "float32", make, lambda data: data, origin, whole.nbytes)


modelslim = Hook(read)
