"""A client of others, as it is: litellm, in the dialects that it speaks."""

from __future__ import annotations

import pytest
from http_server import CHAT, SECRET

pytestmark = pytest.mark.http


def test_litellm_says_the_same_in_every_dialect(server, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = pytest.importorskip("litellm")

    def ask(model, base, **more):
        asked = {"messages": CHAT["messages"], "max_tokens": 8, "temperature": 0, "api_key": SECRET}
        return litellm.completion(model=model, api_base=server.url + base, **asked, **more)

    want = ask("openai/tiny", "/v1").choices[0].message.content
    assert want
    for model, base in (("hosted_vllm/tiny", "/v1"), ("anthropic/tiny", ""), ("ollama_chat/tiny", "")):
        assert ask(model, base).choices[0].message.content == want, model
    pieces = list(ask("openai/tiny", "/v1", stream=True, stream_options={"include_usage": True}))
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices) == want
    with pytest.raises(litellm.NotFoundError):
        ask("openai/nope", "/v1")
