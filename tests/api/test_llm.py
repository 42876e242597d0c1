"""LLM: forms of prompts, batches, streams, chats, what is refused and what a fault leaves behind."""

from __future__ import annotations

import dataclasses
import threading

import numpy as np
import pytest
from chat_models import make_chat_model

from trivium import LLM, SamplingParams
from trivium.errors import BackendError, ContextLengthError, InvalidRequestError, UnsupportedError

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_chat_model(tmp_path_factory.mktemp("models") / "chat")


@pytest.fixture(scope="module", params=["reference", "cpu"])
def backend(request):
    return request.param


@pytest.fixture(scope="module")
def llm(folder, backend):
    with LLM(folder, backend=backend, seed=3) as model:
        yield model


@pytest.fixture(autouse=True)
def nothing_is_left_behind(llm):
    yield
    llm.engine.check()
    assert not llm.engine.has_unfinished() and not llm._inbox


def ids_of(outputs):
    return [list(o.outputs[0].token_ids) for o in outputs]


def test_every_form_of_prompt(llm):
    text, ids = "hello", [104, 101, 108, 108, 111]
    [want] = ids_of(llm.generate(text, GREEDY))
    assert len(want) == 8
    for prompts in ([text], ids, [ids], np.array(ids), np.array([ids]), tuple(ids), [np.array(ids)]):
        assert ids_of(llm.generate(prompts, GREEDY)) == [want]
    assert ids_of(llm.generate([text, [1, 2], ids], GREEDY))[::2] == [want, want]
    assert llm.generate([], GREEDY) == []


def test_a_batch_gives_what_each_gives_alone_in_order(llm):
    prompts = [[i, 2 * i, 7] * (1 + i % 5) for i in range(1, 9)]
    params = [SamplingParams(temperature=0.9, seed=i, max_tokens=3 + i, ignore_eos=True) for i in range(8)]
    together = llm.generate(prompts, params)
    assert [o.prompt_token_ids for o in together] == prompts
    assert [len(o.outputs[0].token_ids) for o in together] == [3 + i for i in range(8)]
    assert ids_of(together) == [ids_of(llm.generate([p], s))[0] for p, s in zip(prompts, params)]


def test_a_stream_is_the_generated_text_in_pieces(llm):
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=1)
    [whole] = llm.generate("abc", params)
    pieces = list(llm.stream("abc", params))
    assert "".join(p.outputs[0].text for p in pieces) == whole.outputs[0].text
    assert [t for p in pieces for t in p.outputs[0].token_ids] == whole.outputs[0].token_ids
    assert [p.finished for p in pieces] == [False] * 29 + [True]
    assert pieces[-1].outputs[0].finish_reason == "length" and pieces[-1].metrics.time_to_first_token > 0
    assert sum(len(p.outputs[0].logprobs) for p in pieces) == 30


def test_streams_and_batches_may_run_side_by_side(llm):
    want = ids_of(llm.generate(["one", "two", "three"], GREEDY))
    first, second = llm.stream("one", GREEDY), llm.stream("two", GREEDY)
    news = {0: [next(first)], 1: [next(second)]}
    third = ids_of(llm.generate("three", GREEDY))
    news[1] += list(second)
    news[0] += list(first)
    assert [[t for p in news[i] for t in p.outputs[0].token_ids] for i in (0, 1)] + third == want


def test_leaving_a_stream_early_aborts_the_request(llm):
    stream = llm.stream("abc", SamplingParams(max_tokens=200, ignore_eos=True))
    next(stream)
    stream.close()
    assert not llm.engine.has_unfinished()


def test_threads_may_share_a_model(llm):
    want = ids_of(llm.generate(["ab", "cd", "ef"], GREEDY))
    got: dict[int, list] = {}
    jobs = [
        threading.Thread(target=lambda i=i, p=p: got.update({i: ids_of(llm.generate(p, GREEDY))[0]}))
        for i, p in enumerate(["ab", "cd", "ef"])
    ]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    assert [got[i] for i in range(3)] == want


def test_a_chat_is_its_rendered_text(llm):
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "hi"}]
    rendered = "[system]S[user]hi[assistant]"
    [want] = ids_of(llm.generate(rendered, GREEDY))
    assert ids_of(llm.chat(messages, GREEDY)) == [want]
    assert ids_of(llm.chat([messages, messages], GREEDY)) == [want, want]
    assert [t for p in llm.stream(messages, GREEDY) for t in p.outputs[0].token_ids] == want
    assert llm.encode_chat(messages, add_generation_prompt=False) == list(b"[system]S[user]hi")


def test_n_samples_differ_and_the_first_is_the_single_one(llm):
    params = SamplingParams(temperature=1.5, seed=9, max_tokens=12, ignore_eos=True)
    [[one]] = [o.outputs for o in llm.generate("x", params)]
    [many] = llm.generate("x", dataclasses.replace(params, n=3))
    assert [c.index for c in many.outputs] == [0, 1, 2]
    assert many.outputs[0].token_ids == one.token_ids
    assert len({tuple(c.token_ids) for c in many.outputs}) == 3


def test_the_models_seed_makes_unseeded_requests_repeat(folder, backend):
    params = SamplingParams(temperature=1, max_tokens=12, ignore_eos=True)
    runs = []
    for seed in (1, 1, 2):
        with LLM(folder, backend=backend, seed=seed) as model:
            runs.append(ids_of(model.generate(["a", "a"], params)))
    assert runs[0] == runs[1] != runs[2]
    assert runs[0][0] != runs[0][1]


def test_default_params_are_the_models_own(tmp_path, llm):
    assert llm.default_params() == SamplingParams(temperature=0)
    config = {"do_sample": True, "temperature": 0.5, "top_k": 7}
    with LLM(make_chat_model(tmp_path / "m", generation=config), backend="reference") as model:
        assert model.default_params(max_tokens=3) == SamplingParams(temperature=0.5, top_k=7, max_tokens=3)


def test_a_closed_model_says_so(folder, backend):
    model = LLM(folder, backend=backend)
    model.close()
    model.close()
    with pytest.raises(InvalidRequestError, match="closed"):
        model.generate("x", GREEDY)


def test_a_step_that_is_interrupted_by_a_call_to_the_same_model_refuses_it(llm, monkeypatch):
    """As a signal handler on the thread that steps would."""
    run, refused = llm.engine.model.executable.run, []

    def handler(batch):
        for call in (lambda: llm.generate("y", GREEDY), llm.close, lambda: next(llm.stream("y", GREEDY))):
            with pytest.raises(InvalidRequestError, match="in the middle of a step on this thread") as refusal:
                call()
            refused.append(refusal)
        return run(batch)

    monkeypatch.setattr(llm.engine.model.executable, "run", handler)
    assert len(llm.generate("x", GREEDY)[0].outputs[0].token_ids) == 8
    assert len(refused) >= 3


def test_a_stream_that_lags_behind_other_threads_steps_misses_nothing(llm):
    stream = llm.stream("hello", GREEDY)
    news = [next(stream)]
    llm.generate("other", dataclasses.replace(GREEDY, max_tokens=20))
    news += stream
    assert len(news) == 2
    assert [t for o in news for t in o.outputs[0].token_ids] == ids_of(llm.generate("hello", GREEDY))[0]


def test_settings_are_refused_before_anything_is_loaded(tmp_path):
    with pytest.raises(InvalidRequestError, match="scheduling_policy must be fcfs or priority, not 'lifo'"):
        LLM(str(tmp_path / "nothing"), backend="reference", scheduling_policy="lifo")


def test_bad_prompts_and_counts_are_refused(llm):
    for bad in (5, None, {"prompt": "x"}):
        with pytest.raises(InvalidRequestError, match="prompts must be"):
            llm.generate(bad, GREEDY)
    with pytest.raises(InvalidRequestError, match="2 prompts came with 1"):
        llm.generate(["a", "b"], [GREEDY])
    with pytest.raises(ContextLengthError):
        llm.generate([1] * 600, GREEDY)


def test_one_bad_request_keeps_the_whole_call_from_starting(llm):
    with pytest.raises(InvalidRequestError):
        llm.generate(["good", [999999]], GREEDY)
    assert llm.engine.stats.failed_steps == 0


@pytest.mark.parametrize(
    "option", [{"seed": "x"}, {"max_num_seqs": 0}, {"kv_host_bytes": -1}, {"kv_disk_path": ""}, {"speculative": {"method": "x"}}]
)
def test_options_of_the_engine_are_refused_before_anything_is_loaded(monkeypatch, option):
    monkeypatch.setattr("trivium.api.load", lambda *_, **__: pytest.fail("it was loaded"))
    with pytest.raises(InvalidRequestError) as refused:
        LLM("anything", progress=False, **option)
    assert refused.value.param == next(iter(option))


def test_loading_refuses_by_name(folder):
    with pytest.raises(InvalidRequestError, match="max_num_seqs"):
        LLM(folder, backend="reference", max_num_seqs=0)
    with pytest.raises(InvalidRequestError, match="threads"):
        LLM(folder, backend="reference", threads=2)
    with pytest.raises(InvalidRequestError, match="nonsense"):
        LLM(folder, backend="reference", backend_options={"nonsense": 1})


class Broken:
    """An Executable whose steps fail while `prompt` is among their tokens."""

    def __init__(self, inner, token):
        self.inner, self.token = inner, token

    def run(self, batch):
        if self.token in batch.token_ids:
            raise OSError("the device fell off")
        return self.inner.run(batch)


def test_a_fault_hits_its_own_request_only(llm, monkeypatch):
    [want] = ids_of(llm.generate("good", GREEDY))
    monkeypatch.setattr(llm.engine, "model", dataclasses.replace(llm.loaded, executable=Broken(llm.loaded.executable, 258)))
    good, bad = llm.generate(["good", [258, 3]], GREEDY)
    assert good.outputs[0].token_ids == want and good.error is None
    assert bad.outputs[0].finish_reason == "error" and isinstance(bad.error, BackendError)
    with pytest.raises(BackendError, match="the device fell off"):
        llm.generate([258, 3], GREEDY)
    with pytest.raises(BackendError):
        list(llm.stream([258, 3], GREEDY))


@pytest.mark.faults
def test_o01_every_min_p_gives_a_text_and_one_is_greedy(llm):
    [greedy] = ids_of(llm.generate("abc", GREEDY))
    for min_p in (0, 0.05, 0.999, 1.0):
        [got] = ids_of(llm.generate("abc", SamplingParams(temperature=1, min_p=min_p, max_tokens=8, ignore_eos=True, seed=1)))
        assert len(got) == 8 and (got == greedy or min_p < 0.999)


@pytest.mark.faults
def test_o02_prompt_ids_must_be_ids(llm):
    size = llm.loaded.vocab_size
    for bad in ([-1], [size], [2**63], [1.5], [True], [[1, 2], [-3]], [None]):
        with pytest.raises(InvalidRequestError, match="out of the vocabulary"):
            llm.generate(bad, GREEDY)
    assert len(llm.generate([1, 2, 3], GREEDY)) == 1 and len(llm.generate([[1, 2], [3]], GREEDY)) == 2


@pytest.mark.faults
def test_o04_no_id_beyond_the_tokenizer_is_made_shown_or_biased(llm):
    size = llm.loaded.vocab_size
    assert size == 259 < llm.loaded.program.outputs["logits"].shape[-1]
    [out] = llm.generate("a", SamplingParams(temperature=5, max_tokens=200, ignore_eos=True, seed=1, logprobs=5))
    assert max(out.outputs[0].token_ids) < size and max(i for entry in out.outputs[0].logprobs for i in entry) < size
    with pytest.raises(InvalidRequestError, match="logit_bias"):
        llm.generate("a", SamplingParams(logit_bias={size: 1.0}))


@pytest.mark.faults
def test_o05_temperature_zero_is_one_text(llm):
    variants = [{"seed": s} for s in range(1, 6)] + [{"top_p": 0.1}, {"top_k": 5}, {"min_p": 0.3}]
    outs = [llm.generate("abc", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, **v))[0] for v in variants]
    assert len({tuple(o.outputs[0].token_ids) for o in outs}) == 1


@pytest.mark.faults
def test_o06_any_mixture_of_top_k_runs_together(llm):
    base = {"max_tokens": 8, "ignore_eos": True, "seed": 1}
    mixed = [SamplingParams(temperature=t, top_k=k, **base) for t, k in ((1, 9999999), (0, 0), (1, 1), (1, -1))]
    got = ids_of(llm.generate(["abc"] * 4, mixed))
    assert got[1] == got[2] and got[0] == got[3]


@pytest.mark.faults
def test_o07_a_stop_id_outside_the_vocabulary_spares_the_neighbour(llm):
    [want] = ids_of(llm.generate("known", GREEDY))
    stream = llm.stream("known", GREEDY)
    got = list(next(stream).outputs[0].token_ids)
    with pytest.raises(InvalidRequestError, match="stop_token_ids"):
        llm.generate("x", SamplingParams(stop_token_ids=[llm.loaded.vocab_size + 10], min_tokens=4))
    assert got + [t for p in stream for t in p.outputs[0].token_ids] == want


@pytest.mark.faults
def test_o08_a_parameter_the_backend_lacks_is_refused_and_the_stream_goes_on(llm, monkeypatch):
    capabilities = dataclasses.replace(llm.loaded.capabilities, sampling=frozenset({"temperature", "seed"}))
    monkeypatch.setattr(llm.engine, "model", dataclasses.replace(llm.loaded, capabilities=capabilities))
    stream = llm.stream("abc", GREEDY)
    got = list(next(stream).outputs[0].token_ids)
    with pytest.raises(UnsupportedError, match="top_p") as caught:
        llm.generate("x", SamplingParams(top_p=0.5))
    assert caught.value.param == "top_p"
    got += [t for p in stream for t in p.outputs[0].token_ids]
    assert [got] == ids_of(llm.generate("abc", GREEDY))


@pytest.mark.faults
def test_o09_a_seeded_request_does_not_depend_on_its_batch(llm):
    seeded = SamplingParams(temperature=0.8, seed=42, max_tokens=16, ignore_eos=True)
    others = [SamplingParams(temperature=0.8, max_tokens=16, ignore_eos=True, seed=s) for s in (None, None, 7)]
    runs = [ids_of(llm.generate("A", seeded))[0]]
    for other in others:
        runs.append(ids_of(llm.generate(["A", "B"], [seeded, other]))[0])
        runs.append(ids_of(llm.generate(["B", "A"], [other, seeded]))[1])
    assert all(run == runs[0] for run in runs)


@pytest.mark.faults
def test_o11_logprobs_zero_reports_the_chosen_token_alone(llm):
    [out] = llm.generate("abc", dataclasses.replace(GREEDY, logprobs=0))
    assert [list(entry) for entry in out.outputs[0].logprobs] == [[t] for t in out.outputs[0].token_ids]


@pytest.mark.faults
def test_o12_alternatives_are_exactly_k_sorted_and_of_their_position(llm):
    [out] = llm.generate("abc", dataclasses.replace(GREEDY, logprobs=3, max_tokens=12))
    entries = out.outputs[0].logprobs
    assert all(len(e) == 3 and next(iter(e)) == t for e, t in zip(entries, out.outputs[0].token_ids))
    for entry in entries:
        values = [v.logprob for v in entry.values()]
        assert values == sorted(values, reverse=True) and sum(np.exp(values)) <= 1
    assert len({tuple(e) for e in entries}) > 1


@pytest.mark.faults
def test_o20_an_empty_prompt_begins_with_bos_or_is_refused(llm):
    [bos] = ids_of(llm.generate([[llm.tokenizer.bos_id]], GREEDY))
    assert ids_of(llm.generate(["", []], GREEDY)) == [bos, bos]


@pytest.mark.faults
def test_o10_the_end_token_and_special_alternatives_have_a_finite_logprob_and_a_text(llm):
    end, pad = 257, 258
    [out] = llm.generate("abc", SamplingParams(temperature=0, logit_bias={end: 100.0}, logprobs=llm.loaded.vocab_size))
    [entry] = out.outputs[0].logprobs
    assert out.outputs[0].token_ids == [end] and out.outputs[0].finish_reason == "stop" and out.outputs[0].text == ""
    assert entry[end].decoded_token == "</s>" and entry[pad].decoded_token == "<pad>"
    assert len(entry) == llm.loaded.vocab_size and np.isfinite([v.logprob for v in entry.values()]).all()


@pytest.mark.parametrize("given", [None, 5, {"role": "user", "content": "hi"}])
def test_a_chat_that_is_no_list_is_refused(llm, given):
    with pytest.raises(InvalidRequestError, match=f"not {type(given).__name__}"):
        llm.chat(given)
