"""Every operator that the backend calls is registered by the installed torch-npu in exactly the words that the backend relies on.

Needs the package's bytes only: nothing of it is imported or run.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch
from wheel_schemas import differences, installed, schemas

LIBRARY = installed()
if LIBRARY is None:
    pytest.skip("torch-npu is not installed", allow_module_level=True)
operators = pytest.importorskip("trivium_ascend.operators")
SOURCES = sorted(Path(operators.__file__).parent.rglob("*.py"))


def test_the_wheel_is_the_one_that_the_backend_was_written_for():
    try:
        found = version("torch-npu")
    except PackageNotFoundError:
        found = version("torch_npu")
    assert found.startswith("2.13.0")


def test_the_wheel_s_schemas_can_be_read():
    assert len(schemas(LIBRARY)) > 400


@pytest.mark.parametrize("name", operators.SCHEMAS)
def test_an_operator_is_registered_in_exactly_these_words(name):
    assert list(differences({name: operators.SCHEMAS[name]}, LIBRARY)) == []


@pytest.mark.parametrize(
    "changed",
    [
        "npu_rms_norm(Tensor input, Tensor gamma, float epsilon=1e-05) -> (Tensor, Tensor)",
        "npu_rms_norm(Tensor input, Tensor gamma, float eps=1e-06) -> (Tensor, Tensor)",
        "npu_rms_norm(Tensor input, Tensor gamma, float epsilon=1e-06) -> Tensor",
    ],
)
def test_a_schema_that_differs_in_a_default_a_name_or_a_result_is_found(changed):
    [line] = differences({"npu_rms_norm": changed}, LIBRARY)
    assert "has:    npu_rms_norm(Tensor input, Tensor gamma, float epsilon=9.9999999999999995e-07)" in line


def test_an_operator_that_is_gone_is_found():
    [line] = differences({"npu_rms_normal": "npu_rms_normal(Tensor x) -> Tensor"}, LIBRARY)
    assert "no such operator" in line


def dotted(node: ast.expr) -> str:
    """a.b.c of an attribute expression; "" for any other."""
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return inner and f"{inner}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def called(source: Path) -> Iterator[tuple[str, ast.Call]]:
    """Calls of torch-npu's operators in a file, by the operator's name."""
    for node in ast.walk(ast.parse(source.read_text())):
        name = dotted(node.func) if isinstance(node, ast.Call) else ""
        for prefix in ("npu.", "torch.ops.npu.", "torch_npu."):
            rest = name.removeprefix(prefix)
            if name.startswith(prefix) and "npu_" in rest.partition(".")[0]:
                yield rest, node  # type: ignore[misc]


CALLS = [(source.name, name, call) for source in SOURCES for name, call in called(source)]


def test_the_backend_s_calls_are_found():
    assert {"npu_rms_norm", "npu_fused_infer_attention_score_v2"} <= {name for _, name, _ in CALLS}


@pytest.mark.parametrize(("source", "name", "call"), [pytest.param(*c, id=f"{c[0]}:{c[2].lineno}-{c[1]}") for c in CALLS])
def test_a_call_names_a_listed_operator_and_its_arguments(source, name, call):
    assert name in operators.SCHEMAS, f"{source}:{call.lineno} calls {name}, which operators.py doesn't list"
    schema = torch._C.parse_schema("npu::" + operators.SCHEMAS[name])
    names = [a.name for a in schema.arguments]
    assert {k.arg for k in call.keywords if k.arg} <= set(names)
    starred = any(isinstance(a, ast.Starred) for a in call.args)
    assert starred or len(call.args) <= sum(not a.kwarg_only for a in schema.arguments)


def test_what_is_listed_is_called_or_asked_for():
    """A name that nothing uses would be a check of nothing."""
    text = "\n".join(source.read_text() for source in SOURCES if source.name != "operators.py")
    unused = [name for name in operators.SCHEMAS if name.partition(".")[0] not in text]
    assert unused == []


def test_what_the_bed_emulates_is_what_the_wheel_calls():
    import emulated_cann.operators  # noqa: F401
    from emulated_cann.registry import OPERATORS

    content = LIBRARY.read_bytes()
    assert [name for name in OPERATORS if name.encode() + b"\0" not in content] == []
