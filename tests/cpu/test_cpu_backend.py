"""The CPU backend at its edges: options, refusals, weights kept once, steps that name what does not exist."""

from __future__ import annotations

import dataclasses
import sys

import numpy as np
import pytest
from cpu_cases import batch_of, embedding_program
from trivium.conformance.kit import open_lab
from trivium.conformance.lab import as_weight
from trivium.errors import BackendError, BackendUnavailableError, CapacityError, InvalidRequestError, UnsupportedError
from trivium.ops import Group, KVSpec, PagedKV, Weight, new_builder
from trivium.plugin import HostFallbackWarning
from trivium_cpu.plugin import CpuBackend, _tier


@pytest.fixture
def backend():
    return CpuBackend()


@pytest.fixture
def device(backend):
    return backend.probe().devices[0]


@pytest.fixture
def session(backend, device):
    session = backend.open(device, {"threads": 2})
    yield session
    session.close()


def test_an_unknown_option_is_refused_by_name(backend, device):
    with pytest.raises(InvalidRequestError, match=r"no option thread; it has .*threads"):
        backend.open(device, {"thread": 2})


def test_an_unknown_instruction_set_is_refused(backend, device):
    with pytest.raises(InvalidRequestError, match="choose from auto, portable"):
        backend.open(device, {"isa": "sse9"})


def test_an_instruction_set_the_machine_lacks_is_unavailable():
    with pytest.raises(BackendUnavailableError, match="'avx512' is not available: too old; this machine runs avx2, portable"):
        _tier("avx512", ["avx2", "portable"], lambda tier: "too old")


def test_another_activation_dtype_is_refused_with_the_reason(backend, device):
    with pytest.raises(UnsupportedError, match="activations are float32"):
        backend.open(device, {"dtype": "bfloat16"})


def test_without_the_compiled_module_the_probe_says_what_to_do(backend, monkeypatch):
    monkeypatch.setitem(sys.modules, "trivium_cpu._native", None)
    monkeypatch.delattr("trivium_cpu._native", raising=False)
    probe = backend.probe()
    assert probe.devices == ()
    assert "install trivium again" in probe.reason


def test_the_device_says_its_threads_and_why(device):
    assert device.details["threads"] >= 1
    assert "processors" in device.details["threads_reason"]


def test_memory_loaded_twice_is_kept_once(session):
    table = np.random.default_rng(0).standard_normal((40, 64), dtype=np.float32)
    first, second = session.load(as_weight("embed", table), "int8"), session.load(as_weight("head", table), "int8")
    assert first is second
    other = session.load(as_weight("head", table), "bfloat16")
    assert other is not first
    assert session.memory().weights == first.nbytes + other.nbytes


def test_numbers_that_a_format_can_not_hold_are_refused_by_name(session):
    bad = np.full((4, 32), np.nan, np.float32)
    with pytest.raises(UnsupportedError, match=r"model\.w .*int4"):
        session.load(as_weight("model.w", bad), "int4")


def test_a_storage_format_without_a_packer_is_decoded_first(session):
    numbers = np.random.default_rng(1).standard_normal((5, 32), dtype=np.float32)
    weight = Weight("w", (5, 32), "some_block_format", np.zeros((5, 3), np.uint8), lambda data: numbers)
    np.testing.assert_array_equal(session.read_weight(session.load(weight, "float32")), numbers)


def test_a_pool_beyond_the_memory_is_refused_with_the_bytes(session):
    spec = KVSpec(16, "float32", (Group(PagedKV(2, 16), (0,)),))
    with pytest.raises(CapacityError, match=str(10**12 * session.page_bytes(spec))):
        session.kv_store(spec, 10**12)


@pytest.fixture
def table():
    return np.random.default_rng(2).standard_normal((8, 5), dtype=np.float32)


@pytest.fixture
def executable(session, table):
    return session.compile(embedding_program(), {"table": session.load(as_weight("table", table), "float32")})


@pytest.mark.parametrize("ids", [[8], [0, -1], [3, 2**31 - 1]])
def test_token_ids_beyond_the_table_are_refused(executable, ids):
    with pytest.raises(InvalidRequestError, match="outside the model's 8 embeddings"):
        executable.run(batch_of(ids))


def test_after_a_refused_step_the_next_runs(executable, table):
    with pytest.raises(InvalidRequestError):
        executable.run(batch_of([9]))
    np.testing.assert_array_equal(executable.run(batch_of([1])).output("logits"), table[[1]])


def test_steps_larger_than_announced_run(executable, table):
    ids = np.random.default_rng(0).integers(0, 8, 3000)
    np.testing.assert_array_equal(executable.run(batch_of(ids)).output("logits"), table[ids])


def test_a_step_without_sampled_rows_gives_no_ids(executable):
    step = executable.run(batch_of([1, 2], rows=[]))
    assert len(step.tokens().ids) == 0
    assert step.output("logits").shape == (0, 5)


def test_outputs_of_an_older_step_are_gone_with_a_word(executable):
    old = executable.run(batch_of([1]))
    executable.run(batch_of([2]))
    with pytest.raises(BackendError, match="before the next step"):
        old.output("logits")


def test_an_unknown_output_is_named(executable):
    with pytest.raises(UnsupportedError, match=r"no output 'hidden'; it has logits"):
        executable.run(batch_of([1])).output("hidden")


def test_pages_beyond_the_pool_are_refused(session):
    b = new_builder()
    x = b.embedding(b.input("token_ids"), b.weight("table", (8, 8)))
    heads = b.reshape(x, shape=("tokens", 1, 8))
    kv = b.kv_write(b.state("kv", PagedKV(1, 8)), heads, heads)
    y = b.paged_attention(heads, kv, b.input("query_starts"), b.input("context_lens"), None, scale=1.0)
    program = b.finish({"logits": b.gather_rows(b.reshape(y, shape=("tokens", 8)), b.input("sample_rows"))}, vocab_size=8)
    session.kv_store(KVSpec(16, "float32", (Group(PagedKV(1, 8), (0,)),)), 2)
    executable = session.compile(program, {"table": session.load(as_weight("t", np.eye(8, dtype=np.float32)), "float32")})
    good = dataclasses.replace(batch_of([1]), block_tables=np.zeros((1, 1, 1), np.int32), slot_mapping=np.zeros((1, 1), np.int64))
    executable.run(good)
    for wrong in ({"block_tables": np.full((1, 1, 1), 2, np.int32)}, {"slot_mapping": np.full((1, 1), 32)}):
        with pytest.raises(InvalidRequestError, match="beyond the pool's 2"):
            executable.run(dataclasses.replace(good, **wrong))


@pytest.fixture
def fewer_kernels(monkeypatch):
    """The backend as if it had no kernel for head_linear."""
    from trivium_cpu import lower_models

    left = tuple(kernel for kernel in lower_models.MODEL_KERNELS if kernel.op != "head_linear")
    monkeypatch.setattr(lower_models, "MODEL_KERNELS", left)


def head_linear_program():
    b = new_builder()
    x = b.reshape(b.embedding(b.input("token_ids"), b.weight("table", (8, 6))), shape=("tokens", 2, 3))
    y = b.reshape(b.head_linear(x, b.weight("heads", (2, 4, 3))), shape=("tokens", 8))
    return b.finish({"logits": b.gather_rows(b.add(y, y), b.input("sample_rows"))}, vocab_size=8)


def head_linear_weights(session):
    rng = np.random.default_rng(4)
    arrays = {"table": rng.standard_normal((8, 6), dtype=np.float32), "heads": rng.standard_normal((2, 4, 3), dtype=np.float32)}
    return arrays, {name: session.load(as_weight(name, a), "float32") for name, a in arrays.items()}


def test_an_operator_without_a_kernel_runs_on_the_host_with_a_warning(fewer_kernels, session):
    arrays, weights = head_linear_weights(session)
    with pytest.warns(HostFallbackWarning, match="head_linear"):
        executable = session.compile(head_linear_program(), weights)
    x = arrays["table"][[3, 5]].reshape(2, 2, 3)
    want = 2 * np.einsum("thi,hoi->tho", x, arrays["heads"]).reshape(2, 8)
    np.testing.assert_allclose(executable.run(batch_of([3, 5])).output("logits"), want, rtol=1e-5)


def test_strict_refuses_the_host(fewer_kernels, backend, device):
    session = backend.open(device, {"strict": True})
    _, weights = head_linear_weights(session)
    with pytest.raises(UnsupportedError, match="head_linear"):
        session.compile(head_linear_program(), weights)


def test_the_profile_times_what_runs_on_the_host_too(fewer_kernels, session):
    _, weights = head_linear_weights(session)
    with pytest.warns(HostFallbackWarning, match="head_linear"):
        executable = session.compile(head_linear_program(), weights)
    executable.profile(True)
    executable.run(batch_of([1]))
    found = {o.name: o for o in executable.profile(False).operators}
    assert set(found) == {"embedding", "head_linear (host)", "add", "gather rows"}
    assert all(o.calls == 1 and o.seconds > 0 for o in found.values())


def test_a_lab_opens_on_every_instruction_set(device):
    for isa in device.details["isas"]:
        assert open_lab("cpu", {"isa": isa}).device.details["isa"] == device.details["isas"][0]
