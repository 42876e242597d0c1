"""The seam between the engine and whatever runs its batches. In-process here; a remote one has its own Session and Executable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trivium.engine.adapters import Adapters
from trivium.engine.pooling import PoolingParams
from trivium.kv import Layout
from trivium.ops import KVSpec
from trivium.plugin.contract import Backend, Capabilities, Executable, Session, Tensor

if TYPE_CHECKING:
    from trivium.engine.media import Images


@dataclass(frozen=True)
class Model:
    """What the engine needs of a loaded model, its page pool allocated.

    kv_spec: without groups nothing is stored between steps, so that each sequence must be whole in one, and no tokens are made.
    num_pages: pages of the pool that Session.kv_store() made for it. vocab_size: ids from 0 that are accepted and sampled.
    max_model_len: tokens of prompt and output together. eos_ids end an output unless ignore_eos. fingerprint: identity of
    weights and configuration; pages are never shared between different ones. layout: what the numbers in its pages mean.
    hidden_size: width of the Program's output "hidden", 0 if it has none. pooling: what is made of it where a request leaves that
    open. lora: its adapters, None if it was loaded without. media: the constant of that name, which is written between steps; None:
    there is none. images: how it sees, None if it does not.
    """

    backend: Backend
    capabilities: Capabilities
    session: Session
    executable: Executable
    kv_spec: KVSpec
    num_pages: int
    vocab_size: int
    max_model_len: int
    eos_ids: frozenset[int]
    fingerprint: str
    lora: Adapters | None
    hidden_size: int
    pooling: PoolingParams
    layout: Layout
    media: Tensor
    images: Images | None
