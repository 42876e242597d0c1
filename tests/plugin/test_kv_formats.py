"""Which format a backend's pages have when nobody says: the best that goes with the activations."""

from __future__ import annotations

import warnings

import pytest
from fake_plugins import install
from faulty_chips import faulty
from tiny_checkpoints import make_checkpoint

from trivium import LLM
from trivium.errors import InvalidRequestError
from trivium.plugin import HostFallbackWarning

CHOICE = "kv_dtypes=('float16', 'float32'), kv_refused=lambda dtype, kv: {reason} if kv in {refused!r} else None"


@pytest.fixture
def model(tmp_path):
    return str(make_checkpoint(tmp_path / "llama", "llama"))


def kept(model, name, kv_dtype="auto"):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HostFallbackWarning)
        with LLM(model, name, num_kv_blocks=24, kv_dtype=kv_dtype, progress=False) as llm:
            return llm.engine.model.kv_spec.dtype


@pytest.mark.parametrize(("refused", "wanted"), [((), "float16"), (("float16",), "float32")])
def test_auto_is_the_first_that_is_not_refused(tmp_path, monkeypatch, model, refused, wanted):
    monkeypatch.syspath_prepend(str(tmp_path))
    install(tmp_path, "chip", faulty("chip", capabilities=CHOICE.format(refused=refused, reason="'too narrow for ' + dtype")))
    assert kept(model, "chip") == wanted
    assert kept(model, "chip", "float32") == "float32"


def test_where_all_are_refused_the_reasons_are_given(tmp_path, monkeypatch, model):
    monkeypatch.syspath_prepend(str(tmp_path))
    everything = ("float16", "float32")
    install(tmp_path, "chip", faulty("chip", capabilities=CHOICE.format(refused=everything, reason="'no ' + kv")))
    with pytest.raises(InvalidRequestError, match="kv_dtype 'auto': no float16; no float32"):
        kept(model, "chip")
    with pytest.raises(InvalidRequestError, match="kv_dtype 'float32': no float32"):
        kept(model, "chip", "float32")
