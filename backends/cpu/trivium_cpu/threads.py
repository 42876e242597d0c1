"""How many threads this process may keep busy, and why."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from trivium.errors import InvalidRequestError

MOST = 1024
"""Threads that may be asked for: more than any machine has processors, fewer than any system refuses to start."""


class ThreadCount(NamedTuple):
    """A number of threads and the reason for it, for people to read."""

    threads: int
    reason: str


def count_threads(asked: int | None = None, *, root: Path = Path("/"), affinity: int | None = None) -> ThreadCount:
    """min(processors the process may run on, control group quota rounded down), at least 1; `asked` wins.

    root: where /proc and /sys are. affinity: number of processors, by default the process's own mask.
    Sources: cgroups(7); kernel documentation, admin-guide/cgroup-v2 (cpu.max) and scheduler/sched-bwc (cpu.cfs_quota_us).
    """
    if asked is not None:
        if type(asked) is not int or not 1 <= asked <= MOST:
            raise InvalidRequestError(f"threads must be a positive integer up to {MOST}, not {asked!r}", param="threads")
        return ThreadCount(asked, "as asked")
    processors = affinity if affinity is not None else _affinity()
    quota = min((q for q in _quotas(root)), default=None)
    if quota is None or int(quota) >= processors:
        return ThreadCount(processors, f"{processors} processors may be used and no smaller quota is set")
    return ThreadCount(max(1, int(quota)), f"the control group allows {quota:g} of {processors} processors")


def _affinity() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _quotas(root: Path) -> Iterator[float]:
    """Every processor quota that applies: of the process's control groups and of their ancestors, versions 1 and 2."""
    for controllers, path in _groups(root):
        if not controllers:
            yield from _quotas_above(root / "sys/fs/cgroup", path, _quota_v2)
            yield from _quotas_above(root / "sys/fs/cgroup/unified", path, _quota_v2)
        elif "cpu" in controllers.split(","):
            for mount in ("cpu", "cpu,cpuacct", "cpuacct,cpu"):
                yield from _quotas_above(root / "sys/fs/cgroup" / mount, path, _quota_v1)


def _groups(root: Path) -> Iterator[tuple[str, Path]]:
    """(controllers, path) of each line of /proc/self/cgroup; inside a container the path may not exist, its ancestors do."""
    text = _read(root / "proc/self/cgroup") or "0::/"
    for line in text.splitlines():
        parts = line.split(":", 2)
        if len(parts) == 3:
            yield parts[1], Path(parts[2].lstrip("/"))


def _quotas_above(mount: Path, path: Path, quota_of: object) -> Iterator[float]:
    assert callable(quota_of)
    for group in (path, *path.parents) if path.parts else (path,):
        quota = quota_of(mount / group)
        if quota is not None:
            yield quota


def _quota_v2(group: Path) -> float | None:
    fields = (_read(group / "cpu.max") or "").split()
    return _ratio(fields[0], fields[1] if len(fields) > 1 else "100000") if fields else None


def _quota_v1(group: Path) -> float | None:
    return _ratio(_read(group / "cpu.cfs_quota_us") or "", _read(group / "cpu.cfs_period_us") or "100000")


def _ratio(quota: str, period: str) -> float | None:
    """quota / period in processors; None where there is no limit ("max", -1) or no sense."""
    quota, period = quota.strip(), period.strip()
    if not quota.isdigit() or not period.isdigit() or int(quota) == 0 or int(period) == 0:
        return None
    return int(quota) / int(period)


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None
