"""What plugins give that is of another kind or shape than the contract says: blamed on them by name, before it is used."""

from __future__ import annotations

import sys

import pytest
from documented_plugins import distribution
from tiny_checkpoints import make_checkpoint

from trivium import LLM, SamplingParams
from trivium.errors import InvalidRequestError, PluginError

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder on sys.path."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    yield folder
    sys.modules.pop("odd_plugin", None)


def offer(site, kind, name, source):
    """Installs a plugin whose hook returns the function `read` of the source."""
    hook = f"from trivium.plugin import hookimpl\n@hookimpl\ndef trivium_{kind}():\n    return read\n"
    (site / "odd_plugin.py").write_text(source + hook)
    distribution(site, "vendor", {f"trivium.{kind}s": {name: "odd_plugin"}})


@pytest.mark.parametrize("part", ["config", "generation_config", "fingerprint", "tensors", "tokenizer"])
def test_a_checkpoint_of_which_a_part_is_of_another_kind_is_the_plugins_fault(site, tmp_path, part):
    none = "lambda: None" if part == "tokenizer" else "None"
    source = "from dataclasses import replace\nfrom trivium.weights import open_checkpoint\ndef read(path):\n"
    source += f"    return replace(open_checkpoint(path.with_suffix('')), {part}={none})\n"
    offer(site, "checkpoint", "odd", source)
    make_checkpoint(tmp_path / "model", "llama")
    (tmp_path / "model.odd").write_bytes(b"odd")
    with pytest.raises(PluginError, match=rf"^checkpoint 'odd' \(vendor 1\.0\): {part} returned a NoneType"):
        LLM(str(tmp_path / "model.odd"), "reference", progress=False, num_kv_blocks=20)


def test_an_adapter_under_too_long_a_name_is_refused_as_any_that_is_not_there(tmp_path):
    folder = make_checkpoint(tmp_path / "model", "llama")
    refused = pytest.raises(InvalidRequestError, match="is a folder on this machine")
    with LLM(folder, "reference", progress=False, num_kv_blocks=30, enable_lora=True) as llm, refused:
        llm.load_adapter("own", tmp_path / ("x" * 300))


@pytest.mark.parametrize("part", [
    "(np.ones((1, 5)), np.ones((1, 5)))", "(np.ones(64), np.ones(64))", "(np.ones((9, 64)), np.ones((9, 64)))",
    "(np.ones((1, 64)),)",
    "None", "('a', 'b')", "5", "(np.ones((1, 64)), np.array([['x'] * 64]))", "(np.ones((1, 1)), np.ones((1, 64)))",
])  # fmt: skip
def test_parts_of_an_adapter_that_do_not_fit_are_the_plugins_fault_when_it_is_loaded(site, tmp_path, part):
    source = "import numpy as np\ndef read(folder, targets, rank, head_dim):\n"
    source += f"    return {{(t.module, t.rows): {part} for t in targets if t.module.endswith('o_proj')}}\n"
    offer(site, "adapter_format", "odd.npz", source)
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "odd.npz").write_bytes(b"odd")
    model = make_checkpoint(tmp_path / "model", "llama")
    with LLM(str(model), "reference", progress=False, num_kv_blocks=30, enable_lora=True, max_lora_rank=8) as llm:
        with pytest.raises(
            PluginError, match=r"adapter format 'odd\.npz' \(vendor 1\.0\): model\.layers\.0\.self_attn\.o_proj (failed|returned)"
        ):
            llm.load_adapter("odd", tmp_path / "odd")
        assert llm.adapters == () and len(llm.generate([[5, 6]], GREEDY)[0].outputs[0].token_ids) > 0
