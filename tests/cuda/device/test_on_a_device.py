"""The cuda backend on a device of its kind: skipped without one. `python -m pytest -m cuda` on the machine that has it."""

from __future__ import annotations

import pytest
from tiny_checkpoints import FAMILIES, make_checkpoint

from trivium import LLM, SamplingParams
from trivium.conformance import collect_checks, open_lab
from trivium.plugin import find_backends

HERE = any(status.name == "cuda" and status.devices for status in find_backends())
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not HERE, reason="the cuda backend sees no device")]

LOAD = {"dtype": "float32", "kv_dtype": "float32", "num_kv_blocks": 96, "block_size": 16, "progress": False, "max_num_seqs": 8}
PROMPTS = [[(7 * i * i + n) % 250 for i in range(n)] for n in (1, 16, 37, 50)]
ASKED = [
    SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=5, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=1.2, seed=6, top_k=30, top_p=0.9, min_p=0.01, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=7, repetition_penalty=1.3, logit_bias={7: 2.0}, max_tokens=24, ignore_eos=True),
]  # fmt: skip


def ids(folder, backend, **options):
    with LLM(folder, backend, **{**LOAD, **options}) as llm:
        found = [[c.token_ids for c in o.outputs] for o in llm.generate(PROMPTS, ASKED)]
        llm.engine.check()
        return found, dict(getattr(llm.loaded.executable, "captured", {}))


@pytest.mark.parametrize("area", ["rules", "operators", "fusions", "formats", "pages", "sampler", "models", "serving"])
def test_the_kit_finds_nothing(area):
    rows = {check.name: check.run() for check in collect_checks(open_lab("cuda"), [area])}
    assert rows and {name: row.detail for name, row in rows.items() if row.status == "failed"} == {}


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_the_reference_s_with_graphs_and_without(tmp_path, family):
    folder = make_checkpoint(tmp_path / family, family)
    wanted, _ = ids(folder, "reference")
    captured, graphs = ids(folder, "cuda", strict=True)
    eager, none = ids(folder, "cuda", strict=True, backend_options={"graph_sizes": ()})
    assert captured == eager == wanted
    assert list(graphs) == [1, 2, 4, 8] and none == {}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_in_sixteen_bits_a_request_s_tokens_are_its_own(tmp_path, dtype):
    folder = make_checkpoint(tmp_path / "llama", "llama")
    options = {"dtype": dtype, "kv_dtype": "auto", "enable_prefix_caching": False, "backend_options": {"batch_invariant": True}}
    together, _ = ids(folder, "cuda", **options)
    alone, _ = ids(folder, "cuda", **options, **{"max_num_seqs": 1})
    assert together == alone
