"""`trivium bench serve`: what it sends, and that it reports what really happened."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from xml.etree import ElementTree

import numpy as np
import pytest
import virtual_peer as peers
from http_server import SECRET, running
from trivium.cli import main
from trivium.cli.main import build_parser
from trivium.errors import InvalidRequestError
from trivium_server.load.command import measured, planned
from trivium_server.load.page import page
from trivium_server.load.summary import slo, spread
from trivium_server.load.table import table
from trivium_server.load.wire import Address
from trivium_server.load.workload import Ask, Ids, Text, arrivals, pieces, trace

pytestmark = pytest.mark.http
NAMED = ("--model", "m", "--seed", "1")


def flags(*argv):
    return build_parser("bench").parse_args(["bench", "serve", *map(str, argv)])


def against(peer, *argv):
    """(report, run) of the command's flags against a peer in virtual time. The probes and the warm-up are asked first."""

    async def measure():
        clock = asyncio.get_running_loop().time
        return await measured(flags(*NAMED, *argv), clock=clock, connect=peer.connect)

    return peers.run(measure())


def probed(answer):
    """A peer's answers after those to the two probes, and whatever the workload asks: answer(number, body)."""

    def answers(number, path, body):
        if number < 2:
            words = len(body["messages"][0]["content"].split())
            return peers.streamed(0.001, 0.0, 1, prompt=5 + 2 * words)
        return answer(number - 2, body)

    return answers


def test_a_closed_loop_reports_the_schedule_exactly():
    answers = [(0.100, 0.010, 11), (0.200, 0.020, 6), (0.300, 0.030, 2)]
    peer = peers.Peer(probed(lambda n, body: peers.streamed(*answers[n % 3])))
    report, _ = against(peer, "--concurrency", 1, "--requests", 30, "--warmup", 0)
    firsts, lasts = [first for first, _, _ in answers] * 10, [first + gap * (n - 1) for first, gap, n in answers] * 10
    gaps = [gap for _, gap, n in answers for _ in range(n - 1)] * 10
    for name, want in (("ttft_s", firsts), ("e2e_s", lasts), ("itl_s", gaps), ("tpot_s", [gap for _, gap, _ in answers] * 10)):
        quantiles = dict(zip(("p50", "p90", "p95", "p99"), np.percentile(want, (50, 90, 95, 99)), strict=True))
        assert report[name]["n"] == len(want)
        assert report[name] == pytest.approx({**report[name], **quantiles, "mean": np.mean(want), "max": max(want)}, abs=1e-9)
    assert report["tokens"] == {"output": 190, "prompt": 210, "counted_by": "the server's usage"}
    assert report["seconds"] == pytest.approx(sum(lasts))
    assert report["rates"]["output_tokens_per_s"] == pytest.approx(190 / sum(lasts)) and report["rates"]["denominator"]
    assert report["requests"] == {"sent": 30, "whole": 30, "failed": 0} and report["failures"] == {}
    assert peer.connections == 1 and "late_s" not in report


def test_a_closed_loop_keeps_so_many_under_way_and_begins_none_after_the_duration():
    peer = peers.Peer(probed(lambda n, body: peers.streamed(0.5, 0.1, 6)))
    report, _ = against(peer, "--concurrency", 4, "--duration", 3.5, "--warmup", 3)
    assert peer.most == 4 and peer.connections == 4
    assert report["requests"]["sent"] == 16 and len(peer.bodies) == 2 + 3 + 16
    assert report["seconds"] == pytest.approx(4.0)


def test_an_open_loop_counts_from_the_schedule():
    """One seat, each answer a second, two requests a second: the n-th begins n/2 s late, and a client that waits for answers would
    never see it."""
    peer = peers.Peer(probed(lambda n, body: peers.streamed(0.9, 0.1, 2)))
    report, _ = against(peer, "--rate", 2, "--arrivals", "constant", "--requests", 10, "--max-in-flight", 1, "--warmup", 0)
    late = [0.5 * n for n in range(10)]
    assert report["late_s"]["max"] == pytest.approx(max(late)) and report["late_s"]["mean"] == pytest.approx(np.mean(late))
    assert report["ttft_s"]["mean"] == pytest.approx(0.9 + np.mean(late)) and report["ttft_s"]["max"] == pytest.approx(0.9 + 4.5)
    assert report["ttft_from_sending_s"]["max"] == pytest.approx(0.9) and report["e2e_from_sending_s"]["p99"] == pytest.approx(1.0)
    assert report["e2e_s"]["p50"] == pytest.approx(1.0 + np.median(late)) and any("late" in note for note in report["notes"])


def test_an_open_loop_waits_for_nobody():
    peer = peers.Peer(probed(lambda n, body: peers.streamed(5.0, 1.0, 2)))
    report, _ = against(peer, "--rate", 10, "--arrivals", "constant", "--duration", 2, "--warmup", 0)
    assert report["requests"]["sent"] == 20 and peer.most == 20 and report["late_s"]["max"] == pytest.approx(0, abs=1e-9)
    assert np.diff(peer.arrivals[2:]) == pytest.approx([0.1] * 19)


def test_poisson_arrivals_have_the_rate_and_the_spread_and_repeat_by_seed():
    times = list(itertools.islice(arrivals(50.0, "poisson", 3), 4000))
    gaps = np.diff(times)
    assert times[0] == 0.0 and np.mean(gaps) == pytest.approx(0.02, rel=0.05) and np.std(gaps) == pytest.approx(0.02, rel=0.05)
    assert times == list(itertools.islice(arrivals(50.0, "poisson", 3), 4000))
    assert times != list(itertools.islice(arrivals(50.0, "poisson", 4), 4000))


def test_goodput_is_what_meets_every_limit():
    answers = [(0.1, 0.01, 5), (0.6, 0.01, 5), (0.1, 0.06, 5), (0.1, 0.01, 1)]
    fails = peers.plain("500 No", b'{"error": {"message": "no"}}')
    peer = peers.Peer(probed(lambda n, body: fails if n == 4 else peers.streamed(*answers[n])))
    report, _ = against(peer, "--requests", 5, "--warmup", 0, "--slo", "ttft=500ms, itl=50ms")
    assert report["goodput"]["met"] == 2 and report["goodput"]["share"] == pytest.approx(0.4)
    assert report["goodput"]["slo_s"] == {"ttft": 0.5, "itl": 0.05}
    assert report["goodput"]["requests_per_s"] == pytest.approx(2 / report["seconds"])
    for wrong in ("ttft", "ttft=5", "speed=5ms", "ttft=1s,ttft=2s", "ttft=-1s", ""):
        with pytest.raises(ValueError, match="SLO"):
            slo(wrong)


def test_failures_are_told_by_kind_with_the_first_words_of_each():
    good = peers.streamed(0.1, 0.1, 3)
    cut = [*good[:3], (0.15, b"")]
    kinds = {
        "http_429": peers.plain("429 Full", b'{"error": {"message": "the queue is full"}}'),
        "disconnected": cut, "event": [*good[:3], (0.2, peers.framed(b'data: {"error": {"message": "broke"}}\n\n'))],
        "protocol": [(0.0, b"SSH-2.0-OpenSSH\r\n")], "timeout": [*good[:3], (99.0, b"x")],
    }  # fmt: skip
    listed = [*kinds.values(), good, good[:2] + [(0.1, peers.framed(b"data: {]\n\n"))]]
    peer = peers.Peer(probed(lambda n, body: listed[n]))
    report, _ = against(peer, "--requests", 7, "--warmup", 0, "--timeout", 10)
    failures = report["failures"]
    assert {kind: one["count"] for kind, one in failures.items()} == {**dict.fromkeys(kinds, 1), "protocol": 2}
    assert "queue is full" in failures["http_429"]["first"] and "broke" in failures["event"]["first"]
    assert "10 s" in failures["timeout"]["first"] and "before the answer's end" in failures["disconnected"]["first"]
    assert report["requests"]["whole"] == 1 and report["ttft_s"]["n"] == 1 and any("6 of 7" in note for note in report["notes"])
    assert "http_429: 1" in table(report)


def test_a_stream_without_its_end_or_a_server_that_closes_between_requests():
    close = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
    until_closed = [(0.0, close), (0.1, peers.chunk("a")), (0.2, b"data: [DONE]\n\n"), (0.2, b"")]
    cut = [(0.0, close), (0.1, peers.chunk("a")), (0.2, b"")]
    good = peers.streamed(0.1, 0.1, 2)
    peer = peers.Peer(probed(lambda n, body: [until_closed, cut, [*good, (0.2, b"")], good][n]))
    report, run = against(peer, "--requests", 4, "--warmup", 0)
    assert [o.failure for o in run.outcomes] == ["", "disconnected", "", ""]
    assert report["tokens"]["counted_by"].startswith("the server's usage in 2") and peer.connections == 4


def test_split_and_joined_events_are_read_alike():
    whole = b"".join(data for _, data in peers.streamed(0.0, 0.0, 40))
    peer = peers.Peer(probed(lambda n, body: [(0.01 * i, whole[i : i + 1 + 6 * n]) for i in range(0, len(whole), 1 + 6 * n)]))
    report, run = against(peer, "--requests", 3, "--warmup", 0)
    assert report["failures"] == {} and [len(o.times) for o in run.outcomes] == [40] * 3


def test_prompts_have_the_tokens_that_the_server_counts_and_share_what_they_should():
    peer = peers.Peer(probed(lambda n, body: peers.streamed(0.1, 0.0, 1)))
    shape = ("--input-len", "20-60", "--prefix-tokens", 30, "--prefix-groups", 2, "--output-len", 9)
    report, _ = against(peer, "--requests", 40, "--warmup", 0, *shape)
    texts = [body["messages"][0]["content"].split() for body in peer.bodies[2:]]
    assert len({tuple(words[:15]) for words in texts}) == 2 and len({tuple(words[15:]) for words in texts}) == 40
    assert all(20 <= 5 + 2 * (len(words) - 15) <= 61 for words in texts) and len({len(words) for words in texts}) > 8
    assert "2 a word, 5 around" in report["target"]["prompts"]
    assert all(
        {"max_tokens": 9, "stream": True, "ignore_eos": True, "temperature": 0.0, "model": "m"}.items() <= body.items()
        and body["stream_options"] == {"include_usage": True}
        for body in peer.bodies[2:]
    )


def test_a_server_that_counts_nothing_is_measured_by_pieces_and_says_so():
    peer = peers.Peer(lambda n, path, body: peers.streamed(0.1, 0.1, 4, usage=False))
    report, _ = against(peer, "--requests", 2, "--warmup", 0, "--input-len", 10)
    assert report["tokens"] == {"output": 8, "prompt": None, "counted_by": "pieces of output"}
    assert report["rates"]["total_tokens_per_s"] is None and "one counted as one token" in report["target"]["prompts"]
    assert len(peer.bodies[-1]["messages"][0]["content"].split()) == 10


def test_exact_ids_and_fields_of_ones_own():
    peer = peers.Peer(lambda n, path, body: peers.streamed(0.1, 0.1, 1) if path == "/v1/completions" else [])
    own = ("--body", "top_p=0.5", "--body", "temperature=null", "--body", "user=me", "--no-ignore-eos")
    against(peer, "--endpoint", "completions", "--vocab-size", 100, "--input-len", 50, "--requests", 3, *own)
    assert all(len(body["prompt"]) == 50 and max(body["prompt"]) < 100 for body in peer.bodies)
    assert len({tuple(body["prompt"]) for body in peer.bodies}) == 4
    assert all(
        body["top_p"] == 0.5 and body["user"] == "me" and not {"temperature", "ignore_eos"} & set(body) for body in peer.bodies
    )


def test_a_trace_is_replayed_at_its_times(tmp_path):
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 3000, "input_length": 40, "output_length": 2, "hash_ids": [1, 2]},
        {"timestamp": 1000, "prompt": "hi", "max_tokens": 3},
        {"timestamp": 2000, "prompt_tokens": 20, "output_tokens": 4, "hash_ids": [1, 3]},
    ]  # fmt: skip
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    peer = peers.Peer(probed(lambda n, body: peers.streamed(0.1, 0.1, body["max_tokens"])))
    report, _ = against(peer, "--trace", path, "--trace-unit", "ms", "--trace-speed", 2, "--trace-block", 16, "--warmup", 0)
    sent = peer.arrivals[2:]
    assert [at - sent[0] for at in sent] == pytest.approx([0, 0.5, 1.0]) and report["load"]["kind"] == "open"
    assert [body["max_tokens"] for body in peer.bodies[2:]] == [3, 4, 2]
    texts = [body["messages"][0]["content"].split() for body in peer.bodies[2:]]
    assert texts[0] == ["hi"] and texts[1][:8] == texts[2][:8] and texts[1][8:] != texts[2][8 : len(texts[1])]
    report, _ = against(peer, "--trace", path, "--concurrency", 2, "--warmup", 0, "--requests", 2)
    assert report["load"]["kind"] == "closed" and report["requests"]["sent"] == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no requests"), ("{", r":1: this is no JSON"), ('{"timestamp": 1}', r":1: input_length"), ("[1]", ":1: a line"),
        ('{"input_length": 4, "output_length": 0}', ":1: output_length"),
        ('{"input_length": true, "output_length": 1}', ":1: input"),
        ('{"timestamp": 1, "prompt": "a", "max_tokens": 1}\n{"prompt": "a", "max_tokens": 1}', "either all"),
        ('{"prompt": "a", "max_tokens": 1}\n{"prompt": 3, "max_tokens": 1}', ":2: prompt"),
        ('{"timestamp": "soon", "prompt": "a", "max_tokens": 1}', ":1: timestamp"),
        ('{"input_length": 4, "output_length": 1, "hash_ids": ["a"]}', ":1: hash_ids"),
    ],
)  # fmt: skip
def test_a_bad_trace_is_refused_with_its_line(tmp_path, text, words):
    (tmp_path / "trace.jsonl").write_text(text)
    with pytest.raises(InvalidRequestError, match=words):
        trace(tmp_path / "trace.jsonl")


def test_pieces_add_up_to_the_prompt():
    assert pieces(Ask(4, None, 40, 1, blocks=(7, 8, 9)), 16) == [("block 7", 16), ("block 8", 16), ("block 9", 8)]
    assert pieces(Ask(4, None, 40, 1, blocks=(7,)), 16) == [("block 7", 16), ("request 4", 24)]
    assert pieces(Ask(4, None, 40, 1, prefix_tokens=8, group=1), 16) == [("prefix 1", 8), ("request 4", 40)]
    ask = Ask(4, None, 40, 1, prefix_tokens=8)
    assert len(Ids(1, 10).prompt(ask)) == 48 and len(Text(1, fixed=4, per_word=2).prompt(ask).split()) == 4 + 18


def test_mixes_and_seeds():
    plans = [planned(flags("--mix", "chat", "--requests", 200), seed) for seed in (1, 1, 2)]
    asks = [[(ask.prompt_tokens, ask.output_tokens) for ask in plan.asks] for plan in plans]
    assert asks[0] == asks[1] != asks[2] and min(asks[0])[0] < 128 < 1024 < max(asks[0])[0]
    assert planned(flags(), 1).load["requests"] == 100 and planned(flags("--duration", 3), 1).load["requests"] is None


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--rate", 1, "--concurrency", 1], "open loop"), (["--mix", "chat", "--input-len", 3], "--mix"),
        (["--trace", "x", "--rate", 1], "--trace"),
        (["--vocab-size", 10], "completions"), (["--max-in-flight", 3, "--concurrency", 2], "open loop"),
        (["--input-len", "9-3"], "LOW-HIGH"), (["--rate", 0], "from 0.001"), (["--slo", "x"], "SLO"),
        (["--url", "ftp://x"], "no URL"),
        (["--body", "x"], "NAME=VALUE"), (["--requests", 0], "from 1 up"), (["--mix", "chta"], "did you mean chat"),
        (["--concurency", 2], "did you mean --concurrency"), (["--html", "/nothing/x.html"], "no folder"),
    ],
)  # fmt: skip
def test_contradictions_end_with_one_line(argv, words, capsys):
    assert main(["bench", "serve", *map(str, argv)]) == 2
    said = capsys.readouterr().err.strip()
    assert words in said and "\n" not in said


def test_addresses():
    assert Address.of("http://127.0.0.1:8000") == ("127.0.0.1", 8000, False, "/v1")
    assert Address.of("https://api.example/openai/v1/") == ("api.example", 443, True, "/openai/v1")
    assert Address.of("localhost:1") == ("localhost", 1, False, "/v1") and Address.of("http://[::1]:2").authority == "[::1]:2"


def test_nobody_there_is_one_line(capsys):
    assert main(["bench", "serve", "--url", "http://127.0.0.1:1"]) == 1
    said = capsys.readouterr().err.strip()
    assert said.startswith("trivium: 127.0.0.1:1: connect:") and "\n" not in said


def test_spreads_by_hand():
    assert spread([]) is None and spread([3.0])["p99"] == 3.0
    assert spread([4.0, 1.0, 2.0, 3.0]) == pytest.approx(
        {"mean": 2.5, "p50": 2.5, "p90": 3.7, "p95": 3.85, "p99": 3.97, "min": 1.0, "max": 4.0, "n": 4}
    )


def test_the_page_is_whole_and_asks_no_network():
    answers = [(0.1, 0.01, 20), (0.3, 0.02, 9)]
    refused = peers.plain("503 <b>", b"<script>alert(1)</script>")
    peer = peers.Peer(probed(lambda n, body: refused if n == 7 else peers.streamed(*answers[n % 2])))
    report, run = against(peer, "--rate", 3, "--requests", 20, "--warmup", 0, "--slo", "e2e=2s")
    made = page(report, run)
    assert not re.search(r"\b(src|href)=|url\(|https?://|<script|@import", made)
    pictures = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", made, re.DOTALL)]
    assert len(pictures) == 5 and sum(len(p.findall("circle")) for p in pictures) == 20
    words = "".join("".join(p.itertext()) for p in pictures)
    assert all(word in words for word in ("TTFT", "E2E", "ITL", "TPOT", "failed, after"))
    assert f"{report['ttft_s']['p50'] * 1e3:.2f}" in made and "goodput" in made
    numbers = [float(n) for n in re.findall(r'(?:cx|cy|x1|y1)="([^"]+)"', made)]
    assert numbers and all(0 <= n <= 640 for n in numbers)
    nothing = peers.Peer(probed(lambda n, body: peers.plain("500 No", b"")))
    report, run = against(nothing, "--requests", 2, "--warmup", 0)
    assert "<svg" in page(report, run) and table(report)


class Real:
    """A peer on a socket: each answer is sent by a schedule of real time."""

    def __init__(self, first, gap, tokens):
        self.pieces = peers.streamed(first, gap, tokens)

    async def __call__(self, reader, writer):
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                await reader.readexactly(int(re.search(rb"(?i)content-length: (\d+)", head)[1]))
                loop = asyncio.get_running_loop()
                start = loop.time()
                for after, data in self.pieces:
                    await asyncio.sleep(max(0.0, start + after - loop.time()))
                    writer.write(data)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


def test_over_a_socket_nothing_is_seen_before_it_was_sent():
    async def measure():
        server = await asyncio.start_server(Real(0.05, 0.02, 6), "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            where = ("--url", f"http://127.0.0.1:{port}", "--concurrency", 3, "--requests", 12)
            return await measured(flags(*NAMED, *where))

    report, run = asyncio.run(measure())
    assert report["requests"]["whole"] == 12 and report["tokens"]["output"] == 72 and report["itl_s"]["n"] == 60
    assert report["ttft_s"]["min"] >= 0.05 and report["ttft_s"]["p50"] < 2.0
    assert report["e2e_s"]["min"] >= 0.15 and report["itl_s"]["mean"] >= 0.0199 - 1.0 / 60
    assert report["client"]["cpu_s"] > 0 and report["client"]["cpu_us_per_token"] > 0
    assert all(o.end - o.sent >= 0.15 for o in run.outcomes)


def test_the_command_measures_trivium_itself(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    with running(folder) as server:
        common = ["bench", "serve", "--url", server.url, "--json", "--seed", "1"]
        common += ["--output-len", "5", "--requests", "6", "--input-len", "40"]
        assert main([*common, "--concurrency", "3", "--html", str(tmp_path / "page.html"), "--slo", "ttft=60s"]) == 0
        chat = json.loads(capsys.readouterr().out)
        assert main([*common, "--endpoint", "completions", "--vocab-size", "90", "--rate", "50", "--body", "temperature=0"]) == 0
        ids = json.loads(capsys.readouterr().out)
        assert main([*common[:-2], "--api-key", "wrong"]) == 1
        assert "http_401" in capsys.readouterr().err
    for report in (chat, ids):
        assert report["requests"] == {"sent": 6, "whole": 6, "failed": 0} and report["tokens"]["output"] == 30
        assert report["lengths"]["output_tokens"]["min"] == report["lengths"]["output_tokens"]["max"] == 5
        assert report["target"]["model"] == "tiny" and report["ttft_s"]["n"] == 6
    assert ids["lengths"]["prompt_tokens"]["min"] == 40 == ids["lengths"]["prompt_tokens"]["max"]
    assert abs(chat["lengths"]["prompt_tokens"]["mean"] - 40) < 12 and chat["goodput"]["met"] == 6
    assert "<svg" in (tmp_path / "page.html").read_text()
