"""Images over HTTP: every dialect shows the model the same picture, and a request never makes the server open anything."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from http_server import AUTH, CHATS, Running, running
from vision_cases import make_seeing_checkpoint, make_vision_model, oracle_inputs, oracle_processor, photo, png

httpx = pytest.importorskip("httpx")
pytest.importorskip("uvicorn")
pytest.importorskip("PIL")
pytestmark = [pytest.mark.http, pytest.mark.oracles]

PICTURE = photo(64, 50, 3)
DATA = base64.b64encode(png(PICTURE)).decode()
URL = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{DATA}"}}
ASK = {"type": "text", "text": "what is it?"}
GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("seeing") / "Idefics3"
    make_vision_model(made)
    return made


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with running(folder, loading={"num_kv_blocks": 200}) as made:
        yield made


@pytest.fixture(scope="module")
def prompt_tokens() -> int:
    """By transformers' processor."""
    chat = [{"role": "user", "content": [{"type": "image", "image": PICTURE}, ASK]}]
    return oracle_inputs(oracle_processor(), chat)["input_ids"].shape[1]


def post(server: Running, path: str, body: dict[str, Any]) -> Any:
    return httpx.post(server.url + path, json={"model": "tiny", **body}, headers={**AUTH, "x-api-key": "k1"}, timeout=60)


def test_all_dialects_show_the_same_picture(server: Running, prompt_tokens: int) -> None:
    chat = {"messages": [{"role": "user", "content": [URL, ASK]}], "max_completion_tokens": 8, **GREEDY}
    first = post(server, CHATS, chat).json()
    assert first["usage"]["prompt_tokens"] == prompt_tokens and first["usage"]["completion_tokens"] == 8
    source = {"type": "base64", "media_type": "image/png", "data": DATA}
    said = {"messages": [{"role": "user", "content": [{"type": "image", "source": source}, ASK]}]}
    message = post(server, "/v1/messages", {**said, "max_tokens": 8, "temperature": 0}).json()
    used = message["usage"]
    assert used["input_tokens"] + used["cache_read_input_tokens"] == prompt_tokens and used["cache_read_input_tokens"] > 0
    assert post(server, "/v1/messages/count_tokens", said).json() == {"input_tokens": prompt_tokens}
    options = {"stream": False, "options": {"temperature": 0, "num_predict": 8}}
    shown = {"role": "user", "content": ASK["text"], "images": [DATA]}
    ollama = post(server, "/api/chat", {"messages": [shown], **options}).json()
    plain = post(server, "/api/generate", {"prompt": ASK["text"], "images": [DATA], **options}).json()
    assert ollama["prompt_eval_count"] == plain["prompt_eval_count"] == prompt_tokens
    parts = [{"type": "input_image", "image_url": URL["image_url"]["url"]}, {"type": "input_text", "text": ASK["text"]}]
    asked = {"input": [{"role": "user", "content": parts}], "max_output_tokens": 8, "temperature": 0}
    response = post(server, "/v1/responses", asked).json()
    assert response["usage"]["input_tokens"] == prompt_tokens
    texts = [first["choices"][0]["message"]["content"], message["content"][0]["text"], ollama["message"]["content"]]
    texts += [plain["response"], response["output"][0]["content"][0]["text"]]
    assert len(set(texts)) == 1 and texts[0]


def test_another_picture_of_the_same_size_gets_another_answer(server: Running) -> None:
    texts = []
    for seed in (3, 4, 3):
        data = base64.b64encode(png(photo(64, 50, seed))).decode()
        part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
        chat = {"messages": [{"role": "user", "content": [part, ASK]}], "max_completion_tokens": 8, **GREEDY}
        texts.append(post(server, CHATS, chat).json()["choices"][0]["message"]["content"])
    assert texts[0] == texts[2] != texts[1]


def test_streams_take_pictures_too(server: Running) -> None:
    chat = {"messages": [{"role": "user", "content": [URL, ASK]}], "max_completion_tokens": 4, "stream": True, **GREEDY}
    text = post(server, CHATS, chat).text
    assert text.count('"chat.completion.chunk"') >= 2 and text.rstrip().endswith("data: [DONE]")


@pytest.mark.parametrize("part", [
    {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/a.png"}}, {"type": "image_url", "image_url": "file:///etc/passwd"},
    {"type": "image", "image": "/etc/passwd"}, {"type": "image", "path": "/etc/passwd"}, {"type": "image"},
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, {"type": "image_url"},
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,%%"}}, {"type": "image_url", "image_url": {"url": 5}},
    {"type": ["image"], "image": "x"}, {"type": {}, "image": "x"},
], ids=str)  # fmt: skip
def test_what_is_no_image_in_itself_is_refused(server: Running, part: dict[str, Any]) -> None:
    answer = post(server, CHATS, {"messages": [{"role": "user", "content": [part, ASK]}], "max_completion_tokens": 2})
    assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error", answer.text
    assert "root:" not in answer.text


def test_anthropic_sources_by_address_are_refused_in_results_too(server: Running) -> None:
    for source in ({"type": "url", "url": "http://127.0.0.1:1/a.png"}, {"type": "file", "file_id": "x"}, None, "x"):
        said = [{"role": "user", "content": [{"type": "image", "source": source}, ASK]}]
        assert post(server, "/v1/messages", {"messages": said, "max_tokens": 2}).status_code == 400
        result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image", "source": source}]}
        answer = post(server, "/v1/messages", {"messages": [{"role": "user", "content": [result]}], "max_tokens": 2})
        assert answer.status_code == 400 and "content[0].content[0].source" in answer.json()["error"]["message"]


SEEN = [{"role": "user", "content": [ASK]}, {"role": "tool", "content": [{"type": "text", "text": "see:"}, URL]}]


def of_dialects() -> dict[str, dict[str, Any]]:
    """A tool's result with a text and a picture, by path, as the dialects have it."""
    source = {"type": "base64", "media_type": "image/png", "data": DATA}
    blocks = [{"type": "text", "text": "see:"}, {"type": "image", "source": source}]
    given = {"type": "tool_result", "tool_use_id": "a", "content": blocks}
    parts = [{"type": "input_text", "text": "see:"}, {"type": "input_image", "image_url": URL["image_url"]["url"]}]
    output = {"type": "function_call_output", "call_id": "a", "output": parts}
    greedy = {"temperature": 0}
    first = [{"role": "user", "content": [ASK]}]
    return {
        CHATS: {"messages": SEEN, "max_completion_tokens": 8, **GREEDY},
        "/v1/messages": {"messages": [*first, {"role": "user", "content": [given]}], "max_tokens": 8, **greedy},
        "/v1/responses": {"input": [*first, output], "max_output_tokens": 8, **greedy},
    }


def test_pictures_in_the_results_of_tools_are_seen_in_every_dialect(server: Running) -> None:
    chat = [SEEN[0], {"role": "tool", "content": [{"type": "text", "text": "see:"}, {"type": "image", "image": PICTURE}]}]
    want = oracle_inputs(oracle_processor(), chat)["input_ids"].shape[1]
    chats, messages, responses = (post(server, path, body).json() for path, body in of_dialects().items())
    used = messages["usage"]
    assert chats["usage"]["prompt_tokens"] == responses["usage"]["input_tokens"] == want
    assert used["input_tokens"] + used["cache_read_input_tokens"] == want
    texts = [
        chats["choices"][0]["message"]["content"],
        messages["content"][0]["text"],
        responses["output"][0]["content"][0]["text"],
    ]
    assert len(set(texts)) == 1 and texts[0]


@pytest.mark.parametrize(("path", "wrong"), [
    ("/v1/messages", {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "document", "source": {}}]}),
    ("/v1/responses", {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_file", "file_id": "x"}]}),
])  # fmt: skip
def test_other_kinds_in_results_are_refused_by_name(server: Running, path: str, wrong: dict[str, Any]) -> None:
    said = {"messages": [{"role": "user", "content": [wrong]}], "max_tokens": 2} if "messages" in path else {"input": [wrong]}
    answer = post(server, path, said)
    kind = (wrong.get("content") or wrong.get("output"))[0]["type"]
    assert answer.status_code == 400 and repr(kind) in answer.json()["error"]["message"], answer.text


def test_a_template_that_does_not_show_a_tool_s_picture_is_a_refusal(tmp_path: Path) -> None:
    make_seeing_checkpoint(tmp_path)
    words = json.loads((tmp_path / "tokenizer_config.json").read_text())
    part = "{{ '<image>' if part.type == 'image' else part.text }}"
    deaf = "{% for m in messages if m.role != 'tool' %}{% for part in m.content %}" + part + "{% endfor %}{% endfor %}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**words, "chat_template": deaf}))
    with running(tmp_path, loading={"num_kv_blocks": 100}) as server:
        answer = post(server, CHATS, {"messages": SEEN, "max_completion_tokens": 2})
        assert answer.status_code == 400 and "must show the images of every role" in answer.json()["error"]["message"]


def claim(width: int, height: int) -> dict[str, Any]:
    """A picture that says its size and has no pixels."""
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)), (b"IDAT", b""), (b"IEND", b"")]
    body = b"".join(struct.pack(">I", len(d)) + n + d + struct.pack(">I", zlib.crc32(n + d)) for n, d in chunks)
    data = base64.b64encode(b"\x89PNG\r\n\x1a\n" + body).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def test_pixels_of_all_pictures_together_are_bounded_before_any_is_unpacked(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def show(*parts: dict[str, Any]) -> Any:
        said = [{"role": "user", "content": [part]} for part in parts]
        return post(server, CHATS, {"messages": said, "max_completion_tokens": 2})

    read: list[Any] = []
    monkeypatch.setattr("trivium_families.vision.parts.read", lambda *given: read.append(given))
    answer = show(URL, claim(7000, 7000), claim(4000, 4000))
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "messages" and not read
    assert f"{64 * 50 + 49_000_000 + 16_000_000} pixels together" in answer.json()["error"]["message"]
    answer = show(*[URL] * 65)
    assert answer.status_code == 400 and "65 images are more than the 64" in answer.json()["error"]["message"] and not read
    monkeypatch.undo()
    answer = show(claim(7000, 7000))  # few enough, but then there are none
    assert answer.status_code == 400 and "pixels together" not in answer.json()["error"]["message"]


def test_the_operator_decides_how_many_pixels_there_may_be(tmp_path: Path) -> None:
    with running(make_seeing_checkpoint(tmp_path), loading={"num_kv_blocks": 200}, max_image_pixels=2 * 64 * 50) as server:
        for count, status in ((2, 200), (3, 400)):
            chat = {"messages": [{"role": "user", "content": [*[URL] * count, ASK]}], "max_completion_tokens": 2}
            assert post(server, CHATS, chat).status_code == status
        said = [{"role": "user", "content": "x", "images": [DATA] * 3}]
        assert "9600 pixels" in post(server, "/api/chat", {"messages": said}).json()["error"]
        source = {"type": "base64", "media_type": "image/png", "data": DATA}
        body = {"messages": [{"role": "user", "content": [{"type": "image", "source": source}] * 3}]}
        assert "9600 pixels" in post(server, "/v1/messages/count_tokens", body).json()["error"]["message"]


@pytest.mark.parametrize(("path", "body", "param"), [
    ("/api/embed", {"input": "a", "images": [DATA]}, "images"), ("/api/embeddings", {"prompt": "a", "images": [DATA]}, "images"),
    ("/v1/rerank", {"query": "a", "documents": [{"text": "b", "image": DATA}]}, "documents"),
])  # fmt: skip
def test_images_that_would_be_ignored_are_refused_by_name(server: Running, path: str, body: dict[str, Any], param: str) -> None:
    answer = post(server, path, body)
    assert answer.status_code == 400 and "texts only" in answer.text and param in answer.text
    assert post(server, "/api/embed", {"input": "a", "images": []}).status_code == 200


@pytest.mark.parametrize("images", ["abc", [5], [None], ["%%"], [""], ["AAAA"]])
def test_ollama_images_must_be_base64_of_an_image(server: Running, images: Any) -> None:
    said = [{"role": "user", "content": "x", "images": images}]
    answer = post(server, "/api/chat", {"messages": said, "stream": False})
    assert answer.status_code == 400 and answer.json()["error"], answer.text


def test_ollama_says_which_models_see(server: Running) -> None:
    assert "vision" in post(server, "/api/show", {}).json()["capabilities"]


def test_a_model_that_reads_text_only_refuses_images_in_every_dialect(tmp_path: Path) -> None:
    from tiny_checkpoints import make_checkpoint

    with running(make_checkpoint(tmp_path / "blind", "llama"), loading={"num_kv_blocks": 50}) as blind:
        source = {"type": "base64", "media_type": "image/png", "data": DATA}
        asked = [
            (CHATS, {"messages": [{"role": "user", "content": [URL]}]}),
            ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "image", "source": source}]}], "max_tokens": 2}),
            ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": [DATA]}]}),
        ]
        for path, body in asked:
            answer = post(blind, path, body)
            assert answer.status_code == 400 and "takes text only" in answer.text, answer.text
        assert "vision" not in post(blind, "/api/show", {}).json()["capabilities"]
