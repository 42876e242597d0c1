"""The launches that a launcher makes, recorded on tensors without memory and compiled ahead of time for chips that aren't there."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton", reason="triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels can't be compiled in the interpreter's process", allow_module_level=True)

import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from trivium_cuda.kernels import common  # noqa: E402

CHIPS = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""Shared memory of a block in KiB (CUDA C++ Programming Guide, "Technical specifications per compute capability")."""

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
MATRIX = re.compile(r"wgmma\.mma_async|tcgen05\.mma|mma\.sync\.aligned")

_NAMES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int8: "i8", torch.uint8: "u8", torch.int32: "i32",
    torch.int64: "i64", torch.uint64: "u64", torch.uint32: "u32", torch.bool: "i1", torch.float8_e4m3fn: "fp8e4nv",
}  # fmt: skip


class Launch(NamedTuple):
    """One kernel with the arguments of one launch."""

    kernel: Any
    args: dict[str, Any]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.kernel.fn.__name__)


class Built(NamedTuple):
    """What the compiler made of a launch."""

    name: str
    ptx: str
    shared: int
    registers: int
    spilled: int

    @property
    def matrix(self) -> set[str]:
        """The kinds of matrix instructions in it."""
        return set(MATRIX.findall(self.ptx))


@contextmanager
def recorded(capability: int) -> Iterator[list[Launch]]:
    """Launches are noted, not made, and laid out for a chip."""
    found: list[Launch] = []
    keys = {"num_warps", "num_stages", "enable_fp_fusion", "num_ctas", "maxnreg"}

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        options = {k: kwargs.pop(k) for k in keys & kwargs.keys()}
        found.append(Launch(self, dict(zip(self.arg_names, args)) | kwargs, options))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", run)
        patch.setattr(common, "HOST", capability)
        yield found


def signature(launch: Launch) -> tuple[dict[str, str], dict[str, Any], dict[Any, Any]]:
    """(types, constants, divisibility) as a launch would specialise them: tensors lie at multiples of 16 bytes."""
    types, constants, attrs = {}, {}, {}
    for i, parameter in enumerate(launch.kernel.params):
        value = launch.args[parameter.name]
        if parameter.is_constexpr or (type(value) is int and value == 1):
            types[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        if isinstance(value, torch.Tensor):
            types[parameter.name] = "*" + _NAMES[value.dtype]
        else:
            assert isinstance(value, (int, float)) and not isinstance(value, bool), (parameter.name, value)
            types[parameter.name] = "fp32" if isinstance(value, float) else "i32" if abs(value) < 2**31 else "i64"
        if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
            attrs[(i,)] = [["tt.divisibility", 16]]
    return types, constants, attrs


def build(launch: Launch, capability: int) -> Built:
    """Compiles a launch for a chip and reads what it takes."""
    types, constants, attrs = signature(launch)
    source = ASTSource(launch.kernel, types, constants, attrs)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch.options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        shown = subprocess.run([TOOLS / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{field}:(\d+)", shown).group(1)) for field in ("REG", "STACK"))
    spilled = spills(made.asm["ptx"], capability, launch) if stack else 0
    return Built(launch.name, made.asm["ptx"], made.metadata.shared, registers, spilled)


def spills(ptx: str, capability: int, launch: Launch) -> int:
    """Bytes that the assembler stores for want of registers. A stack alone says little: the sine of a large angle needs a table."""
    chip = re.search(r"\.target (\w+)", ptx).group(1)
    fusion = ["-fmad=false"] if launch.options.get("enable_fp_fusion") is False else []
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        tool = TOOLS / ("ptxas-blackwell" if capability >= 100 else "ptxas")
        asked = [tool, "-v", *fusion, f"--gpu-name={chip}", file.name, "-o", "/dev/null"]
        said = subprocess.run(asked, capture_output=True, text=True, check=True).stderr
    return sum(int(found) for found in re.findall(r"(\d+) bytes spill stores", said))


def meta(*shape: int, dtype: Any = torch.bfloat16) -> Any:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def builds(call: Callable[[], Any], capability: int) -> list[Built]:
    """Every launch of a call, compiled; each must keep its numbers in registers and fit the chip."""
    with recorded(capability) as found:
        call()
    assert found
    made = [build(launch, capability) for launch in found]
    for b in made:
        assert b.spilled == 0, f"{b.name} spills {b.spilled} bytes with {b.registers} registers"
        assert b.shared <= CHIPS[capability] * 1024, f"{b.name}: {b.shared} bytes of shared memory"
    return made


__all__ = ["CHIPS", "Built", "Launch", "build", "builds", "meta", "recorded", "tl", "torch"]
