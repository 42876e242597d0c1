"""The comparison with other engines: who runs, what is compared with what, and the JSON, with peers that only pretend."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import cpu_vs_peers
import numpy as np
import pytest
import quality
from peers import ceilings, entrants, report, running
from tiny_checkpoints import make_checkpoint
from trivium_compress.measures import compare

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

PRETENDER = """
import json, sys
figures = {"decode_tps": {"median": SPEED}, "rss_mb_single": 1e-3, "cold_first_token_s": 1e6, "prefill_tps_512": {"median": SPEED}}
figures |= {"prefill_tps_2048": {"median": 7.0}, "ttft_512_ms": {"median": 9.0}, "batch8_tps": {"median": 5.0}}
print("a line of its own")
print("JSON " + json.dumps({"version": "1.2", "parts": sys.argv, **figures}))
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Peers that answer at once, one that fails; the model is tiny."""
    for folder in ("bench", "models", "llbin"):
        (tmp_path / folder).mkdir()
    for venv in ("llamacpp", "ov", "ort"):
        python = tmp_path / "venv" / venv / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        python.chmod(0o755)
    (tmp_path / "bench" / "bench_llamacpp.py").write_text(PRETENDER.replace("SPEED", "2.0"))
    (tmp_path / "bench" / "bench_ov.py").write_text(PRETENDER.replace("SPEED", "3.0"))
    (tmp_path / "bench" / "bench_ort.py").write_text("raise SystemExit('its model is broken')")
    prompts = {"p32": 12, "p512": 12, "p2048": 8, "p128": 96}
    rng = np.random.default_rng(0)
    ids = {kind: rng.integers(3, 200, (count, 20)).tolist() for kind, count in prompts.items()}
    (tmp_path / "bench" / "prompts-smollm2.json").write_text(json.dumps(ids))
    forms = {peer.forms["smollm2-135m"] for peer in entrants.peers() if "smollm2-135m" in peer.forms and peer.venv != "hf"}
    for name in (*forms, "../llbin/llama-server", "../llbin/llama-bench"):
        (tmp_path / "models" / name).touch()
    make_checkpoint(tmp_path / "models" / entrants.SUBJECTS["smollm2-135m"].ours, "llama", max_position_embeddings=4096)
    return tmp_path


def test_everybody_runs_by_turns_and_who_cannot_is_named(root: Path):
    flags = [
        "--quick",
        "--json",
        "--models",
        "smollm2-135m",
        "--axes",
        "decode,peak_memory",
        "--all-peers",
        "--patience",
        "0",
        "--timeout",
        "100",
    ]
    command = [sys.executable, str(BENCHMARKS / "cpu_vs_peers.py"), "--peers", str(root), *flags]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    found = json.loads(done.stdout)
    rows = {(row["model"], row["axis"]): row for row in found["rows"]}
    decode, memory = rows["smollm2-135m", "decode"], rows["smollm2-135m", "peak_memory"]
    assert decode["best_peer"] == 3.0 and decode["peer"].startswith("openvino-genai") and "1.2" in decode["peer"]
    assert decode["ratio"] == pytest.approx(decode["ours"] / 3.0) and decode["ours"] > 0
    assert memory["ratio"] > 1 and memory["ours"] == pytest.approx(memory["ours_runs"]["median"])
    assert 0 < decode["share_of_floor"] < 1 and "share_of_floor" not in memory
    absent = {entry["peer"]: entry["error"] for entry in found["absent"]}
    assert "its model is broken" in absent["onnxruntime-genai int4"]
    assert {"machine", "instruction_sets", "ceilings", "precision", "versions", "quality"} <= found.keys()
    assert "openvino-genai" in done.stderr and "ratio" in done.stderr


def test_a_peer_that_is_not_installed_says_what_is_missing(root: Path):
    (root / "venv" / "ov" / "bin" / "python").unlink()
    [peer, *_] = [p for p in entrants.peers() if p.venv == "ov"]
    assert "venv/ov/bin/python" in str(peer.missing(root, "smollm2-135m"))
    assert "llama1b" in str(peer.missing(root, "llama-1b"))


def test_the_scripts_are_called_as_they_expect(root: Path):
    by_label = {p.label: p for p in entrants.peers()}
    command = by_label["llama.cpp Q4_0"].command(root, "smollm2-135m", "batch_8", 3, 7)
    assert command[1:5] == ["bench_llamacpp.py", str(root / "llbin"), str(root / "models" / "smollm2-135m-q4_0.gguf"), "smollm2"]
    assert command[command.index("--parts") + 1] == "d" and command[command.index("--batches") + 1] == "8"
    assert "c" not in by_label["llama.cpp Q4_0"].command(root, "llama-1b", "prefill", 3, 7)[6].split(",")
    assert by_label["ctranslate2 int8"].command(root, "llama-1b", "decode", 2, 7)[1] == "bench_ct2.py"


def some_runs(**figures: float) -> list[report.Runs]:
    axis = "ttft_512" if min(figures.values()) < 100 else "decode"
    return [report.Runs(label, 4.5, "", {axis: [value]}) for label, value in figures.items()]


def test_the_best_is_the_most_or_the_least_and_the_ratio_is_ours_over_it():
    fast = report.row("m", "decode", report.Runs("trivium", 0, "", {"decode": [300, 500, 400]}), some_runs(a=200, b=160), {})
    assert fast is not None and (fast["peer"], fast["ratio"]) == ("a", 2.0)
    soon = report.row("m", "ttft_512", report.Runs("trivium", 0, "", {"ttft_512": [10]}), some_runs(a=40, b=20), {"ttft_512": 5})
    assert soon is not None and (soon["peer"], soon["ratio"], soon["share_of_floor"]) == ("b", 0.5, 0.5)
    assert report.row("m", "decode", report.Runs("trivium", 0), some_runs(a=200), {}) is None


def test_peak_memory_is_compared_with_weights_of_four_bits_only():
    peers = [report.Runs(f"{bits}", bits, "", {"peak_memory": [bits]}) for bits in (4.5, 4.25, 2.0 + 8, 16)]
    chosen = report.best("peak_memory", peers)
    assert chosen is not None and chosen.label == "4.25"


def test_the_floor_is_the_longer_of_reading_and_multiplying():
    work = ceilings.Work(1e8, 1e8, 3e7)
    slow_memory = ceilings.floors(work, 10, 1e9)
    assert slow_memory["decode"] == pytest.approx(100) and slow_memory["batch_8"] == pytest.approx(8 * 128 / 1.28)
    slow_units = ceilings.floors(work, 1e9, 1.0)
    assert slow_units["ttft_512"] == pytest.approx(2e3 * (512e8 + 3e7) / 1e12)


def test_what_a_busy_machine_is():
    first, second = "cpu 100 10 50 800 40 0 0\nx", "cpu 110 10 60 870 50 0 0\n"
    (a, b), (c, d) = running.processor_times(first), running.processor_times(second)
    assert ((c - a), (d - b)) == (20, 100)


def test_a_child_that_hangs_is_ended_and_one_without_figures_is_quoted(tmp_path: Path):
    with pytest.raises(running.Failed, match="took longer"):
        running.figures([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path, 0.5)
    with pytest.raises(running.Failed, match=r"no figures.*status 3.*what it said"):
        running.figures([sys.executable, "-c", "print('what it said'); raise SystemExit(3)"], tmp_path, 60)


@pytest.mark.parametrize("flags", [["--axes", "speed"], ["--models", "gpt"], ["--peers", "/nowhere"]])
def test_wrong_arguments_are_refused(root: Path, flags: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        cpu_vs_peers.arguments(["--peers", str(root), *flags])
    assert flags[1] in capsys.readouterr().err


def test_a_quick_run_has_one_round(root: Path):
    args = cpu_vs_peers.arguments(["--peers", str(root), "--quick", "--rounds", "5"])
    assert args.rounds == 1 and "gemma3-270m" not in args.models


def test_divergence_and_agreement_are_those_of_the_formula():
    rng = np.random.default_rng(1)
    p, q = rng.standard_normal((2, 5, 30)).astype(np.float32)
    want_p, want_q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (p.astype(np.float64), q.astype(np.float64)))
    divergence, same = compare(p + 3, q)
    np.testing.assert_allclose(divergence, (want_p * np.log(want_p / want_q)).sum(-1), rtol=1e-6)
    assert same.tolist() == (want_p.argmax(-1) == want_q.argmax(-1)).tolist()
    assert quality.summary(*compare(p, p)) == {"kl_mean": 0, "kl_median": 0, "kl_p99": 0, "top1": 1, "positions": 5}


def test_saved_log_probabilities_are_read_back(tmp_path: Path):
    windows, length, vocab = 2, 8, 5
    rows = length - 1 - length // 2
    tokens = np.arange(windows * length, dtype=np.int32)
    codes = np.random.default_rng(2).integers(0, 65536, (windows, rows, vocab), dtype=np.uint16)
    head = np.array([0.25, -16.0], np.float32).view(np.uint16)
    table = np.zeros((windows, rows, 2 * ((vocab + 1) // 2) + 4), np.uint16)
    table[..., :4], table[..., 4 : 4 + vocab] = head, codes
    sizes = np.array([length, vocab, windows], np.int32)
    whole = [sizes.tobytes(), tokens.tobytes()]
    whole += [window.tobytes() for window in table]
    (tmp_path / "saved").write_bytes(b"_logits_" + b"".join(whole))
    read = list(quality.saved_by_llama(tmp_path / "saved"))
    assert [ids.tolist() for ids, _ in read] == tokens.reshape(windows, length).tolist()
    np.testing.assert_array_equal(np.stack([logits for _, logits in read]), codes * np.float32(0.25) - 16)


@pytest.mark.oracles
def test_our_full_logits_are_the_models(tmp_path: Path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    form = make_checkpoint(tmp_path / "model", "llama", max_position_embeddings=1024)
    windows = np.random.default_rng(3).integers(3, 200, (1, quality.WINDOW), dtype=np.int32)
    [ours] = quality.by_trivium(str(form), windows, "{}")
    with torch.inference_mode():
        model = transformers.AutoModelForCausalLM.from_pretrained(form, dtype=torch.float32)
        want = model(torch.tensor(windows, dtype=torch.int64)).logits[0, quality.ROWS].numpy()
    assert len(ours) == len(want)
    np.testing.assert_allclose(ours, want[:, : ours.shape[1]], rtol=0.1, atol=0.05)
