"""newchip in trivium. The kit itself: pytest --trivium-backend=newchip"""

from __future__ import annotations

from trivium.conformance import run_conformance
from trivium.plugin import find_backends, resolve


def test_it_is_listed_with_its_device():
    found = {status.name: status for status in find_backends()}
    assert found["newchip"].reason == ""
    assert resolve("newchip")[1].name == "newchip 0"


def test_its_own_kernels_pass():
    report = run_conformance("newchip", areas=["operators", "fusions"])
    assert report.ok, str(report)
    own = {row.name for row in report.rows if row.status == "passed"}
    assert own >= {"linear", "add", "rms_norm", "kv_write", "gated_mlp"}
