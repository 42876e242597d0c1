"""bitsandbytes in 4 bits (nf4, fp4): codes of a table of 16 numbers in blocks with a scale each, which may be rounded themselves.

STEM.weight uint8[numbers / 2, 1]: the matrix' codes row after row, the first of a byte in its high half. STEM.weight.quant_map
float32[16]. STEM.weight.quant_state.bitsandbytes__nf4 (or __fp4): JSON as uint8, of which `shape` and `blocksize` are used.
STEM.weight.absmax float32[blocks]; or uint8[blocks], codes of nested_quant_map float32[256] in blocks of `nested_blocksize` with a
nested_absmax float32 each, to which `nested_offset` is added. A number is its table's entry times absmax, in float32; what
bitsandbytes then rounds to the model's dtype is not rounded here.

Source: the package bitsandbytes (Dettmers et al. 2023, "QLoRA", for the method).
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from trivium.errors import CheckpointError, UnsupportedError
from trivium.ops import Weight

from trivium_formats.lazy import Decoded, Floats
from trivium_formats.modules import Config, Hook, Module, Tensors, choice, join

_STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")
_OTHERS = ("weight", "weight.absmax", "weight.nested_absmax", "weight.nested_quant_map", "weight.quant_map")


def read(config: Config, tensors: Tensors) -> Tensors:
    """Raises UnsupportedError for weights in 8 bits, CheckpointError for tensors that don't fit together."""
    choice(config, "load_in_8bit", (False, None))
    if any(name.endswith(".SCB") for name in tensors):
        raise UnsupportedError(
            "bitsandbytes checkpoints in 8 bits (with tensors called SCB) can't be read; with nf4 and fp4 they can"
        )
    for state in _STATES:
        tensors = join(tensors, state, _OTHERS, _weight)
    return tensors


def _weight(module: Module) -> Weight:
    state = _state(module)
    out, size = state["shape"]
    block, count = state["blocksize"], out * size
    codes, table = module.need("weight", None, ("uint8",)), module.need("weight.quant_map", (16,), ("float32",))
    blocks = -(-count // block)
    absmax = module.need("weight.absmax", (blocks,), ("float32", "uint8"))
    stored = [codes, table, absmax]
    if codes.data.size != -(-count // 2):
        raise CheckpointError(f"{module.stem}.weight has {codes.data.size} bytes, too many or few for {out} x {size} numbers")
    if nested := absmax.format == "uint8":
        groups = -(-blocks // state["nested_blocksize"])
        stored += [module.need("weight.nested_quant_map", (256,), ("float32",))]
        stored += [module.need("weight.nested_absmax", (groups,), ("float32",))]

    def scales(first: int, last: int) -> Floats:
        if not nested:
            return absmax.decoder(absmax.data[first:last])
        outer = stored[4].data[np.arange(first, last) // state["nested_blocksize"]]
        return np.asarray(stored[3].data[absmax.data[first:last]] * outer + np.float32(state["nested_offset"]), np.float32)

    def decode(start: int, stop: int) -> Floats:
        at, end = start * size, stop * size
        packed = codes.data.reshape(-1)[at // 2 : -(-end // 2)]
        entries = np.stack([packed >> 4, packed & 15], axis=-1).reshape(-1)[at % 2 :][: end - at]
        first = at // block
        of = np.arange(at, end) // block - first
        return np.asarray(table.data[entries] * scales(first, -(-end // block))[of], np.float32).reshape(stop - start, size)

    return Decoded((out, size), "bitsandbytes", decode, tuple(stored), f"bitsandbytes {sorted(state.items())}")


def _state(module: Module) -> dict[str, Any]:
    """The numbers of quant_state that decoding needs."""
    part = next(part for part in _STATES if part in module.parts)
    try:
        state = json.loads(module.need(part, None, ("uint8",)).data.tobytes())
        shape, nested = state["shape"], state.get("nested_blocksize", 1)
        sizes = [*shape, state["blocksize"], nested]
        offset = float(state.get("nested_offset", 0.0))
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise CheckpointError(f"{module.stem}.{part} is no quant_state: {e}") from None
    if len(shape) != 2 or not all(type(n) is int and n > 0 for n in sizes):
        raise CheckpointError(f"{module.stem}.{part} says shape {shape}, blocks of {sizes[2:]}; they must be numbers from 1")
    return {"shape": tuple(shape), "blocksize": state["blocksize"], "nested_blocksize": nested, "nested_offset": offset}


bitsandbytes = Hook(read)
