"""Reported faults of sampling, text and grammars, tried over HTTP: the same on chats and completions, streamed and not."""

from __future__ import annotations

import concurrent.futures
import json
import os
import re
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from chat_models import TEMPLATE, make_chat_model
from fake_plugins import install
from http_server import AUTH, CHAT, CHATS, LONG, SPELL, TEXTS, beside, events, metric, running
from scripted import make_scripted_model, say
from tiny_checkpoints import make_checkpoint, read_safetensors, write_safetensors

from trivium.plugin import HostFallbackWarning

pytestmark = [pytest.mark.http, pytest.mark.faults]
WAYS = [(path, streamed) for path in (CHATS, TEXTS) for streamed in (False, True)]
BOS = "{{ bos_token }}"


def client_of(server):
    import httpx

    return httpx.Client(base_url=server.url, headers=AUTH, timeout=60)


def done(http, path, **body):
    reply = http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply


def ask(http, path, streamed, **body):
    """(text, reasoning, finish reasons, number of events before the first text) of the one choice."""
    if not streamed:
        [choice] = done(http, path, **body).json()["choices"]
        message = choice.get("message", {"content": choice.get("text")})
        return message["content"], message.get("reasoning"), [choice["finish_reason"]], 0
    found = events(done(http, path, **body, stream=True).text)
    assert found.pop() == "[DONE]"
    pieces = [c.get("delta", {"content": c.get("text")}) for chunk in found for c in chunk["choices"]]
    reasons = [c["finish_reason"] for chunk in found for c in chunk["choices"] if c["finish_reason"]]
    text = "".join(piece.get("content") or "" for piece in pieces)
    reasoning = "".join(piece.get("reasoning") or "" for piece in pieces) or None
    silent = next((i for i, piece in enumerate(pieces) if piece.get("content")), len(pieces))
    return text, reasoning, reasons, silent


@pytest.fixture(scope="module")
def padded(tmp_path_factory):
    """A model whose largest logit always belongs to an id that the tokenizer does not have."""
    folder = make_chat_model(tmp_path_factory.mktemp("models") / "padded")
    tensors = {name: tensor.copy() for name, tensor in read_safetensors(folder / "model.safetensors").items()}
    head = tensors["lm_head.weight"]
    head[300], head[301] = 50 * head[5], -50 * head[5]
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


def test_o04_no_padded_id_is_made_shown_or_biased(padded):
    body = {"prompt": "a", "max_tokens": 200, "temperature": 2, "ignore_eos": True, "seed": 1, "logprobs": 5}
    with running(padded) as server, client_of(server) as http:
        [choice] = done(http, TEXTS, **body, return_tokens_as_token_ids=True).json()["choices"]
        known = done(http, CHATS, **LONG).json()["choices"][0]["message"]["content"]
        with beside(http, known):
            for given in ({"logit_bias": {"300": 1}}, {"prompt": [300]}, {"stop_token_ids": [300]}, {"allowed_token_ids": [300]}):
                assert http.post(TEXTS, json={**body, **given}).status_code == 400, given
    names = [*choice["logprobs"]["tokens"], *(name for top in choice["logprobs"]["top_logprobs"] for name in top)]
    assert len(names) > 1000 and max(int(name.removeprefix("token_id:")) for name in names) < 259


def test_o08_a_parameter_that_the_backend_lacks_is_named_and_the_stream_goes_on(tmp_path, monkeypatch):
    import private_chip

    monkeypatch.syspath_prepend(str(tmp_path))
    path = [str(tmp_path), str(Path(private_chip.__file__).parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    install(tmp_path, "private", "from private_chip import trivium_backend")
    folder = str(make_checkpoint(tmp_path / "tied", "qwen2"))
    config = Path(folder) / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": TEMPLATE}))
    loading = {"backend": "private", "dtype": "auto", "num_kv_blocks": 24}
    plain = {"temperature": 0, "ignore_eos": True, "max_completion_tokens": 60, "messages": CHAT["messages"]}
    with pytest.warns(HostFallbackWarning), running(folder, loading=loading) as server, client_of(server) as http:
        want = ask(http, CHATS, False, **plain)[0]
        with http.stream("POST", CHATS, json={**plain, "stream": True}) as stream:
            lines = stream.iter_lines()
            first = next(lines)
            refused = http.post(CHATS, json={**plain, "top_p": 0.5, "temperature": 1})
            assert refused.status_code == 400 and refused.json()["error"]["param"] == "top_p", refused.text
            found = events("\n".join([first, *lines]))
        assert "".join(c["delta"].get("content") or "" for chunk in found[:-1] for c in chunk["choices"]) == want
        assert ask(http, CHATS, False, **{**plain, "top_p": 0.5})[0] == want


def test_o09_a_seeded_request_does_not_depend_on_its_neighbours(http):
    body = {"prompt": "A", "temperature": 0.8, "max_tokens": 16, "ignore_eos": True, "seed": 42}
    alone = ask(http, TEXTS, False, **body)[0]
    for seed in (None, None, None, None, 7):
        other = {**body, "prompt": "B", "seed": seed, "max_tokens": 300, "stream": True}
        with http.stream("POST", TEXTS, json=other) as stream:
            next(stream.iter_lines())
            assert ask(http, TEXTS, False, **body)[0] == alone
            assert ask(http, TEXTS, True, **body)[0] == alone


def test_o12_alternatives_are_k_sorted_and_of_their_position(http):
    body = {**CHAT, "max_completion_tokens": 12, "allowed_token_ids": None, "logprobs": True, "top_logprobs": 3}
    content = done(http, CHATS, **body).json()["choices"][0]["logprobs"]["content"]
    for entry in content:
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert len(values) == 3 and values == sorted(values, reverse=True) and np.exp(values).sum() <= 1
        assert entry["top_logprobs"][0]["token"] == entry["token"]
    assert len({json.dumps(entry["top_logprobs"]) for entry in content}) > 1


@pytest.fixture(scope="module")
def scripted(tmp_path_factory):
    """(server, client, says): says(answer) is what the model answers from then on, to chats and to PROMPT alike."""
    folder = make_scripted_model(
        tmp_path_factory.mktemp("models") / "scripted", template=BOS + TEMPLATE + "{% if open %}<think>{% endif %}"
    )
    with running(folder) as server, client_of(server) as http:
        ids = server.llm.encode_chat(CHAT["messages"])
        prompts = {CHATS: {"messages": CHAT["messages"]}, TEXTS: {"prompt": ids}}
        yield http, prompts, lambda answer: say(server.llm, answer, len(ids))


def everywhere(scripted, answer, **body):
    """What all ways of asking say; their texts and reasons must be the same."""
    http, prompts, says = scripted
    says(answer)
    found = [ask(http, path, streamed, **{"max_tokens": 200, "temperature": 0, **body}, **prompts[path]) for path, streamed in WAYS]
    assert len({(text, *reasons) for text, _, reasons, _ in found}) == 1, found
    return found[0][0], found[0][2][0]


@pytest.mark.parametrize("stop", [None, "ZZZZZZ", "a b</think>\nHelloo"])
def test_o15_a_stop_that_never_comes_changes_no_field(scripted, stop):
    http, prompts, says = scripted
    says("<think>a b</think>Hello")
    for streamed in (False, True):
        found = ask(http, CHATS, streamed, max_tokens=100, temperature=0, stop=stop, **prompts[CHATS])
        assert found[:3] == ("Hello", "a b", ["stop"])


def test_o15_a_plain_answer_with_tools_and_a_stop_word_in_it(tmp_path):
    tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
    template = "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}" + TEMPLATE
    with running(make_scripted_model(tmp_path / "tools", template=template)) as server, client_of(server) as http:
        say(server.llm, "Plain text, then STOP and more", len(server.llm.encode_chat(CHAT["messages"], tools=[tool])))
        body = {"messages": CHAT["messages"], "tools": [tool], "tool_choice": "auto", "stop": ["STOP"], "temperature": 0}
        found = [ask(http, CHATS, streamed, **body) for streamed in (False, True)]
        assert [one[:3] for one in found] == [("Plain text, then ", None, ["stop"])] * 2


def test_o16_a_stop_of_several_words_is_found(tmp_path):
    """A tokenizer whose words begin with a blank that decoding one by one would lose."""
    folder = make_chat_model(tmp_path / "words", bos_token_id=1, eos_token_id=2, pad_token_id=0)
    words = ["\u2581one", "\u2581two", "\u2581three", "\u2581four", "\u2581five"]
    vocabulary = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("\u2581", -9.0), *((w, -1.0) for w in words)]
    vocabulary += [(chr(i), -5.0) for i in range(33, 127)]
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    blank = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}
    content = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None, "decoder": blank,
        "added_tokens": [{"id": i, "content": t, **special} for i, t in enumerate(["<unk>", "<s>", "</s>"])],
        "pre_tokenizer": blank, "model": {"type": "Unigram", "unk_id": 0, "vocab": vocabulary, "byte_fallback": False},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with running(folder) as server, client_of(server) as http:
        prompt = [4, 5, 6]
        say(server.llm, [4, 5, 6, 7, 8], len(prompt))
        whole = ask(http, TEXTS, False, prompt=prompt, max_tokens=5, temperature=0)[0]
        assert whole.strip() == "one two three four five"
        for streamed in (False, True):
            body = {"prompt": prompt, "max_tokens": 5, "temperature": 0, "stop": ["two three four five six", "two three four"]}
            text, _, reasons, _ = ask(http, TEXTS, streamed, **body)
            assert (text, reasons) == (whole[: whole.index("two three four")], ["stop"])


def test_o19_everybody_ends_with_its_text_where_pages_are_scarce(folder):
    """Both classes of priority, more requests than pages: some give theirs up, run again, and nothing is left behind."""
    loading = {"num_kv_blocks": 40, "block_size": 4, "max_num_seqs": 8, "enable_prefix_caching": False}
    with running(folder, loading=loading) as server, client_of(server) as http:
        bodies = [{"prompt": [97 + i] * (3 + i % 9), "max_tokens": 20 + i % 24, **SPELL, "priority": i % 2} for i in range(24)]
        want = [ask(http, TEXTS, False, **body)[0] for body in bodies]
        with concurrent.futures.ThreadPoolExecutor(len(bodies)) as pool:
            got = list(pool.map(lambda pair: ask(http, TEXTS, pair[0] % 2 == 0, **pair[1])[0], enumerate(bodies)))
        assert got == want
        assert metric(http, "trivium:num_preemptions_total") > 0
        assert metric(http, "trivium:num_requests_running") == metric(http, "trivium:num_requests_waiting") == 0
        assert metric(http, "trivium:kv_cache_free_pages") == 40


def test_o21_output_does_not_depend_on_the_chunk_and_nothing_comes_before_it(folder, http):
    prompts = [[(7 * i + n) % 250 for i in range(n)] for n in (15, 16, 17, 31, 32, 33, 48)]
    bodies = [{"prompt": p, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "echo": True, "logprobs": 2} for p in prompts]
    bodies.append({**bodies[0], "prompt": prompts[2:4]})
    with running(folder, loading={"max_num_batched_tokens": 16}) as server, client_of(server) as small:
        for body in bodies:
            [one, other] = [done(client, TEXTS, **body).json()["choices"] for client in (small, http)]
            for a, b in zip(one, other, strict=True):
                assert a["text"] == b["text"] and a["logprobs"]["tokens"] == b["logprobs"]["tokens"]
                assert np.allclose(a["logprobs"]["token_logprobs"][1:], b["logprobs"]["token_logprobs"][1:], atol=1e-4)
        content = "x" * 60
        text, _, _, silent = ask(small, CHATS, True, **{**CHAT, "messages": [{"role": "user", "content": content}]})
        assert silent <= 1 and len(text) == 24


def test_o25_special_tokens_are_hidden_or_shown_raw(scripted):
    bos, pad = 256, 258
    answer = [bos, *b"Hi", pad, *b"x", 257]
    for skip, want, cut in ((True, "Hix", "Hi"), (False, "<s>Hi<pad>x", "<s>Hi")):
        assert everywhere(scripted, answer, skip_special_tokens=skip) == (want, "stop")
        assert everywhere(scripted, answer, skip_special_tokens=skip, stop_token_ids=[pad]) == (cut, "stop")


@pytest.mark.parametrize("text", [" a", "  two", "x\n\n y", "a    b", "a" + " " * 40 + "b", "\tif x:\n\t\ty  ", "中文 🙂"])
def test_o26_blanks_come_through(scripted, text):
    assert everywhere(scripted, text) == (text, "stop")


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_o27_a_cut_character_is_one_replacement(scripted, kept):
    assert everywhere(scripted, [*b"ab", *"\U0001f642".encode()], max_tokens=2 + kept) == ("ab\ufffd", "length")


def test_o29_one_begin_token_whoever_writes_it(tmp_path):
    folder = make_chat_model(tmp_path / "bos", template=BOS + TEMPLATE)
    content = json.loads((folder / "tokenizer.json").read_text())
    sequence = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    special = {"<s>": {"id": "<s>", "ids": [256], "tokens": ["<s>"]}}
    content["post_processor"] = {"type": "TemplateProcessing", "single": sequence, "pair": sequence, "special_tokens": special}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with running(folder) as server, client_of(server) as http:
        ids = [
            done(http, "/tokenize", **given).json()["tokens"]
            for given in ({"messages": CHAT["messages"]}, {"prompt": "hi"}, {"prompt": "<s>hi"})
        ]
        assert [one.count(256) for one in ids] == [1, 1, 1] and ids[1] == ids[2] == [256, *b"hi"]
        used = [done(http, TEXTS, prompt=p, max_tokens=1).json()["usage"]["prompt_tokens"] for p in ("hi", "<s>hi")]
        assert used == [3, 3]
        assert done(http, CHATS, **CHAT).json()["usage"]["prompt_tokens"] == len(ids[0])


UNICODE = ["在线", "café", "🙂"]
IDS = {"type": "array", "items": {"type": "string", "pattern": r"^(\d+|ab:[a-z]+)$", "maxLength": 9}, "minItems": 1, "maxItems": 3}
NODE = {"type": "object", "properties": {"v": {"enum": [1, 2]}, "children": {"type": "array", "items": {}, "maxItems": 1}}}
NODE = {**NODE, "required": ["v"], "additionalProperties": False}


def object_of(**properties):
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def children(reference):
    items = {"type": "array", "items": {"$ref": reference}, "maxItems": 1}
    return {**NODE, "properties": {**NODE["properties"], "children": items}}


def valid(http, schema):
    """Answers that the schema holds for, at both temperatures, whole and streamed; at least one of them is complete."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    complete = []
    for temperature in (0, 2):
        body = {"messages": CHAT["messages"], "max_completion_tokens": 120, "temperature": temperature, "seed": 3}
        found = [ask(http, CHATS, streamed, **body, response_format=form) for streamed in (False, True)]
        assert found[0][:3] == found[1][:3]
        complete += [found[0][0]] if found[0][2] == ["stop"] else []
    for text in complete:
        jsonschema.validate(json.loads(text), schema)
    assert complete
    return [json.loads(text) for text in complete]


def test_o37_values_outside_ascii_stay_what_they_are(http):
    assert set(valid(http, {"enum": UNICODE})) <= set(UNICODE)
    schema = object_of(größe={"enum": ["groß"]}, c={"const": 'say "\\é"'})
    assert all(found == {"größe": "groß", "c": 'say "\\é"'} for found in valid(http, schema))


@pytest.mark.parametrize("reference", ["#", "#/$defs/node", "#/$defs/node/properties/children/items"])
def test_o38_references_may_be_recursive_or_are_refused(http, refused, reference):
    schema = children("#") if reference == "#" else {"$defs": {"node": children("#/$defs/node")}, "$ref": reference}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    reply = http.post(CHATS, json={**CHAT, "allowed_token_ids": None, "max_completion_tokens": 1, "response_format": form})
    if reply.status_code == 200:
        valid(http, schema)
    else:
        refused(CHATS, {**CHAT, "allowed_token_ids": None, "response_format": form})


def test_o39_patterns_hold_at_any_depth(http):
    for schema in (object_of(ids=IDS), {"type": "array", "items": IDS, "minItems": 1, "maxItems": 2}):
        for found in valid(http, schema):
            ids = found["ids"] if isinstance(found, dict) else [one for part in found for one in part]
            assert all(re.fullmatch(r"\d+|ab:[a-z]+", one) for one in ids)


def test_o39_patterns_hold_in_a_tools_parameters(tmp_path):
    template = "{% if tools %}{{ tools | tojson }}{% endif %}" + TEMPLATE
    tool = {"type": "function", "function": {"name": "look", "parameters": object_of(ids=IDS)}}
    body = {"messages": CHAT["messages"], "tools": [tool], "tool_choice": "required", "max_completion_tokens": 200, "seed": 1}
    with running(make_chat_model(tmp_path / "tools", template=template)) as server, client_of(server) as http:
        for temperature in (0, 2):
            [choice] = done(http, CHATS, **body, temperature=temperature).json()["choices"]
            for call in choice["message"].get("tool_calls", ()):
                jsonschema.validate(json.loads(call["function"]["arguments"]), object_of(ids=IDS))
            assert temperature or choice["finish_reason"] == "tool_calls"
