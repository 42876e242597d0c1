"""The whole engine on trivium_cuda over an emulated device: the tokens are the reference's, and nothing waits but for them.

A device of compute capability 7.5 runs trivium_torch's kernels in the same steps, quickly; one of 9.0 Triton's, interpreted.
"""

from __future__ import annotations

import dataclasses
import warnings

import emulated_cuda
import pytest
import torch
from tiny_checkpoints import FAMILIES, make_checkpoint, read_safetensors, write_safetensors
from trivium_cuda import sampler
from trivium_cuda.executor import QueuedExecutable
from trivium_cuda.graphs import GraphExecutable

from trivium import LLM, SamplingParams
from trivium.errors import CapacityError

LOAD = {"dtype": "float32", "kv_dtype": "float32", "num_kv_blocks": 40, "block_size": 16, "progress": False, "max_num_seqs": 4}
PROMPTS = [[(7 * i * i + n) % 250 for i in range(n)] for n in (1, 16, 37, 50)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
ASKED = [
    GREEDY, SamplingParams(temperature=0.9, seed=5, max_tokens=7, ignore_eos=True),
    SamplingParams(temperature=1.2, seed=6, top_k=30, top_p=0.9, min_p=0.01, max_tokens=8, ignore_eos=True, logprobs=3),
    SamplingParams(temperature=0.8, seed=7, repetition_penalty=1.3, logit_bias={7: 2.0}, max_tokens=9, ignore_eos=True),
]  # fmt: skip
DRAWN = [ASKED[0], ASKED[1], GREEDY, ASKED[3]]
SMALL = {**LOAD, "max_model_len": 40, "num_kv_blocks": 12, "max_num_seqs": 2, "max_num_batched_tokens": 8}
NARROW = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 48}
SHORT = [[5, 6, 7], [8], [9, 10]]
FEW = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (4, 3, 2)]


def ids(outputs):
    return [[c.token_ids for c in output.outputs] for output in outputs]


def made(folder, backend, asked=ASKED, prompts=PROMPTS, **options):
    with LLM(folder, backend, **{**LOAD, **options}) as llm:
        found = ids(llm.generate(prompts, asked))
        llm.engine.check()
        return found


@pytest.fixture
def old(emulated, monkeypatch):
    """A device too old for Triton."""
    device = emulated_cuda.EmulatedDevice((7, 5))
    monkeypatch.setattr(emulated_cuda, "DEVICES", (device,))
    return device


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_the_reference_s(tmp_path, old, family):
    folder = make_checkpoint(tmp_path / family, family)
    assert made(folder, "cuda_emulated", strict=True) == made(folder, "reference")


@pytest.mark.parametrize("settings", [{"max_num_batched_tokens": 7}, {"block_size": 32, "max_num_seqs": 2}], ids=str)
def test_no_schedule_changes_the_tokens(tmp_path, old, settings):
    folder = make_checkpoint(tmp_path / "llama", "llama")
    assert made(folder, "cuda_emulated", **settings) == made(folder, "reference")


def test_the_next_step_is_built_while_one_runs_and_only_tokens_are_waited_for(tmp_path, old, monkeypatch):
    folder = make_checkpoint(tmp_path / "llama", "llama")
    order = []
    run, wait = QueuedExecutable.run, emulated_cuda.EmulatedEvent.wait

    def guarded(self, batch):
        order.append("run")
        with emulated_cuda.host_reads_forbidden(old):
            return run(self, batch)

    monkeypatch.setattr(QueuedExecutable, "run", guarded)
    monkeypatch.setattr(emulated_cuda.EmulatedEvent, "wait", lambda self: order.append("wait") or wait(self))
    with LLM(folder, "cuda_emulated", **LOAD) as llm:
        engine = llm.engine
        prepare = engine.runner.prepare
        monkeypatch.setattr(engine.runner, "prepare", lambda *a: order.append("prepare") or prepare(*a))
        order.clear()
        found = ids(llm.generate(PROMPTS, DRAWN))
        steps = engine.stats.steps
    assert found == made(folder, "reference", DRAWN)
    assert order.count("wait") == order.count("run") == steps
    assert order[:8] == ["prepare", "run", "prepare", "wait", "run", "prepare", "wait", "run"]


def test_the_guard_notices_what_waits(old):
    for wait in (lambda x: x.tolist(), lambda x: x.sum().item(), lambda x: bool(x[0] > 0), lambda x: x[x > 0], lambda x: x.cpu()):
        with pytest.raises(AssertionError, match="waits for the device"), emulated_cuda.host_reads_forbidden(old):
            wait(torch.ones(3))
    with pytest.raises(AssertionError, match="event was waited for"), emulated_cuda.host_reads_forbidden(old):
        old.record().wait()


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_graphs_are_replayed_with_one_copy_in_and_one_out_and_the_tokens_stay(tmp_path, emulated, family, monkeypatch):
    folder = make_checkpoint(tmp_path / family, family, **NARROW)
    run = GraphExecutable.run
    seen = []

    def guarded(self, batch):
        before, replays = len(emulated.copies), emulated.replays
        with emulated_cuda.host_reads_forbidden(emulated):
            step = run(self, batch)
        seen.append((batch.seqs, emulated.replays - replays, [way for way, _ in emulated.copies[before:]]))
        return step

    monkeypatch.setattr(GraphExecutable, "run", guarded)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        warnings.filterwarnings("ignore", "overflow", RuntimeWarning)  # the interpreter's whole numbers
        found = made(folder, "cuda_emulated", FEW, SHORT, strict=True, **SMALL)
    assert found == made(folder, "reference", FEW, SHORT, **SMALL)
    assert emulated.captures == 2 and emulated.replays > 2
    assert {tuple(ways) for _, _, ways in seen} == {("in", "out")}
    assert {seqs for seqs, replayed, _ in seen if replayed} == {1, 2}


def test_three_sequences_in_a_graph_of_four(tmp_path, emulated):
    folder = make_checkpoint(tmp_path / "llama", "llama", **NARROW)
    options = {**SMALL, "max_num_seqs": 4, "backend_options": {"graph_sizes": (4,)}}
    found = made(folder, "cuda_emulated", FEW, SHORT, **options)
    assert emulated.captures == 1 and emulated.replays
    assert found == made(folder, "reference", FEW, SHORT, **SMALL)


def test_graphs_stay_within_their_memory_and_what_is_left_runs_eagerly(tmp_path, emulated, monkeypatch):
    folder = make_checkpoint(tmp_path / "llama", "llama", **NARROW)
    capture = emulated_cuda.EmulatedDevice.capture

    def dear(self, run):
        self.free -= 1000
        return capture(self, run)

    monkeypatch.setattr(emulated_cuda.EmulatedDevice, "capture", dear)
    options = {**SMALL, "backend_options": {"graph_memory": 1500}}
    with pytest.warns(RuntimeWarning, match="batch sizes 1 could not be captured and run eagerly: graphs up to 1 take 2000 bytes"):
        llm = LLM(folder, "cuda_emulated", **options)
    with llm:
        assert list(llm.loaded.executable.captured) == [2]


def test_a_kernel_that_plans_on_the_host_is_not_captured(tmp_path, emulated, monkeypatch):
    from trivium_torch.plugin import TorchBackend

    folder = make_checkpoint(tmp_path / "llama", "llama", **NARROW)
    monkeypatch.setattr(emulated_cuda.EmulatedBackend, "kernels", TorchBackend.kernels)
    with pytest.warns(RuntimeWarning, match="could not be captured and run eagerly: .*numbers from the host"):
        found = made(folder, "cuda_emulated", DRAWN[:3], SHORT, **SMALL)
    assert emulated.captures == 0
    assert found == made(folder, "reference", DRAWN[:3], SHORT, **SMALL)


def test_a_step_without_memory_is_rolled_back_and_the_requests_go_on(tmp_path, old, monkeypatch):
    folder = make_checkpoint(tmp_path / "llama", "llama")
    run = QueuedExecutable.run
    faults = iter([None, None, True])

    def short_of_memory(self, batch):
        if next(faults, None):
            monkeypatch.setattr(self.tape, "run", lambda *a: (_ for _ in ()).throw(torch.OutOfMemoryError("no memory")))
        try:
            return run(self, batch)
        finally:
            monkeypatch.setattr(self.tape, "run", type(self.tape).run.__get__(self.tape))

    monkeypatch.setattr(QueuedExecutable, "run", short_of_memory)
    with LLM(folder, "cuda_emulated", **LOAD) as llm:
        found = ids(llm.generate(PROMPTS, ASKED))
        assert llm.engine.stats.failed_steps == 1 and old.released == 1
        llm.engine.check()
    assert found == made(folder, "reference")


def test_a_request_that_alone_has_no_memory_ends_with_the_numbers(tmp_path, old, monkeypatch):
    folder = make_checkpoint(tmp_path / "llama", "llama")
    from trivium_cuda.tape import Tape

    def greedy_for_memory(self, inputs, batch):
        raise torch.OutOfMemoryError("no memory")

    with LLM(folder, "cuda_emulated", **LOAD) as llm:
        monkeypatch.setattr(Tape, "run", greedy_for_memory)
        with pytest.raises(
            CapacityError, match=r"a step of 16 tokens in 1 sequences needs more memory than is free.*num_kv_blocks"
        ):
            llm.generate(PROMPTS[1], GREEDY)
        monkeypatch.undo()


def test_the_emulated_graph_repeats_what_was_captured_with_the_numbers_of_then(emulated):
    x, total = torch.zeros(4), torch.zeros(4)
    told = [10.0]

    def work():
        y = (x + told[0]).view(2, 2)
        total.add_(y.flatten())
        return y * 2

    graph, y = emulated.capture(work)
    x.fill_(5)
    told[0] = 100.0
    graph.replay()
    assert y.tolist() == [[30.0, 30.0], [30.0, 30.0]], "memory is read anew; a number of the host is that of the capture"
    assert total.tolist() == [25.0] * 4, "what is written in place is written again"


FAMILIES_OF_THEIR_OWN = {
    "hybrid": {
        "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", **NARROW, "num_hidden_layers": 2, "conv_L_cache": 3,
        "layer_types": ["conv", "full_attention"], "norm_eps": 1e-6, "conv_bias": False, "block_auto_adjust_ff_dim": False,
    },
    "experts": {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2,
        **NARROW,
    },
    "latent": {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", **NARROW, "num_key_value_heads": 2,
        "q_lora_rank": None, "kv_lora_rank": 28, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 16,
        "first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "n_shared_experts": 1,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", FAMILIES_OF_THEIR_OWN)
def test_other_kinds_of_layers_are_captured_too(tmp_path, emulated, kind):
    folder = make_checkpoint(tmp_path / kind, "llama", **FAMILIES_OF_THEIR_OWN[kind])
    tensors = read_safetensors(folder / "model.safetensors")
    convolved = {name: x[:, None] for name, x in tensors.items() if name.endswith("conv.conv.weight")}  # as torch stores them
    write_safetensors(folder / "model.safetensors", {**tensors, **convolved})
    found = made(folder, "cuda_emulated", FEW[:2], SHORT[:2], strict=True, **SMALL)
    assert emulated.captures == 2 and emulated.replays
    assert found == made(folder, "reference", FEW[:2], SHORT[:2], **SMALL)


def test_rows_do_not_depend_on_each_other_where_that_is_asked_for(emulated):
    backend = emulated_cuda.backend()
    [device] = backend.probe().devices
    kernel = next(k for k in backend.kernels(device) if k.op == "linear" and not k.name.startswith("torch"))
    x, w = torch.randn(70, 96), torch.randn(40, 96)
    with torch.inference_mode():
        session = backend.open(device, {"dtype": "float32", "batch_invariant": True})
        together = kernel.run(session, (x, w, None), {})
        alone = torch.cat([kernel.run(session, (x[i : i + 1], w, None), {}) for i in (0, 33, 69)])
    assert torch.equal(alone, together[[0, 33, 69]])
    torch.testing.assert_close(together, x @ w.T, rtol=1e-5, atol=1e-4)


def test_a_largest_step_that_does_not_fit_is_refused_on_load_and_stores_nothing(tmp_path, old, monkeypatch):
    from trivium_cuda.tape import Tape

    folder = make_checkpoint(tmp_path / "llama", "llama")
    run, sizes = Tape.run, []

    def short_of_memory(self, inputs, batch):
        sizes.append((batch.tokens, batch.seqs, set(batch.slot_mapping.flatten().tolist())))
        if batch.tokens > 90:
            raise torch.OutOfMemoryError("no memory")
        return run(self, inputs, batch)

    monkeypatch.setattr(Tape, "run", short_of_memory)
    with pytest.raises(CapacityError, match=r"a step of 100 tokens in 3 sequences needs more memory.*max_num_batched_tokens"):
        LLM(folder, "cuda_emulated", **{**LOAD, "max_model_len": 40, "max_num_batched_tokens": 100})
    with LLM(folder, "cuda_emulated", **{**LOAD, "max_model_len": 40, "max_num_batched_tokens": 90}) as llm:
        pages = llm.loaded.session.export_pages(0, range(llm.loaded.num_pages))
        assert not any(array.any() for layer in pages.tensors for array in layer)
    assert sizes == [(100, 3, {-1}), (90, 3, {-1})]


def test_the_kit_s_steps_of_one_token_a_sequence_are_replayed(monkeypatch):
    """Their batches and Programs are not those of a model: adapters that nobody reads, outputs of other names."""
    monkeypatch.setattr(sampler, "_by_triton", sampler._by_torch)  # the interpreter takes long over it, and nothing here is drawn
    from trivium.conformance import collect_checks
    from trivium.conformance.lab import Lab

    device = emulated_cuda.EmulatedDevice()
    backend = emulated_cuda.EmulatedBackend((device,))
    [found] = backend.probe().devices
    can = dataclasses.replace(backend.capabilities(found), dtypes=("float32",), kv_dtypes=("float32",), page_sizes=(16,))
    lab = Lab(backend, found, can, backend.kernels(found))
    [row] = [check.run() for check in collect_checks(lab, ["operators"]) if check.name == "moe_route"]
    assert row.status == "passed", row.detail
    assert device.replays


def test_a_misfit_goes_to_the_next_kernel_and_explain_says_why(emulated):
    from tiny_checkpoints import tiny_config

    from trivium.models import build
    from trivium.plugin import select_kernels

    backend = emulated_cuda.EmulatedBackend((emulated,))
    [device] = backend.probe().devices
    program = build(tiny_config("llama", head_dim=320))
    [choice, *_] = [c for c in select_kernels(program, backend.kernels(device)) if c.call.name == "paged_attention"]
    assert choice.kernel.name == "scaled_dot_product_attention"
    assert [(k.name, why) for k, why in choice.refused] == [("triton paged_attention", "heads of 320 numbers are over its 256")]
