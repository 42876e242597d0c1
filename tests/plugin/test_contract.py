"""The contract's own promises: its size, and that the core stays neutral."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

from trivium.plugin import contract

CORE = Path(contract.__file__).parents[1]


def required_entries() -> list[str]:
    classes = [c for _, c in inspect.getmembers(contract, inspect.isclass) if c.__module__ == contract.__name__]
    return [f"{c.__name__}.{n}" for c in classes for n in sorted(getattr(c, "__abstractmethods__", ()))]


def test_the_contract_is_one_short_file_with_few_required_entries():
    assert len(Path(contract.__file__).read_text().splitlines()) < 300
    assert 10 <= len(required_entries()) <= 25


def test_an_entry_with_a_default_says_so():
    for cls in (contract.Session, contract.Executable, contract.Step, contract.Backend):
        for name, fn in vars(cls).items():
            if inspect.isfunction(fn) and name not in cls.__abstractmethods__:
                assert (fn.__doc__ or "").startswith("(optional)"), f"{cls.__name__}.{name}"


def test_the_core_names_no_vendor():
    vendors = re.compile(r"cuda|\bnpu\b|\bascend\b|nvidia|openvino|triton|onnxruntime|torch", re.IGNORECASE)
    files = [p for p in CORE.rglob("*.py") if "template" not in p.parts]  # an installed trivium has the plugins' templates there
    hits = [f"{p}: {line}" for p in files for line in p.read_text().splitlines() if vendors.search(line)]
    assert hits == []


def test_importing_trivium_loads_no_device_library_and_no_backend():
    heavy = "('torch', 'trivium_cpu', 'transformers', 'numpy')"
    code = f"import sys, trivium; print([m for m in sys.modules if m.split('.')[0] in {heavy}])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
