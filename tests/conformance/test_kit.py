"""The kit passes what is right and finds what is wrong: numpy backends with one deliberate fault each."""

from __future__ import annotations

import json
import math
import os

import numpy as np
import pytest
from fake_plugins import install
from fused_patterns import PATTERNS
from judged_backends import Backend, Session, failed, fused, judge, kernel

from trivium.conformance import AREAS, Mismatch, Report, Row, run_conformance
from trivium.conformance.rules import judge_core
from trivium.errors import BackendNotFoundError, BackendUnavailableError, InvalidRequestError
from trivium.ops import OPERATORS, Case, Pattern, Sampled
from trivium.ops.patterns import run_pattern
from trivium.plugin import EagerExecutable, Kernel, Pages, Step, WeightFormat, resolve


def test_the_reference_passes():
    report = run_conformance("reference", areas=[a for a in AREAS if a != "models"])  # which test_backends.py judges
    assert report.ok and report.count("passed") > 40 and report.count("fallback") == 0
    assert {row.area for row in report.rows} == set(AREAS) - {"models"}


def test_numpy_fusions_pass_in_every_tiny_model():
    backend = Backend([fused(p) for p in PATTERNS.values()])
    rows = judge(backend, "fusions") | judge(backend, "models", only="logits")
    assert not failed(rows)
    assert {name for area, name in rows if area == "fusions"} == set(PATTERNS)
    assert "46 calls, " in rows["models", "llama, logits"].detail and "46 fused" not in rows["models", "llama, logits"].detail


@pytest.mark.parametrize(
    ("name", "fn"),
    [
        ("linear", lambda x, w, b: x @ w.T),
        ("linear", lambda x, w, b: OPERATORS["linear"](x, w, b) * 1.001),
        ("rms_norm", lambda x, w, eps, offset: OPERATORS["rms_norm"](x, w, eps=1e-6, offset=offset)),
        ("rope", lambda x, p, f, interleaved, scale: OPERATORS["rope"](x, p, f, interleaved=False, scale=scale)),
        ("paged_attention", lambda *a, window, **k: OPERATORS["paged_attention"](*a, window=window and window + 1, **k)),
        ("paged_attention", lambda q, kv, s, c, sinks, **k: OPERATORS["paged_attention"](q, kv, s, c, None, **k)),
        ("gather_rows", lambda x, rows: x[: len(rows)]),
        ("moe_route", lambda *a, normalize, **k: OPERATORS["moe_route"](*a, normalize=True, **k)),
        ("kv_write", lambda kv, k, v: OPERATORS["kv_write"](kv, v, k)),
    ],
)  # fmt: skip
def test_a_wrong_kernel_fails_its_row(name, fn):
    backend = Backend([kernel(name, fn)])
    rows = judge(backend, "operators")
    assert name in failed(rows)
    assert failed(rows) <= {name, "moe_experts"} or name == "gather_rows"  # these two serve to judge others


def test_a_kernel_that_writes_into_other_pages_is_found():
    def spill(kv, k, v):
        kv = OPERATORS["kv_write"](kv, k, v)
        unused = np.setdiff1d(np.arange(len(kv.k)), kv.block_table)
        kv.k[unused] = 0
        return kv

    assert failed(judge(Backend([kernel("kv_write", spill)]), "operators")) == {"kv_write"}


def test_a_kernel_that_starts_from_a_stale_state_is_found():
    def stale(q, k, v, g, beta, s, starts, contexts, scale):
        return OPERATORS["gated_delta_rule"](q, k, v, g, beta, s, starts, contexts + 1, scale=scale)

    assert failed(judge(Backend([kernel("gated_delta_rule", stale)]), "operators")) == {"gated_delta_rule"}


def test_a_missing_kernel_is_a_fallback_and_a_refusing_one_says_why():
    rows = judge(Backend(without={"softcap"}), "operators")
    assert rows["operators", "softcap"].status == "fallback" and not failed(rows)
    picky = Kernel(
        "scale",
        lambda s, a, k: OPERATORS["scale"](*a, **k),
        "picky",
        1,
        lambda call: "factor is negative" if call.attrs["factor"] < 0 else None,
    )
    row = judge(Backend([picky], without={"scale"}), "operators")["operators", "scale"]
    assert row.status == "passed" and "on the host (factor is negative)" in row.detail


def test_a_fused_kernel_that_differs_from_its_pattern_is_found():
    pattern = PATTERNS["add_norm"]
    rows = judge(Backend([fused(pattern, lambda args, attrs: run_pattern(pattern, args, {**attrs, "eps": 0.01}))]), "fusions")
    assert failed(rows) == {"add_norm"}


def test_a_pattern_without_any_example_fails_and_one_with_cases_passes():
    chain = lambda b, x: b.softcap(b.softcap(x, cap=3.0), cap=2.0)
    rows = judge(Backend([fused(Pattern("chain", chain))]), "fusions")
    assert failed(rows) == {"chain"} and "no example" in rows["fusions", "chain"].detail
    with_cases = Pattern("chain", chain, cases=lambda rng: [Case((rng.standard_normal((3, 5), dtype=np.float32),))])
    assert not failed(judge(Backend([fused(with_cases)]), "fusions"))


class Rounding(Session):
    """Holds weights in steps of 1/256; the numbers it tells are those it holds."""

    def load(self, weight, format):
        return np.round(weight.decode() * 256) / np.float32(256) if format == "coarse" else super().load(weight, format)


def test_formats_are_held_to_what_they_promise():
    float32 = WeightFormat("float32", 32.0)
    coarse = lambda **k: Backend(session=Rounding, weight_formats=(float32, WeightFormat("coarse", 8.0, **k)))
    assert not failed(judge(coarse(error_budget=0.05), "formats"))
    assert failed(judge(coarse(error_budget=0.01), "formats")) == {f"coarse from {s}" for s in ("float32", "float16", "bfloat16")}
    assert failed(judge(coarse(lossless_from=frozenset({"q8_0"})), "formats")) == {"coarse from q8_0"}


class Swelling(Rounding):
    """Tells what its weights take, four bytes a number."""

    held = 0

    def load(self, weight, format):
        self.held += 4 * math.prod(weight.shape)
        return super().load(weight, format)

    def memory(self):
        return super().memory()._replace(weights=self.held)


def test_a_format_that_takes_more_than_it_says_is_found():
    def swelling(bits):
        formats = (WeightFormat("float32", 32.0), WeightFormat("coarse", bits, error_budget=0.05))
        return judge(Backend(session=Swelling, weight_formats=formats), "formats")

    assert not failed(swelling(32.0))
    rows = swelling(8.0)
    assert failed(rows) == {f"coarse from {s}" for s in ("float32", "float16", "bfloat16")}
    assert "32 bits a weight by memory(); capabilities() says 8" in rows["formats", "coarse from float32"].detail


class Lossy(Session):
    def export_pages(self, group, ids):
        pages = super().export_pages(group, ids)
        return Pages(*pages[:3], tuple(tuple(t.astype(np.float16).astype(np.float32) for t in layer) for layer in pages.tensors))


class Smearing(Session):
    def copy_pages(self, src, dst):
        super().copy_pages([*src, 0], [*dst, 5])


def test_pages_that_lose_bits_or_land_elsewhere_are_found():
    assert {"one group, float32", "latent, float32"} <= failed(judge(Backend(session=Lossy), "pages"))
    assert "one group, float32" in failed(judge(Backend(session=Smearing), "pages"))


def test_a_sampler_with_other_ids_or_without_logprobs_is_found():
    def other(logits, inputs, vocab_size):
        right = OPERATORS["sample"](logits, inputs, vocab_size=vocab_size)
        return right._replace(ids=np.where(inputs.temperature > 0, (right.ids + 1) % vocab_size, right.ids).astype(np.int32))

    bad = failed(judge(Backend([kernel("sample", other)]), "sampler", only="vector"))
    assert 8 <= len(bad) < 22  # greedy vectors are still right
    silent = lambda logits, inputs, vocab_size: Sampled(OPERATORS["sample"](logits, inputs, vocab_size=vocab_size).ids)
    assert failed(judge(Backend([kernel("sample", silent)]), "sampler")) == {"vector 10", "vector 21"}


def test_results_that_depend_on_the_neighbours_or_on_chance_are_found():
    crowded = lambda x, w, b: OPERATORS["linear"](x, w, b) * np.float32(1 + 1e-2 * (len(x) > 1))
    rows = judge(Backend([kernel("linear", crowded)]), "models", only="llama, batched")
    assert failed(rows) == {"llama, batched = alone"}
    rows = judge(Backend([kernel("linear", crowded)]), "models", only="gemma3, tokens")
    assert failed(rows) == {"gemma3, tokens = reference"}
    rng = np.random.default_rng()
    noisy = lambda x, w, b: OPERATORS["linear"](x, w, b) * np.float32(1 + 1e-6 * rng.uniform())
    assert failed(judge(Backend([kernel("linear", noisy)]), "models", only="llama, repeated")) == {"llama, repeated = once"}


def test_what_this_machine_lacks_is_unavailable_not_failed(monkeypatch):
    class Absent(Backend):
        def open(self, device, options):
            raise BackendUnavailableError("this CPU has no such instructions")

    absent = Absent()
    monkeypatch.setattr("trivium.conformance.kit.resolve", lambda name: (absent, absent.probe().devices[0]))
    report = run_conformance("test", {"isa": "avx10"})
    assert report.rows == (Row("device", "test", "unavailable", "this CPU has no such instructions"),)
    assert report.ok and report.to_json()["failed"] == 0


class Lazy(EagerExecutable):
    """Starts the step when it is asked for the result, from arrays that are no longer its own."""

    def run(self, batch):
        outer, start = self, super().run

        class Late(Step):
            def tokens(self):
                outer.step = start(batch)
                return outer.step.tokens()

            def output(self, name):
                return outer.step.output(name)

        return Late()


def test_an_executable_that_keeps_the_batch_is_found():
    class Keeping(Session):
        def compile(self, program, weights):
            return Lazy(self, program, weights, self._kernels, self._spec, backend="test")

    assert {"add", "linear", "paged_attention"} <= failed(judge(Backend(session=Keeping), "operators"))


def test_rules_beyond_numbers():
    rows = judge(Backend(page_sizes=()), "rules", only="capabilities")
    assert failed(rows) == {"capabilities"} and "page_sizes" in rows["rules", "capabilities"].detail
    assert failed(judge(Backend(unsupported={"float32": "too precise"}), "rules", only="capabilities")) == {"capabilities"}
    assert failed(judge(Backend(), "rules", only="unknown option")) == {"unknown option"}  # it takes any


PATCHES = {
    "trivium.sched.Scheduler.plan = lambda self: None": r"trivium\.sched\.scheduler\.Scheduler\.plan",
    "trivium.engine.Engine.model = property(lambda self: None)": r"trivium\.engine\.engine\.Engine\.model",
    "trivium.engine.Engine.step.__code__ = (lambda self: []).__code__": r"Engine\.step\.__code__",
    "trivium.ops.Batch.extra = 1": r"trivium\.ops\.batch\.Batch\.extra",
    "trivium.conformance.kit.AREAS['models'] = trivium.conformance.kit.AREAS['rules']": r"AREAS\.'models'",
    "trivium.models.build = None": r"trivium\.models\.build",
}


@pytest.mark.parametrize("patch", PATCHES)
def test_a_plugin_that_patches_the_core_is_found(patch, tmp_path, monkeypatch):
    source = f"""
import trivium.sched, trivium.engine, trivium.ops, trivium.models, trivium.conformance.kit
from trivium_reference.plugin import ReferenceBackend
from trivium.plugin import hookimpl
class Patching(ReferenceBackend):
    name = "patching"
    def probe(self):
        {patch}
        return super().probe()
@hookimpl
def trivium_backend():
    return Patching()
"""
    install(tmp_path, "patching", source)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    with pytest.raises(Mismatch, match=PATCHES[patch]):
        judge_core("patching")


def test_a_backend_that_leaves_the_core_alone_passes():
    assert judge_core("reference").status == "passed"


def test_misspelt_words_are_refused():
    with pytest.raises(BackendNotFoundError, match="reference"):
        run_conformance("refrence")
    with pytest.raises(InvalidRequestError, match="speed"):
        run_conformance("reference", {"speed": 11})
    with pytest.raises(InvalidRequestError, match="operators"):
        run_conformance("reference", areas=["operator"])


def test_a_report_is_plain_json_and_readable():
    rows = (Row("operators", "add", "passed", "6 cases"), Row("operators", "mul", "failed", "off"), Row("pages", "x", "skipped"))
    report = Report("b", "dev", rows, {"isa": "avx2"})
    assert json.loads(json.dumps(report.to_json())) == {
        "backend": "b", "device": "dev", "options": {"isa": "avx2"}, "passed": 1, "failed": 1, "skipped": 1, "fallback": 0,
        "unavailable": 0, "rows": [r._asdict() for r in rows],
    }  # fmt: skip
    assert not report.ok
    assert str(report).splitlines()[-2:] == [
        "failed      operators  mul                              off",
        "b on dev: 1 passed, 1 failed, 1 skipped",
    ]


def test_an_exception_is_a_failed_row_and_the_rest_is_judged():
    def broken(*args, **attrs):
        raise RuntimeError("kernel exploded")

    rows = judge(Backend([kernel("add", broken)]), "operators")
    assert failed(rows) == {"add"} and "kernel exploded" in rows["operators", "add"].detail


def test_the_reference_is_found_like_any_other_backend():
    assert resolve("reference")[0].name == "reference"
