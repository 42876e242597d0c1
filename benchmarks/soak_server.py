"""Clients of every bad kind by the thousand against one server, and what they leave behind; prints JSON.

    python benchmarks/soak_server.py [--requests 1000] [--workers 16] [--seed 0] [--url URL --api-key KEY --model NAME --pid PID]

Without --url it starts `trivium serve` with a tiny model on the reference backend. Each request is of one kind, by chance: whole or
streamed answers that are read to the end, clients that leave before or while they are answered, readers that are slow, bodies that
are half sent, broken or wrong, headers too large, wrong keys, deadlines that pass, several outputs given up. A known answer is
asked for all the while and must stay what it is alone ("wrong_answers": how often it was not).

"memory": resident bytes of the server after each half of the requests; "growth": what the second half added. "left": what /metrics
and the process hold beyond what they held before, when all have ended: requests, pages, sockets.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))
from chat_models import make_chat_model
from http_server import SPELL

CHATS, TEXTS = "/v1/chat/completions", "/v1/completions"


class Target(NamedTuple):
    """The server. pid: its process."""

    url: str
    key: str
    model: str
    pid: int


@contextlib.contextmanager
def started(backend: str) -> Iterator[Target]:
    """`trivium serve` over a tiny model, whose cache holds a few requests at a time."""
    with tempfile.TemporaryDirectory() as folder:
        model = make_chat_model(Path(folder) / "model")
        line = [sys.executable, "-m", "trivium.cli", "serve", f"tiny={model}", "--backend", backend, "--dtype", "float32"]
        line += ["--port", "0", "--api-key", "k1", "--max-num-seqs", "16", "--num-kv-blocks", "512", "--block-size", "16"]
        with subprocess.Popen(line, stderr=subprocess.PIPE, text=True) as process:
            try:
                assert process.stderr is not None
                where = next(found[1] for said in process.stderr if (found := re.search(r"at (http://\S+)", said)))
                yield Target(where, "k1", "tiny", process.pid)
                process.send_signal(signal.SIGTERM)
                if process.wait(60) != 0:
                    raise SystemExit(f"the server ended with {process.returncode}")
            finally:
                process.kill()


class Client:
    """One caller; its requests are of the kinds below, each a method that says how it ended."""

    def __init__(self, target: Target, rng: random.Random) -> None:
        self._target, self._rng = target, rng

    def run(self) -> tuple[str, str]:
        """One request of a kind chosen by chance: (kind, how it ended)."""
        kind = self._rng.choice(KINDS)
        return kind.__name__, str(kind(self))

    def _body(self, **more: Any) -> dict[str, Any]:
        chosen = {"temperature": self._rng.choice([0, 1]), "seed": self._rng.randrange(9), "max_tokens": self._rng.randrange(1, 40)}
        chosen["messages"] = [{"role": "user", "content": "hello " * self._rng.randrange(1, 30)}]
        return {"model": self._target.model, "ignore_eos": True, **chosen, **more}

    def _send(
        self, data: bytes, path: str = CHATS, *, key: str | None = None, head: bytes = b"", cut: int | None = None
    ) -> socket.socket:
        host = urllib.parse.urlsplit(self._target.url)
        sock = socket.create_connection((host.hostname, host.port), timeout=60)
        lines = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer {key or self._target.key}\r\n"
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # refused before all was sent
            sock.sendall((lines.encode() + head + b"Content-Length: %d\r\n\r\n" % len(data) + data)[:cut])
        return sock

    def _ask(self, body: dict[str, Any], **more: Any) -> socket.socket:
        return self._send(json.dumps(body).encode(), **more)

    def whole(self) -> int:
        """Reads the answer."""
        return status(self._ask(self._body(n=self._rng.randrange(1, 3), temperature=1)))

    def streamed(self) -> int:
        """Reads all events."""
        return status(self._ask(self._body(stream=True)))

    def slow(self) -> int:
        """Reads a few bytes at a time."""
        return status(self._ask(self._body(stream=True)), piece=64, pause=0.001)

    def leaves(self) -> str:
        """Asks for much, and leaves before or while it comes."""
        body = self._body(max_tokens=300, n=self._rng.randrange(1, 4), temperature=1, stream=self._rng.random() < 0.6)
        with self._ask(body) as sock:
            for _ in range(self._rng.randrange(4)):
                sock.recv(256)
                if not body["stream"]:
                    break
        return "left"

    def batch(self) -> str:
        """Gives up several prompts at once."""
        body = self._body(prompt=["a", "b", "c"], n=2, temperature=1, max_tokens=300, stream=self._rng.random() < 0.5)
        sock = self._ask(body, path=TEXTS)
        sock.settimeout(self._rng.random() / 5)
        with sock, contextlib.suppress(TimeoutError):
            sock.recv(256)
        return "left"

    def half(self) -> str:
        """Sends a part of its head or body, and leaves."""
        self._ask(self._body(), cut=self._rng.randrange(1, 250)).close()
        return "left"

    def broken(self) -> int:
        """What is no JSON, or says nothing that is possible."""
        bodies = [b"", b"{", b"[" * 5000, b"\xff", b'{"messages": 3}', b'{"messages": [], "temperature": "hot"}']
        bodies += [json.dumps(self._body(**wrong)).encode() for wrong in ({"n": -1}, {"stop_token_ids": [9**9]}, {"model": "nope"})]
        return status(self._send(self._rng.choice(bodies)))

    def headers(self) -> int:
        """Too many of them."""
        return status(self._ask(self._body(), head=b"X-Long: " + b"a" * 100_000 + b"\r\n"))

    def stranger(self) -> int:
        """Has no key that is known."""
        return status(self._ask(self._body(), key="wrong"))

    def late(self) -> int:
        """Its time is over before the answer is made."""
        body = self._body(max_tokens=300, timeout=self._rng.uniform(0.001, 0.05), stream=self._rng.random() < 0.5)
        return status(self._ask(body))


KINDS: list[Callable[[Client], Any]] = [
    Client.whole, Client.streamed, Client.slow, Client.leaves, Client.leaves, Client.batch, Client.half, Client.broken,
    Client.headers, Client.stranger, Client.late,
]  # fmt: skip


def status(sock: socket.socket, piece: int = 1 << 16, pause: float = 0.0) -> int:
    """Reads a reply to its end; 0: none came."""
    data = b""
    with sock, contextlib.suppress(ConnectionResetError):
        while more := sock.recv(piece):
            data = (data + more)[:64]
            time.sleep(pause)
    return int(data.split(b" ", 2)[1]) if data.startswith(b"HTTP/1.1 ") else 0


def read(target: Target, path: str, body: dict[str, Any] | None = None) -> bytes:
    """One plain call."""
    import urllib.request

    data = None if body is None else json.dumps(body).encode()
    call = urllib.request.Request(target.url + path, data, {"authorization": f"Bearer {target.key}"})
    with urllib.request.urlopen(call, timeout=120) as reply:
        found: bytes = reply.read()
        return found


def known(target: Target) -> str:
    """The answer that must stay what it is."""
    asked = {"model": target.model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 40, **SPELL}
    found: str = json.loads(read(target, CHATS, asked))["choices"][0]["message"]["content"]
    return found


def held(target: Target) -> dict[str, float]:
    """What the server holds: requests, pages in use, sockets."""
    text = read(target, "/metrics").decode()
    names = {"running": "num_requests_running", "waiting": "num_requests_waiting", "pages": "kv_cache_usage_perc"}
    found = {name: sum(map(float, re.findall(rf"^trivium:{full}{{.*}} (\S+)$", text, re.M))) for name, full in names.items()}
    links = [str(link.readlink()) for link in Path(f"/proc/{target.pid}/fd").iterdir() if link.is_symlink()]
    return {**found, "sockets": float(sum(link.startswith("socket:") for link in links))}


def settled(target: Target, before: dict[str, float]) -> dict[str, float]:
    """What is still held, beyond `before`, when everybody has had time to be noticed as gone."""
    end = time.monotonic() + 60
    while (now := held(target)) != before and time.monotonic() < end:
        time.sleep(0.02)
    return {name: now[name] - before[name] for name in now}


def resident(target: Target) -> int:
    """Bytes."""
    return int(Path(f"/proc/{target.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def soak(target: Target, requests: int, workers: int, seed: int) -> dict[str, Any]:
    """All requests, in two halves."""
    want, began = known(target), time.perf_counter()
    before = held(target)
    ends: Counter[str] = Counter()
    memory: list[int] = []
    wrong = 0
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        for half in (0, 1):
            clients = [Client(target, random.Random(f"{seed}/{half}/{i}")) for i in range(requests // 2)]
            for i, (kind, end) in enumerate(pool.map(Client.run, clients)):
                ends[f"{kind} {end}"] += 1
                if i % 50 == 0:
                    wrong += known(target) != want
            left = settled(target, before)
            memory.append(resident(target))
    wrong += known(target) != want
    return {
        "requests": 2 * (requests // 2), "seconds": round(time.perf_counter() - began, 1), "ends": dict(sorted(ends.items())),
        "server_errors": sum(count for end, count in ends.items() if end.endswith((" 500", " 503"))), "wrong_answers": wrong,
        "left": left, "memory": memory, "growth": memory[1] - memory[0],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Clients of every bad kind against one server.")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="reference", help="of the server that is started")
    parser.add_argument("--url", help="a server that runs already")
    parser.add_argument("--api-key", default="k1")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--pid", type=int, help="its process")
    args = parser.parse_args()
    own = contextlib.nullcontext(Target(args.url, args.api_key, args.model, args.pid)) if args.url else started(args.backend)
    with own as target:
        print(json.dumps(soak(target, args.requests, args.workers, args.seed), indent=2))


if __name__ == "__main__":
    main()
