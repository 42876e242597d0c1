"""How many pages a pool gets when nobody says: by the memory that is left and the share of it that the backend names."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiny_checkpoints import make_checkpoint
from trivium.engine.loader import LoadOptions, load
from trivium.plugin import Memory, resolve
from trivium_reference.plugin import ReferenceSession


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_the_pool_takes_the_share_that_the_backend_names(tmp_path, monkeypatch, share):
    folder = make_checkpoint(tmp_path / "llama", "llama")
    backend, device = resolve("reference")
    free = 40 * page_bytes(folder)
    can = replace(backend.capabilities(device), memory_share=share)
    monkeypatch.setattr(type(backend), "capabilities", lambda self, device: can)
    monkeypatch.setattr(ReferenceSession, "memory", lambda self: Memory(free, free, 0, 0))
    assert load(str(folder), "reference", LoadOptions(max_num_seqs=64)).num_pages == 40 * share


def page_bytes(folder):
    loaded = load(str(folder), "reference", LoadOptions(num_kv_blocks=8))
    return loaded.session.page_bytes(loaded.kv_spec)
