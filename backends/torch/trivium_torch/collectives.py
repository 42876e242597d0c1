"""Collectives over torch.distributed. Without a group (or with one rank) the group is this process alone."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from trivium.errors import UnsupportedError


class Team(NamedTuple):
    """Where a rank stands among all. group: torch's, of the ranks that share heads with it (None: all ranks). stride: how many
    ranks a stage of the pipeline has; those with one share of the heads are in a line from stage to stage."""

    group: Any = None
    stride: int = 1


EVERYONE = Team()


def teams(ranks: int, stride: int) -> Team:
    """This rank's team where every `stride` ranks in a row share a stage. All ranks call it together."""
    if stride in (1, ranks):
        return EVERYONE
    made = [dist.new_group(list(range(first, first + stride))) for first in range(0, ranks, stride)]
    return Team(made[dist.get_rank() // stride], stride)


def ranks(team: Team = EVERYONE) -> int:
    """How many ranks share heads."""
    return dist.get_world_size(team.group) if dist.is_available() and dist.is_initialized() else 1


def all_reduce(x: Tensor, team: Team = EVERYONE) -> Tensor:
    """The sum of x over the ranks; x stays."""
    if ranks(team) == 1:
        return x
    total = x.clone()
    dist.all_reduce(total, group=team.group)
    return total


def expect_ranks(expected: int, team: Team = EVERYONE) -> None:
    """UnsupportedError unless there are so many ranks."""
    if expected != ranks(team):
        raise UnsupportedError(f"a group of {expected} ranks was asked for; torch.distributed has {ranks(team)}")


def all_gather(x: Tensor, dim: int, team: Team = EVERYONE) -> Tensor:
    """The x of all ranks, in order of rank, along `dim`."""
    if ranks(team) == 1:
        return x
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(ranks(team))]
    dist.all_gather(parts, x.contiguous(), group=team.group)
    return torch.cat(parts, dim)


def send(x: Tensor, stage: int, team: Team = EVERYONE) -> None:
    """Sends x to the rank in line of a stage; to itself, in a group of one, there is nothing to do."""
    if ranks() > 1:
        dist.send(x.contiguous(), dst=_in_line(stage, team))


def recv(like: Tensor, stage: int, team: Team = EVERYONE) -> Tensor:
    """What the rank in line of a stage sends, in like's shape and dtype; `like` itself in a group of one."""
    if ranks() == 1:
        return like
    got = torch.empty_like(like, memory_format=torch.contiguous_format)
    dist.recv(got, src=_in_line(stage, team))
    return got


def _in_line(stage: int, team: Team) -> int:
    return stage * team.stride + dist.get_rank() % team.stride
