"""Collectives over two processes of torch.distributed, through the kernels of a Program."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from trivium.errors import UnsupportedError

pytest.importorskip("torch")

RANK = """
import json, sys
import numpy as np, torch.distributed as dist
from trivium.ops import Batch, KVSpec, new_builder
from trivium.ops.sample import plain_inputs
from trivium.conformance.lab import as_weight
from trivium.plugin import resolve

rank, store, dtype = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
b = new_builder()
x = b.embedding(b.input("token_ids"), b.weight("table", (4, 3)))
outputs = {"logits": b.gather_rows(b.all_reduce(x), b.input("sample_rows")),
           "last": b.all_gather(x, dim=-1, ranks=2), "first": b.all_gather(b.scale(x, factor=2.0), dim=1, ranks=2),
           "moved": b.send(x, rank=1) if rank == 0 else b.recv(x, rank=0)}
program = b.finish(outputs, vocab_size=3)
backend, device = resolve("torch:cpu")
session = backend.open(device, {"dtype": dtype, "strict": True})
table = np.arange(12, dtype=np.float32).reshape(4, 3) * (1 + 4 * rank)
ids, one = np.array([2, 0], np.int32), np.zeros((0, 1, 0), np.int32)
batch = Batch(ids, ids, np.array([0, 2], np.int32), np.array([2], np.int32), one, np.zeros((0, 2), np.int64),
              np.array([0, 1], np.int32), plain_inputs(2))
step = session.compile(program, {"table": session.load(as_weight("table", table), "float32")}).run(batch)
print(json.dumps({name: step.output(name).tolist() for name in program.outputs} | {"ids": step.tokens().ids.tolist()}))
dist.destroy_process_group()
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_processes_reduce_gather_send_and_receive(tmp_path, dtype):
    command = [sys.executable, "-c", RANK]
    running = [
        subprocess.Popen([*command, str(r), str(tmp_path / "store"), dtype], stdout=subprocess.PIPE, text=True) for r in (0, 1)
    ]
    said = [process.communicate(timeout=240)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0]
    first, second = (json.loads(text.strip().splitlines()[-1]) for text in said)
    mine, theirs = [[6.0, 7, 8], [0, 1, 2]], [[30.0, 35, 40], [0, 5, 10]]
    for rank in (first, second):
        assert rank["logits"] == [[36, 42, 48], [0, 6, 12]] and rank["ids"] == [2, 2]
        assert rank["last"] == [a + b for a, b in zip(mine, theirs)]
        assert rank["first"] == [[2 * n for n in a + b] for a, b in zip(mine, theirs)]
        assert rank["moved"] == mine


def test_a_group_of_another_size_is_refused_with_both_numbers():
    from trivium_torch.collectives import expect_ranks

    with pytest.raises(UnsupportedError, match=r"a group of 4 ranks was asked for; torch\.distributed has 1"):
        expect_ranks(4)
