"""Moving numbers about, within a device and between ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from trivium_torch import collectives
from trivium_torch.kernels.dense import Args, Attrs
from trivium_torch.session import TorchSession


def reshape(session: TorchSession, args: Args, attrs: Attrs) -> Tensor:
    x: Tensor = args[0]
    return x.reshape([-1 if isinstance(d, str) else d for d in attrs["shape"]])


def slice_columns(session: TorchSession, args: Args, attrs: Attrs) -> Tensor:
    x: Tensor = args[0]
    return x[..., attrs["start"] : attrs["stop"]]


def concat(session: TorchSession, args: Args, attrs: Attrs) -> Tensor:
    return torch.cat([args[0], args[1]], dim=-1)


def gather_rows(session: TorchSession, args: Args, attrs: Attrs) -> Tensor:
    return torch.index_select(args[0], 0, args[1])


def text_ids(session: TorchSession, args: Args, attrs: Attrs) -> Tensor:
    return torch.clamp(args[0], 0, attrs["vocab"] - 1)


def media_rows(session: TorchSession, args: Args, attrs: Attrs) -> Tensor:
    """No shape depends on where rows stand, so a capture holds for all steps."""
    ids, media, x = args
    found = torch.index_select(media.reshape(-1, media.shape[-1]), 0, (ids - attrs["first"]).clamp(min=0)).to(session.dtype)
    return found if x is None else torch.where((ids >= attrs["first"])[:, None], found, x)


def gather_blocks(session: TorchSession, args: Args, attrs: Attrs) -> Tensor:
    x, rows = args
    each = (rows[:, None] + torch.arange(attrs["count"], device=x.device)).flatten()
    return torch.index_select(x, 0, each).reshape(len(rows), attrs["count"] * x.shape[1])


def all_reduce(session: TorchSession, args: Args, attrs: Attrs) -> Tensor:
    return session.all_reduce(args[0])


def all_gather(session: TorchSession, args: Args, attrs: Attrs) -> Tensor:
    collectives.expect_ranks(attrs["ranks"], session.team)
    return session.all_gather(args[0], attrs["dim"])


def send(session: TorchSession, args: Args, attrs: Attrs) -> Tensor:
    session.send(args[0], attrs["rank"])
    x: Tensor = args[0]
    return x


def recv(session: TorchSession, args: Args, attrs: Attrs) -> Tensor:
    return session.recv(args[0], attrs["rank"])


KERNELS: Mapping[str, Callable[[TorchSession, Args, Attrs], Any]] = {
    "reshape": reshape, "slice": slice_columns, "concat": concat, "gather_rows": gather_rows, "text_ids": text_ids,
    "media_rows": media_rows, "gather_blocks": gather_blocks, "all_reduce": all_reduce,
    "all_gather": all_gather, "send": send, "recv": recv,
}  # fmt: skip
