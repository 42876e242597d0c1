"""`quantize=`: which part of a model becomes resident in which format, with tied and untied tables, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_checkpoints import make_checkpoint
from trivium import LLM, SamplingParams
from trivium.conformance import kit
from trivium.engine.loader import LoadOptions, plan
from trivium.errors import InvalidRequestError
from trivium.weights import open_checkpoint
from trivium_cpu.formats import FORMATS
from trivium_cpu.plugin import TIERS

native = pytest.importorskip("trivium_cpu._native")

HEAD, TABLE, LINEAR = "lm_head.weight", "model.embed_tokens.weight", "model.layers.0.mlp.down_proj.weight"


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Rounded weights are kept in a folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("quantize")
    return {tied: make_checkpoint(root / f"tied-{tied}", "llama", tie_word_embeddings=tied) for tied in (False, True)}


def resident(folder, quantize, backend="cpu"):
    """(head, table, a projection): resident formats."""
    routes = {c.value.name: f.name for c, _, f, _ in plan(str(folder), backend, LoadOptions(quantize=quantize)).routes}
    return tuple(routes[name] for name in (HEAD, TABLE, LINEAR))


@pytest.mark.parametrize(
    ("quantize", "untied", "tied"),
    [
        (None, ("float32", "float32", "float32"), ("float32", "float32", "float32")),
        ("int4", ("int8", "float32", "int4"), ("int8", "int8", "int4")),
        ("linear=int8_channel", ("int8_channel", "float32", "int8_channel"), ("int8_channel", "int8_channel", "int8_channel")),
        ("int4,lm_head=int4_asym", ("int4_asym", "float32", "int4"), ("int4_asym", "int4_asym", "int4")),
        ("int4_g64, embedding=int4", ("int8", "int4", "int4_g64"), ("int8", "int4", "int4_g64")),
        ("lm_head=int8,embedding=auto", ("int8", "float32", "float32"), ("int8", "float32", "float32")),
        ("int4,lm_head=auto", ("float32", "float32", "int4"), ("float32", "float32", "int4")),
        ("bfloat16", ("bfloat16", "float32", "bfloat16"), ("bfloat16", "bfloat16", "bfloat16")),
    ],
)
def test_each_part_gets_its_format(folders, quantize, untied, tied):
    """A head that is not named keeps 8 bits; a tied table follows it."""
    assert resident(folders[False], quantize) == untied
    assert resident(folders[True], quantize) == tied


def test_a_tied_table_in_one_format_is_resident_once(folders):
    once, twice = (LLM(folders[True], backend="cpu", quantize=q) for q in ("int8", "int8,embedding=auto"))
    with once, twice:
        vocab, hidden = open_checkpoint(folders[True]).tensor(TABLE).shape
        saved = twice.loaded.session.memory().weights - once.loaded.session.memory().weights
        assert saved == vocab * hidden * 4  # the float32 table


@pytest.mark.parametrize("tied", [False, True])
def test_a_quantised_table_looks_its_rows_up_and_projects(folders, tied):
    """The same weights, decoded, in the reference."""
    prompt, greedy = [[3, 9, 4, 1, 7]], SamplingParams(temperature=0.0, max_tokens=1, logprobs=-1)
    with LLM(folders[tied], backend="cpu", quantize="int8,embedding=int8") as llm:
        [got] = llm.generate(prompt, greedy)
    with LLM(folders[tied], backend="reference") as llm:
        [want] = llm.generate(prompt, greedy)
    mine, theirs = (dict_of(out.outputs[0].logprobs[0]) for out in (got, want))
    assert np.corrcoef([[x[i] for i in sorted(theirs)] for x in (mine, theirs)])[0, 1] > 0.995


def dict_of(position):
    return {token: entry.logprob for token, entry in position.items()}


@pytest.mark.parametrize(
    "quantize", ["int3", "int4,lm_head=int3", "int4,int8", "head=int4", "int4,lm_head=int8,lm_head=int4", "", "int4,", 4]
)
def test_a_format_or_part_that_does_not_exist_is_refused(folders, quantize):
    with pytest.raises(InvalidRequestError, match="quantize") as caught:
        resident(folders[True], quantize)
    assert caught.value.param == "quantize"


def test_another_backends_formats_are_named(folders):
    with pytest.raises(InvalidRequestError, match="'int4' is not a format here; float32"):
        resident(folders[True], "int4", "reference")


def test_the_report_says_what_is_lossy(folders):
    with LLM(folders[True], backend="cpu", quantize="int4") as llm:
        assert "float32 -> int4 (lossy)" in llm.loaded.summary()


@pytest.mark.parametrize("isa", TIERS)
def test_every_format_passes_the_kit_on_every_instruction_set(isa):
    report = kit.run_conformance("cpu", {"isa": isa}, areas=("formats",))
    assert [row for row in report.rows if row.status not in ("passed", "skipped", "unavailable")] == []
    names = {row.name.split()[0] for row in report.rows if row.status == "passed"}
    assert {f.name for f in FORMATS} <= names or not names


@pytest.mark.parametrize("isa", TIERS)
def test_zero_points_and_wide_groups_do_not_change_a_row_in_a_batch(isa, folders):
    if isa not in native.tiers():
        pytest.skip(f"this machine lacks {isa}")
    prompts, greedy = [[5, 2, 8], [1, 4, 9, 9, 3], [7]], SamplingParams(temperature=0.0, max_tokens=6, logprobs=2)
    for format in ("int4_g64", "int4_g128", "int4_asym", "int4_asym_g64", "int4_asym_g128", "int4_i8", "int8_channel"):
        with LLM(folders[True], backend="cpu", quantize=format, backend_options={"isa": isa}) as llm:
            together = llm.generate(prompts, greedy)
            for prompt, out in zip(prompts, together, strict=True):
                [alone] = llm.generate([prompt], greedy)
                assert alone.outputs[0].token_ids == out.outputs[0].token_ids
                np.testing.assert_array_equal(
                    *([entry.logprob for p in o.outputs[0].logprobs for entry in p.values()] for o in (alone, out))
                )
