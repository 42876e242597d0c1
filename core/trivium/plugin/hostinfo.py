"""Memory of this host as a process may use it: the smaller of the machine's and its control group's."""

from __future__ import annotations

import os
from pathlib import Path


def _cgroup_limit() -> int | None:
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(name).read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < 1 << 60:
            return int(text)
    return None


def total_memory() -> int:
    """Bytes of memory this process may use at most."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(total, _cgroup_limit() or total)


def available_memory() -> int:
    """Bytes that can be taken now without swapping (MemAvailable where the kernel tells, else free pages)."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return min(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES"), total_memory())
    return min(kib * 1024, total_memory())
