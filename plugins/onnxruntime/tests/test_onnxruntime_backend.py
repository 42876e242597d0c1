"""The onnxruntime backend: the kit, the same tokens as the reference under every schedule, and requests that change backends."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from trivium.conformance.kit import collect_checks
from trivium.conformance.lab import Lab
from trivium.conformance.models import Generations, Numbers, open_model
from trivium.conformance.zoo import CONFIGS
from trivium.engine import Engine, EngineConfig, RequestState
from trivium.errors import InvalidRequestError, UnsupportedError
from trivium.plugin import find_plugins, resolve
from trivium.sampling import SamplingParams

pytest.importorskip("onnxruntime")
pytest.importorskip("onnx")

from trivium_onnxruntime.plugin import OnnxBackend

PROMPT = [3 + i * 5 % 60 for i in range(40)]


def lab_of(name: str, **options: Any) -> Lab:
    if name == "onnxruntime":
        backend: Any = OnnxBackend()
        device = backend.probe().devices[0]
    else:
        backend, device = resolve(name)
    return Lab(backend, device, backend.capabilities(device), backend.kernels(device), options)


@contextlib.contextmanager
def tiny(name: str, model: str, *, page_size: int = 16, share: float = 1.0, kv_dtype: str = "float32", config: Any = None,
         **options: Any) -> Iterator[Engine]:  # fmt: skip
    """An engine on a tiny model with real arithmetic."""
    lab = lab_of(name, **options)
    with lab.session(tokens=64, seqs=8, length=128) as session:
        loaded = open_model(lab, session, CONFIGS[model], partial(Generations.pages, page_size, share), page_size, kv_dtype)
        yield Engine(loaded, Numbers(), config or EngineConfig(8, 64))


def params(count: int = 10, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": count, "ignore_eos": True, **fields})


def finish(engine: Engine, *numbers: int) -> list[list[int]]:
    done: dict[int, Any] = {}
    while engine.has_unfinished():
        done |= {o.request_id: o for o in engine.step()}
        engine.check()
    return [done[n].outputs[0].token_ids for n in numbers]


def generate(engine: Engine, *prompts: list[int], **fields: Any) -> list[list[int]]:
    return finish(engine, *[engine.add_request(prompt, params(**fields)) for prompt in prompts])


PROMPTS = [PROMPT[:7], PROMPT, PROMPT[:21], PROMPT[:1], [*PROMPT[:32], 8, 9], PROMPT[3:20]]


@pytest.mark.parametrize("area", ["rules", "operators", "fusions", "formats", "pages", "sampler", "models"])
def test_the_kit_finds_no_fault(area):
    rows = [check.run() for check in collect_checks(lab_of("onnxruntime"), [area])]
    uninstalled = {"the core is not patched"} if "onnxruntime" not in find_plugins() else set()
    assert {r.name: r.detail for r in rows if r.status == "failed" and r.name not in uninstalled} == {}
    assert any(r.status == "passed" for r in rows)


@pytest.mark.parametrize("model", CONFIGS)
def test_ids_equal_the_references_for_every_family(model):
    fields = {"temperature": 0.8, "seed": 11, "top_p": 0.9}
    with tiny("onnxruntime", model) as mine, tiny("reference", model) as theirs:
        assert generate(mine, *PROMPTS) == generate(theirs, *PROMPTS)
        assert generate(mine, *PROMPTS, **fields) == generate(theirs, *PROMPTS, **fields)


@pytest.mark.parametrize("kv_dtype", ["float16", "bfloat16"])
def test_smaller_pages_give_the_same_ids_whole_chunked_and_resumed(kv_dtype):
    found = []
    for budget, share in ((64, 1.0), (8, 1.0), (64, 0.3)):
        with tiny("onnxruntime", "qwen3", kv_dtype=kv_dtype, share=share, config=EngineConfig(8, budget)) as engine:
            found.append(generate(engine, *PROMPTS, count=24))
    assert found[0] == found[1] == found[2]


def test_a_prefix_is_found_again_and_gives_the_same_ids():
    with tiny("onnxruntime", "llama", share=3.0) as engine:
        want = generate(engine, PROMPT)
        computed = engine.stats.computed_tokens
        assert generate(engine, PROMPT) == want
        assert engine.stats.computed_tokens - computed < len(PROMPT)


def test_preemption_changes_no_id():
    with tiny("onnxruntime", "llama", share=0.3) as little, tiny("onnxruntime", "llama", share=2.0) as much:
        assert generate(little, *PROMPTS, count=24) == generate(much, *PROMPTS, count=24)
        assert little.stats.preemptions > 0


@pytest.mark.parametrize("rows_bytes", [1, 200_000])
def test_few_rows_give_the_same_ids_and_stay_within_their_budget(rows_bytes):
    with tiny("onnxruntime", "gemma3", rows_bytes=rows_bytes) as few, tiny("onnxruntime", "gemma3") as many:
        assert generate(few, *PROMPTS) == generate(many, *PROMPTS)
        each = few.model.executable.rows.nbytes // few.model.executable.rows.rows
        assert few.model.executable.rows.nbytes <= max(rows_bytes, each)


@pytest.mark.parametrize("model", ["llama", "gemma3"])
@pytest.mark.parametrize("steps", [0, 1, 4])
@pytest.mark.parametrize(
    "ways",
    [("onnxruntime", 16, "cpu", 32), ("cpu", 16, "onnxruntime", 32), ("onnxruntime", 16, "reference", 7),
     ("reference", 8, "onnxruntime", 16)],
)  # fmt: skip
def test_requests_change_backends_under_way(model, steps, ways):
    here, here_size, there, there_size = ways
    if "cpu" in (here, there) and not any(p == "cpu" for p in find_plugins()):
        pytest.skip("the cpu backend is not installed")
    with tiny(here, model, page_size=here_size) as first, tiny(there, model, page_size=there_size) as second:
        number = first.add_request(PROMPT, params())
        for _ in range(steps):
            first.step()
        state = RequestState.from_bytes(first.export_request(number).to_bytes())
        ids = finish(second, second.import_request(state))
        assert ids == generate(first, PROMPT)


def test_a_fault_in_a_step_is_raised_and_the_next_step_is_right(monkeypatch):
    from trivium_onnxruntime.executable import Model

    with tiny("onnxruntime", "llama") as engine:
        want = generate(engine, PROMPT)
        run, failing = Model.run, [True]

        def once(self: Any, *args: Any) -> Any:
            made = run(self, *args)
            if failing:
                failing.clear()
                raise RuntimeError("out of luck")
            return made

        monkeypatch.setattr(Model, "run", once)
        assert generate(engine, PROMPT) == want and not failing


def test_importing_the_plugin_imports_neither_runtime():
    code = "import sys, trivium_onnxruntime.plugin as p; p.OnnxBackend(); print({'onnx', 'onnxruntime'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_probe_says_why_there_is_no_device(monkeypatch):
    import onnxruntime

    monkeypatch.setattr(onnxruntime, "__version__", "1.20.1")
    probe = OnnxBackend().probe()
    assert not probe.devices and "1.20.1 is too old" in probe.reason
    monkeypatch.setitem(sys.modules, "onnx", None)
    assert "install onnxruntime and onnx" in OnnxBackend().probe().reason


def test_options_are_refused_by_name():
    backend = OnnxBackend()
    device = backend.probe().devices[0]
    for options, named in (({"colour": 1}, "colour"), ({"threads": 0}, "threads"), ({"accuracy_level": 3}, "accuracy_level")):
        with pytest.raises(InvalidRequestError, match=named):
            backend.open(device, options)
    with pytest.raises(UnsupportedError, match="float32"):
        backend.open(device, {"dtype": "bfloat16"})


def test_strict_refuses_what_runs_on_the_host():
    from trivium.ops import new_builder

    b = new_builder()
    x = b.embedding(b.input("token_ids"), b.weight("table", (11, 8)))
    weights, _ = b.moe_route(x, top_k=2)
    rows = b.gather_rows(weights, b.input("sample_rows"))
    lab = lab_of("onnxruntime", strict=True)
    with lab.session() as session, pytest.raises(UnsupportedError, match="moe_route"):
        session.compile(b.finish({"logits": rows}), {"table": np.zeros((11, 8), np.float32)})
