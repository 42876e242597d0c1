"""A bf16 original to judge roundings by, from a .gguf file of rounded weights where no bf16 file can be had.

Rounded weights lie on the grid of their own format, which flatters it and its kin. Here channels are scaled where the model
computes the same without regard to scales: the inputs of a block's projections against the norm before them, the outputs of `up`
against the inputs of `down`, those of the values against the inputs of attention's output, by factors e^u, u uniform in +-0.3. Then
no block of weights lies on a common grid any more, and all are rounded to bf16. What comes out is the original: it differs from the
source by bf16's rounding alone. The embedding keeps its numbers. For the tensor names of llama and gemma3.

    python benchmarks/off_grid.py smollm2-135m original.gguf
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from trivium.weights import resolve

Array = np.ndarray[Any, np.dtype[np.float32]]
SPREAD = 0.3


def factors(rng: np.random.Generator, size: int) -> Array:
    return np.exp(rng.uniform(-SPREAD, SPREAD, size)).astype(np.float32)


def scale_block(t: dict[str, Array], at: str, heads: int, rng: np.random.Generator) -> None:
    """Scales the channels of one block in place. t: float32 tensors by name, matrices as [outputs, inputs]."""
    for norm, readers in (("attn_norm", ("attn_q", "attn_k", "attn_v")), ("ffn_norm", ("ffn_gate", "ffn_up"))):
        by = factors(rng, t[f"{at}.{norm}.weight"].size)
        t[f"{at}.{norm}.weight"] /= by
        for reader in readers:
            t[f"{at}.{reader}.weight"] *= by
    by = factors(rng, t[f"{at}.ffn_up.weight"].shape[0])
    t[f"{at}.ffn_up.weight"] *= by[:, None]
    t[f"{at}.ffn_down.weight"] /= by
    values, output = t[f"{at}.attn_v.weight"], t[f"{at}.attn_output.weight"]
    width = output.shape[1] // heads
    by = factors(rng, values.shape[0]).reshape(-1, width)
    values *= by.reshape(-1, 1)
    output /= np.repeat(by, heads // len(by), axis=0).reshape(-1)


def move(source: Path, target: Path) -> None:
    """Writes the original."""
    reader, rng = gguf.GGUFReader(source), np.random.default_rng(0)
    arch = reader.fields["general.architecture"].contents()
    heads = int(reader.fields[f"{arch}.attention.head_count"].contents())
    t = {i.name: gguf.quants.dequantize(i.data, i.tensor_type).astype(np.float32) for i in reader.tensors}
    for block in sorted({name.rsplit(".", 2)[0] for name in t if name.startswith("blk.")}):
        scale_block(t, block, heads, rng)
    writer = gguf.GGUFWriter(target, arch)
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name not in ("general.architecture", "general.file_type"):
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    for info in reader.tensors:
        kind = gguf.GGMLQuantizationType.F32 if t[info.name].ndim == 1 else gguf.GGMLQuantizationType.BF16
        writer.add_tensor(info.name, gguf.quants.quantize(t[info.name], kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="A bf16 original that lies on no grid")
    parser.add_argument("source", help="a .gguf file or a name")
    parser.add_argument("target", type=Path, help="the .gguf file to write")
    args = parser.parse_args()
    move(resolve(args.source), args.target)


if __name__ == "__main__":
    main()
