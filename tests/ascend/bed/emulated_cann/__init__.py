"""An emulated CANN under the unchanged torch-npu wheel: npu tensors, fused operators and graphs on a machine without an NPU.

What is real: the wheel, its schemas, its dispatcher and the host code of its operators. What is ours: the C libraries below them.
They are built with gcc when a process first asks for them; each device call lands in a reference that checks the operator's
documented limits, and one that is not emulated fails with its name. Nothing is proven here about device kernels, memory or time.

In a test below tests/ascend (fixtures of tests/ascend/conftest.py):

    def test_norm_is_fused(npu):                        # skips where torch-npu is not installed
        y = torch_npu_operator(torch.ones(4, 64).half().npu())
        assert npu.log.names == ["aclnnRmsNorm"]        # fused operators in call order; .calls has their arguments
        assert not npu.log.aten                         # plain torch operations that ran on the device, counted by name

`npu` is the Device of this process with an empty log:

- `npu.log.calls`, `.names`, `.count("aclnnRmsNorm")`, `.last("aclnnRmsNorm").epsilon`: what the host called;
  `.aten["mm"]`: plain torch operations; `.ran`: names of tasks in the order the device ran them, also by replay of a graph
- `with recorded() as log:` a log of its own for a block
- `with late_device():` tasks wait until the host synchronises: finds results read, or pinned memory reused, too early
- `npu.graph_limit = 3`: the fourth graph alive at a time is refused as by a device that is out of streams
- a violated limit is a RuntimeError with "LimitError: <the limit>" in its text
- `host(tensor)`: a CPU view of an npu tensor's memory

The chip is chosen once per process, by EMULATED_SOC (Ascend310P3, Ascend910B1, Ascend910_9391, Ascend950PR_9589; default 910B1),
and so are EMULATED_CANN (9.1.0), EMULATED_DEVICES (2) and EMULATED_MEMORY (bytes a process may take). `on_chip("310P", code)` runs
Python source in a process of that chip, in which `npu` and `torch_npu` are there, and returns what it prints.
"""

from __future__ import annotations

from emulated_cann.chips import chip
from emulated_cann.device import Device, Log, late_device, recorded
from emulated_cann.load import available, load, on_chip
from emulated_cann.objects import host
from emulated_cann.registry import LimitError

__all__ = ["Device", "LimitError", "Log", "available", "chip", "host", "late_device", "load", "on_chip", "recorded"]
