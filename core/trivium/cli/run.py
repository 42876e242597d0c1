"""`trivium run`: one answer, or an interactive chat that streams and survives Ctrl-C."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

from trivium.cli.parser import UsageError, add_model, add_split, load_options, number

if TYPE_CHECKING:
    from trivium.api import LLM
    from trivium.engine import RequestOutput

SEED = 0
MAX_TOKENS = 512
UNTEMPLATED = "this model has no chat template"
HELP = "/help: this list; /clear: forget the conversation; /bye: leave (or Ctrl-D); Ctrl-C: stop the answer"


def add_run(parser: argparse.ArgumentParser) -> None:
    """The options of `trivium run`."""
    add_model(parser)
    add_split(parser)
    parser.add_argument(
        "prompt", metavar="PROMPT", nargs="?", help="without one: an interactive chat, or a question a line from a pipe"
    )
    group = parser.add_argument_group(
        "answering",
        "By default the model's own generation config decides (greedy where it does not ask for sampling), with a fixed seed: "
        "the same command gives the same answer.",
    )
    group.add_argument("--system", metavar="TEXT", help="system message of the chat")
    group.add_argument("--raw", action="store_true", help="continue the text as it is, without the model's chat template")
    limit = f"longest answer in tokens (default: {MAX_TOKENS}, or what the context leaves)"
    group.add_argument("--max-tokens", type=number(int, 1), metavar="N", help=limit)
    group.add_argument("--temperature", type=float, metavar="T", help="0 = greedy")
    group.add_argument("--top-p", type=float, metavar="P", help="draw from the likeliest tokens that sum to this probability")
    group.add_argument("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens (0: from all)")
    group.add_argument("--min-p", type=float, metavar="P", help="draw from tokens at least P times as likely as the likeliest")
    group.add_argument("--repetition-penalty", type=float, metavar="R", help="above 1: tokens already seen become less likely")
    group.add_argument("--seed", type=int, metavar="N", default=SEED, help=f"of the random draws (default: {SEED})")
    group.add_argument("--stop", action="append", metavar="TEXT", help="end the answer before this text; may be repeated")
    group.add_argument("--ignore-eos", action="store_true", help="go on after the model's end token")


def run(args: argparse.Namespace) -> int:
    """Answers the prompt, or chats; 130 if the one answer was interrupted."""
    from trivium import LLM

    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop", "max_tokens", "ignore_eos")
    chosen = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    _check(chosen)
    with LLM(args.model, **load_options(args)) as llm:
        chat = Chat(llm, chosen, args.system, raw=args.raw)
        if args.prompt is None:
            return converse(chat)
        if not chat.templated and not args.raw:
            print(f"({UNTEMPLATED}: the text is continued)", file=sys.stderr, flush=True)
        return 0 if chat.ask(args.prompt) else 130


def _check(chosen: dict[str, Any]) -> None:
    """Refuses bad values before anything is loaded."""
    from trivium.sampling import SamplingParams

    SamplingParams(**chosen)


class Chat:
    """A conversation; with a model that has no chat template, single completions."""

    def __init__(self, llm: LLM, chosen: dict[str, Any], system: str | None, *, raw: bool) -> None:
        self.templated = llm.tokenizer.chat_template is not None and not raw
        if system is not None and not self.templated:
            why = "--raw leaves the chat template out" if raw else UNTEMPLATED
            raise UsageError(f"trivium run: --system has no place: {why}")
        self._llm = llm
        self._chosen = chosen
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._history: list[dict[str, str]] = []

    def clear(self) -> None:
        """Forgets what was said, but not the system message."""
        self._history = []

    def ask(self, text: str) -> bool:
        """Streams the answer to standard output and its figures to standard error; False if Ctrl-C stopped it."""
        text = readable(text)
        question = {"role": "user", "content": text}
        prompt = self._llm.encode_chat([*self._system, *self._history, question]) if self.templated else self._llm.encode(text)
        room = max(1, self._llm.loaded.max_model_len - len(prompt))
        params = self._llm.default_params(**{"max_tokens": min(MAX_TOKENS, room), **self._chosen})
        parts: list[str] = []
        count, last = 0, None
        with Interrupt() as interrupt, contextlib.closing(self._llm.stream(prompt, params)) as news:  # type: ignore[type-var]
            for last in news:
                for output in last.outputs:
                    count += len(output.token_ids)
                    parts.append(output.text)
                    print(output.text, end="", flush=True)
                if interrupt.seen:
                    break
        print(flush=True)
        self._history += [question, {"role": "assistant", "content": "".join(parts)}]
        print(_figures(last, count), file=sys.stderr, flush=True)
        return not interrupt.seen


def readable(text: str) -> str:
    """Bytes that the locale could not decode, read as UTF-8; what is not UTF-8 either becomes U+FFFD."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _figures(last: RequestOutput | None, count: int) -> str:
    made = f"{count} token" if count == 1 else f"{count} tokens"
    metrics = None if last is None else last.metrics
    if last is None or metrics is None or metrics.time_to_first_token is None:
        return f"[{made}, interrupted]"
    speed = f"{(count - 1) / metrics.decode_time:.1f} tokens/s, " if metrics.decode_time else ""
    cut = ", cut off at the limit of tokens" if any(o.finish_reason == "length" for o in last.outputs) else ""
    return f"[{made}, {speed}first token after {metrics.time_to_first_token * 1e3:.0f} ms{cut}]"


class Interrupt:
    """Turns the first Ctrl-C into a flag, so that a step is never torn; the second raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.seen = False

    def __enter__(self) -> Interrupt:
        self._main = threading.current_thread() is threading.main_thread()
        if self._main:
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._main:
            signal.signal(signal.SIGINT, self._before)

    def _note(self, *_: object) -> None:
        if self.seen:
            raise KeyboardInterrupt
        self.seen = True


def converse(chat: Chat) -> int:
    """Reads questions until the end of input or /bye. A faulty question is told and forgotten."""
    from trivium.cli.main import complain
    from trivium.errors import TriviumError

    terminal = sys.stdin.isatty()
    if terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (makes input() editable)
        print(HELP if chat.templated else f"{UNTEMPLATED}: each line is continued on its own. {HELP}", file=sys.stderr)
    while True:
        try:
            line = input(">>> " if terminal else "").strip()
        except EOFError:
            if terminal:
                print(file=sys.stderr)  # the shell's own prompt begins a line
            return 0
        except KeyboardInterrupt:
            if not terminal:
                raise
            print("\n(/bye or Ctrl-D to leave)", file=sys.stderr)
            continue
        if line == "/bye":
            return 0
        if line == "/clear":
            chat.clear()
        elif line.startswith("/"):
            print(HELP if line == "/help" else f"no command {line.split()[0]}; {HELP}", file=sys.stderr, flush=True)
        elif line:
            try:
                chat.ask(line)
            except TriviumError as e:
                complain(str(e))
