"""The CUDA provider's models, pages and steps, emulated (see conftest.py). None of this is a run on a GPU."""

from __future__ import annotations

import contextlib
import dataclasses
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from trivium.conformance.kit import collect_checks
from trivium.conformance.lab import Lab, as_weight
from trivium.conformance.models import Generations, Numbers, open_model
from trivium.conformance.zoo import CONFIGS
from trivium.engine import Engine, EngineConfig, RequestState
from trivium.errors import CapacityError, InvalidRequestError, UnsupportedError
from trivium.ops import Batch, Group, KVSpec, PagedKV, new_builder
from trivium.ops.sample import plain_inputs
from trivium.plugin import HostFallbackWarning, find_plugins, resolve
from trivium.sampling import SamplingParams

pytest.importorskip("onnxruntime")
pytest.importorskip("onnx")

import onnxruntime
from trivium_onnxruntime.cuda import CudaSession
from trivium_onnxruntime.plugin import OnnxBackend
from trivium_onnxruntime.providers import CUDA

PROMPT = [3 + i * 5 % 60 for i in range(40)]
PROMPTS = [PROMPT[:7], PROMPT, PROMPT[:21], PROMPT[:1]]


class InFloat32(OnnxBackend):
    """The same models in float32, in which ids are those of the reference."""

    def capabilities(self, device):
        return dataclasses.replace(super().capabilities(device), dtypes=("float32",), kv_dtypes=("float32",))

    def open(self, device, options):
        return CudaSession(self.kernels(device), options, 0, "float32")


def lab_of(backend):
    if isinstance(backend, str):
        backend, device = resolve(backend)
    else:
        device = backend.probe().devices[1]
    return Lab(backend, device, backend.capabilities(device), backend.kernels(device), {})


@contextlib.contextmanager
def tiny(backend, model, *, share=1.0, kv_dtype="float32", tokens=64):
    lab = lab_of(backend)
    with lab.session(tokens=64, seqs=8, length=128) as session:
        loaded = open_model(lab, session, CONFIGS[model], partial(Generations.pages, 16, share), 16, kv_dtype)
        yield Engine(loaded, Numbers(), EngineConfig(8, tokens))


def finish(engine, *numbers):
    done = {}
    while engine.has_unfinished():
        done |= {o.request_id: o for o in engine.step()}
        engine.check()
    return [done[n].outputs[0].token_ids for n in numbers]


def generate(engine, *prompts, count=6, **fields):
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": count, "ignore_eos": True, **fields})
    return finish(engine, *[engine.add_request(prompt, params) for prompt in prompts])


def faults(checks):
    """What the checks find, but for one that needs the plugin to be installed."""
    rows = [check.run() for check in checks]
    assert any(r.status == "passed" for r in rows)
    uninstalled = {"the core is not patched"} if "onnxruntime" not in find_plugins() else set()
    return {r.name: r.detail for r in rows if r.status == "failed" and r.name not in uninstalled}


@pytest.mark.parametrize("area", ["rules", "operators", "fusions", "formats", "pages", "sampler"])
def test_the_kit_finds_no_fault_in_float16(machine, area):
    assert faults(collect_checks(lab_of(OnnxBackend()), [area])) == {}


@pytest.mark.parametrize("model", ["llama interleaved", "gemma3"])
def test_the_kit_finds_no_fault_with_models_in_float16(machine, model):
    checks = collect_checks(lab_of(OnnxBackend()), ["models"])
    assert faults([check for check in checks if model in check.name]) == {}


@pytest.mark.parametrize("model", CONFIGS)
def test_ids_in_float32_equal_the_references(machine, model):
    drawn = {"temperature": 0.8, "seed": 11, "top_p": 0.9}
    with tiny(InFloat32(), model) as mine, tiny("reference", model) as theirs:
        assert generate(mine, *PROMPTS) == generate(theirs, *PROMPTS)
        assert generate(mine, *PROMPTS, **drawn) == generate(theirs, *PROMPTS, **drawn)


def test_chunks_preemption_and_prefixes_change_no_id(machine):
    with tiny(InFloat32(), "gemma3", share=2.0) as engine:
        want = generate(engine, *PROMPTS, count=20)
        computed = engine.stats.computed_tokens
        assert generate(engine, PROMPT, count=20) == want[1:2]
        assert engine.stats.computed_tokens - computed < len(PROMPT)
    with tiny(InFloat32(), "gemma3", tokens=8) as engine:
        assert generate(engine, *PROMPTS, count=20) == want
    more = [*PROMPTS, [*PROMPT[:32], 8, 9], PROMPT[3:20]]
    with tiny(InFloat32(), "gemma3", share=0.3) as little, tiny("reference", "gemma3", share=2.0) as much:
        assert generate(little, *more, count=24) == generate(much, *more, count=24)
        assert little.stats.preemptions > 0


@pytest.mark.parametrize("ways", [("reference", InFloat32), (InFloat32, "reference")])
def test_requests_change_backends_under_way(machine, ways):
    backends = [way if isinstance(way, str) else way() for way in ways]
    with tiny(backends[0], "gemma3") as first, tiny(backends[1], "gemma3") as second:
        number = first.add_request(PROMPT, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
        for _ in range(3):
            first.step()
        state = RequestState.from_bytes(first.export_request(number).to_bytes())
        assert finish(second, second.import_request(state)) == generate(first, PROMPT, count=8)


def test_a_session_is_opened_on_the_named_device_alone_and_may_not_use_the_cpu(machine):
    backend = OnnxBackend()
    device = backend.probe().devices[2]
    with Lab(backend, device, backend.capabilities(device), backend.kernels(device), {}).session(
        tokens=64, seqs=8, length=128
    ) as session:
        open_model(lab_of(backend), session, CONFIGS["llama"], lambda *_: 8, 16, "float16")
        [made] = machine.sessions
        [(name, options)] = made.providers
        assert device.name == "cuda:1" and name == CUDA and options["device_id"] == "1" and options["use_tf32"] == "0"
        assert made.settings.entries == {"session.disable_cpu_ep_fallback": "1"}
        assert {(v.device, v.index) for pair in session._pool.values.values() for v in pair} == {("cuda", 1)}


def test_a_step_moves_its_integers_in_and_the_sampled_rows_out(machine):
    with tiny(OnnxBackend(), "llama", kv_dtype="float16") as engine:
        generate(engine, PROMPT, PROMPT[:9], count=3)
        pages = {id(v) for pair in engine.model.session._pool.values.values() for v in pair}
    vocabulary = CONFIGS["llama"]["vocab_size"]
    for _, binding in machine.runs:
        moved = {name: value.array for name, value in binding.inputs.items() if id(value) not in pages}
        assert all(array.dtype == np.int32 for array in moved.values())
        [logits] = [v.array for v in binding.outputs.values() if id(v) not in pages and v.array.size]
        assert logits.shape == (len(moved["step.past"]), vocabulary) and logits.dtype == np.float32
        held = [name for name, v in binding.inputs.items() if id(v) in pages]
        assert len(held) == len(pages) and all(name.startswith(("keys.", "values.")) for name in held)
    assert [len(binding.inputs["step.slots.0"].array) for _, binding in machine.runs] == [49, 2, 2]


def test_a_fault_in_a_step_is_raised_with_its_sizes(machine, monkeypatch):
    with tiny(OnnxBackend(), "llama", kv_dtype="float16") as engine:
        [session] = machine.sessions

        def fail(binding):
            raise RuntimeError("CUDA failure 700: an illegal memory access")

        monkeypatch.setattr(session, "run_with_iobinding", fail)
        engine.add_request(PROMPT[:5], SamplingParams(max_tokens=2))
        [output] = engine.step()
        assert output.finished and "5 tokens of 1 sequences" in str(output)


def test_host_fallbacks_are_announced_and_strict_refuses_them(machine):
    b = new_builder()
    weights, _ = b.moe_route(b.embedding(b.input("token_ids"), b.weight("table", (11, 8))), top_k=2)
    program = b.finish({"logits": b.gather_rows(weights, b.input("sample_rows"))})
    backend = OnnxBackend()
    device = backend.probe().devices[1]
    table = as_weight("table", np.zeros((11, 8), np.float32))
    session = backend.open(device, {})
    with pytest.warns(HostFallbackWarning, match="moe_route"):
        session.compile(program, {"table": session.load(table, "float16")})
    session = backend.open(device, {"strict": True})
    with pytest.raises(UnsupportedError, match="moe_route"):
        session.compile(program, {"table": session.load(table, "float16")})


def test_what_float16_cannot_hold_is_refused_by_name(machine):
    session = OnnxBackend().open(OnnxBackend().probe().devices[1], {})
    numbers = np.full((2, 32), 1e5, np.float32)
    with pytest.raises(UnsupportedError, match=r"w has numbers beyond 65504"):
        session.load(as_weight("w", numbers), "float16")
    np.testing.assert_array_equal(session.read_weight(session.load(as_weight("w", numbers), "float32")), numbers)


@pytest.mark.parametrize("options, error, words", [
    ({"threads": 2}, InvalidRequestError, "threads"), ({"dtype": "bfloat16"}, UnsupportedError, "float16"),
    ({"dtype": "float32"}, UnsupportedError, "PagedAttention"),
])  # fmt: skip
def test_options_that_mean_nothing_there_are_refused(machine, options, error, words):
    with pytest.raises(error, match=words):
        OnnxBackend().open(OnnxBackend().probe().devices[1], options)


def test_pages_that_do_not_fit_name_their_bytes(machine, monkeypatch):
    spec = KVSpec(16, "float16", (Group(PagedKV(2, 64), (0, 1)),))
    session = OnnxBackend().open(OnnxBackend().probe().devices[1], {})
    assert session.page_bytes(spec) == 2 * 2 * 16 * 2 * 64 * 2
    with pytest.raises(CapacityError, match=f"{1 << 29}"):
        session.kv_store(spec, (1 << 29) // session.page_bytes(spec) + 1)

    def full(array, device, index):
        raise RuntimeError("BFCArena: available memory is smaller than requested")

    monkeypatch.setattr(onnxruntime, "OrtValue", SimpleNamespace(ortvalue_from_numpy=full))
    with pytest.raises(CapacityError, match="BFCArena"):
        session.kv_store(spec, 4)
    with pytest.raises(UnsupportedError, match="float32"):
        session.kv_store(KVSpec(16, "float32", spec.groups), 4)


def test_weights_that_are_not_on_the_device_yet_count_as_taken(machine):
    session = OnnxBackend().open(OnnxBackend().probe().devices[1], {})
    b = new_builder()
    program = b.finish(
        {"logits": b.gather_rows(b.embedding(b.input("token_ids"), b.weight("w", (64, 32))), b.input("sample_rows"))}
    )
    weights = {"w": session.load(as_weight("w", np.ones((64, 32), np.float32)), "float16")}
    assert session.memory()[1:] == ((1 << 29) - 4096, 4096, 0)
    session.compile(program, weights)
    assert session.memory()[1:] == (1 << 29, 4096, 0)


def step(ids):
    """One sequence that begins with `ids`, on page 0; all rows are sampled."""
    n, zero = len(ids), np.zeros((1, 1, 1), np.int32)
    at = np.arange(n, dtype=np.int32)
    starts, lengths = np.array([0, n], np.int32), np.array([n], np.int32)
    return Batch(np.array(ids, np.int32), at, starts, lengths, zero, at[None].astype(np.int64), at, plain_inputs(n))


def resident(session, arrays, **formats):
    return {name: session.load(as_weight(name, array), formats.get(name, "float16")) for name, array in arrays.items()}


@pytest.mark.parametrize("format", ["int4", "int4_min", "int8", "float16", "float32"])
def test_a_product_with_a_bias_is_that_of_the_numbers_held(machine, format):
    rng = np.random.default_rng(5)
    arrays = {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in (("t", (9, 64)), ("w", (16, 64)), ("b", (16,)))}
    b = new_builder()
    x = b.embedding(b.input("token_ids"), b.weight("t", (9, 64)))
    y = b.linear(x, b.weight("w", (16, 64)), b.weight("b", (16,)))
    program = b.finish({"logits": b.gather_rows(y, b.input("sample_rows"))})
    session = OnnxBackend().open(OnnxBackend().probe().devices[1], {})
    weights = resident(session, arrays, w=format)
    ids = [3, 8, 1]
    want = session.read_weight(weights["t"])[ids] @ session.read_weight(weights["w"]).T + arrays["b"]
    np.testing.assert_allclose(session.compile(program, weights).run(step(ids)).output("logits"), want, rtol=4e-3, atol=2e-2)


def test_a_second_reader_of_a_state_reads_what_the_first_one_left(machine):
    b = new_builder()
    x = b.reshape(b.embedding(b.input("token_ids"), b.weight("t", (9, 16))), shape=("tokens", 2, 8))
    kv = b.kv_write(b.state("kv", PagedKV(2, 8)), x, x)
    starts, lengths = b.input("query_starts"), b.input("context_lens")
    y = b.add(b.paged_attention(x, kv, starts, lengths, scale=0.3), b.paged_attention(x, kv, starts, lengths, scale=-0.3))
    y = b.reshape(y, shape=("tokens", 16))
    program = b.finish({"logits": b.gather_rows(y, b.input("sample_rows"))})
    session = OnnxBackend().open(OnnxBackend().probe().devices[1], {})
    arrays = {"t": np.random.default_rng(6).standard_normal((9, 16), dtype=np.float32)}
    session.kv_store(KVSpec(16, "float16", (Group(PagedKV(2, 8), (0,)),)), 2)
    made = session.compile(program, resident(session, arrays)).run(step([2, 7])).output("logits")
    nodes = [node for node in machine.sessions[0].graph.node if node.op_type == "PagedAttention"]
    assert list(nodes[1].input[3:5]) == list(nodes[0].output[1:3])
    first, second = arrays["t"][[2, 7]].reshape(2, 2, 8)
    weights = [1 / (1 + np.exp(sign * 0.3 * ((first - second) * second).sum(-1))) for sign in (1, -1)]
    want = sum(first + w[:, None] * (second - first) for w in weights)
    np.testing.assert_allclose(made[0], 2 * first.reshape(-1), atol=5e-3)
    np.testing.assert_allclose(made[1], want.reshape(-1), atol=5e-3)
