"""Images over HTTP: every dialect shows the model the same picture, and a request never makes the server open anything."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from http_server import AUTH, CHATS, Running, running
from vision_cases import make_vision_model, oracle_inputs, oracle_processor, photo, png

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


def test_anthropic_sources_by_address_and_images_in_results_are_refused(server: Running) -> None:
    for source in ({"type": "url", "url": "http://127.0.0.1:1/a.png"}, {"type": "file", "file_id": "x"}, None, "x"):
        said = [{"role": "user", "content": [{"type": "image", "source": source}, ASK]}]
        assert post(server, "/v1/messages", {"messages": said, "max_tokens": 2}).status_code == 400
    result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image", "source": {}}]}
    said = [{"role": "user", "content": [result]}]
    assert post(server, "/v1/messages", {"messages": said, "max_tokens": 2}).status_code == 400


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
