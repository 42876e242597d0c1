"""What the Ascend tests need: emulated NPUs, where torch-npu is installed (tests/ascend/run.sh makes such an environment)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")  # an installed torch-npu without CANN breaks `import torch` otherwise


@pytest.fixture(scope="session")
def emulated() -> Any:
    """The emulated device of this process."""
    from emulated_cann import available, load

    if why := available():
        pytest.skip(why)
    return load()


@pytest.fixture
def npu(emulated: Any) -> Iterator[Any]:
    """The emulated device with an empty log; torch.npu is there."""
    emulated.log.clear()
    yield emulated
    emulated.flush()
