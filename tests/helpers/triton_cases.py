"""Triton kernels under the interpreter: example calls of operators as torch tensors, and their references' answers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton", reason="triton is not installed")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the interpreter wants TRITON_INTERPRET=1 and a process of its own", allow_module_level=True)

import quick_interpreter  # noqa: E402
import triton.language as tl  # noqa: E402

from trivium.ops import OPERATORS  # noqa: E402
from trivium.ops.state import PagedState, kv_int8  # noqa: E402
from trivium_cuda.kernels.rotary import Store  # noqa: E402

quick_interpreter.install()

DTYPES = ("float32", "float16")
"""bfloat16 is wrong in the interpreter itself."""


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def tensor(x: Any, dtype: str = "float32") -> Any:
    """A tensor of an array, floats in `dtype`; None stays None."""
    if x is None:
        return None
    made = torch.from_numpy(np.ascontiguousarray(x))
    return made.to(getattr(torch, dtype)) if made.is_floating_point() else made


def rounded(x: Any, dtype: str) -> Any:
    """What `dtype` keeps of an array's floats, as float32."""
    return x.astype(dtype).astype(np.float32) if isinstance(x, np.ndarray) and x.dtype == np.float32 else x


def cases(name: str, dtype: str) -> Iterator[tuple[tuple[Any, ...], Mapping[str, Any]]]:
    """(arguments rounded to dtype, attributes) of every example of an operator."""
    for case in OPERATORS[name].cases(rng()):
        yield tuple(rounded(a, dtype) for a in case.args), case.attrs


def near(got: Any, want: Any, dtype: str, name: str, factor: float = 1.0) -> None:
    """Within `factor` of the operator's own tolerance."""
    rtol, atol = OPERATORS[name].tolerances[dtype]
    np.testing.assert_allclose(got.to(torch.float32).numpy(), want, rtol=factor * rtol, atol=factor * atol)


def exact(got: Any, want: Any) -> None:
    np.testing.assert_array_equal(got.to(torch.float32).numpy(), want)


def stores_of(state: PagedState, kind: str) -> tuple[Store, Store]:
    """A reference state's keys and values in one of the forms: a float dtype, "int8", "fp8" or "fp8 given"."""
    return store_of(state.k, kind), store_of(state.v, kind)


def store_of(pages: Any, kind: str) -> Store:
    rows = torch.from_numpy(np.ascontiguousarray(pages)).flatten(0, 1).transpose(0, 1).contiguous()
    if kind in DTYPES:
        return Store(rows.to(getattr(torch, kind)))
    scales = rows.abs().amax(dim=-1, keepdim=True) / (127 if kind == "int8" else 448)
    scales = scales.to(torch.bfloat16)
    if kind == "fp8 given":
        fresh = rows.abs().amax(dim=-1) < 100  # not those of pages that nobody owns
        scales = scales[fresh].amax().expand(scales.shape)
    divided = rows / torch.where(scales == 0, torch.inf, scales.float())
    if kind == "int8":
        return Store(divided.round().clamp(-127, 127).to(torch.int8), scales)
    return Store(divided.clamp(-448, 448).to(torch.float8_e4m3fn), scales)


def numbers_of(store: Store, pages: Any) -> Any:
    """What a store holds, in the neutral shape of `pages`."""
    rows = store.numbers.to(torch.float32) * (1 if store.scales is None else store.scales.to(torch.float32))
    return rows.transpose(0, 1).reshape(pages.shape).numpy()


def held(x: Any, kind: str) -> Any:
    """What a KV format keeps of rows x[..., n], by numpy alone."""
    if kind in DTYPES:
        return x.astype(kind).astype(np.float32)
    assert kind == "int8"
    return kv_int8(x)


__all__ = [
    "DTYPES", "OPERATORS", "cases", "exact", "held", "near", "numbers_of", "rng", "rounded", "store_of", "stores_of", "tensor",
    "tl", "torch", "triton",
]  # fmt: skip
