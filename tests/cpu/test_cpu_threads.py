"""How many threads the CPU backend takes: affinity, control group quotas of both versions, and the user's word."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from trivium.errors import InvalidRequestError
from trivium_cpu.threads import count_threads


def fake_root(tmp_path: Path, groups: str, files: dict[str, str]) -> Path:
    """A root folder with /proc/self/cgroup and files below /sys/fs/cgroup."""
    proc = tmp_path / "proc/self"
    proc.mkdir(parents=True)
    (proc / "cgroup").write_text(groups)
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.mark.faults
@pytest.mark.parametrize(
    ("quota", "threads"),
    [
        ("200000 100000", 2),
        ("max 100000", 8),
        ("765000 100000", 7),
        ("50000 100000", 1),
        ("1600000 100000", 8),
        ("300000 200000", 1),
    ],
)
def test_o43_quota_of_version_two(tmp_path, quota, threads):
    root = fake_root(tmp_path, "0::/\n", {"cpu.max": quota + "\n"})
    assert count_threads(root=root, affinity=8).threads == threads


@pytest.mark.faults
@pytest.mark.parametrize(("quota", "threads"), [("150000", 1), ("400000", 4), ("-1", 8), ("50000", 1)])
@pytest.mark.parametrize("mount", ["cpu", "cpu,cpuacct"])
def test_o43_quota_of_version_one(tmp_path, mount, quota, threads):
    files = {f"{mount}/docker/abc/cpu.cfs_quota_us": quota, f"{mount}/docker/abc/cpu.cfs_period_us": "100000"}
    root = fake_root(tmp_path, "12:cpuset:/docker/abc\n4:cpu,cpuacct:/docker/abc\n0::/docker/abc\n", files)
    assert count_threads(root=root, affinity=8).threads == threads


@pytest.mark.faults
def test_o43_the_smallest_quota_of_nested_groups_counts(tmp_path):
    files = {"a/cpu.max": "300000 100000", "a/b/cpu.max": "600000 100000", "a/b/c/cpu.max": "max 100000"}
    root = fake_root(tmp_path, "0::/a/b/c\n", files)
    assert count_threads(root=root, affinity=16).threads == 3


@pytest.mark.faults
def test_o43_a_group_path_of_the_host_falls_back_to_the_mount(tmp_path):
    root = fake_root(tmp_path, "0::/system.slice/container-of-the-host\n", {"cpu.max": "200000 100000"})
    assert count_threads(root=root, affinity=64).threads == 2


@pytest.mark.faults
def test_o43_affinity_is_the_limit_without_a_quota(tmp_path):
    count = count_threads(root=tmp_path, affinity=2)
    assert count.threads == 2
    assert "2 processors" in count.reason


@pytest.mark.faults
def test_o43_the_reason_names_the_quota(tmp_path):
    root = fake_root(tmp_path, "0::/\n", {"cpu.max": "250000 100000"})
    assert count_threads(root=root, affinity=96).reason == "the control group allows 2.5 of 96 processors"


@pytest.mark.faults
def test_o43_the_users_number_wins(tmp_path):
    root = fake_root(tmp_path, "0::/\n", {"cpu.max": "100000 100000"})
    assert count_threads(6, root=root, affinity=2) == (6, "as asked")


@pytest.mark.faults
def test_o43_the_list_of_backends_says_the_threads_and_why(capsys):
    from trivium.cli import main

    assert main(["backends"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("cpu"))
    count = count_threads()
    assert f"{count.threads} threads: {count.reason}" in line


@pytest.mark.parametrize("asked", [0, -1, 2.0, "2", True])
def test_a_senseless_number_of_threads_is_refused(asked):
    with pytest.raises(InvalidRequestError, match="threads"):
        count_threads(asked)


@pytest.mark.parametrize("text", ["", "max", "nonsense", "0 100000", "100000 0"])
def test_an_unreadable_quota_is_no_quota(tmp_path, text):
    assert count_threads(root=fake_root(tmp_path, "0::/\n", {"cpu.max": text}), affinity=4).threads == 4


@pytest.mark.faults
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity masks here")
def test_o43_a_process_bound_to_one_processor_says_one():
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))});"
        "from trivium_cpu.plugin import CpuBackend; print(CpuBackend().probe().devices[0].details['threads'])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "1\n"
