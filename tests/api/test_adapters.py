"""LoRA adapters on both backends: against merged weights, several at a time, coming and going, short of slots and pages."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import numpy as np
import private_chip
import pytest
from fake_plugins import install
from model_cases import load_oracle, oracle_logits
from peft_adapters import EVERY, FUSED, make_adapter, make_merged
from tiny_checkpoints import FAMILIES, make_checkpoint, make_weights, tiny_config, write_safetensors

from trivium import LLM, AsyncLLM, PoolingParams, SamplingParams
from trivium.errors import InvalidRequestError, UnsupportedError

BACKENDS = ["reference", "cpu"]
LOAD = {
    "dtype": "float32", "kv_dtype": "float32", "num_kv_blocks": 96, "max_num_batched_tokens": 24, "enable_lora": True,
    "progress": False, "block_size": 16,
}  # fmt: skip
PROMPTS = [[(7 * i * i + n) % 250 for i in range(n)] for n in (1, 16, 37, 50)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
SCORED = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=259)
NAMES = ["one", "two", "three", "four"]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A llama and four adapters of different ranks and modules."""
    folder = tmp_path_factory.mktemp("lora")
    make_checkpoint(folder / "model", "llama")
    for i, name in enumerate(NAMES):
        make_adapter(folder / name, "llama", EVERY if i % 2 == 0 else EVERY[:3], rank=1 + 3 * i, seed=i)
    return folder


def opened(home, backend, names=NAMES, **options):
    llm = LLM(home / "model", backend, **{**LOAD, **options})
    for name in names:
        llm.load_adapter(name, home / name)
    return llm


@pytest.fixture(scope="module", params=BACKENDS)
def llm(request, home):
    with opened(home, request.param) as model:
        yield model


@pytest.fixture(scope="module")
def alone(home):
    """Ids of every prompt with every adapter, each request alone, by backend."""
    found = {}
    for backend in BACKENDS:
        with opened(home, backend, enable_prefix_caching=False) as llm:
            found[backend] = {(n, i): ids(llm, p, n) for n in (None, *NAMES) for i, p in enumerate(PROMPTS)}
    return found


def ids(llm, prompt, adapter=None):
    [output] = llm.generate([prompt], GREEDY, adapter=adapter)
    return output.outputs[0].token_ids


def scores(outputs):
    """float32[tokens - 1, vocab] of each prompt, by rising id."""
    return [np.array([[e[i].logprob for i in sorted(e)] for e in o.prompt_logprobs[1:]]) for o in outputs]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("family", "modules"), [(f, FUSED if f == "phi3" else EVERY) for f in FAMILIES])
def test_an_adapter_does_what_its_merged_weights_do(family, modules, backend, tmp_path):
    make_checkpoint(tmp_path / "model", family)
    rank = {"llama": 16, "phi3": 7}.get(family, 4)
    root = family == "qwen3"
    adapter = make_adapter(tmp_path / "a", family, modules, rank, use_rslora=root, lora_alpha=3)
    merged = make_merged(tmp_path / "merged", family, adapter, 3 / (rank**0.5 if root else rank))
    with LLM(merged, backend, **{**LOAD, "enable_lora": False}) as llm:
        want = scores(llm.generate(PROMPTS[1:], SCORED))
    with LLM(tmp_path / "model", backend, **LOAD) as llm:
        plain = scores(llm.generate(PROMPTS[1:], SCORED))
        llm.load_adapter("a", adapter)
        got = scores(llm.generate(PROMPTS[1:], SCORED, adapter="a"))
    for mine, theirs, base in zip(got, want, plain):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4)
        assert np.abs(mine - base).max() > 0.1


@pytest.mark.oracles
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", ["llama", "phi3", "gemma3"])
def test_an_adapter_equals_the_oracle_s_merged_model(family, backend, tmp_path):
    make_checkpoint(tmp_path / "model", family)
    adapter = make_adapter(tmp_path / "a", family, FUSED if family == "phi3" else EVERY)
    oracle = load_oracle(make_merged(tmp_path / "merged", family, adapter, 2.0))
    with LLM(tmp_path / "model", backend, **LOAD) as llm:
        llm.load_adapter("a", adapter)
        for prompt, got in zip(PROMPTS[1:], scores(llm.generate(PROMPTS[1:], SCORED, adapter="a"))):
            logits = oracle_logits(oracle, prompt, decode=1)[:-1, : llm.loaded.vocab_size].astype(np.float64)
            want = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_a_batch_of_many_adapters_gives_what_each_gives_alone(llm, alone):
    wanted = [(n, i) for i in range(len(PROMPTS)) for n in (None, *NAMES)]
    streams = [llm.stream(PROMPTS[i], GREEDY, adapter=n) for n, i in wanted]
    news = [[next(stream)] for stream in streams]
    got = [first + list(rest) for first, rest in zip(news, streams)]
    tokens = {key: [t for o in outputs for t in o.outputs[0].token_ids] for key, outputs in zip(wanted, got)}
    assert tokens == alone[llm.loaded.backend.name]
    assert len({tuple(alone["cpu"][n, 3]) for n in (None, *NAMES)}) == 5


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("slots", [1, 2])
def test_short_of_slots_and_pages_every_request_ends_with_its_ids(backend, slots, home, alone):
    with opened(home, backend, max_loras=slots, num_kv_blocks=9, max_num_seqs=4, max_model_len=96) as llm:
        wanted = [(n, i) for i in range(len(PROMPTS)) for n in (*NAMES, None, *NAMES[::-1])]
        engine, finished, numbers = llm.engine, {}, []
        for n, i in wanted:
            numbers.append(engine.add_request(PROMPTS[i], GREEDY, adapter=n, priority=-len(numbers) // 3))
            finished |= {out.request_id: out for out in engine.step() if out.finished}
        while engine.has_unfinished():
            finished |= {out.request_id: out for out in engine.step() if out.finished}
            engine.check()
            assert len({seq.adapter for seq in engine.scheduler.running} - {None}) <= slots
        assert engine.stats.preemptions > 0
        assert [finished[n].outputs[0].token_ids for n in numbers] == [alone[backend][key] for key in wanted]


def test_adapters_come_and_go_while_another_runs(llm, home, alone):
    want = alone[llm.loaded.backend.name]
    running = {name: llm.stream(PROMPTS[2], GREEDY, adapter=name) for name in ("one", "two")}
    news = {name: [next(stream)] for name, stream in running.items()}
    llm.unload_adapter("one")
    assert llm.adapters == ("two", "three", "four")
    with pytest.raises(InvalidRequestError, match="no adapter is called 'one'; loaded are: two, three, four") as refusal:
        ids(llm, PROMPTS[0], "one")
    assert refusal.value.param == "adapter"
    llm.load_adapter("one", home / "four")  # another of that name
    assert ids(llm, PROMPTS[2], "one") == want["four", 2]
    for name, stream in running.items():
        news[name] += stream
        assert [t for o in news[name] for t in o.outputs[0].token_ids] == want[name, 2], name
    llm.unload_adapter("one")
    llm.load_adapter("one", home / "one")
    assert ids(llm, PROMPTS[2], "one") == want["one", 2]


def test_pages_are_shared_within_an_adapter_only(llm, home):
    prompt = [9, 8, 7] * 20

    def cached(adapter):
        return llm.generate([prompt], GREEDY, adapter=adapter)[0].metrics.num_cached_tokens

    assert [cached(n) for n in (None, *NAMES)] == [0] * 5
    assert [cached(n) for n in (None, *NAMES)] == [48] * 5
    llm.load_adapter("again", home / "two")  # the same numbers under another name
    assert cached("again") == 48
    llm.unload_adapter("again")
    llm.load_adapter("again", home / "three")
    assert cached("again") == 48
    llm.unload_adapter("again")


def test_embeddings_scores_chats_and_samples_take_adapters(llm, home):
    base, tuned = (llm.embed(["text"], PoolingParams("mean"), adapter=n)[0].embedding for n in (None, "one"))
    assert np.abs(base - tuned).max() > 1e-3
    assert llm.loglikelihood([("a", "b")]) != llm.loglikelihood([("a", "b")], adapter="one")
    drawn = {"temperature": 1.0, "seed": 4, "max_tokens": 5, "ignore_eos": True}
    [many] = llm.generate([PROMPTS[2]], SamplingParams(n=3, **drawn), adapter="three")
    [single] = llm.generate([PROMPTS[2]], SamplingParams(**drawn), adapter="three")
    assert many.outputs[0].token_ids == single.outputs[0].token_ids
    [beams] = llm.generate([PROMPTS[2]], SamplingParams(beam_width=2, n=2, max_tokens=5, ignore_eos=True), adapter="three")
    [plain] = llm.generate([PROMPTS[2]], SamplingParams(beam_width=2, n=2, max_tokens=5, ignore_eos=True))
    assert [o.token_ids for o in beams.outputs] != [o.token_ids for o in plain.outputs]


def test_the_async_front_loads_and_uses_adapters(home, llm, alone):
    backend = llm.loaded.backend.name

    async def front():
        async with AsyncLLM(home / "model", backend, **LOAD) as model:
            await asyncio.gather(*(model.load_adapter(n, home / n) for n in NAMES))
            outputs = await asyncio.gather(*(model.generate([PROMPTS[3]], GREEDY, adapter=n) for n in (None, *NAMES)))
            await model.unload_adapter("one")
            with pytest.raises(InvalidRequestError):
                await model.generate("x", GREEDY, adapter="one")
            return [o.outputs[0].token_ids for [o] in outputs], sorted(model.adapters)

    assert asyncio.run(front()) == ([alone[backend][n, 3] for n in (None, *NAMES)], sorted(NAMES[1:]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_an_adapter_a_model_for_adapters_is_the_model(backend, home):
    with LLM(home / "model", backend, **{**LOAD, "enable_lora": False}) as llm:
        want = scores(llm.generate(PROMPTS[1:], SCORED))
        with pytest.raises(UnsupportedError, match="enable_lora=True"):
            llm.load_adapter("one", home / "one")
        with pytest.raises(UnsupportedError, match="enable_lora=True"):
            ids(llm, PROMPTS[0], "one")
        assert llm.adapters == ()
    with opened(home, backend) as llm:
        for mine, theirs in zip(scores(llm.generate(PROMPTS[1:], SCORED)), want):
            np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [{"enable_lora": 1}, {"max_loras": 0}, {"max_lora_rank": True}, {"max_lora_rank": None}])
def test_bad_limits_are_refused_by_name(options, home):
    with pytest.raises(InvalidRequestError):
        LLM(home / "model", "reference", **{**LOAD, **options})


@pytest.fixture
def private(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(Path(private_chip.__file__).parent)]))
    install(tmp_path, "private", "from private_chip import trivium_backend")
    return {**LOAD, "kv_dtype": "auto", "dtype": "auto", "block_size": None}


@pytest.mark.faults
@pytest.mark.filterwarnings("ignore::trivium.plugin.HostFallbackWarning")
def test_o52_adapters_on_weights_in_a_private_layout_give_the_merged_model_s_ids(private, home, tmp_path):
    merged = make_merged(tmp_path / "merged", "llama", home / "three", 2.0)
    with LLM(merged, "reference", **{**LOAD, "enable_lora": False}) as llm:
        want = [ids(llm, p) for p in PROMPTS]
    with opened(home, "private", **private) as llm:
        assert [ids(llm, p, "three") for p in PROMPTS] == want
        target, (a_there, _) = next(iter(llm.loaded.lora._placed.items()))
        a = llm.loaded.session.read_weight(a_there)
        part = llm.loaded.lora.get("three").parts[target[:2]][0]
        assert any(np.array_equal(slot[: len(part)], part) and not slot[len(part) :].any() for slot in a)


@pytest.mark.filterwarnings("ignore::trivium.plugin.HostFallbackWarning")
def test_a_backend_that_can_t_change_weights_is_refused_by_name(private, home, monkeypatch):
    monkeypatch.delattr(private_chip.PrivateSession, "assign")
    with pytest.raises(UnsupportedError, match="backend private can't change a weight") as refusal:
        opened(home, "private", **private)
    assert refusal.value.param == "enable_lora"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_checkpoint_of_interleaved_heads_takes_the_same_adapters(backend, home, tmp_path, alone):
    """As GGUF files of llamas have them: rows of q_proj and k_proj so that pairs which are rotated together are neighbours."""
    weights = make_weights(tiny_config("llama"))
    for name, weight in weights.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            order = [head * 16 + half * 8 + i for head in range(len(weight) // 16) for i in range(8) for half in (0, 1)]
            weights[name] = weight[order]
    make_checkpoint(tmp_path / "model", "llama", rope_interleaved=True)
    write_safetensors(tmp_path / "model" / "model.safetensors", weights, {"format": "pt"})
    with LLM(tmp_path / "model", backend, **LOAD) as llm:
        assert [ids(llm, p) for p in PROMPTS] == [alone[backend][None, i] for i in range(4)]
        for name in NAMES:
            llm.load_adapter(name, home / name)
            assert [ids(llm, p, name) for p in PROMPTS] == [alone[backend][name, i] for i in range(4)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_drafts_are_checked_with_the_adapter(backend, home):
    prompt, params = [5, 6, 7, 8] * 6, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    with opened(home, backend) as llm:
        want = [llm.generate([prompt], params, adapter=n)[0].outputs[0].token_ids for n in (None, *NAMES)]
    with opened(home, backend, speculative={"method": "ngram"}) as llm:
        assert [llm.generate([prompt], params, adapter=n)[0].outputs[0].token_ids for n in (None, *NAMES)] == want


def test_a_fault_while_an_adapter_is_put_in_place_hits_its_requests_only(home, alone, monkeypatch):
    with opened(home, "reference", max_loras=1) as llm:
        assert ids(llm, PROMPTS[1], "one") == alone["reference"]["one", 1]
        assign, calls = llm.loaded.session.assign, []

        def failing(tensor, index, array):
            calls.append(index)
            if len(calls) in (5, 9):
                raise RuntimeError("the device is busy")
            assign(tensor, index, array)

        monkeypatch.setattr(llm.loaded.session, "assign", failing)
        engine = llm.engine
        numbers = [engine.add_request(PROMPTS[1], GREEDY, adapter=n) for n in (None, "two", None)]
        finished = {}
        while engine.has_unfinished():
            finished |= {out.request_id: out for out in engine.step() if out.finished}
            engine.check()
        assert [finished[n].error is None for n in numbers] == [True, False, True]
        assert "the device is busy" in str(finished[numbers[1]].error)
        for name in ("two", "one"):  # half written, the slot is nobody's
            assert ids(llm, PROMPTS[1], name) == alone["reference"][name, 1]
