"""What the Ascend tests need: emulated NPUs, where torch-npu is installed (tests/ascend/run.sh makes such an environment)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")  # an installed torch-npu without CANN breaks `import torch` otherwise


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`pytest -m npu tests/ascend/emulated` on a machine with CANN runs these tests on its NPU."""
    for item in items:
        if "ascend/emulated" in item.path.as_posix():
            item.add_marker(pytest.mark.npu)


@pytest.fixture(scope="session")
def emulated() -> Any:
    """The emulated device of this process; a real one where there is a CANN."""
    from emulated_cann import available, load
    from emulated_cann.silicon import Silicon, has_cann

    if has_cann():
        return Silicon()
    if why := available():
        pytest.skip(why)
    return load()


@pytest.fixture
def npu(emulated: Any) -> Iterator[Any]:
    """The emulated device with an empty log; torch.npu is there."""
    emulated.log.clear()
    yield emulated
    emulated.flush()
