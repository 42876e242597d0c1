"""The whole engine on trivium_cuda over an emulated device: the tokens are the reference's, and nothing waits but for them."""

from __future__ import annotations

import emulated_cuda
import pytest
from tiny_checkpoints import FAMILIES, make_checkpoint
from trivium_cuda.executor import QueuedExecutable

from trivium import LLM, SamplingParams

LOAD = {"dtype": "float32", "kv_dtype": "float32", "num_kv_blocks": 40, "block_size": 16, "progress": False, "max_num_seqs": 4}
PROMPTS = [[(7 * i * i + n) % 250 for i in range(n)] for n in (1, 16, 37, 50)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
ASKED = [
    GREEDY, SamplingParams(temperature=0.9, seed=5, max_tokens=7, ignore_eos=True),
    SamplingParams(temperature=1.2, seed=6, top_k=30, top_p=0.9, min_p=0.01, max_tokens=8, ignore_eos=True, logprobs=3),
    SamplingParams(temperature=0.8, seed=7, repetition_penalty=1.3, logit_bias={7: 2.0}, max_tokens=9, ignore_eos=True),
]  # fmt: skip
DRAWN = [ASKED[0], ASKED[1], GREEDY, ASKED[3]]


def ids(outputs):
    return [[c.token_ids for c in output.outputs] for output in outputs]


def made(folder, backend, asked=ASKED, **options):
    with LLM(folder, backend, **{**LOAD, **options}) as llm:
        found = ids(llm.generate(PROMPTS, asked))
        llm.engine.check()
        return found


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_the_reference_s(tmp_path, emulated, family):
    folder = make_checkpoint(tmp_path / family, family)
    assert made(folder, "cuda_emulated", strict=True) == made(folder, "reference")


@pytest.mark.parametrize("settings", [{"max_num_batched_tokens": 7}, {"block_size": 32, "max_num_seqs": 2}], ids=str)
def test_no_schedule_changes_the_tokens(tmp_path, emulated, settings):
    folder = make_checkpoint(tmp_path / "llama", "llama")
    assert made(folder, "cuda_emulated", **settings) == made(folder, "reference")


def test_the_next_step_is_built_while_one_runs_and_only_tokens_are_waited_for(tmp_path, emulated, monkeypatch):
    folder = make_checkpoint(tmp_path / "llama", "llama")
    order = []
    run, wait = QueuedExecutable.run, emulated_cuda.EmulatedEvent.wait

    def guarded(self, batch):
        order.append("run")
        with emulated_cuda.host_reads_forbidden(emulated):
            return run(self, batch)

    monkeypatch.setattr(QueuedExecutable, "run", guarded)
    monkeypatch.setattr(emulated_cuda.EmulatedEvent, "wait", lambda self: order.append("wait") or wait(self))
    with LLM(folder, "cuda_emulated", **LOAD) as llm:
        engine = llm.engine
        prepare = engine.runner.prepare
        monkeypatch.setattr(engine.runner, "prepare", lambda *a: order.append("prepare") or prepare(*a))
        order.clear()
        found = ids(llm.generate(PROMPTS, DRAWN))
        steps = engine.stats.steps
    assert found == made(folder, "reference", DRAWN)
    assert order.count("wait") == order.count("run") == steps
    assert order[:8] == ["prepare", "run", "prepare", "wait", "run", "prepare", "wait", "run"]
