"""Pooled embeddings on the fake model, whose hidden states are known exactly: chunks, batch mates, preemption, prefix hits."""

from __future__ import annotations

import numpy as np
import pytest
from engine_runs import engine_of, generate, greedy, prompts_of, run_all
from fake_model import HIDDEN, hidden_of, mix

from trivium.engine import PoolingParams
from trivium.errors import BackendError, CapacityError, ContextLengthError, InvalidRequestError, UnsupportedError

KINDS = ("last", "mean", "cls")


def states(prompt):
    """float32[tokens, HIDDEN]."""
    return np.array([hidden_of([mix(prompt[: i + 1])]) for i in range(len(prompt))])


def expected(prompt, pooling="last", normalize=True, dimensions=None):
    rows = states(prompt).astype(np.float64)
    vector = {"last": rows[-1], "cls": rows[0], "mean": rows.sum(0) / len(rows)}[pooling][:dimensions]
    return (vector / np.sqrt((vector * vector).sum()) if normalize else vector).astype(np.float32)


def embed(engine, prompts, params):
    numbers = [engine.add_request(p, pooling=q) for p, q in zip(prompts, params, strict=True)]
    done = run_all(engine)
    return [done[n] for n in numbers]


@pytest.mark.parametrize("budget", [1, 3, 7, 200])
@pytest.mark.parametrize("caching", [True, False])
def test_embeddings_are_those_of_the_states_whatever_the_chunks(budget, caching):
    prompts = [p for p in prompts_of(9, 40) for _ in KINDS] * 2
    params = [PoolingParams(kind, normalize=i % 2 == 0) for i in range(18) for kind in KINDS]
    engine = engine_of(max_num_batched_tokens=budget, enable_prefix_caching=caching)
    for output, prompt, pooling in zip(embed(engine, prompts, params), prompts, params, strict=True):
        np.testing.assert_allclose(output.embedding, expected(prompt, pooling.pooling, pooling.normalize), rtol=2e-6, atol=1e-6)
        assert output.embedding.dtype == np.float32 and output.finished and output.prompt_token_ids == prompt
        assert output.outputs[0].token_ids == [] and output.error is None


def test_the_same_bits_alone_in_a_batch_in_chunks_and_after_preemption():
    prompts = [*prompts_of(12, 30), list(range(3, 60))]
    params = [PoolingParams("mean")] * len(prompts)
    alone = [embed(engine_of(), [p], [q])[0].embedding for p, q in zip(prompts, params)]
    tight = engine_of(pages=17, max_num_batched_tokens=11, max_num_seqs=6)
    generating = [tight.add_request(p, greedy(12)) for p in prompts[:6]]
    numbers = [tight.add_request(p, pooling=q, priority=-(i % 2)) for i, (p, q) in enumerate(zip(prompts, params))]
    done = run_all(tight)
    assert tight.stats.preemptions > 0
    for number, want in zip(numbers, alone, strict=True):
        np.testing.assert_array_equal(done[number].embedding, want)
    assert [done[n].outputs[0].token_ids for n in generating] == [generate(p, greedy(12)).outputs[0].token_ids for p in prompts[:6]]


def test_generation_and_pooling_share_a_step():
    engine = engine_of()
    generated, pooled = engine.add_request([5, 6, 7], greedy(3)), engine.add_request([8, 9], pooling=PoolingParams())
    outputs = engine.step()
    assert engine.stats.steps == 1 and [o.request_id for o in outputs] == [pooled]
    assert engine.model.executable.batches[0].pool_rows.tolist() == [4]
    assert run_all(engine)[generated].embedding is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_cached_prefix_is_used_where_its_states_are_not_needed(kind):
    engine = engine_of()
    prompt = list(range(3, 33))
    first, again = (embed(engine, [prompt], [PoolingParams(kind)])[0] for _ in range(2))
    np.testing.assert_array_equal(first.embedding, again.embedding)
    assert again.metrics.num_cached_tokens == (28 if kind == "last" else 0)
    assert embed(engine, [prompt], [PoolingParams("cls")])[0].metrics.num_cached_tokens == 0


def test_the_first_token_s_state_needs_no_other():
    engine = engine_of()
    embed(engine, [list(range(3, 33))], [PoolingParams("cls")])
    assert engine.stats.computed_tokens == 1


def test_dimensions_cut_first_and_normalise_then():
    [output] = embed(engine_of(), [[4, 5, 6]], [PoolingParams("mean", dimensions=5)])
    np.testing.assert_allclose(output.embedding, expected([4, 5, 6], "mean", dimensions=5), rtol=1e-6)
    assert output.embedding.shape == (5,) and np.linalg.norm(output.embedding) == pytest.approx(1, abs=1e-6)
    assert embed(engine_of(), [[4]], [PoolingParams(dimensions=HIDDEN)])[0].embedding.shape == (HIDDEN,)


def test_no_rows_are_gathered_where_nothing_is_pooled():
    engine = engine_of()
    engine.add_request([4, 5, 6], greedy(2))
    run_all(engine)
    assert all(len(batch.pool_rows) == 0 and batch.pool_rows.dtype == np.int32 for batch in engine.model.executable.batches)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"pooling": "max"}, "pooling"), ({"pooling": 1}, "pooling"), ({"pooling": ["last"]}, "pooling"),
        ({"normalize": 1}, "normalize"), ({"dimensions": 0}, "dimensions"), ({"dimensions": True}, "dimensions"),
        ({"dimensions": 2.0}, "dimensions"),
    ],
)  # fmt: skip
def test_bad_parameters_are_refused_by_name(fields, param):
    with pytest.raises(InvalidRequestError) as refusal:
        PoolingParams(**fields)
    assert refusal.value.param == param


def test_what_can_t_be_pooled_is_refused_before_anything_changes():
    engine = engine_of(max_model_len=16)
    refused = [
        (InvalidRequestError, [4], {"pooling": PoolingParams(dimensions=HIDDEN + 1)}),
        (InvalidRequestError, [4], {"pooling": PoolingParams(), "params": greedy(2)}),
        (InvalidRequestError, [], {"pooling": PoolingParams()}),
        (ContextLengthError, [4] * 17, {"pooling": PoolingParams()}),
        (InvalidRequestError, [4], {"params": greedy(0, prompt_logprobs=1), "score_from": 2}),
        (InvalidRequestError, [4], {"params": greedy(0, prompt_logprobs=1), "score_from": 0}),
    ]
    for error, prompt, options in refused:
        with pytest.raises(error):
            engine.add_request(prompt, **options)
    assert not engine.has_unfinished()
    assert embed(engine, [[4] * 16], [PoolingParams()])[0].embedding is not None
    small = engine_of(pages=2)
    with pytest.raises(CapacityError):
        small.add_request([4] * 20, pooling=PoolingParams())
    engine.model.hidden_size = 0
    with pytest.raises(UnsupportedError, match="fake gives no hidden states"):
        engine.add_request([4], pooling=PoolingParams())


def test_an_aborted_request_has_no_embedding():
    engine = engine_of(max_num_batched_tokens=4)
    number = engine.add_request(list(range(3, 23)), pooling=PoolingParams("mean"))
    engine.step()
    output = engine.abort(number)
    assert output.embedding is None and output.outputs[0].finish_reason == "abort"


@pytest.mark.parametrize("fault", ["raise", "shape"])
def test_a_fault_of_the_hidden_states_hits_only_pooled_requests(fault):
    engine = engine_of()
    run = engine.model.executable.run

    def spoilt(batch):
        step = run(batch)
        if len(batch.pool_rows):
            step.hidden = step.hidden[:, 1:] if fault == "shape" else None
        return step

    engine.model.executable.run = spoilt
    generated, pooled = engine.add_request([5, 6], greedy(3)), engine.add_request([7], pooling=PoolingParams())
    done = run_all(engine)
    assert isinstance(done[pooled].error, BackendError) and done[pooled].embedding is None
    assert done[generated].error is None and len(done[generated].outputs[0].token_ids) == 3


def test_scores_begin_where_they_are_asked_for_and_the_prefix_before_is_reused():
    engine = engine_of()
    prompt = list(range(3, 33))
    whole = engine.add_request(prompt, greedy(0, prompt_logprobs=2))
    part = engine.add_request(prompt, greedy(0, prompt_logprobs=2), score_from=25)
    done = run_all(engine)
    again = engine.add_request(prompt, greedy(0, prompt_logprobs=2), score_from=25)
    done |= run_all(engine)
    assert done[part].prompt_logprobs == done[again].prompt_logprobs == [None] * 25 + done[whole].prompt_logprobs[25:]
    assert done[again].metrics.num_cached_tokens == 24 and all(done[whole].prompt_logprobs[1:])
