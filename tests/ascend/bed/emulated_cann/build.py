"""Builds the shared libraries that the torch-npu wheel expects of CANN: shim.c, jumps into Python for the emulated entry points,
and for every other undefined symbol of the wheel a function that fails with its name."""

from __future__ import annotations

import ctypes as c
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

# The names under which the wheel's libraries were linked or are opened later; libascendcl carries every symbol.
ALIASES = (
    "hccl", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel", "fmk_parser", "ascend_protobuf", "atb", "opapi", "nnopbase",
)  # fmt: skip
SYSTEM = ("libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2")
# Profiling, logging and shutdown: called without device data, and returning 0 says "nothing to do".
HARMLESS = ("Msprof", "HcclSetConfig", "aclAppLog", "_ZN2ge10GEFinalize", "_ZN2ge12GEInitialize")


def run(*command: object) -> str:
    return subprocess.run([str(a) for a in command], capture_output=True, text=True, check=True).stdout


def dynamic_symbols(library: Path, which: str) -> dict[str, str]:
    """symbol -> nm's type letter; `which` is "defined" or "undefined"."""
    lines = (line.split() for line in run("nm", "-D", f"--{which}-only", library).splitlines())
    return {fields[-1].partition("@")[0]: fields[-2] for fields in lines}


def wheel_libraries(torch_npu: Path) -> list[Path]:
    return [*torch_npu.glob("lib/*.so"), *torch_npu.glob("_C*.so"), *(torch_npu / "dynamo/torchair/core").glob("*.so")]


def wanted_symbols(torch_dir: Path, torch_npu: Path) -> set[str]:
    """What the wheel needs and neither torch, the C and C++ libraries nor Python provide."""
    own = wheel_libraries(torch_npu)
    system = (Path(run("gcc", f"-print-file-name={name}").strip()) for name in SYSTEM)
    provided = set[str]().union(*(dynamic_symbols(f, "defined") for f in (*torch_dir.glob("lib/*.so*"), *own, *system)))
    undefined = {s for f in own for s, letter in dynamic_symbols(f, "undefined").items() if letter not in "wv"}
    return {s for s in undefined - provided if not s.startswith(("Py", "_Py"))}


def loud_stubs(names: Iterable[str]) -> str:
    """C source: mangled C++ names are valid C identifiers."""
    lines = ["int emulated_missing(const char *);"]
    for name in sorted(names):
        value = "0" if name.startswith(HARMLESS) else f'emulated_missing("{name}")'
        lines.append(f"long {name}(void) {{ return {value}; }}")
    return "\n".join(lines) + "\n"


def jumps(operators: Sequence[str], functions: Sequence[str]) -> str:
    """x86-64 assembly: each entry point jumps through a table that Python fills. The first slot is phase two of all operators."""
    code = [".bss", ".globl emulated_table", f"emulated_table: .skip {8 * (1 + len(operators) + len(functions))}", ".text"]

    def entry(labels: Sequence[str], slot: int) -> None:
        code.append(f".globl {', '.join(labels)}")
        code.extend(f"{label}:" for label in labels)
        code.extend((" mov emulated_table@GOTPCREL(%rip), %rax", f" jmp *{8 * slot}(%rax)"))

    entry(operators, 0)
    for slot, name in enumerate(operators, 1):
        entry([f"{name}GetWorkspaceSize", f"{name}GetMaxWorkspaceSize"], slot)
    for slot, name in enumerate(functions, 1 + len(operators)):
        entry([name], slot)
    return "\n".join((*code, '.section .note.GNU-stack,"",@progbits', ""))


def build(folder: Path, torch_dir: Path, torch_npu: Path, operators: Sequence[str], functions: Sequence[str]) -> None:
    """Writes libascendcl.so and its aliases into the folder (about a second)."""
    folder.mkdir(parents=True, exist_ok=True)
    flags = ("gcc", "-shared", "-fPIC", "-O1", "-w")
    shim = folder / "shim.o"
    run("gcc", "-c", "-fPIC", "-O1", "-w", Path(__file__).with_name("shim.c"), "-o", shim)
    present = {line.split()[-1] for line in run("nm", "-g", "--defined-only", shim).splitlines()}
    stubs, table, empty = folder / "stubs.c", folder / "jumps.S", folder / "empty.c"
    stubs.write_text(loud_stubs(wanted_symbols(torch_dir, torch_npu) - present - set(functions)))
    table.write_text(jumps(operators, functions))
    empty.write_text("")
    run(*flags, "-Wl,-soname,libascendcl.so", stubs, shim, table, "-o", folder / "libascendcl.so")
    for name in ALIASES:
        link = ("-Wl,--no-as-needed", f"-L{folder}", "-lascendcl", "-o", folder / f"lib{name}.so")
        run(*flags, f"-Wl,-soname,lib{name}.so", empty, *link)


def open_all(folder: Path) -> c.CDLL:
    """Opens the libraries globally; later NEEDED entries and dlopen calls resolve by soname, with no search path."""
    library = c.CDLL(str(folder / "libascendcl.so"), c.RTLD_GLOBAL)
    for name in ALIASES:
        c.CDLL(str(folder / f"lib{name}.so"), c.RTLD_GLOBAL)
    return library
