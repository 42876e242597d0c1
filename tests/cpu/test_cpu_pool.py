"""Threads of the pool: what a step computes does not depend on how many there are, who else is on the machine, or who calls."""

from __future__ import annotations

import subprocess
import sys
import threading

import numpy as np
import pytest
from trivium.conformance.lab import as_weight
from trivium.ops import Batch, new_builder
from trivium.ops.sample import plain_inputs
from trivium_cpu.plugin import CpuBackend

VOCAB, WIDTH = 80, 64


def program():
    b = new_builder()
    x = b.embedding(b.input("token_ids"), b.weight("table", (VOCAB, WIDTH)))
    for layer in range(4):
        h = b.rms_norm(x, b.weight(f"norm{layer}", (WIDTH,)), eps=1e-5)
        wide = b.activation(b.linear(h, b.weight(f"up{layer}", (3 * WIDTH, WIDTH))), kind="silu")
        x = b.add(x, b.linear(wide, b.weight(f"down{layer}", (WIDTH, 3 * WIDTH))))
    return b.finish({"logits": b.gather_rows(x, b.input("sample_rows"))}, vocab_size=WIDTH)


def compiled(threads):
    backend = CpuBackend()
    session = backend.open(backend.probe().devices[0], {"threads": threads})
    rng = np.random.default_rng(5)
    weights = {}
    for constant in program().constants:
        array = rng.standard_normal(constant.value.shape, dtype=np.float32)
        weights[constant.value.name] = session.load(as_weight(constant.value.name, array), "float32")
    return session.compile(program(), weights)


def batch(tokens):
    ids = np.random.default_rng(tokens).integers(0, VOCAB, tokens).astype(np.int32)
    rows = np.arange(tokens, dtype=np.int32)
    return Batch(
        ids, rows.copy(), np.array([0, tokens], np.int32), np.array([tokens], np.int32), np.zeros((0, 1, 0), np.int32),
        np.zeros((0, tokens), np.int64), rows, plain_inputs(tokens),
    )  # fmt: skip


@pytest.fixture(scope="module")
def alone():
    executable = compiled(1)
    return {tokens: executable.run(batch(tokens)).output("logits") for tokens in (1, 2, 7, 40)}


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_many_steps_on_many_threads_give_the_bits_of_one(alone, threads):
    executable = compiled(threads)
    for _ in range(60):
        for tokens, want in alone.items():
            np.testing.assert_array_equal(executable.run(batch(tokens)).output("logits"), want)


def test_steps_may_come_from_one_thread_after_another(alone):
    executable, failures = compiled(2), []

    def steps():
        for tokens, want in alone.items():
            if not np.array_equal(executable.run(batch(tokens)).output("logits"), want):
                failures.append(tokens)

    for _ in range(20):
        thread = threading.Thread(target=steps)
        thread.start()
        thread.join()
    assert failures == []


def test_two_pools_of_one_process_work_side_by_side(alone):
    failures = []

    def steps(executable):
        for _ in range(40):
            for tokens, want in alone.items():
                if not np.array_equal(executable.run(batch(tokens)).output("logits"), want):
                    failures.append(tokens)

    workers = [threading.Thread(target=steps, args=(compiled(2),)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert failures == []


def test_beside_busy_processes_the_bits_stay(alone):
    """Enough steps for threads to be taken out of the runs and put in again."""
    executable = compiled(2)
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        for _ in range(100):
            for tokens, want in alone.items():
                np.testing.assert_array_equal(executable.run(batch(tokens)).output("logits"), want)
    finally:
        for process in busy:
            process.kill()
            process.wait()
