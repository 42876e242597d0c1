"""Reported faults, tried on LLM with both backends: what a user of the Python interface would meet.

The model is a byte-level llama of two layers in float32; what it should give is known from the reference backend.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import multiprocessing
import threading
import weakref

import numpy as np
import pytest
from chat_models import make_chat_model

from trivium import LLM, AsyncLLM, SamplingParams
from trivium.errors import BackendError, CapacityError, ContextLengthError, InvalidRequestError, TriviumError

pytestmark = pytest.mark.faults

LETTERS = tuple(range(97, 123)) + (32,)
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SPELL = dataclasses.replace(GREEDY, allowed_token_ids=LETTERS)
"""Greedy, in letters and blanks: a text where every token is one character."""
PROMPTS = ["a", "bcd", "the quick brown fox", "x" * 17, "hello, world", "0123456789" * 5, "\u00e9\u00e8", "zz top"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_chat_model(tmp_path_factory.mktemp("models") / "chat")


@pytest.fixture(scope="module", params=["cpu", "reference"])
def exact(request):
    """Options of a model whose numbers are the reference's."""
    return {"backend": request.param, "dtype": "float32", "kv_dtype": "float32", "progress": False}


@pytest.fixture(scope="module")
def llm(folder, exact):
    with LLM(folder, **exact) as model:
        yield model


@pytest.fixture(scope="module")
def reference(folder):
    with LLM(folder, backend="reference", progress=False) as model:
        yield model


@pytest.fixture(autouse=True)
def nothing_is_left_behind(llm):
    yield
    llm.engine.check()
    assert not llm.engine.has_unfinished() and not llm._inbox


def threads_of(exact, *counts):
    """The option in each of its values, on the backend that has it."""
    return [{"threads": n} for n in counts] if exact["backend"] == "cpu" else [{}]


def ids_of(outputs):
    return [list(o.outputs[0].token_ids) for o in outputs]


def reference_logprobs(reference, ids):
    """float64[len(ids), vocab]: the log softmax of the reference logits behind every token of `ids`."""
    [out] = reference.generate([[*ids, 0]], SamplingParams(max_tokens=0, prompt_logprobs=-1))
    rows = [[entry[i].logprob for i in range(reference.loaded.vocab_size)] for entry in out.prompt_logprobs[1:]]
    return np.array(rows)


def test_o05_every_greedy_id_is_the_argmax_of_the_reference_logits(llm, reference):
    prompt = llm.encode("the quick brown fox")
    for fields in ({}, {"seed": 5}, {"top_p": 0.1}, {"top_k": 5}, {"min_p": 0.3}, {"temperature": 0}):
        [made] = ids_of(llm.generate([prompt], dataclasses.replace(GREEDY, **fields)))
        rows = reference_logprobs(reference, prompt + made[:-1])[len(prompt) - 1 :]
        assert made == rows.argmax(-1).tolist()


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 0, 1, 2), (1, 2, 3, 0)])
def test_o06_rows_of_any_top_k_share_a_batch(llm, order):
    base = {"max_tokens": 12, "ignore_eos": True, "seed": 1}
    kinds = [SamplingParams(temperature=t, top_k=k, **base) for t, k in ((1, 9999999), (0, 0), (1, 1), (1, -1))]
    together = dict(zip(order, ids_of(llm.generate(["abc"] * 4, [kinds[i] for i in order]))))
    assert together[1] == together[2] and together[0] == together[3] != together[1]


def test_o12_logprobs_equal_the_log_softmax_of_the_reference_logits(llm, reference):
    prompt = llm.encode("hello")
    for fields in ({"temperature": 0}, {"temperature": 3, "seed": 3}):
        [out] = llm.generate([prompt], SamplingParams(max_tokens=12, ignore_eos=True, logprobs=3, **fields))
        made, entries = out.outputs[0].token_ids, out.outputs[0].logprobs
        want = reference_logprobs(reference, [*prompt, *made[:-1]])[len(prompt) - 1 :]
        for token, entry, row in zip(made, entries, want, strict=True):
            best = np.argsort(-row, kind="stable")[:3].tolist()
            assert list(entry) == list(dict.fromkeys([token, *best]))
            assert all(abs(v.logprob - row[i]) < 1e-3 and v.rank == (row > row[i]).sum() + 1 for i, v in entry.items())


@pytest.mark.parametrize("cut", [(0, 1), (5, 7), (9, 16), (23, 24), (0, 24)])
@pytest.mark.parametrize("include", [False, True])
def test_o13_o14_o16_text_ends_at_the_stop_streamed_and_not(llm, cut, include):
    [whole] = llm.generate("tell", SPELL)
    text = whole.outputs[0].text
    stop = text[slice(*cut)]
    params = dataclasses.replace(SPELL, stop=[stop + "QQ", stop], include_stop_str_in_output=include)
    [out] = llm.generate("tell", params)
    pieces = list(llm.stream("tell", params))
    end = text.index(stop)
    assert out.outputs[0].text == text[: end + len(stop) * include]
    assert (out.outputs[0].finish_reason, out.outputs[0].stop_reason) == ("stop", stop)
    assert "".join(p.outputs[0].text for p in pieces) == out.outputs[0].text
    made = [t for p in pieces for t in p.outputs[0].token_ids]
    assert made == out.outputs[0].token_ids == whole.outputs[0].token_ids[: end + len(stop)]


def test_o17_scoring_alone_makes_no_token(llm, reference):
    prompt = llm.encode("Your answer: Yes")
    [out] = llm.generate([prompt], SamplingParams(max_tokens=0, prompt_logprobs=1))
    assert (out.outputs[0].token_ids, out.outputs[0].text, out.outputs[0].finish_reason) == ([], "", "length")
    want = reference_logprobs(reference, prompt[:-1])
    assert out.prompt_logprobs[0] is None and len(out.prompt_logprobs) == len(prompt)
    for token, entry, row in zip(prompt[1:], out.prompt_logprobs[1:], want, strict=True):
        assert abs(entry[token].logprob - row[token]) < 1e-3
    [bare] = llm.generate([prompt], SamplingParams(max_tokens=0))
    assert bare.outputs[0].finish_reason == "length" and bare.prompt_logprobs is None


def test_o18_a_stream_that_is_left_gives_its_pages_back(llm):
    endless = SamplingParams(max_tokens=400, ignore_eos=True)
    for leave in (lambda s: s.close(), lambda s: None):
        stream = llm.stream("abc", endless)
        next(stream)
        assert llm.engine.has_unfinished()
        leave(stream)
        del stream
        gc.collect()
        assert not llm.engine.has_unfinished() and llm.engine.kv.pool.available == llm.engine.kv.pool.pages


@pytest.mark.parametrize("point", ["plan", "grow"])
def test_o18_a_stream_that_is_collected_inside_a_step_does_not_disturb_it(llm, monkeypatch, point):
    [want] = ids_of(llm.generate("known", GREEDY))
    owner = {"plan": llm.engine.scheduler, "grow": llm.engine.kv}[point]
    inner, failed = getattr(owner, point), llm.engine.stats.failed_steps
    streams = [llm.stream("left", SamplingParams(max_tokens=400, ignore_eos=True))]
    next(streams[0])

    def collect(*args, **options):
        result = inner(*args, **options)
        streams.clear()
        return result

    monkeypatch.setattr(owner, point, collect)
    assert ids_of(llm.generate("known", GREEDY)) == [want]
    assert llm.engine.stats.failed_steps == failed


@pytest.mark.parametrize("chunk", [16, 1])
def test_o21_output_does_not_depend_on_the_chunk(folder, exact, llm, chunk):
    prompts = [[(7 * i + k) % 250 for i in range(k)] for k in (15, 16, 17, 31, 32, 33, 48)]
    params = dataclasses.replace(GREEDY, max_tokens=12, logprobs=2, prompt_logprobs=1)
    want = llm.generate(prompts, params)
    with LLM(folder, **exact, max_num_batched_tokens=chunk) as small:
        got = small.generate(prompts, params)
    assert ids_of(got) == ids_of(want)
    for a, b in zip(got, want):
        for x, y in zip(a.prompt_logprobs[1:], b.prompt_logprobs[1:], strict=True):
            assert list(x) == list(y) and np.allclose([v.logprob for v in x.values()], [v.logprob for v in y.values()], atol=1e-4)


def test_o23_prompt_and_output_may_fill_the_context_exactly(folder, exact):
    with LLM(folder, **exact, max_model_len=64) as model:
        for length, made in ((62, 2), (63, 1), (64, 0)):
            params = dataclasses.replace(GREEDY, max_tokens=made, prompt_logprobs=None if made else 0)
            [out] = model.generate([[5] * length], params)
            assert len(out.outputs[0].token_ids) == made and out.outputs[0].finish_reason == "length"
        for length, made in ((62, 3), (64, 1), (65, 0), (64, None)):
            with pytest.raises(ContextLengthError, match=rf"{length} tokens.*64"):
                model.generate([[5] * length], dataclasses.replace(GREEDY, max_tokens=made))
        [cut] = model.generate([[5] * 60], dataclasses.replace(GREEDY, max_tokens=None))
        assert len(cut.outputs[0].token_ids) == 4 and cut.outputs[0].finish_reason == "length"


COUNTS = ("block_size", "num_kv_blocks", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "threads")
SIZES = [
    *({name: value} for name in COUNTS for value in (0, -1, 1.5, "16", True)),
    {"max_model_len": 1}, {"max_model_len": 10**9}, {"num_kv_blocks": 10**9}, {"threads": 10**6}, {"seed": "x"}, {"seed": 1.5},
    {"dtype": "foo"}, {"kv_dtype": "int3"}, {"quantize": "int1"},
]  # fmt: skip
ONLY_REFERENCE = [{"block_size": 1}, {"block_size": 24}, {"max_num_batched_tokens": 2**45}, {"max_num_seqs": 2**45}]
SMALL = [
    {"max_model_len": 2}, {"num_kv_blocks": 1}, {"max_num_seqs": 1}, {"max_num_batched_tokens": 1}, {"block_size": 16},
    {"block_size": 128}, {"max_num_seqs": 1, "max_num_batched_tokens": 1, "num_kv_blocks": 1, "block_size": 16}, {"seed": -1},
]  # fmt: skip


def is_refused(folder, backend, options):
    with pytest.raises((InvalidRequestError, CapacityError)) as caught:
        LLM(folder, backend=backend, progress=False, **options)
    [(name, value)] = options.items()
    assert "\n" not in str(caught.value) and (name in str(caught.value) or str(value) in str(caught.value))


def works(folder, exact, llm, options):
    with LLM(folder, **exact, **options) as model:
        params = dataclasses.replace(GREEDY, max_tokens=1)
        assert ids_of(model.generate(["a"] * 3, params)) == ids_of(llm.generate(["a"] * 3, params))


@pytest.mark.parametrize("options", SIZES, ids=str)
def test_o24_sizes_that_can_not_work_are_refused_in_one_line(folder, exact, options):
    is_refused(folder, exact["backend"], options)


@pytest.mark.parametrize("options", ONLY_REFERENCE, ids=str)
def test_o24_sizes_that_one_backend_lacks_are_refused_there_alone(folder, exact, llm, options):
    if exact["backend"] == "reference":
        works(folder, exact, llm, options)
    else:
        is_refused(folder, exact["backend"], options)


@pytest.mark.parametrize("options", SMALL, ids=str)
def test_o24_the_smallest_sizes_work(folder, exact, llm, options):
    works(folder, exact, llm, options)


def test_o24_one_thread_works_where_there_are_threads(folder, exact, llm):
    if exact["backend"] == "reference":
        is_refused(folder, "reference", {"threads": 1})
    else:
        works(folder, exact, llm, {"threads": 1})


def test_o26_o27_streamed_text_is_the_whole_text_also_where_a_character_is_cut(llm):
    face = "\U0001f642".encode()
    spell = [SamplingParams(temperature=0, max_tokens=1, allowed_token_ids=[b]) for b in face]
    assert [i for p in spell for i in ids_of(llm.generate("x", p))[0]] == list(face)
    params = SamplingParams(temperature=5, max_tokens=1, ignore_eos=True, seed=2, allowed_token_ids=[*face, 32, 97])
    seen = set()
    for count in (1, 2, 3, 5, 8, 13, 21):
        now = dataclasses.replace(params, max_tokens=count)
        [out] = llm.generate("x", now)
        pieces = [p.outputs[0].text for p in llm.stream("x", now)]
        assert "".join(pieces) == out.outputs[0].text == bytes(out.outputs[0].token_ids).decode(errors="replace")
        seen |= set(out.outputs[0].text)
    assert "\ufffd" in seen


def test_o30_developer_is_system(llm):
    roles = [[{"role": role, "content": "S"}, {"role": "user", "content": "hi"}] for role in ("developer", "system")]
    assert llm.encode_chat(roles[0]) == llm.encode_chat(roles[1])
    one, two = ids_of(llm.chat(roles, GREEDY))
    assert one == two


def test_o42_eight_prompts_alone_and_together(folder, exact, reference):
    want = ids_of(reference.generate(PROMPTS, GREEDY))
    for threads in threads_of(exact, 1, 2, 3):
        with LLM(folder, **exact, **threads) as model:
            assert ids_of(model.generate(PROMPTS, GREEDY)) == want
            assert [ids_of(model.generate(p, GREEDY))[0] for p in PROMPTS] == want


def test_o42_eight_prompts_alone_and_together_in_16_bits(folder, exact, reference):
    if exact["backend"] == "reference":
        is_refused(folder, "reference", {"dtype": "bfloat16"})
        return
    params, exact = dataclasses.replace(GREEDY, logprobs=0), {**exact, "dtype": "bfloat16"}
    want = [reference_logprobs(reference, reference.encode(p))[-1] for p in PROMPTS]
    for threads in threads_of(exact, 1, 2, 3):
        with LLM(folder, **exact, **threads) as model:
            together = model.generate(PROMPTS, params)
            assert ids_of(together) == [ids_of(model.generate(p, params))[0] for p in PROMPTS]
        for out, row in zip(together, want):
            made = out.outputs[0].token_ids[0]
            assert abs(out.outputs[0].logprobs[0][made].logprob - row[made]) < 0.05


def test_float32_gives_the_references_ids(llm, reference):
    params = dataclasses.replace(GREEDY, max_tokens=64)
    assert ids_of(llm.generate(PROMPTS, params)) == ids_of(reference.generate(PROMPTS, params))


def _child(llm, answers):
    try:
        answers.put(ids_of(llm.generate("a", GREEDY)))
    except TriviumError as fault:
        answers.put((type(fault).__name__, str(fault)))


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_is_told_to_load_the_model_itself(exact, llm):
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    child = context.Process(target=_child, args=(llm, answers), daemon=True)
    child.start()
    answer = answers.get(timeout=60)
    child.join(60)
    if exact["backend"] == "reference":
        assert answer == ids_of(llm.generate("a", GREEDY))  # without threads a copy works on
    else:
        assert answer[0] == "BackendError" and "fork" in answer[1]


def test_a_model_closed_below_a_stream_says_so(folder, exact):
    model = LLM(folder, **exact)
    stream = model.stream("ab", GREEDY)
    next(stream)
    model.close()
    with pytest.raises(InvalidRequestError, match="closed"):
        next(stream)
    model.engine.check()
    assert not model.engine.has_unfinished()


def test_a_closed_model_lets_go_of_its_weights(folder, exact):
    model = LLM(folder, **exact)
    model.generate("ab", GREEDY)
    held = [weakref.ref(model.loaded.session), weakref.ref(model.loaded.executable)]
    model.close()
    gc.collect()
    assert [ref() for ref in held] == [None, None]


def test_closing_while_another_thread_generates_ends_that_call(folder, exact):
    model, ends = LLM(folder, **exact), []
    stream = model.stream("ab", dataclasses.replace(GREEDY, max_tokens=400))
    next(stream)

    def work():
        with contextlib.suppress(InvalidRequestError):
            list(stream)
        ends.append(model.engine.has_unfinished())

    job = threading.Thread(target=work)
    job.start()
    model.close()
    job.join(60)
    assert ends == [False]


def test_a_request_that_an_interrupt_has_lost_does_not_wait_for_ever(llm):
    stream = llm.stream("ab", GREEDY)
    next(stream)
    llm.engine.fail_all(BackendError("news that an interrupt kept from being delivered"))
    with pytest.raises(BackendError, match="lost"):
        next(stream)


def test_two_models_in_two_threads_do_not_meet(folder, exact, llm):
    want = ids_of(llm.generate(PROMPTS, GREEDY))
    got = {}

    def work(name):
        with LLM(folder, **exact, **threads_of(exact, 2)[0]) as model:
            got[name] = ids_of(model.generate(PROMPTS, GREEDY))

    jobs = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    assert got == {0: want, 1: want}


BARRED = [
    {"allowed_token_ids": [97], "bad_words": ["a"]},
    {"allowed_token_ids": [97, 257], "bad_words": ["a"], "min_tokens": 2},
    {"allowed_token_ids": [257], "min_tokens": 1},
    {"stop_token_ids": list(range(259)), "min_tokens": 3},
]


@pytest.mark.parametrize("fields", BARRED, ids=lambda fields: "+".join(fields))
def test_a_request_that_leaves_no_token_to_choose_is_refused(llm, fields):
    with pytest.raises(InvalidRequestError, match="no token is left"):
        llm.generate("x", SamplingParams(**fields))


def test_a_request_that_runs_out_of_tokens_ends_with_an_error_and_no_other_does(llm):
    [want] = ids_of(llm.generate("known", GREEDY))
    stuck = SamplingParams(temperature=0, allowed_token_ids=[97], bad_words=["aa"], max_tokens=9)
    good, bad = llm.generate(["known", "x"], [GREEDY, stuck])
    assert good.outputs[0].token_ids == want
    assert bad.outputs[0].token_ids == [97] and bad.outputs[0].finish_reason == "error" and "no token is left" in str(bad.error)


@pytest.mark.parametrize("params", [5, "greedy", {"max_tokens": 3}, [GREEDY, None], [3]], ids=repr)
def test_sampling_params_of_another_type_are_refused(llm, params):
    for call in (llm.generate, lambda *given: list(llm.stream(*given))):
        with pytest.raises(InvalidRequestError, match="sampling_params"):
            call("x", params)


@pytest.mark.parametrize("prompt", [None, 5, {"prompt": "x"}], ids=repr)
def test_a_stream_refuses_what_is_no_prompt(llm, prompt):
    with pytest.raises(InvalidRequestError, match="prompts must be"):
        next(llm.stream(prompt, GREEDY))


@pytest.mark.parametrize("method", ["quanto", "aqlm", "a-new-one"])
def test_o46_a_quantised_checkpoint_that_can_not_be_read_says_so(tmp_path, exact, method):
    made = make_chat_model(tmp_path / "m", quantization_config={"quant_method": method, "bits": 4})
    with pytest.raises(TriviumError, match=f"quantised by {method}.*GGUF"):
        LLM(made, **exact)


def test_a_checkpoint_that_says_it_is_not_quantised_loads(tmp_path, exact):
    with LLM(make_chat_model(tmp_path / "m", quantization_config=None), **exact) as made:
        assert made.generate("x", GREEDY)[0].finished


WRONG_TYPES = [
    {"model": None}, {"model": ""}, {"model": 7}, {"backend": None}, {"backend": ""}, {"backend": 3}, {"dtype": None},
    {"kv_dtype": None}, {"backend_options": 3},
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG_TYPES, ids=str)
def test_an_argument_of_another_type_is_refused_by_name(folder, wrong):
    with pytest.raises(InvalidRequestError, match=next(iter(wrong))):
        LLM(**({"model": folder, "backend": "cpu", "progress": False} | wrong))


def test_an_async_model_may_be_collected_by_its_own_thread(folder, exact):
    model = AsyncLLM(folder, **exact)
    engine, session, model.itself, gone = model.async_engine, model.loaded.session, model, weakref.ref(model)
    gc.disable()
    try:
        del model
        engine._commands.put(gc.collect)
        engine._thread.join(60)
    finally:
        gc.enable()
    assert gone() is None and not engine._thread.is_alive() and session.memory().kv == 0


def test_o22_two_live_requests_with_one_client_id_do_not_meet(llm):
    want = ids_of(llm.generate(["first", "second"], GREEDY))
    numbers = [llm.engine.add_request(llm.encode(p), GREEDY, client_id="same") for p in ("first", "second", "third")]
    aborted = llm.engine.abort(numbers[2])
    assert len(set(numbers)) == 3 and aborted.outputs[0].finish_reason == "abort"
    done = {}
    while llm.engine.has_unfinished():
        done |= {output.request_id: output for output in llm.engine.step()}
    assert [done[n].client_id for n in numbers[:2]] == ["same", "same"]
    assert ids_of(done[n] for n in numbers[:2]) == want


def test_o40_totals_grow_by_what_the_requests_report(llm):
    stats = llm.engine.stats
    before = stats.prompt_tokens, stats.generated_tokens
    params = [dataclasses.replace(GREEDY, n=1 + i % 2, temperature=0.5, seed=i, max_tokens=i) for i in range(1, 9)]
    stream = llm.stream("left", GREEDY)
    kept = len(next(stream).outputs[0].token_ids)
    outs = llm.generate(PROMPTS, params)
    stream.close()
    made = sum(len(c.token_ids) for out in outs for c in out.outputs)
    prompts = sum(len(out.prompt_token_ids) for out in outs) + len(llm.encode("left"))
    extra = stats.generated_tokens - before[1] - made  # what the stream's request made before it was left
    assert stats.prompt_tokens - before[0] == prompts
    assert kept <= extra <= GREEDY.max_tokens


DIVISORS = [1.0, 1.0, 1.5, 2.0, 4.0, 8.0, 8.0, 8.0]


def test_o44_frequency_factors_reach_the_logits(tmp_path, exact, llm, reference):
    prompt, params = [i * i % 251 for i in range(120)], SamplingParams(max_tokens=0, prompt_logprobs=0)

    def logprobs(model):
        [out] = model.generate([prompt], params)
        return np.array([entry[i].logprob for i, entry in zip(prompt[1:], out.prompt_logprobs[1:])])

    def with_factors(name, divisors, backend):
        folder = make_chat_model(tmp_path / name, rope_parameters={"rope_type": "factors", "factors": divisors})
        with LLM(folder, **{**exact, "backend": backend}) as model:
            return logprobs(model)

    np.testing.assert_array_equal(with_factors("ones", [1.0] * 8, exact["backend"]), logprobs(llm))
    scaled = [with_factors(backend, DIVISORS, backend) for backend in (exact["backend"], "reference")]
    np.testing.assert_allclose(scaled[0], scaled[1], atol=1e-3)
    assert np.abs(scaled[0] - logprobs(reference)).max() > 0.01
