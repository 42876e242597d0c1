"""Settings from the environment and from a YAML file. Which there are, and what they may be, is said in one place: by the flags of
the command line. A flag goes before a variable, that before the file, and that before the default."""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

PREFIX = "TRIVIUM_"
_WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


class ConfigError(ValueError):
    """A setting that can't be; one line that begins with where it stands: FILE:LINE, or the variable."""


def settled(
    flags: Iterable[argparse.Action], defaults: Mapping[str, Any], given: Mapping[str, Any], environ: Mapping[str, str],
    closed: frozenset[str] = frozenset(),
) -> dict[str, Any]:  # fmt: skip
    """The value of every flag. given: those of the command line; defaults: of all. closed: those that decide what is computed; they
    don't come from the environment. Raises ConfigError."""
    known = {flag.dest: flag for flag in flags}
    variables = from_environment(known, environ, closed)
    file = given.get("config") or variables.get("config")
    return {**defaults, **(from_file(known, Path(file)) if file else {}), **variables, **given}


def from_environment(known: Mapping[str, argparse.Action], environ: Mapping[str, str], closed: frozenset[str]) -> dict[str, Any]:
    """What the variables TRIVIUM_FLAG say; lists are divided by commas. Raises ConfigError, also for one that is no flag's."""
    found = {}
    for name in sorted(name for name in environ if name.startswith(PREFIX)):
        dest, text = name.removeprefix(PREFIX).lower(), environ[name]
        if text.startswith("tcp://") or dest.startswith("service_"):
            raise ConfigError(f"{name}: set by Kubernetes for a Service of this name; give the pod enableServiceLinks: false")
        if dest not in known:
            names = [PREFIX + other.upper() for other in known if other not in closed]
            raise ConfigError(f"{name}: there is no such setting{_nearest(name, names)}")
        if dest in closed:
            raise ConfigError(f"{name}: this decides what is computed, so it is for the command line or the file, not a variable")
        flag = known[dest]
        value = [part.strip() for part in text.split(",") if part.strip()] if _is_list(flag) else text.strip()
        if not value:
            raise ConfigError(f"{name}: is empty; unset it, or give it a value")
        found[dest] = _converted(flag, value, name)
    return found


def from_file(known: Mapping[str, argparse.Action], path: Path) -> dict[str, Any]:
    """What a YAML mapping of flag (dashes or underscores) to value says. Raises ConfigError."""
    try:
        loader = yaml.SafeLoader(path.read_bytes())
        root = loader.get_single_node()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        why = getattr(error, "problem", None) or str(error)
        raise ConfigError(f"{path}:{mark.line + 1 if mark else 1}: this is no YAML: {why}") from error
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path}:{root.start_mark.line + 1}: must be a mapping of settings to values")
    found: dict[str, Any] = {}
    for key, node in root.value:
        where, name = f"{path}:{key.start_mark.line + 1}", str(key.value)
        dest = name.replace("-", "_")
        if dest not in known or dest == "config":
            names = [other.replace("_", "-") for other in known]
            raise ConfigError(f"{where}: there is no setting {name!r:.80}{_nearest(name, names)}")
        if dest in found:
            raise ConfigError(f"{where}: {name} stands there twice")
        try:
            value = loader.construct_object(node, deep=True)
        except (yaml.YAMLError, ValueError) as error:
            raise ConfigError(f"{where}: {name}: {getattr(error, 'problem', None) or error}") from error
        found[dest] = _converted(known[dest], value, f"{where}: {name}")
    return found


def _is_list(flag: argparse.Action) -> bool:
    return isinstance(flag, argparse._AppendAction) or flag.nargs in ("*", "+")


def _converted(flag: argparse.Action, value: Any, where: str) -> Any:
    """`value` as the flag would have had it from the command line."""
    if flag.nargs == 0:
        switch = value if isinstance(value, bool) else _WORDS.get(value.lower()) if isinstance(value, str) else None
        if switch is None:
            raise ConfigError(f"{where}: must be true or false, not {_shown(value)}")
        return switch
    if not _is_list(flag):
        return _one(flag, value, where)
    if isinstance(value, Mapping):
        if "=" not in str(flag.metavar):
            raise ConfigError(f"{where}: must be a list, not a mapping")
        value = [f"{key}={part if isinstance(part, str) else json.dumps(part, default=str)}" for key, part in value.items()]
    return [_one(flag, part, where) for part in (value if isinstance(value, list) else [value])]


def _one(flag: argparse.Action, value: Any, where: str) -> Any:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        kind = "a number or text" if value is not None else "a value"
        raise ConfigError(f"{where}: must be {kind}, not {_shown(value)}; text in quotes is always text")
    convert: Any = flag.type or str
    try:
        found = convert(str(value))
    except (argparse.ArgumentTypeError, TypeError, ValueError) as error:
        raise ConfigError(f"{where}: {error}") from error
    if flag.choices is not None and found not in flag.choices:
        raise ConfigError(f"{where}: {_shown(value)} is not one of {', '.join(map(str, flag.choices))}")
    return found


def _shown(value: Any) -> str:
    """As YAML has it, cut to a length."""
    return f"{json.dumps(value, default=str):.80}"


def _nearest(word: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, known, 1)
    return f"; did you mean {near[0]}?" if near else ""
