"""Several backends in one process: a model each, a draft on one and its target on another, prompts on one and the rest on another.
Over all pairs of the backends that are installed; the tokens are those that `reference` makes alone."""

from __future__ import annotations

import asyncio
import json
import threading
from itertools import product

import pytest
from chat_models import TEMPLATE, make_chat_model
from installed_backends import available, exact
from peft_adapters import make_adapter
from tiny_checkpoints import make_checkpoint
from trivium import LLM, AsyncLLM, SamplingParams, StructuredOutputs
from trivium.cli import main
from trivium.errors import BackendNotFoundError, DeadlineError, InvalidRequestError

BACKENDS = available()
PAIRS = list(product(BACKENDS, BACKENDS))
FAMILIES = ["llama", "gemma3"]
PROMPTS = [[(37 * i + n) % 250 for i in range(n)] for n in (29, 1, 70, 16, 33)]
DRAWN = {"max_tokens": 14, "ignore_eos": True}
ASKED = [
    SamplingParams(temperature=0.0, **DRAWN),
    SamplingParams(temperature=0.9, seed=11, logprobs=2, **DRAWN),
    SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.2, n=3, seed=4, prompt_logprobs=1, **DRAWN),
    SamplingParams(temperature=0.0, stop=["q"], presence_penalty=0.4, **DRAWN),
    SamplingParams(temperature=1.0, seed=8, structured_outputs=StructuredOutputs(regex="[a-f]{3}-[0-9]{4}"), max_tokens=14),
]
BEAMS = SamplingParams(max_tokens=6, beam_width=3, n=3, ignore_eos=True)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("m") / request.param, request.param, seed=5, max_position_embeddings=128)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    template = "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}" + TEMPLATE
    return make_chat_model(tmp_path_factory.mktemp("m") / "llama", template=template, max_position_embeddings=256)


def opened(kind, folder, backend, ahead=None, **options):
    more = {} if ahead is None else {"prefill": ahead, "prefill_options": {**exact(ahead), **options.pop("prefill_options", {})}}
    return kind(folder, backend, progress=False, num_kv_blocks=200, seed=3, **{**exact(backend), **more, **options})


def seen(outputs):
    """What must not depend on who computes."""
    return [[(c.index, c.token_ids, c.text, c.finish_reason, c.stop_reason) for c in o.outputs] for o in outputs]


def values(outputs):
    """All log probabilities, which may differ by rounding."""
    rows = [row for o in outputs for c in o.outputs for row in c.logprobs or ()]
    rows += [row for o in outputs for row in o.prompt_logprobs or () if row is not None]
    return [value for row in rows for _, value in sorted((token, entry.logprob) for token, entry in row.items())]


@pytest.fixture(scope="module")
def alone(folder):
    with opened(LLM, folder, "reference") as llm:
        outputs = llm.generate(PROMPTS, ASKED)
        return seen(outputs), values(outputs), seen(llm.generate([PROMPTS[0]], BEAMS)), llm.embed([PROMPTS[2]])[0].embedding


@pytest.mark.parametrize(("ahead", "backend"), PAIRS)
def test_prompts_on_one_backend_and_the_rest_on_another_give_the_tokens_of_one(folder, alone, ahead, backend):
    with opened(LLM, folder, backend, ahead) as llm:
        outputs = llm.generate(PROMPTS, ASKED)
        assert seen(outputs) == alone[0]
        assert values(outputs) == pytest.approx(alone[1], abs=2e-4)
        assert all(o.metrics.transfer_time > 0 and o.metrics.num_cached_tokens == 0 for o in outputs[:3])
        assert llm.engine.front.stats.computed_tokens >= sum(map(len, PROMPTS))
        assert llm.engine.stats.computed_tokens > 0
        assert seen(llm.generate([PROMPTS[0]], BEAMS)) == alone[2]
        assert llm.embed([PROMPTS[2]])[0].embedding == pytest.approx(alone[3], abs=1e-4)
        again = llm.generate(PROMPTS, ASKED)
        assert seen(again)[:2] == alone[0][:2] and again[2].metrics is not None
        page = llm.engine.front.kv.page_size
        assert again[0].metrics.num_cached_tokens == 28 // page * page
        llm.engine.check()


@pytest.mark.parametrize(("ahead", "backend"), PAIRS)
def test_tasks_that_come_and_go_on_two_backends(folder, alone, ahead, backend):
    async def run():
        async with opened(AsyncLLM, folder, backend, ahead) as llm:

            async def whole(i):
                pieces = [[], ""]
                async for o in llm.stream(PROMPTS[i], ASKED[i]):
                    for c in o.outputs:
                        pieces[0] += c.token_ids
                        pieces[1] += c.text
                return pieces

            async def leave(i):
                async for _ in llm.stream(PROMPTS[i], SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)):
                    return

            late = asyncio.create_task(llm.generate(PROMPTS[2], ASKED[0], timeout=1e-4))
            first, *_, second = await asyncio.gather(whole(0), leave(2), leave(4), whole(1))
            with pytest.raises(DeadlineError):
                await late
            stats = await llm.stats()
            assert (stats.running, stats.waiting) == (0, 0) and stats.free_pages == stats.pages
            both = llm.engine.kv.pool.pages + llm.engine.front.kv.pool.pages
            assert stats.pages == both and stats.prompt_tokens > 0 and stats.computed_tokens > llm.engine.stats.computed_tokens
            await llm.async_engine.call(lambda engine: engine.check())
            return first, second

    first, second = asyncio.run(run())
    assert [first, second] == [[c[1], c[2]] for c in (alone[0][0][0], alone[0][1][0])]


@pytest.mark.parametrize(("ahead", "backend"), PAIRS)
def test_a_small_cache_and_small_steps_on_both_sides_change_nothing(folder, alone, ahead, backend):
    small = {"max_num_seqs": 3, "max_num_batched_tokens": 16}
    with opened(LLM, folder, backend, ahead, **small, max_model_len=96, prefill_options={"max_num_seqs": 2}) as llm:
        assert seen(llm.generate(PROMPTS, ASKED)) == alone[0]
        llm.engine.check()


@pytest.mark.parametrize(("beside", "backend"), PAIRS)
def test_a_draft_on_one_backend_and_its_target_on_another(folder, alone, beside, backend):
    draft = {"method": "draft", "model": str(folder), "backend": beside, "num_speculative_tokens": 3, "adaptive": False}
    with opened(LLM, folder, backend, speculative=draft) as llm:
        assert seen(llm.generate(PROMPTS, ASKED)) == alone[0]
        assert llm.engine.stats.accepted_tokens > 0


def test_prompt_draft_and_target_on_three_sides(folder, alone):
    ahead, beside, backend = (BACKENDS * 3)[:3]
    draft = {"method": "draft", "model": str(folder), "backend": beside, "num_speculative_tokens": 3, "adaptive": False}
    with opened(LLM, folder, backend, ahead, speculative=draft) as llm:
        assert seen(llm.generate(PROMPTS, ASKED)) == alone[0]
        assert llm.engine.stats.accepted_tokens > 0
        llm.engine.check()


def test_a_model_on_each_backend_in_one_process_and_nothing_is_shared(tmp_path):
    """Different models, interleaved from a thread each, and each alone."""
    folders = {b: make_checkpoint(tmp_path / f"m{i}", FAMILIES[i % 2], seed=i) for i, b in enumerate(BACKENDS)}
    expected = {}
    for backend in BACKENDS:
        with opened(LLM, folders[backend], backend) as llm:
            expected[backend] = [seen(llm.generate([p], ASKED[1]))[0] for p in PROMPTS]
    models = {backend: opened(LLM, folders[backend], backend) for backend in BACKENDS}
    found = {backend: [] for backend in BACKENDS}
    begin = threading.Barrier(len(BACKENDS))

    def ask(backend):
        begin.wait(60)
        for prompt in PROMPTS:
            found[backend].append(seen(models[backend].generate([prompt], ASKED[1]))[0])

    threads = [threading.Thread(target=ask, args=(backend,)) for backend in BACKENDS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    models.pop(BACKENDS[0]).close()
    assert found == expected
    for backend, llm in models.items():  # the end of one is not the end of another
        assert [seen(llm.generate([p], ASKED[1]))[0] for p in PROMPTS] == expected[backend]
        llm.close()


@pytest.mark.parametrize(("ahead", "backend"), PAIRS)
def test_chats_with_tools_and_adapters_are_served_from_two_sides(llama, tmp_path, ahead, backend):
    adapter = make_adapter(tmp_path / "adapter", "llama")
    tool = {
        "type": "function",
        "function": {"name": "now", "parameters": {"type": "object", "properties": {"zone": {"enum": ["a"]}}}},
    }
    asked = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    found = []
    for first in (None, ahead):
        lora = {"enable_lora": True, "max_lora_rank": 8}
        with opened(LLM, llama, backend if first else "reference", first, **lora) as llm:
            llm.load_adapter("mine", adapter)
            [forced] = llm.chat([{"role": "user", "content": "when?"}], asked, tools=[tool], tool_choice="required")
            [changed] = llm.generate([PROMPTS[0]], asked, adapter="mine")
            found.append(([(c.name, c.arguments) for c in forced.outputs[0].tool_calls], seen([changed])))
            llm.unload_adapter("mine")
    assert found[0] == found[1] and found[0][0][0][0] == "now"


def test_each_side_keeps_its_own_formats_and_says_so(folder):
    ahead, backend = BACKENDS[0], BACKENDS[-1]
    with opened(LLM, folder, backend, ahead, prefill_options={"num_kv_blocks": 90}) as llm:
        assert llm.engine.front.model.num_pages == 90 and llm.engine.model.num_pages == 200
        assert llm.engine.front.model.backend.name == ahead.partition(":")[0]


def test_bad_pairs_are_refused_before_anything_runs(folder):
    for options, error, words in (
        ({"prefill": "referense"}, BackendNotFoundError, "did you mean 'reference'"),
        ({"prefill": "reference", "prefill_options": {"block": 16}}, InvalidRequestError, "no other options than .*block_size"),
        ({"prefill": "reference", "prefill_options": 16}, InvalidRequestError, "must be a mapping"),
        ({"prefill_options": {}}, InvalidRequestError, "there is none"),
        ({"decode": "reference", "backend": "cpu"}, InvalidRequestError, "mean the same"),
        ({"prefill": "reference", "prefill_options": {"backend_options": {"speed": 9}}}, InvalidRequestError, "speed"),
        ({"prefill": "reference", "prefill_options": {"dtype": "int3"}}, InvalidRequestError, "dtype 'int3'"),
    ):
        with pytest.raises(error, match=words):
            LLM(folder, progress=False, num_kv_blocks=50, **{"backend": "reference", **options})
    with LLM(folder, prefill="reference", decode="reference", progress=False, num_kv_blocks=50) as llm:
        threads = [t.name for t in threading.enumerate()]
        assert sum(name.startswith("trivium-prefill") for name in threads) <= 1
        llm.generate([PROMPTS[0]], ASKED[0])
    assert not [t for t in threading.enumerate() if t.name.startswith("trivium-prefill")]


def test_the_command_line_names_both_sides(llama, capsys):
    ahead, backend = BACKENDS[0], BACKENDS[-1]
    sides = ["--prefill", ahead, "--decode", backend, "--num-kv-blocks", "60"]
    small = ["--prefill-option", "num_kv_blocks=60", "--prefill-option", "max_num_seqs=4"]
    assert main(["run", str(llama), "hello", *sides, *small, "--max-tokens", "5"]) == 0
    both = capsys.readouterr().out
    assert main(["run", str(llama), "hello", "--backend", "reference", "--max-tokens", "5"]) == 0
    assert capsys.readouterr().out == both
    lengths = ["--input-len", "20", "--output-len", "4", "--repeat", "1", "--warmup", "0", "--json"]
    assert main(["bench", "latency", str(llama), *sides, *small, *lengths]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["transfer_s"]["median"] > 0 and figures["device"].startswith(f"prompts on {ahead}")
    assert main(["explain", str(llama), *sides, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    names = found["device"].partition(":")[0], found["prefill"]["device"].partition(":")[0]
    assert names == (backend.partition(":")[0], ahead.partition(":")[0])
    assert all({"call", "kernel", "why", "next"} == c.keys() for c in [*found["calls"], *found["prefill"]["calls"]])
    assert main(["explain", str(llama), *sides]) == 0
    out = capsys.readouterr().out
    assert f"prefill on {names[1]}:" in out and f"decode on {names[0]}:" in out
    assert main(["run", str(llama), "hello", "--prefill", "referense"]) == 2


QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one short sentence."}]
SMALL = {"max_model_len": 256, "max_num_seqs": 4}
TEN = SamplingParams(temperature=0.0, max_tokens=10)


@pytest.fixture(scope="module")
def smollm2():
    with opened(LLM, "smollm2-135m", "cpu", **SMALL) as llm:
        return llm.chat(QUESTION, TEN)[0].outputs[0].token_ids


@pytest.mark.weights
@pytest.mark.parametrize(
    ("ahead", "backend"),
    [pytest.param(*p, marks=[pytest.mark.slow] if "reference" in p else []) for p in PAIRS if "cpu" in p],
)
def test_smollm2_says_the_same_whoever_reads_the_prompt(smollm2, ahead, backend):
    with opened(LLM, "smollm2-135m", backend, ahead, **SMALL) as llm:
        [output] = llm.chat(QUESTION, TEN)
        assert output.outputs[0].token_ids == smollm2 and "Paris" in output.outputs[0].text
