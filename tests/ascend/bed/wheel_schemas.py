"""Operator schemas out of the bytes of a torch-npu library, without loading it.

python tests/ascend/bed/wheel_schemas.py torch_npu-2.14.0-....whl      # what the backend relies on and that wheel has otherwise
"""

from __future__ import annotations

import re
import sys
import zipfile
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

LIBRARY = "torch_npu/lib/libtorch_npu.so"
PRINTABLE = re.compile(rb"[\x20-\x7e]{12,}")
SCHEMA = re.compile(rb"([A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_0-9]+)?)\(.*\) ?-> ?.+")


def installed() -> Path | None:
    """The library of the installed package; None if there is none."""
    spec = find_spec("torch_npu")
    return None if spec is None or spec.origin is None else Path(spec.origin).parents[1] / LIBRARY


@cache
def schemas(library: Path) -> Mapping[str, frozenset[str]]:
    """Name (with the overload after a dot) -> the schemas by which a library or wheel registers it, as torch prints them."""
    if library.suffix == ".whl":
        with zipfile.ZipFile(library) as wheel:
            return texts(wheel.read(LIBRARY))
    return texts(library.read_bytes())


def texts(content: bytes) -> Mapping[str, frozenset[str]]:
    found: dict[str, set[str]] = {}
    for text in PRINTABLE.finditer(content):
        if b"->" in text[0] and (match := SCHEMA.fullmatch(text[0])) and (schema := printed(match[0].decode())):
            found.setdefault(match[1].decode(), set()).add(schema)
    return {name: frozenset(group) for name, group in found.items()}


def printed(schema: str) -> str:
    """As torch prints a schema, without the namespace: quotes and numbers in one form. "" for a text that is none."""
    try:
        return str(torch._C.parse_schema(f"npu::{schema}")).removeprefix("npu::")
    except RuntimeError:
        return ""


def differences(wanted: Mapping[str, str], library: Path) -> Iterator[str]:
    """A text for each operator that the library doesn't have in exactly these words."""
    known = schemas(library)
    for name, schema in wanted.items():
        if printed(schema) not in known.get(name, ()):
            have = "; ".join(sorted(known.get(name, ()))) or "no such operator"
            yield f"{name}\n  wanted: {schema}\n  has:    {have}"


if __name__ == "__main__":
    from trivium_ascend.operators import SCHEMAS

    lines = [line for path in sys.argv[1:] for line in differences(SCHEMAS, Path(path))]
    print("\n".join(lines) or f"{len(SCHEMAS)} operators, no difference")
    sys.exit(bool(lines))
