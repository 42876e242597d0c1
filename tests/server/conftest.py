"""Servers over a tiny model, and a client with the key."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from chat_models import make_chat_model
from http_server import AUTH, running

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
