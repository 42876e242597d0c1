"""newchip in trivium. The kit itself: pytest --trivium-backend=newchip"""

from __future__ import annotations

from trivium.conformance import run_conformance
from trivium.plugin import find_backends


def test_it_is_listed_with_its_device():
    found = {status.name: status for status in find_backends()}
    assert found["newchip"].reason == "" and found["newchip"].devices


def test_its_own_kernel_passes():
    report = run_conformance("newchip", areas=["fusions"])
    assert report.ok, str(report)
    assert "newchip_sum_norm" in {row.name for row in report.rows if row.status == "passed"}
