"""Servers over a tiny model, and a client with the key."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from chat_models import make_chat_model
from http_server import AUTH, CHATS, LONG, beside, running

_NEEDED = ("msgspec", "uvicorn", "httptools", "uvloop", "prometheus_client", "python_multipart", "yaml", "httpx")
collect_ignore_glob = [] if all(find_spec(name) for name in _NEEDED) else ["test_*.py"]


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return make_chat_model(tmp_path_factory.mktemp("models") / "chat")


@pytest.fixture(scope="module")
def server(folder):
    with running(folder) as found:
        yield found


@pytest.fixture(scope="module")
def http(server):
    import httpx

    with httpx.Client(base_url=server.url, headers=AUTH, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def known(http):
    return http.post(CHATS, json=LONG).json()["choices"][0]["message"]["content"]


@pytest.fixture
def refused(http, known):
    """refused(path, body, ...): each body is a 400 with an error object beside the known stream."""

    def check(path, *bodies, words=""):
        with beside(http, known):
            for body in bodies:
                reply = http.post(path, json=body)
                assert reply.status_code == 400, (body, reply.text)
                error = reply.json()["error"]
                assert error["type"] == "invalid_request_error" and words in error["message"]

    return check
