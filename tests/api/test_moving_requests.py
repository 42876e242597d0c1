"""What a request has beside its tokens moves with it to another engine, or is refused there by name."""

from __future__ import annotations

import dataclasses
import itertools
import re

import pytest
from chat_models import make_chat_model
from peft_adapters import make_adapter
from tiny_checkpoints import make_checkpoint

from trivium import LLM, SamplingParams
from trivium.engine import RequestState
from trivium.errors import InvalidRequestError, PageFormatError, TriviumError, UnsupportedError

WAYS = [("reference", "reference"), ("cpu", "reference"), ("reference", "cpu")]
LOAD = {"dtype": "float32", "kv_dtype": "float32", "num_kv_blocks": 60, "progress": False}
CHAT = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {
    "type": "object", "properties": {"x": {"enum": ["a", "b"]}}, "required": ["x"], "additionalProperties": False,
}}}  # fmt: skip
SHOWING = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
THOUGHTS = SamplingParams(temperature=1, seed=3, max_tokens=60, structured_outputs={"regex": "<think>[a-c]{6}</think>[d-f]{6}"})
ASKED = {
    "grammar": ({}, dataclasses.replace(THOUGHTS, structured_outputs={"regex": "[a-e]{12}"}, logprobs=1)),
    "reasoning": ({}, THOUGHTS),
    "tool call": (
        {"tools": [TOOL], "tool_choice": "required", "template": SHOWING},
        SamplingParams(temperature=1, seed=1, max_tokens=90, n=2),
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_chat_model(tmp_path_factory.mktemp("models") / "chat")


@pytest.fixture(scope="module")
def models(folder):
    made = {side: LLM(folder, name, reasoning_parser="think", **LOAD) for side, name in
            (("reference", "reference"), ("cpu", "cpu"), ("other", "reference"))}  # fmt: skip
    yield made
    for model in made.values():
        model.engine.check()
        model.close()


def begun(llm, request, steps, **options):
    """The number of a request that has run for so many steps, and its news so far."""
    number = llm.engine.add_request(request.ids, request.params, **request.options, **options)
    return number, [output for _ in range(steps) for output in llm.engine.step()]


def finished(engine):
    news = []
    while engine.has_unfinished():
        news += engine.step()
    return news


def moved(llm, number):
    return RequestState.from_bytes(llm.engine.export_request(number).to_bytes())


def seen(outputs):
    """All of an output but the ids of its calls, which are drawn anew."""
    plain = [(o.token_ids, o.text, o.content, o.reasoning, o.tool_calls, o.finish_reason, o.events) for o in outputs]
    return [re.sub(r" id='\w+'", "", repr(one)) for one in plain]


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize(("source", "target"), WAYS)
def test_grammars_and_readers_move_with_their_request(models, source, target, asked):
    first, second = models[source], models["other" if source == target else target]
    chat, params = ASKED[asked]
    want = first.chat(CHAT, params, **chat)[0].outputs
    assert all(o.finish_reason in ("stop", "tool_calls") for o in want)
    assert {"reasoning": want[0].reasoning, "tool call": want[0].tool_calls, "grammar": want[0].content}[asked]
    [request] = first._chats(CHAT, params, chat.get("tools"), chat.get("tool_choice"), {"template": chat.get("template")})
    for steps in (0, 4, 8):
        number, _ = begun(first, request, steps)
        second.engine.import_request(moved(first, number))
        [got] = finished(second.engine)
        assert seen(got.outputs) == seen(want)


def test_a_streamed_chat_goes_on_with_the_events_that_follow(models):
    first, second = models["reference"], models["cpu"]
    [request] = first._chats(CHAT, THOUGHTS, None, None, {})
    _, whole = begun(first, request, 0, stream=True)
    whole += finished(first.engine)
    for steps in (3, 9, 16):
        number, news = begun(first, request, steps, stream=True)
        second.engine.import_request(moved(first, number))
        assert seen(o.outputs[0] for o in news + finished(second.engine)) == seen(o.outputs[0] for o in whole)


def test_a_reader_that_makes_no_sense_is_refused_and_nothing_has_changed(models):
    first, second = models["reference"], models["other"]
    [request] = first._chats(CHAT, THOUGHTS, [TOOL], None, {"template": SHOWING})
    number, _ = begun(first, request, 3)
    state = moved(first, number)
    good = state.header["reader"]
    assert good["tools"] == "json" and good["reasoning"] == "think" and good["schemas"] == {"f": TOOL["function"]["parameters"]}
    for name, value in (("tools", "nonsense"), ("reasoning", 5), ("schemas", {"f": 3}), ("schemas", [1]), ("schemas", {"": {}})):
        with pytest.raises(TriviumError):
            second.engine.import_request(dataclasses.replace(state, header={**state.header, "reader": {**good, name: value}}))
    for bad in (3, [], {}):
        with pytest.raises(PageFormatError):
            second.engine.import_request(dataclasses.replace(state, header={**state.header, "reader": bad}))
    assert not second.engine.has_unfinished()


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_beams_and_embeddings_stay_and_go_on(models, backend):
    llm = models[backend]
    params = SamplingParams(beam_width=3, n=2, max_tokens=6)
    want = llm.generate("ab", params)[0].outputs
    number = llm.engine.add_request(llm.encode("ab"), params)
    for _ in range(3):
        llm.engine.step()
        with pytest.raises(UnsupportedError, match="beam searches and embeddings stay"):
            llm.engine.export_request(number)
    assert seen(finished(llm.engine)[-1].outputs) == seen(want)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("lora")
    make_checkpoint(home / "model", "llama")
    for seed, name in enumerate(("right", "wrong")):
        make_adapter(home / name, "llama", ("q_proj", "v_proj", "down_proj"), rank=4, seed=seed)
    return home


@pytest.mark.parametrize(("source", "target"), WAYS)
def test_an_adapter_of_the_same_content_under_its_name_is_needed(home, source, target):
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompt = list(range(5, 25))
    with (
        LLM(home / "model", source, enable_lora=True, **LOAD) as first,
        LLM(home / "model", target, enable_lora=True, **LOAD) as second,
    ):
        first.load_adapter("mine", home / "right")
        want = first.generate([prompt], params, adapter="mine")[0].outputs[0].token_ids
        plain = first.generate([prompt], params)[0].outputs[0].token_ids
        assert want != plain
        for steps, adapter in itertools.product((1, 4), ("mine", None)):
            number = first.engine.add_request(prompt, params, adapter=adapter)
            for _ in range(steps):
                first.engine.step()
            state = moved(first, number)
            if adapter is not None:
                with pytest.raises(InvalidRequestError, match="mine"):
                    second.engine.import_request(state)
                second.load_adapter("mine", home / "wrong")
                with pytest.raises(PageFormatError, match="'mine' has other numbers"):
                    second.engine.import_request(state)
                second.unload_adapter("mine")
                second.load_adapter("mine", home / "right")
            assert not second.engine.has_unfinished()
            second.engine.import_request(state)
            [got] = finished(second.engine)
            assert got.outputs[0].token_ids == (plain if adapter is None else want)
            if adapter is not None:
                second.unload_adapter("mine")
        first.engine.check()
        second.engine.check()
