"""What a precision costs: KL divergence and top-1 agreement against the model's bf16 form, ours and the peers', on the same text.

The text, put on one line, is cut into windows of 512 tokens, each read from nothing; the distributions behind the second half of
each window count (255 positions that have seen 256 tokens or more, as llama-perplexity has it). The measure is the bf16 form as
transformers computes it in float32. trivium's full logits come from its engine, which scores the windows as prompts: the output
"logits" of each step is read. OpenVINO computes the exported model itself; llama.cpp's log probabilities are those that llama-
perplexity saves (16 bits within e^-16 of the likeliest). KL in nats, of the measure to the precision: sum p ln(p / q). Prints
JSON.

    python benchmarks/quality.py --peers ROOT [--json] [--model smollm2-135m] [--text FILE] [--quantize F] [--kv-dtype D]
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
WINDOW, FIRST = 512, 256
ROWS = slice(FIRST, WINDOW - 1)
BYTES = 20_000
TEXTS = ("README.md", "docs/architecture.md", "docs/chat.md", "CONTRIBUTING.md")

Forms = Mapping[str, tuple[str, str]]
"""By label: who computes the logits, and the model's form under ROOT/models."""
MODELS: Mapping[str, tuple[str, str, Forms]] = {
    "smollm2-135m": (
        "smollm2-135m-instruct-q4_1.gguf", "smollm2-135m-hf", {
            "llama.cpp Q4_0": ("llama.cpp", "smollm2-135m-q4_0.gguf"),
            "llama.cpp Q8_0": ("llama.cpp", "smollm2-135m-q8_0.gguf"),
            "openvino int4": ("openvino", "smollm2-135m-ov-int4"),
            "openvino int8": ("openvino", "smollm2-135m-ov-int8"),
            "onnxruntime int4": ("onnxruntime", "smollm2-135m-ort-int4"),
            "transformers bf16": ("transformers", "smollm2-135m-hf"),
        },
    ),
    "llama-1b": (
        "llama1b-q4_0.gguf", "llama1b-rand-hf", {
            "llama.cpp Q4_0": ("llama.cpp", "llama1b-q4_0.gguf"), "openvino int4": ("openvino", "llama1b-ov-int4"),
        },
    ),
}  # fmt: skip
"""What trivium opens, the measure's folder, and the peers' forms."""
VENVS = {"transformers": "hf", "openvino": "ov", "onnxruntime": "ort"}

Logits = np.ndarray[Any, Any]
"""float32[positions, vocabulary] of one window."""


def one_line(text: str) -> str:
    """Runs of white space become a blank: tokenizers made from a GGUF file differ on how they cut several line ends."""
    return " ".join(text.split())


def text_of_this_project() -> str:
    """So many bytes of English prose that this repository holds."""
    whole = one_line("\n".join((HERE.parent / name).read_text("utf-8") for name in TEXTS))
    return whole.encode()[:BYTES].decode("utf-8", "ignore")


# The computers of logits. Each runs in a process of its own: one array a window is written after the other.


def by_transformers(form: str, windows: np.ndarray[Any, Any], dtype: str) -> Iterator[Logits]:
    """`dtype` "float32": the measure."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(form, dtype=getattr(torch, dtype)).eval()
    with torch.inference_mode():
        for window in windows:
            yield model(torch.tensor(window[None], dtype=torch.int64)).logits[0, ROWS].float().numpy()


def by_openvino(form: str, windows: np.ndarray[Any, Any], precision: str) -> Iterator[Logits]:
    """The exported model without the generation library, which computes the last logits only. precision: of the activations."""
    import openvino

    options = {"INFERENCE_PRECISION_HINT": precision}
    request = openvino.Core().compile_model(f"{form}/openvino_model.xml", "CPU", options).create_infer_request()
    names = {name for value in request.model_inputs for name in value.names}
    for window in windows:
        request.reset_state()
        inputs = {
            "input_ids": window[None].astype(np.int64), "attention_mask": np.ones((1, WINDOW), np.int64),
            "position_ids": np.arange(WINDOW, dtype=np.int64)[None], "beam_idx": np.zeros(1, np.int32),
        }  # fmt: skip
        request.infer({name: value for name, value in inputs.items() if name in names})
        yield np.array(request.get_tensor("logits").data[0, ROWS], np.float32)


def by_onnxruntime(form: str, windows: np.ndarray[Any, Any], precision: str) -> Iterator[Logits]:
    """Through its generation library, which gives the last logits only: the second half of each window token by token."""
    import onnxruntime_genai as genai

    model = genai.Model(form)
    for window in windows:
        params = genai.GeneratorParams(model)
        params.set_search_options(max_length=WINDOW + 1, batch_size=1, do_sample=False)
        generator = genai.Generator(model, params)
        rows = []
        for start, end in ((0, FIRST + 1), *((i, i + 1) for i in range(FIRST + 1, WINDOW - 1))):
            generator.append_tokens(window[start:end].astype(np.int32))
            rows.append(np.array(generator.get_logits(), np.float32).reshape(-1))
        yield np.stack(rows)


def by_trivium(form: str, windows: np.ndarray[Any, Any], options: str) -> Iterator[Logits]:
    """Through the engine, as a prompt whose tokens are scored. options: more arguments of LLM(), as JSON."""
    from trivium_compress.logits import Scorer

    given: dict[str, Any] = {"backend": "cpu", "max_num_batched_tokens": WINDOW, "progress": False, **json.loads(options)}
    scorer = Scorer(form, WINDOW, given)
    try:
        for window in windows:
            yield scorer.rows(window.tolist(), FIRST + 1)
    finally:
        scorer.close()


COMPUTERS: Mapping[str, Callable[[str, np.ndarray[Any, Any], str], Iterator[Logits]]] = {
    "transformers": by_transformers, "openvino": by_openvino, "onnxruntime": by_onnxruntime, "trivium": by_trivium,
}  # fmt: skip


def saved_by_llama(path: Path) -> Iterator[tuple[np.ndarray[Any, Any], Logits]]:
    """(tokens, log probabilities) of each window in a file of llama-perplexity --save-all-logits: "_logits_", int32 window length,
    vocabulary and number of windows, int32 tokens, then a row a position: float32 step and minimum, padded uint16 multiples."""
    with path.open("rb") as file:
        if file.read(8) != b"_logits_":
            raise ValueError(f"{path} is not a file of llama-perplexity's logits")
        length, vocab, count = struct.unpack("<iii", file.read(12))
        tokens = np.frombuffer(file.read(4 * length * count), np.int32).reshape(count, length)
        width, rows = 2 * ((vocab + 1) // 2) + 4, length - 1 - length // 2
        for window in tokens:
            raw = np.frombuffer(file.read(2 * width * rows), np.uint16).reshape(rows, width)
            step, least = raw[:, :4].copy().view(np.float32).T[..., None]
            yield window, step * raw[:, 4 : 4 + vocab] + least


def summary(divergence: Logits, same: Logits) -> dict[str, float]:
    """Of all positions."""
    mean, median, high = divergence.mean(), np.median(divergence), np.percentile(divergence, 99)
    return {
        "kl_mean": float(mean),
        "kl_median": float(median),
        "kl_p99": float(high),
        "top1": float(same.mean()),
        "positions": len(same),
    }


class Quality:
    """All comparisons of one model, in a folder for what the processes write."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args = args
        self.folder = folder
        self.ours, self.measure, self.forms = MODELS[args.model]
        self.text = folder / "text.txt"
        self.text.write_text(text_of_this_project() if args.text is None else one_line(args.text.read_text("utf-8")), "utf-8")
        self.windows = self._cut()
        np.save(folder / "windows.npy", self.windows)

    def _cut(self) -> np.ndarray[Any, Any]:
        """int32[windows, WINDOW], by the measure's own tokenizer."""
        from tokenizers import Tokenizer

        path = self.args.peers / "models" / self.measure / "tokenizer.json"
        ids = Tokenizer.from_file(str(path)).encode(self.text.read_text("utf-8"), add_special_tokens=False).ids
        count = len(ids) // WINDOW
        if count < 2:
            raise SystemExit(f"the text has {len(ids)} tokens; two windows of {WINDOW} are the least that is compared")
        return np.array(ids[: count * WINDOW], np.int32).reshape(count, WINDOW)

    def logits(self, computer: str, form: str, setting: str) -> Path:
        """Runs a computer of logits in its own process."""
        out = self.folder / f"{computer}.bin"
        root = self.args.peers
        python = sys.executable if computer == "trivium" else str(root / "venv" / VENVS[computer] / "bin" / "python")
        command = [
            python,
            str(HERE / "quality.py"),
            "--compute",
            computer,
            str(root / "models" / form),
            setting,
            str(self.folder),
            str(out),
        ]
        self._run(command, {"HF_HUB_OFFLINE": "1"})
        return out

    def _run(self, command: list[str], more: Mapping[str, str]) -> None:
        done = subprocess.run(
            command, env={**os.environ, **more}, capture_output=True, text=True, errors="replace", timeout=self.args.timeout
        )
        if done.returncode:
            raise RuntimeError(" | ".join((done.stdout + done.stderr).strip().splitlines()[-3:])[-400:])

    def windows_of(self, path: Path) -> Iterator[Logits]:
        """What a computer has written, window by window."""
        vocab = path.stat().st_size // (4 * len(self.windows) * (WINDOW - 1 - FIRST))
        yield from np.memmap(path, np.float32, "r", shape=(len(self.windows), WINDOW - 1 - FIRST, vocab))

    def by_llama(self, form: str) -> Iterator[Logits]:
        """Log probabilities that llama-perplexity saves."""
        out, binaries = self.folder / "llama.bin", self.args.peers / "llbin"
        model = str(self.args.peers / "models" / form)
        flags = ["-c", str(WINDOW), "-b", str(WINDOW), "-t", "2", "-fa", "on", "--no-escape", "--save-all-logits", str(out)]
        self._run(
            [str(binaries / "llama-perplexity"), "-m", model, "-f", str(self.text), *flags], {"LD_LIBRARY_PATH": str(binaries)}
        )
        for window, (tokens, logprobs) in zip(self.windows, saved_by_llama(out), strict=True):
            if not np.array_equal(window, tokens):
                raise RuntimeError("its tokens of the text are others than those of the model's tokenizer.json")
            yield logprobs

    def judged(self, computer: str, form: str, setting: str) -> dict[str, Any]:
        """One precision against the measure; `error`: why there are no figures."""
        from trivium_compress.measures import compare  # not at the top: peers run this file in environments without trivium

        try:
            given = self.by_llama(form) if computer == "llama.cpp" else self.windows_of(self.logits(computer, form, setting))
            pairs = [compare(p, q) for p, q in zip(self.windows_of(self.folder / "measure.bin"), given, strict=True)]
        except (RuntimeError, OSError, ValueError, subprocess.SubprocessError) as e:
            return {"error": f"{type(e).__name__}: {e}"}
        return summary(*(np.concatenate(column) for column in zip(*pairs)))

    def report(self) -> dict[str, Any]:
        """The measure first, then everybody."""
        self.logits("transformers", self.measure, "float32").rename(self.folder / "measure.bin")
        options = {name: value for name in ("quantize", "kv_dtype") if (value := getattr(self.args, name))}
        chosen = f" {json.dumps(options)}" if options else ""
        jobs = {f"trivium {self.ours}{chosen}": ("trivium", self.ours, json.dumps(options))}
        jobs |= {label: (who, form, _setting(who)) for label, (who, form) in self.forms.items()}
        named = {label: job for label, job in jobs.items() if not self.args.only or job[0] in self.args.only}
        found: dict[str, Any] = {}
        for label, job in named.items():
            found[label] = self.judged(*job)
            print(f"{label}: {found[label]}", file=sys.stderr, flush=True)
        return {
            "model": self.args.model, "against": f"{self.measure}: bf16 weights, computed in float32", "window": WINDOW,
            "windows": len(self.windows), "first_position": FIRST, "text_bytes": self.text.stat().st_size,
            "ours_by": "full logits of the engine's own steps (output 'logits' while it scores the prompt)", "precisions": found,
        }  # fmt: skip


def _setting(computer: str) -> str:
    """Of activations."""
    return {"transformers": "bfloat16", "openvino": "f32"}.get(computer, "")


def compute(computer: str, form: str, setting: str, folder: str, out: str) -> None:
    """The child: writes float32[windows, positions, vocabulary]."""
    windows = np.load(Path(folder) / "windows.npy")
    with Path(out).open("wb") as file:
        for logits in COMPUTERS[computer](form, windows, setting):
            file.write(np.ascontiguousarray(logits, np.float32).tobytes())


def main() -> None:
    if sys.argv[1:2] == ["--compute"]:
        compute(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description="What precisions cost, ours and the peers'")
    parser.add_argument("--peers", type=Path, required=True, metavar="ROOT", help="folder of the peers; see docs/benchmarks-cpu.md")
    parser.add_argument("--json", action="store_true", help="the default")
    parser.add_argument("--model", choices=list(MODELS), default="smollm2-135m")
    parser.add_argument("--text", type=Path, help="default: 20 kB of this project's documents")
    parser.add_argument("--quantize", help="as LLM(quantize=...)")
    parser.add_argument("--kv-dtype", help="as LLM(kv_dtype=...)")
    parser.add_argument("--only", nargs="+", choices=[*COMPUTERS, "llama.cpp"], help="who is judged (default: all)")
    parser.add_argument("--timeout", type=float, default=600, help="seconds that one of them may take (default: 600)")
    args = parser.parse_args()
    args.peers = args.peers.resolve()
    with tempfile.TemporaryDirectory() as folder:
        print("JSON " * (not args.json) + json.dumps(Quality(args, Path(folder)).report()))


if __name__ == "__main__":
    main()
