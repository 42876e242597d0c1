"""Commands, exit codes and the one place where errors become a line on standard error."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from trivium.cli.parser import Command, Parser, UsageError
from trivium.errors import InvalidRequestError, PluginError, TriviumError
from trivium.extensions import Extension, expect, installed

COMMANDS = {
    "run": ("trivium.cli.run", "answer a prompt, or chat"),
    "serve": ("trivium.cli.serve", "serve models over HTTP"),
    "bench": ("trivium.cli.bench", "measure latency or throughput"),
    "backends": ("trivium.cli.show", "list the installed backends and their devices"),
    "inspect": ("trivium.cli.show", "print a model's Program, before and after fusion, and its weights"),
    "explain": ("trivium.cli.show", "say which kernel runs each call of a model, and why"),
    "conformance": ("trivium.cli.judge", "judge a backend against the reference"),
    "record": ("trivium.cli.record", "write the Program and every Batch of a run"),
    "replay": ("trivium.cli.record", "run a recording on any backend and compare"),
    "plugin": ("trivium.cli.plugin", "start a backend of your own, or list what the installed plugins offer"),
    "pull": ("trivium.cli.show", "fetch a model into the cache"),
}
"""Command -> (module with add_NAME(parser) and NAME(args) -> exit code, one line of help)."""


def build_parser(command: str | None) -> Parser:
    """The parser; only the module of `command` is imported, unless that names none."""
    import trivium

    parser = Parser(prog="trivium", description="One LLM inference runtime for any accelerator.")
    parser.add_argument("--version", action="version", version=f"trivium {trivium.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    for name, (home, text) in COMMANDS.items():
        sub = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        if name == command:
            module = importlib.import_module(home)
            getattr(module, f"add_{name}")(sub)
            sub.set_defaults(handler=getattr(module, name))
    if command not in COMMANDS:  # nobody else's is of any use then, and to look for them takes a while
        for name, extension in installed("command").items():
            if name not in COMMANDS:
                _add_plugin(commands, name, extension, command)
    return parser


def _add_plugin(commands: Any, name: str, extension: Extension, asked: str | None) -> None:
    """A command that a plugin brings. It is loaded if it is asked for; also for the list of all, which says so where that fails."""
    found, text = None, f"from {extension.distributions[0]}"
    if asked in (name, None):
        try:
            found = expect(Command, extension.load(), str(extension))
            text = found.help
        except PluginError as e:
            if asked == name:
                raise
            text = f"{text}, can't be used: {e}"
    sub = commands.add_parser(name, help=text.replace("%", "%%"), description=text[:1].upper() + text[1:].replace("%", "%%") + ".")
    if found is not None and asked == name:
        found.add(sub)
        sub.set_defaults(handler=found.run)


def complain(message: str) -> None:
    """One line on standard error."""
    print("trivium: " + " ".join(message.split()), file=sys.stderr, flush=True)


def _warn(message: Warning | str, *_: Any, **__: Any) -> None:
    complain(f"warning: {message}")


def _run(argv: Sequence[str]) -> int:
    command = next((word for word in argv if not word.startswith("-")), None)
    args = build_parser(command).parse_args(argv)
    with warnings.catch_warnings():
        warnings.showwarning = _warn
        return int(args.handler(args))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line; returns the exit code: 0, 1 (it can't be done), 2 (bad flag or value), 130 (interrupted)."""
    try:
        code = _run(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        return code
    except UsageError as e:
        print(" ".join(str(e).split()), file=sys.stderr)
        return 2
    except TriviumError as e:
        complain(str(e))
        return 2 if isinstance(e, InvalidRequestError) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output has left; nothing more can be said to it.
        _leave_output()
        return 141
    except OSError as e:
        _leave_output()
        complain(f"the system refused: {e}")
        return 1


def _leave_output() -> None:
    """What is still buffered for standard output goes nowhere, so that flushing it at exit can't fail again."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
