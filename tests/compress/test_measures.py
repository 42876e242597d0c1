"""What an evaluation counts, against the formulas written down plainly and against transformers."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_models import make_chat_model
from installed_backends import exact
from tiny_checkpoints import make_checkpoint
from trivium_compress.evaluate import Material, Measure, Side, evaluate
from trivium_compress.logits import Scorer
from trivium_compress.measures import Tally, bootstrap, compare, surprise
from trivium_compress.report import as_html, marked
from trivium_compress.texts import cut, of_chats, spread

from trivium.cli import main
from trivium.errors import InvalidRequestError, UnsupportedError
from trivium.text import Tokenizer
from trivium.weights import open_checkpoint

WORDS = "it was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness; " * 8


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two models of one shape with other weights, and one with another vocabulary."""
    folder = tmp_path_factory.mktemp("models")
    made = {name: make_chat_model(folder / name) for name in ("a", "b")}
    make_checkpoint(folder / "b", "llama", seed=5, tokenizer=False)
    made["other"] = make_checkpoint(folder / "other", "llama")
    content = json.loads((folder / "other" / "tokenizer.json").read_text())
    content["added_tokens"][0]["content"] = "<begin>"
    (folder / "other" / "tokenizer.json").write_text(json.dumps(content))
    return made


@pytest.fixture(scope="module")
def text(models: dict[str, Path]) -> Path:
    path = models["a"].parent / "text.txt"
    path.write_text(WORDS)
    return path


@pytest.fixture
def trivium(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*argv: Any) -> tuple[int, str, str]:
        code = main(["eval", *map(str, argv)])
        return code, *capsys.readouterr()

    return run


def test_divergence_and_surprise_are_their_formulas():
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((7, 11)).astype(np.float32) * 4 for _ in range(2))
    tokens = rng.integers(0, 11, 7)
    divergence, same = compare(a, b)
    lost = surprise(b, tokens)
    for i in range(7):
        p = [math.exp(v) for v in a[i].tolist()]
        q = [math.exp(v) for v in b[i].tolist()]
        p, q = [v / sum(p) for v in p], [v / sum(q) for v in q]
        assert divergence[i] == pytest.approx(sum(x * math.log(x / y) for x, y in zip(p, q)), rel=1e-9)
        assert same[i] == (p.index(max(p)) == q.index(max(q)))
        assert lost[i] == pytest.approx(-math.log(q[tokens[i]]), rel=1e-9)
    huge = np.array([[1e4, 0.0], [-1e30, 1e30]], np.float32)
    assert np.isfinite(compare(huge, huge)[0]).all() and not compare(huge, huge)[0].any()


def test_figures_are_of_all_positions_not_of_windows():
    tally = Tally()
    tally.add(np.array([1.0, 2.0, 3.0]), np.array([1.0, 1.0, 1.0]), np.array([0.5, 0.25, 0.0]), np.array([True, False, True]))
    tally.add(np.array([4.0]), np.array([2.0]), np.array([1.25]), np.array([False]))
    found = tally.figures()
    assert (found["positions"], found["windows"]) == (4, 2)
    assert found["perplexity"]["value"] == pytest.approx(math.exp(10 / 4))
    assert found["perplexity_of_measure"]["value"] == pytest.approx(math.exp(5 / 4))
    assert found["perplexity_ratio"]["value"] == pytest.approx(math.exp(5 / 4))
    assert found["kl_mean"]["value"] == pytest.approx(0.5) and found["top1"]["value"] == 0.5
    assert (found["kl_median"], found["kl_max"]) == (0.375, 1.25)


def test_an_interval_is_as_wide_as_theory_says_and_covers_as_often_as_it_promises():
    """Windows of one position with normal divergences: the mean's interval is about 1.96 standard errors to either side."""
    rng, hit = np.random.default_rng(1), 0
    way = {"mean": lambda s: s[:, 1] / s[:, 0]}
    for _ in range(60):
        sample = rng.normal(3.0, 0.5, 50)
        figure = bootstrap([(1.0, v) for v in sample], way)["mean"]
        assert figure.interval is not None
        low, high = figure.interval
        assert high - low == pytest.approx(2 * 1.96 * sample.std() / 50**0.5, rel=0.2)
        hit += low <= 3.0 <= high
    assert 50 <= hit <= 60
    assert bootstrap([(2.0, 3.0)], way)["mean"] == (1.5, None)


@pytest.mark.oracles
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_figures_are_those_of_transformers_logits(models: dict[str, Path], text: Path, backend: str):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    sides = {name: Side(str(models[name]), {"backend": backend, **exact(backend), "progress": False}) for name in "ab"}
    report = evaluate(sides["b"], Material(text, window=48, context=16, max_windows=4), sides["a"])
    loaded = {name: transformers.AutoModelForCausalLM.from_pretrained(models[name], dtype=torch.float32).eval() for name in "ab"}
    ids = Tokenizer.from_data(open_checkpoint(models["a"]).tokenizer_data()).encode(WORDS)
    windows = [ids[at : at + 48] for at in range(0, len(ids), 48)]
    windows = [w for w in windows if len(w) > 16]
    lost, divergence, same = [], [], []
    for window in [windows[i * len(windows) // 4] for i in range(4)]:
        with torch.inference_mode():
            out = {n: torch.log_softmax(m(torch.tensor([window])).logits[0, 15:-1, :259].double(), -1) for n, m in loaded.items()}
        lost += (-out["b"].gather(1, torch.tensor(window[16:])[:, None])[:, 0]).tolist()
        divergence += torch.nn.functional.kl_div(out["b"], out["a"], log_target=True, reduction="none").sum(-1).tolist()
        same += (out["a"].argmax(-1) == out["b"].argmax(-1)).tolist()
    assert report["positions"] == len(lost) == 4 * 32
    assert report["perplexity"]["value"] == pytest.approx(math.exp(np.mean(lost)), rel=1e-3)
    assert report["kl_mean"]["value"] == pytest.approx(np.mean(divergence), rel=1e-3)
    assert report["top1"]["value"] == pytest.approx(np.mean(same), abs=0.02)
    assert report["kl_mean"]["interval"][0] < report["kl_mean"]["value"] < report["kl_mean"]["interval"][1]


def test_a_model_is_not_far_from_itself_on_another_backend(models: dict[str, Path], text: Path):
    model = str(models["a"])
    sides = [Side(model, {"backend": b, "progress": False, **exact(b)}) for b in ("cpu", "reference")]
    report = evaluate(sides[0], Material(text, window=32), sides[1], answers=3, answer_tokens=6)
    assert report["kl_mean"]["value"] < 1e-6 and report["top1"]["value"] > 0.99
    assert [a["measure"] == a["judged"] for a in report["answers"]] == [True] * 3
    rounded = evaluate(Side(model, {"backend": "cpu", "quantize": "int4", "progress": False}), Material(text, window=32), sides[1])
    assert 1e-4 < rounded["kl_mean"]["value"] < 1 and "int4" in rounded["judged"]["loaded"]


def test_one_open_measure_judges_many_and_is_computed_once(models: dict[str, Path], text: Path, tmp_path: Path, monkeypatch: Any):
    options = {"backend": "reference", "progress": False}
    one, other = Side(str(models["b"]), options), Side(str(models["a"]), options)
    material = Material(text, window=32, max_windows=3)
    expected = evaluate(one, material, other)
    with Measure.open(other, 32, tmp_path) as measure:
        assert evaluate(one, material, measure) == expected
        monkeypatch.setattr(measure.scorer, "score", None)  # nothing is left to compute
        assert evaluate(one, material, measure) == expected
        assert evaluate(other, material, measure)["kl_mean"]["value"] == 0
        with pytest.raises(InvalidRequestError, match="give a side to compare answers"):
            evaluate(one, material, measure, answers=1)
    assert len(list(tmp_path.glob("rows-*.npy"))) == 3


def test_logits_come_a_few_rows_at_a_time(models: dict[str, Path]):
    scorer = Scorer(str(models["a"]), 100, {"backend": "reference", "max_num_batched_tokens": 16, "progress": False})
    seen = list[tuple[int, int]]()
    ids = [(7 * i) % 250 for i in range(100)]
    scorer.score(ids, 30, lambda row, logits: seen.append((row, len(logits))))
    assert max(n for _, n in seen) <= 16 and sum(n for _, n in seen) == 70
    assert seen[0][0] == 29 and all(a + n == b for (a, n), (b, _) in pairwise(seen))
    whole = scorer.rows(ids, 1)
    np.testing.assert_allclose(scorer.rows(ids, 30), whole[29:], atol=1e-5)
    assert scorer.llm.loaded.executable is scorer.llm.engine.model.executable
    scorer.close()


def test_chats_count_by_their_last_answer(models: dict[str, Path], tmp_path: Path):
    tokenizer = Tokenizer.from_data(open_checkpoint(models["a"]).tokenizer_data())
    chats = tmp_path / "chats.jsonl"
    asked, answer = {"role": "user", "content": "hello"}, {"role": "assistant", "content": "good day"}
    chats.write_text("\n".join(json.dumps(c) for c in ({"messages": [asked, answer]}, [asked])) + "\n\n")
    answered, open_end = of_chats(tokenizer, chats, 200)
    assert tokenizer.decode(answered.ids[answered.first :].tolist(), skip_special_tokens=False) == "good day"
    assert tokenizer.decode(answered.ids[: answered.first].tolist(), skip_special_tokens=False).endswith("[assistant]")
    assert (answered.prompt, open_end.prompt, open_end.first) == ([asked], [asked], 1)
    report = evaluate(
        Side(str(models["a"]), {"backend": "reference", "progress": False}), Material(chats=chats, window=64),
        Side(str(models["b"]), {"backend": "reference", "progress": False}), answers=5, answer_tokens=4,
    )  # fmt: skip
    assert report["positions"] == len("good day") + len(open_end.ids) - 1 and len(report["answers"]) == 2
    assert report["answers"][0]["prompt"] == "[user]hello[assistant]"


def test_windows_cover_a_text_once(models: dict[str, Path]):
    tokenizer = Tokenizer.from_data(open_checkpoint(models["a"]).tokenizer_data())
    windows = cut(tokenizer, WORDS, 50)
    assert "".join(tokenizer.decode(w.tolist()) for w in windows) == WORDS and {len(w) for w in windows[:-1]} == {50}
    few = spread(windows, 3)
    assert len(few) == 3 and few[0] is windows[0] and few[2] is windows[2 * len(windows) // 3]


class _Page(HTMLParser):
    """Tags in their order, and the text without them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags, self.texts = list[str](), list[str]()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_the_page_shows_hostile_answers_as_text_and_needs_no_other_file():
    evil = '<script>alert("x")</script> & <img src=x onerror=y>'
    side = {"model": evil, "loaded": evil, "backend": "cpu", "stored_bytes": 1}
    answers = [
        {"prompt": evil, "measure": f"one {evil} two", "judged": f"one {evil} three"},
        {"prompt": "p", "measure": "s", "judged": "s"},
    ]  # fmt: skip
    figure = {"value": 0.5, "interval": [0.25, 0.75]}
    report = {
        "judged": side, "against": side, "positions": 5, "windows": 2, "material": {"file": evil}, "answers": answers,
        "kl_mean": figure, "perplexity": figure,
        "gate": [{"figure": "kl_mean", "value": 0.5, "at_most": 0.1, "passed": False}],
    }  # fmt: skip
    page = _Page(as_html(report))
    assert not {"script", "img", "link", "iframe"} & set(page.tags) and page.tags.count("del") == page.tags.count("ins") == 1
    shown = "".join(page.texts)
    assert shown.count(evil) >= 5 and "1 of 2 changed" in shown and "0.250000 to 0.750000" in shown and "failed" in shown
    assert marked("a b c", "a x c d") == ("a <del>b</del> c", "a <ins>x</ins> c <ins>d</ins>")


def test_the_command_reports_and_keeps_the_gate(models: dict[str, Path], text: Path, tmp_path: Path, trivium: Any):
    asked = [models["b"], "--against", models["a"], "--backend", "reference", "--text", text, "--window", 64, "--max-windows", 3]
    code, out, _ = trivium(*asked, "--html", tmp_path / "r.html", "--answers", 2, "--answer-tokens", 4, "--max-kl", 1000, "--json")
    report = json.loads(out)
    assert code == 0 and report["windows"] == 3 and report["gate"][0]["passed"] and len(report["answers"]) == 2
    page = (tmp_path / "r.html").read_text()
    assert f"{report['kl_mean']['value']:.6f}" in page and "Answers: " in page
    value = report["kl_mean"]["value"]
    code, out, _ = trivium(*asked, "--max-kl", value * 0.99, "--min-top1", 0, "--max-ppl-ratio", 1e9)
    assert code == 3 and "FAILED" in out and out.count("passed") == 2
    assert "95 % INTERVAL" in out and f"{value:.6f}" in out
    code, out, _ = trivium(models["b"], "--backend", "reference", "--text", text, "--window", 64, "--json")
    alone = json.loads(out)
    assert code == 0 and alone["against"] is None and "kl_mean" not in alone
    assert alone["perplexity"]["value"] > 1


def test_what_can_not_be_compared_is_refused(models: dict[str, Path], text: Path, tmp_path: Path, trivium: Any):
    (tmp_path / "bad.jsonl").write_text('{"messages": []}\n')
    (tmp_path / "worse.jsonl").write_text("not json\n")
    (tmp_path / "short.txt").write_text("hi")
    a, on = ["reference", "--window", 64], [models["a"], "--backend"]
    for flags, code, message in (
        ([*on, *a, "--text", text, "--against", models["other"]], 1, "different vocabularies"),
        ([*on, *a, "--text", text, "--max-kl", 1], 2, "name the measure with --against"),
        ([*on, *a], 2, "give a text or chats"), ([*on, *a, "--text", text, "--chats", text], 2, "give a text or chats"),
        ([*on, *a, "--text", text, "--context", 64], 2, "leaves nothing to foretell"),
        ([*on, *a, "--text", tmp_path / "none.txt"], 2, "can't be read"),
        ([*on, *a, "--text", tmp_path / "short.txt"], 2, "has 2 tokens; more than 32"),
        ([*on, *a, "--chats", tmp_path / "bad.jsonl"], 2, "line 1 is neither"),
        ([*on, *a, "--chats", tmp_path / "worse.jsonl"], 2, "line 1 is not JSON"),
        ([*on, *a, "--text", text, "--max-model-len", 63], 2, "has no room for windows of 64 tokens"),
        ([*on, *a, "--text", text, "--against", models["b"], "--answers", 1, "--answer-tokens", 600], 2, "leave no room for"),
    ):  # fmt: skip
        got, out, err = trivium(*flags)
        assert (got, out) == (code, "") and message in err, (flags, err)
    with pytest.raises(UnsupportedError):
        evaluate(Side(str(models["a"]), {"progress": False}), Material(text), Side(str(models["other"]), {"progress": False}))
    with pytest.raises(InvalidRequestError):
        Material(text, window=1)


def test_what_would_fail_at_the_end_is_refused_before_anything_is_measured(
    models: dict[str, Path], text: Path, tmp_path: Path, trivium: Any
):  # fmt: skip
    (tmp_path / "file").write_text("")
    for page in (tmp_path, tmp_path / "none" / "r.html", tmp_path / "file" / "r.html"):
        code, out, err = trivium("no-such-model", "--against", "no-such-model", "--text", text, "--html", page)
        assert (code, out) == (2, "") and "no file can be written there" in err
    side, steps = Side(str(models["a"]), {"backend": "reference", "progress": False}), list[str]()
    with pytest.raises(InvalidRequestError, match="leave no room for a prompt"):
        evaluate(
            side, Material(text), side, answers=1, answer_tokens=600, progress=lambda done, total, what: steps.append(what)
        )  # fmt: skip
    assert not steps


def test_a_line_of_chats_ends_where_json_lines_do(models: dict[str, Path], tmp_path: Path):
    """Strings may hold U+2028 and its like as they are; an editor may have put a byte order mark first."""
    tokenizer = Tokenizer.from_data(open_checkpoint(models["a"]).tokenizer_data())
    chats = [[{"role": "user", "content": f"one{end}two"}] for end in "\u2028\u2029\x85\x0b\x0c\x1c"]
    lines = [json.dumps(c, ensure_ascii=False).replace("\\u000b", "\x85").replace("\\f", "\x85") for c in chats]
    (tmp_path / "chats.jsonl").write_bytes("\r\n".join(lines).encode("utf-8-sig"))
    found = of_chats(tokenizer, tmp_path / "chats.jsonl", 200)
    assert [w.prompt for w in found] == [json.loads(line) for line in lines] and len(lines) == 6
    (tmp_path / "deep.jsonl").write_text("[" * 100_000)
    with pytest.raises(InvalidRequestError, match="line 1 is not JSON"):
        of_chats(tokenizer, tmp_path / "deep.jsonl", 200)
