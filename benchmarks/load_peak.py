"""What loading takes beyond what stays: the peak of a process's memory while it loads a bf16 checkpoint, over the bytes of the
weights that are resident afterwards, printed as JSON.

    python benchmarks/load_peak.py [--backend cpu] [--quantize FORMAT] [--layers 22] [--hidden 2048] [--shift BYTES]

The checkpoint has Llama's shape (22 layers of 2048: 1.1 thousand million parameters) and random weights. Memory is read every 5 ms
from /proc: `anonymous` is what the process holds itself, `resident` also counts pages of the file, which the system can drop.
--shift 1: a file whose numbers begin at an odd byte, as other writers of safetensors may leave it.
"""

from __future__ import annotations

import argparse
import json
import struct
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
from trivium import LLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))
from tiny_checkpoints import byte_tokenizer, tiny_config, weight_shapes

KINDS = {"RssAnon": "anonymous", "VmRSS": "resident"}


def make_checkpoint(folder: Path, shift: int, **sizes: int) -> None:
    """Llama's shape in bf16, one tensor in memory at a time; the numbers begin `shift` bytes behind a multiple of 8."""
    config = tiny_config("llama", **sizes)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer()))
    shapes, header, at = weight_shapes(config), {}, 0
    for name, shape in shapes.items():
        end = at + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, end]}
        at = end
    rng, text = np.random.default_rng(0), json.dumps(header).encode()
    text += b" " * (-len(text) % 8 + shift)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for shape in shapes.values():
            numbers = rng.standard_normal(shape, np.float32) * np.float32(0.02)
            file.write((numbers.view(np.uint32) >> np.uint32(16)).astype(np.uint16).tobytes())


def watch(peaks: dict[str, int], done: threading.Event) -> None:
    """Raises `peaks`, bytes by kind, until `done`."""
    while True:
        for line in Path("/proc/self/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in KINDS:
                peaks[KINDS[name]] = max(peaks[KINDS[name]], int(value.split()[0]) * 1024)
        if done.wait(0.005):
            return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--quantize", metavar="FORMAT")
    parser.add_argument("--layers", type=int, default=22, metavar="N")
    parser.add_argument("--hidden", type=int, default=2048, metavar="N")
    parser.add_argument("--shift", type=int, default=0, metavar="BYTES")
    args = parser.parse_args()
    sizes = {
        "hidden_size": args.hidden, "intermediate_size": args.hidden * 11 // 4, "num_attention_heads": args.hidden // 64,
        "head_dim": 64, "num_key_value_heads": 4, "num_hidden_layers": args.layers, "vocab_size": 32000,
    }  # fmt: skip
    peaks, done = dict.fromkeys(KINDS.values(), 0), threading.Event()
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder), args.shift, **sizes)
        watcher = threading.Thread(target=watch, args=(peaks, done))
        watcher.start()
        with LLM(folder, args.backend, quantize=args.quantize, num_kv_blocks=64, progress=False) as llm:
            done.set()
            watcher.join()
            weights = llm.loaded.session.memory().weights
    ratios = {f"{kind}_over_weights": peak / weights for kind, peak in peaks.items()}
    report = {"backend": args.backend, "quantize": args.quantize, "weight_bytes": weights, "peak_bytes": peaks, **ratios}
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
