"""The commands behind the documents' figures run and print what they promise."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader, quants
from tiny_checkpoints import make_checkpoint
from weight_files import whole_blocks_gguf

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(name: str, *flags: str) -> str:
    command = [sys.executable, str(BENCHMARKS / name), *flags]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout


@pytest.mark.weights
@pytest.mark.slow
def test_trivium_alone_is_measured_as_a_table():
    table = run("figures.py", "--markdown", "--repeat", "1", "smollm2-135m").splitlines()
    cells = [line.split("|")[1:-1] for line in table]
    assert len(cells) == 10 and cells[0][1].strip() == "smollm2-135m"
    assert all(float(re.split("[; ]+", row[1].strip())[0]) > 0 for row in cells[2:])


def test_the_hosts_time_is_printed_as_json():
    assert json.loads(run("engine_host.py", "--json", "--steps", "5", "--batch", "1"))


def test_what_loading_takes_is_printed_beside_what_stays():
    report = json.loads(run("load_peak.py", "--layers", "1", "--hidden", "256"))
    assert report["peak_bytes"]["resident"] >= report["peak_bytes"]["anonymous"] > 0 < report["weight_bytes"]


def test_the_price_of_determinism_is_printed_and_is_paid_for_something():
    report = json.loads(run("determinism.py", "1"))["reference"]
    assert [sizes["differs_apart"] for sizes in report.values()] == [0] * 4
    assert any(sizes["differs_together"] for sizes in report.values())


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_short_soak_ends_with_nothing_lost(backend: str):
    report = json.loads(run("soak_engine.py", "--json", "--requests", "60", "--backend", backend))
    assert report["completed"] == report["requests"] == 180
    assert report["mismatches"] == report["leaked_blocks"] == report["invariant_failures"] == 0


def test_the_price_of_rounding_is_printed_as_json(tmp_path: Path):
    model = make_checkpoint(tmp_path / "model", "llama")
    flags = ["--window", "64", "--max-windows", "4", "--windows", "4", "--backend", "reference"]
    report = json.loads(run("quantize_quality.py", "--model", str(model), "--recipes", "int4 gptq", "int8", *flags))
    found = report["found"]
    assert report["original_formats"] == ["float32"] and found.keys() == {"int4 gptq", "int8"}
    assert found["int8"]["kl_mean"]["value"] < 0.1 * found["int4 gptq"]["kl_mean"]["value"]
    assert 5 < found["int4 gptq"]["bits_per_weight"] < found["int8"]["bits_per_weight"] < 10


def test_an_original_off_the_grid_computes_what_its_source_does(tmp_path: Path):
    source, moved = whole_blocks_gguf(tmp_path / "source.gguf"), tmp_path / "moved.gguf"
    run("off_grid.py", str(source), str(moved))
    before, after = ({t.name: quants.dequantize(t.data, t.tensor_type) for t in GGUFReader(p).tensors} for p in (source, moved))
    up, down, v, o = (f"blk.1.{name}.weight" for name in ("ffn_up", "ffn_down", "attn_v", "attn_output"))

    def paths(t):
        """What is between two places where scales count: from norm to scores, and through both pairs of matrices."""
        values = np.repeat(t[v].reshape(2, 1, 16, 64), 2, axis=1).reshape(64, 64)  # each head of values serves two queries
        read = [t[f"blk.1.{name}.weight"] * t["blk.1.attn_norm.weight"] for name in ("attn_q", "attn_k")]
        return [*read, t[down] @ (t[up] * t["blk.1.ffn_norm.weight"]), t[o] @ (values * t["blk.1.attn_norm.weight"])]

    for one, other in zip(paths(before), paths(after), strict=True):
        assert np.abs(one - other).max() < 0.02 * np.abs(one).max()  # bfloat16
    for name in (up, down, v, o):
        assert np.abs(before[name] / after[name] - 1).mean() > 0.05
    np.testing.assert_allclose(after["token_embd.weight"], before["token_embd.weight"], rtol=2**-8)


@pytest.mark.weights
@pytest.mark.slow
def test_speculation_is_measured_with_equal_ids():
    report = json.loads(run("speculation.py", "--repeat", "1", "--tokens", "24", "ngram", "draft"))
    assert set(report["ngram"]) >= {"copy", "random"} and report["draft"]["copy"]["ratio"] > 0


@pytest.mark.weights
@pytest.mark.http
def test_what_http_leaves_of_the_throughput_is_printed_as_json():
    shape = ("--streams", "4", "--input-len", "8", "--output-len", "8")
    figures = json.loads(run("server_throughput.py", "--repeat", "1", *shape))
    assert figures["ratio"] > 0 and figures["http_loop_us_per_token"]["median"] > 0


@pytest.mark.weights
def test_the_cost_of_grammars_is_printed_as_json():
    figures = json.loads(run("grammar_masks.py", "--json", "--tokens", "5", "--repeat", "1"))
    assert figures["vocabulary"] == 49152 and all(f["token_us"] > 0 for f in figures["trivium"].values() if isinstance(f, dict))


@pytest.mark.weights
@pytest.mark.slow
def test_what_the_kv_tiers_gain_is_printed_as_json():
    figures = json.loads(run("kv_tiers.py", "--rounds", "1"))
    assert set(figures["tiers"]) == {"recomputed", "host", "disk"}
    assert figures["tiers"]["recomputed"]["restored_tokens"] == 0 < figures["tiers"]["host"]["restored_tokens"]
    assert figures["speedup"]["host"] > 1 and figures["speedup"]["disk"] > 1


@pytest.mark.weights
def test_the_phases_of_a_cold_start_are_printed_as_json():
    figures = json.loads(run("cold_start.py", "--repeat", "1", "--quantize", "int8"))
    kinds = [figures[kind] for kind in ("as stored", "rounded", "rounded before")]
    for kind in kinds:
        phases = dict(kind["seconds"])
        total = phases.pop("total")
        assert 0 < sum(phases.values()) <= total and kind["bytes"]["peak"] > 0
    assert kinds[1]["first token"] == kinds[2]["first token"]
