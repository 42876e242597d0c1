"""DRY penalties by comparing every earlier place with the end, token by token."""

from __future__ import annotations


def brute(ids: list[int], breakers: frozenset, multiplier: float, base: float, allowed: int) -> dict[int, float]:
    longest: dict[int, int] = {}
    room = next((k for k in range(len(ids)) if any(ids[: len(ids) - k][-len(b) :] == list(b) for b in breakers)), len(ids))
    for at in range(1, len(ids)):
        same = 0
        while same < min(at, room) and ids[at - 1 - same] == ids[-1 - same]:
            same += 1
        if same >= allowed:
            longest[ids[at]] = max(same, longest.get(ids[at], 0))
    return {token: -multiplier * base ** (n - allowed) for token, n in longest.items()}
