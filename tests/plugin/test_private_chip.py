"""A chip with layouts, page sizes and limits of its own: the core adapts to what it declares, and refuses what it lacks by name."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import numpy as np
import private_chip
import pytest
from fake_plugins import install
from tiny_checkpoints import make_checkpoint

from trivium import LLM, SamplingParams
from trivium.conformance import collect_checks, open_lab, run_conformance
from trivium.engine.loader import LoadOptions, plan
from trivium.errors import InvalidRequestError, UnsupportedError
from trivium.plugin import HostFallbackWarning

LONG = [(7 * i) % 250 for i in range(140)]


def greedy(count):
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    path = [str(tmp_path), str(Path(private_chip.__file__).parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    install(tmp_path, "private", "from private_chip import trivium_backend")
    return str(make_checkpoint(tmp_path / "tied", "qwen2"))


def opened(model, backend="private", **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HostFallbackWarning)
        return LLM(model, backend, progress=False, **{"num_kv_blocks": 24, **options})


@pytest.mark.faults
def test_o08_a_parameter_that_the_backend_lacks_is_refused_by_name_and_a_running_stream_goes_on(model):
    with opened(model) as llm:
        alone = llm.generate([[5, 6, 7]], greedy(20))[0].outputs[0].token_ids
        stream = llm.stream([5, 6, 7], greedy(20))
        news = [next(stream)]
        with pytest.raises(UnsupportedError, match="private can't do top_p: its sampler has no sort") as refusal:
            llm.generate([[1, 2]], SamplingParams(top_p=0.5, temperature=1.0))
        assert refusal.value.param == "top_p"
        news += stream
        assert news[-1].finished and [i for output in news for i in output.outputs[0].token_ids] == alone
        assert llm.generate([[1, 2]], SamplingParams(top_p=0.5, temperature=0.0))[0].error is None


@pytest.mark.faults
def test_o52_weights_in_a_private_layout_are_read_back_plain_tied_head_included(model):
    p = plan(model, "private", LoadOptions())
    with opened(model) as llm:
        session = llm.loaded.session
        for constant, weight, resident, exact in p.routes:
            if weight is not None:
                np.testing.assert_array_equal(session.read_weight(session.load(weight, resident.name)), weight.decode())
                assert exact and (resident.name == "tiled") == (len(weight.shape) == 2), constant.source
        assert any(route.resident == "tiled" for route in llm.loaded.routes)


@pytest.mark.faults
def test_o52_the_kit_holds_a_private_layout_to_the_reference(model):
    checks = collect_checks(open_lab("private"), ["operators", "fusions", "formats", "models"])
    rows = [c.run() for c in checks if c.area != "models" or c.name.startswith(("llama,", "qwen2,"))]
    assert [row for row in rows if row.status == "failed"] == []
    assert {row.area for row in rows if row.status == "passed"} == {"operators", "fusions", "formats", "models"}


@pytest.mark.faults
@pytest.mark.parametrize("length", [127, 128, 129])
def test_o53_pages_of_128_tokens_are_the_default_where_there_is_no_other_and_agree_with_16(model, length):
    with opened(model) as llm:
        assert llm.loaded.kv_spec.page_size == 128
        first, again = (llm.generate([LONG[:length]], greedy(6))[0] for _ in range(2))
        assert again.metrics.num_cached_tokens == (length - 1) // 128 * 128
    with opened(model, "reference", block_size=16) as llm:
        want = llm.generate([LONG[:length]], greedy(6))[0].outputs[0].token_ids
    assert first.outputs[0].token_ids == again.outputs[0].token_ids == want


@pytest.mark.faults
def test_o53_a_block_size_that_the_backend_lacks_is_refused_with_those_it_has(model):
    with pytest.raises(InvalidRequestError, match="block_size 16 is not possible on this backend; choose from 128") as refusal:
        opened(model, block_size=16)
    assert refusal.value.param == "block_size"


def test_the_step_s_default_size_follows_the_backend_s_limit_and_more_is_refused(model):
    with opened(model) as llm:
        assert llm.loaded.max_num_batched_tokens == llm.engine.config.max_num_batched_tokens == 64
        assert len(llm.generate([LONG, LONG[3:], LONG[5:]], greedy(3))) == 3
    with pytest.raises(InvalidRequestError, match=r"max_num_batched_tokens 65 is over .*give 64 or less") as refusal:
        opened(model, max_num_batched_tokens=65)
    assert refusal.value.param == "max_num_batched_tokens"


def test_the_kit_judges_within_what_the_backend_declares(model):
    report = run_conformance("private", areas=["rules", "sampler", "pages"])
    assert report.ok
    skipped = {row.detail for row in report.rows if row.status == "skipped"}
    assert "the backend does not declare top_p" in skipped
