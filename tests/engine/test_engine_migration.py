"""Requests under way move to another engine and go on as if nothing had happened."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from engine_runs import engine_of, greedy, run_all
from fake_model import EOS, continuation
from fake_session import moving_model
from hypothesis import given, settings
from hypothesis import strategies as st
from random_lives import KINDS
from trivium.conformance.kit import open_lab
from trivium.conformance.models import Numbers, open_model
from trivium.conformance.zoo import CONFIGS
from trivium.engine import Engine, EngineConfig, RequestState
from trivium.errors import ContextLengthError, PageFormatError, TriviumError, UnsupportedError
from trivium.ops.sample import derive_seed
from trivium.sampling import SamplingParams

PROMPT = [5 + i * 7 % 70 for i in range(31)]


def mover(windows: Any = (None,), *, caching: bool = True, **options: Any) -> Engine:
    return engine_of(
        model=moving_model(windows, **options), max_num_seqs=4, max_num_batched_tokens=12, enable_prefix_caching=caching
    )


def through(state: RequestState) -> RequestState:
    return RequestState.from_bytes(state.to_bytes())


@given(
    windows=st.sampled_from(KINDS), seed=st.integers(0, 2**32), sizes=st.tuples(*[st.sampled_from([2, 3, 4, 8])] * 2),
    pages=st.booleans(), n=st.sampled_from([1, 1, 3]), caching=st.booleans(),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_a_request_moved_at_any_moment_gives_the_tokens_it_would_have_had(
    windows: Any, seed: int, sizes: tuple[int, int], pages: bool, n: int, caching: bool
) -> None:
    rng = random.Random(seed)
    first, second = (mover(windows, page_size=size, pages=70, caching=caching) for size in sizes)
    asked, done = {}, {}
    for _ in range(5):
        prompt = PROMPT[: rng.randrange(1, 31)] + [rng.randrange(3, 80)]
        params = greedy(rng.randrange(1, 14), n=n, temperature=rng.choice([0.0, 1.0]), seed=rng.randrange(99), ignore_eos=False)
        asked[first.add_request(prompt, params, priority=rng.randrange(2), client_id="x")] = prompt, params
    moved: dict[int, int] = {}
    while first.has_unfinished() or second.has_unfinished():
        for number in list(asked):
            if number not in done and number not in moved and rng.random() < 0.15:
                moved[number] = second.import_request(through(first.export_request(number, pages=pages)))
                first.check()
        for output in first.step():
            done[output.request_id] = output
        back = {there: here for here, there in moved.items()}
        done |= {back[output.request_id]: output for output in second.step()}
        first.check()
        second.check()
    for number, (prompt, params) in asked.items():
        for c in done[number].outputs:
            sampling = {"temperature": params.temperature, "seed": derive_seed(params.seed or 0, c.index)}
            assert c.token_ids == continuation(prompt, params.max_tokens or 0, windows, ends=frozenset({EOS}), **sampling)
        assert done[number].client_id == "x" and done[number].prompt_token_ids == prompt
    assert not first.model.executable.violations + second.model.executable.violations
    second.kv.check_idle()


@pytest.mark.parametrize("windows", KINDS)
def test_what_was_computed_is_not_computed_again(windows: Any) -> None:
    first, second = mover(windows, page_size=4), mover(windows, page_size=3)
    number = first.add_request(PROMPT, greedy(9))
    for _ in range(5):
        first.step()
    state = through(first.export_request(number))
    first.kv.check_idle()
    assert not first.has_unfinished() and first.abort(number) is None
    second.import_request(state)
    second.step()
    assert second.stats.computed_tokens == 1
    assert run_all(second)[1].outputs[0].token_ids == continuation(PROMPT, 9, windows)


def test_a_copy_leaves_the_request_where_it_is() -> None:
    first, second = mover(), mover()
    number = first.add_request(PROMPT, greedy(9))
    first.step()
    there = second.import_request(first.export_request(number, copy=True))
    assert (
        run_all(first)[number].outputs[0].token_ids
        == run_all(second)[there].outputs[0].token_ids
        == continuation(PROMPT, 9, (None,))
    )


def test_a_stream_goes_on_where_it_was_and_text_and_stops_are_whole() -> None:
    first, second = mover(), mover()
    whole = run_all_streams(mover(), greedy(12, stop=["zz"], logprobs=2))
    number = first.add_request(PROMPT, greedy(12, stop=["zz"], logprobs=2), stream=True)
    news = [output for _ in range(6) for output in first.step()]
    there = second.import_request(through(first.export_request(number)))
    while second.has_unfinished():
        news += second.step()
    assert [o.outputs[0].token_ids for o in news] == [o.outputs[0].token_ids for o in whole]
    assert "".join(o.outputs[0].text for o in news) == "".join(o.outputs[0].text for o in whole)
    assert [o.outputs[0].logprobs for o in news] == [o.outputs[0].logprobs for o in whole]
    assert news[-1].request_id == there and news[-1].outputs[0].cumulative_logprob == whole[-1].outputs[0].cumulative_logprob


def run_all_streams(engine: Engine, params: SamplingParams) -> list[Any]:
    engine.add_request(PROMPT, params, stream=True)
    news = []
    while engine.has_unfinished():
        news += engine.step()
    return news


def test_scores_penalties_and_seeds_move_and_the_clock_runs_on() -> None:
    params = SamplingParams(
        temperature=1.0, max_tokens=9, prompt_logprobs=1, logprobs=1, repetition_penalty=1.3, logit_bias={7: 2.0}
    )
    stay, first, second = mover(), mover(), mover()
    for engine in (stay, first):
        engine.intake._config = EngineConfig(seed=11)
    number = stay.add_request(PROMPT, params)
    want = run_all(stay)[number]
    number, got = first.add_request(PROMPT, params), None
    while got is None:
        number = second.import_request(through(first.export_request(number)))
        first, second = second, first
        got = next(iter(first.step()), None)
    assert got.outputs == want.outputs and got.prompt_logprobs == want.prompt_logprobs
    assert got.metrics.e2e_time >= got.metrics.time_to_first_token > 0 and got.metrics.num_preemptions == 0


def test_beams_and_embeddings_stay() -> None:
    engine = mover()
    number = engine.add_request(PROMPT, SamplingParams(beam_width=2, max_tokens=3))
    with pytest.raises(UnsupportedError, match="beam"):
        engine.export_request(number)
    with pytest.raises(TriviumError, match="77"):
        engine.export_request(77)


def exported(**options: Any) -> RequestState:
    engine = mover((None, 6), **options)
    number = engine.add_request(PROMPT, greedy(9, logprobs=1))
    for _ in range(5):
        engine.step()
    return engine.export_request(number)


def test_another_model_or_a_shorter_context_is_refused() -> None:
    state = exported()
    with pytest.raises(PageFormatError, match="another model"):
        mover((None, 6), fingerprint="other").import_request(state)
    with pytest.raises(PageFormatError, match="groups"):
        mover((None,)).import_request(state)
    with pytest.raises(ContextLengthError):
        mover((None, 6), max_model_len=35).import_request(state)


def _spots(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from _spots(inner, (*path, key))


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_a_hostile_state_is_refused_or_harmless(data: st.DataObject) -> None:
    """Anything in the header may be anything: it is refused with a typed error, or the request runs to its end."""
    state = STATE
    header = json.loads(json.dumps(state.header))
    spot = data.draw(st.sampled_from([s for s in _spots(header) if s]))
    inner = header
    for key in spot[:-1]:
        inner = inner[key]
    values = [None, True, -1, 0, 1, 2**70, 1.5, float("nan"), float("inf"), "x", [], {}, [[]], [1, 2], {"a": 1}]
    inner[spot[-1]] = data.draw(st.sampled_from(values))
    engine = mover((None, 6))
    neighbour = engine.add_request(PROMPT[:9], greedy(5))
    with contextlib.suppress(TriviumError):
        engine.import_request(RequestState(header, state.arrays))
    engine.check()
    assert run_all(engine)[neighbour].outputs[0].token_ids == continuation(PROMPT[:9], 5, (None, 6))


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_hostile_arrays_are_refused_or_harmless(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(STATE.arrays)))
    dtype, array = STATE.arrays[name]
    other = data.draw(
        st.sampled_from([array[:-1], array.reshape(-1), np.repeat(array, 2, 0), -array - 1, array * 0 + 2**30, array * np.nan])
    )
    with np.errstate(all="ignore"):
        arrays = {**STATE.arrays, name: (dtype, other.astype(array.dtype))}
    if data.draw(st.booleans()):
        del arrays[name]
    engine = mover((None, 6))
    with contextlib.suppress(TriviumError), np.errstate(all="ignore"):
        engine.import_request(RequestState(STATE.header, arrays))
        while engine.has_unfinished():
            engine.step()
            engine.check()
    engine.model.executable.violations.clear()
    number = engine.add_request([*PROMPT, 7], greedy(5))
    assert run_all(engine)[number].outputs[0].token_ids == continuation([*PROMPT, 7], 5, (None, 6)), "nobody else finds its pages"


STATE = exported()


@contextlib.contextmanager
def tiny(backend: str, model: str, *, page_size: int, kv_dtype: str = "float32") -> Iterator[Engine]:
    """An engine on a tiny model with real arithmetic."""
    lab = open_lab(backend)
    with lab.session(tokens=16, seqs=4, length=128) as session:
        loaded = open_model(lab, session, CONFIGS[model], lambda program: 64, page_size, kv_dtype)
        yield Engine(loaded, Numbers(), EngineConfig(4, 16))


def whole(engine: Engine, prompt: list[int], params: SamplingParams) -> Any:
    number = engine.add_request(prompt, params)
    return finish(engine, number)


def finish(engine: Engine, number: int) -> Any:
    done = {}
    while engine.has_unfinished():
        done |= {o.request_id: o for o in engine.step()}
        engine.check()
    output = done[number].outputs[0]
    return output.token_ids, output.logprobs


@pytest.mark.parametrize("model", ["llama", "gemma3"])
@pytest.mark.parametrize("steps", [0, 1, 3, 6])
@pytest.mark.parametrize("ways", [("reference", 16, "reference", 16), ("reference", 16, "reference", 7), ("cpu", 16, "cpu", 32),
                                  ("cpu", 16, "reference", 8), ("reference", 8, "cpu", 32)])  # fmt: skip
def test_backends_hand_requests_to_each_other(model: str, steps: int, ways: tuple[str, int, str, int]) -> None:
    name = next(n for n in CONFIGS if n.startswith(model))
    prompt, params = (
        [3 + i * 5 % 60 for i in range(40)],
        SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, logprobs=1),
    )
    from_backend, from_size, to_backend, to_size = ways
    with tiny(from_backend, name, page_size=from_size) as first, tiny(to_backend, name, page_size=to_size) as second:
        number = first.add_request(prompt, params)
        for _ in range(steps):
            first.step()
        ids, logprobs = finish(second, second.import_request(through(first.export_request(number))))
        first.check()
        want_ids, want_logprobs = whole(first, prompt, params)
    assert ids == want_ids
    if from_backend == to_backend:
        assert logprobs == want_logprobs


def test_pages_of_a_smaller_dtype_move_bit_for_bit() -> None:
    name = next(n for n in CONFIGS if n.startswith("llama"))
    with (
        tiny("cpu", name, page_size=16, kv_dtype="bfloat16") as first,
        tiny("cpu", name, page_size=32, kv_dtype="bfloat16") as second,
    ):
        prompt, params = (
            [3 + i * 5 % 60 for i in range(40)],
            SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, logprobs=1),
        )
        number = first.add_request(prompt, params)
        for _ in range(5):
            first.step()
        state = through(first.export_request(number))
        pages = [array for name, (dtype, array) in state.arrays.items() if ".pages." in name and dtype == "bfloat16"]
        assert pages and all(page.itemsize == 2 for page in pages)
        got = finish(second, second.import_request(state))
        assert got == whole(first, prompt, params)
