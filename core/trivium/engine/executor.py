"""The seam between the engine and whatever runs its batches. In-process here; a remote one offers the same attributes."""

from __future__ import annotations

from typing import Protocol

from trivium.engine.adapters import Adapters
from trivium.kv import Layout
from trivium.ops import KVSpec
from trivium.plugin.contract import Backend, Capabilities, Executable, Session


class Model(Protocol):
    """What the engine needs of a loaded model (engine.loader.Loaded has it), its page pool allocated.

    num_pages: pages of the pool that Session.kv_store() made for kv_spec. vocab_size: ids from 0 that are accepted and sampled.
    max_model_len: tokens of prompt and output together. eos_ids end an output unless ignore_eos. fingerprint: identity of
    weights and configuration; pages are never shared between different ones. layout: what the numbers in its pages mean.
    hidden_size: width of the Program's output "hidden", 0 if it has none. lora: its adapters, None if it was loaded without.
    """

    @property
    def backend(self) -> Backend: ...
    @property
    def capabilities(self) -> Capabilities: ...
    @property
    def session(self) -> Session: ...
    @property
    def executable(self) -> Executable: ...
    @property
    def kv_spec(self) -> KVSpec: ...
    @property
    def num_pages(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def eos_ids(self) -> frozenset[int]: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def lora(self) -> Adapters | None: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def layout(self) -> Layout: ...
