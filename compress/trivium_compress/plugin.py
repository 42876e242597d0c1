"""The entry points: two commands, whose parts are imported when they are run."""

from __future__ import annotations

import argparse

from trivium.cli import Command
from trivium.plugin import hookimpl


class Hook:
    """One entry point."""

    def __init__(self, command: Command) -> None:
        self._command = command

    @hookimpl
    def trivium_command(self) -> Command:
        return self._command


def _add_quantize(parser: argparse.ArgumentParser) -> None:
    from trivium_compress.flags import add_quantize

    add_quantize(parser)


def _quantize(args: argparse.Namespace) -> int:
    from trivium_compress.flags import quantize

    return quantize(args)


def _add_eval(parser: argparse.ArgumentParser) -> None:
    from trivium_compress.flags import add_eval

    add_eval(parser)


def _eval(args: argparse.Namespace) -> int:
    from trivium_compress.flags import evaluate

    return evaluate(args)


quantize = Hook(Command("round or prune a checkpoint's weights, calibrated on a text", _add_quantize, _quantize))
evaluate = Hook(Command("measure a model on a text or chats, alone or against another", _add_eval, _eval))
