"""Prints what the design limits (lines of the core, of files and functions, vendor names) and fails where it is exceeded."""

from __future__ import annotations

import ast
import io
import re
import statistics
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
CORE = ROOT / "core" / "trivium"
OUTSIDE_BUDGET = {"conformance", "cli"}
CORE_LINES, FILE_LINES, FUNCTION_LINES, MEDIAN_FUNCTION = 9_000, 500, 120, 8
VENDORS = re.compile(r"cuda|\bnpu\b|\bascend\b|nvidia|openvino|triton|onnxruntime|torch", re.IGNORECASE)


_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(source: str) -> int:
    """Lines that hold code: blank lines, comments and docstrings (strings that stand alone) don't count, or a budget would
    be an argument against explaining."""
    lines = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or 0) + 1))
    return len(lines)


def functions(files: list[Path]) -> Iterator[tuple[str, int]]:
    """(place, lines of code) of every function; the docstring does not count."""
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = node.body[0]
                doc = (first.end_lineno or 0) - first.lineno + 1 if ast.get_docstring(node, clean=False) is not None else 0
                yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", (node.end_lineno or 0) - node.lineno + 1 - doc


def main() -> int:
    core = [p for p in sorted(CORE.rglob("*.py")) if not OUTSIDE_BUDGET & set(p.relative_to(CORE).parts)]
    everything = sorted(CORE.rglob("*.py")) + sorted((ROOT / "backends").rglob("*.py"))
    lines = {p: len(p.read_text().splitlines()) for p in everything}
    total, full = sum(code_lines(p.read_text()) for p in core), sum(lines[p] for p in core)
    sizes = dict(functions(everything))
    median = statistics.median(sizes.values())
    faults = [f"{p.relative_to(ROOT)} has {n} lines (at most {FILE_LINES})" for p, n in lines.items() if n > FILE_LINES]
    faults += [f"{place} has {n} lines (at most {FUNCTION_LINES})" for place, n in sizes.items() if n > FUNCTION_LINES]
    for path in sorted(CORE.rglob("*.py")):
        named = [line.strip() for line in path.read_text().splitlines() if VENDORS.search(line)]
        faults += [f"{path.relative_to(ROOT)}: vendor name in {line!r}" for line in named]
    if total > CORE_LINES:
        faults.append(f"the core has {total} lines of code (at most {CORE_LINES})")
    if median > MEDIAN_FUNCTION:
        faults.append(f"the median function has {median} lines (at most {MEDIAN_FUNCTION})")
    print(f"core: {total} of {CORE_LINES} lines of code ({full} with docstrings, comments and blank lines)")
    print(f"{len(sizes)} functions, median {median:g} lines, longest {max(sizes.values())}")
    print("\n".join(faults))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
