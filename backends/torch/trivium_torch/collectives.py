"""Collectives over torch.distributed's default group. Without one (or with one rank) the group is this process alone."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from trivium.errors import UnsupportedError


def ranks() -> int:
    """How many ranks there are."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def all_reduce(x: Tensor) -> Tensor:
    """The sum of x over the ranks; x stays."""
    if ranks() == 1:
        return x
    total = x.clone()
    dist.all_reduce(total)
    return total


def expect_ranks(expected: int) -> None:
    """UnsupportedError unless there are so many ranks."""
    if expected != ranks():
        raise UnsupportedError(f"a group of {expected} ranks was asked for; torch.distributed has {ranks()}")


def all_gather(x: Tensor, dim: int) -> Tensor:
    """The x of all ranks, in order of rank, along `dim`."""
    if ranks() == 1:
        return x
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(ranks())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, dim)


def send(x: Tensor, rank: int) -> None:
    """Sends x to a rank; to itself, in a group of one, there is nothing to do."""
    if ranks() > 1:
        dist.send(x.contiguous(), dst=rank)


def recv(like: Tensor, rank: int) -> Tensor:
    """What a rank sends, in like's shape and dtype; `like` itself in a group of one."""
    if ranks() == 1:
        return like
    got = torch.empty_like(like, memory_format=torch.contiguous_format)
    dist.recv(got, src=rank)
    return got
