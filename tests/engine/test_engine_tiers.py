"""Pages that the pool gave away: kept in memory and on disk, found again, and never a different token because of it."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import pytest
from engine_runs import engine_of, greedy, run_all
from fake_model import Fault, continuation
from fake_session import moving_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_lives import KINDS, life
from trivium.engine import Engine
from trivium.errors import InvalidRequestError

SHARED = [3 + i % 80 for i in range(37)]
BIG = 1 << 20


def always(engine: Engine, restore: bool = True) -> Engine:
    """Takes the choice between restoring and computing out of the hands of measurement."""
    assert engine.kv.tiers is not None
    engine.kv.tiers.prefill.seconds = lambda units: 1e9 if restore else 0.0  # type: ignore[method-assign]
    return engine


def tiered(windows: Any = (None,), *, restore: bool = True, model: Any = None, **options: Any) -> Engine:
    config = {k: options.pop(k) for k in list(options) if k.startswith(("kv_", "max_num"))}
    return always(engine_of(model=model or moving_model(windows, **options), **config), restore)


def ask(engine: Engine, prompt: list[int], windows: Any = (None,), count: int = 3, **options: Any) -> Any:
    """One request's metrics; its tokens are those that must come."""
    number = engine.add_request(prompt, greedy(count), **options)
    output = run_all(engine)[number]
    assert output.outputs[0].token_ids == continuation(prompt, count, windows)
    return output.metrics


def flood(engine: Engine, windows: Any = (None,), seed: int = 0) -> None:
    """Requests that drive everything else out of the pool."""
    rng = random.Random(seed)
    for _ in range(4):
        ask(engine, [rng.randrange(3, 80) for _ in range(40)], windows)


@pytest.mark.parametrize("windows", [(None,), (None, 7), (5,), (None, "recurrent"), ("recurrent",), (6, "recurrent")])
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_what_the_pool_gave_away_comes_back(windows: Any, tier: str, tmp_path: Path) -> None:
    options = {"kv_host_bytes": BIG} if tier == "host" else {"kv_disk_path": tmp_path}
    engine = tiered(windows, pages=sum(4 if w == "recurrent" else 14 for w in windows), **options)
    assert ask(engine, [*SHARED, 5], windows).num_cached_tokens == 0
    flood(engine, windows)
    metrics = ask(engine, [*SHARED, 9], windows)
    restored = {"host": metrics.num_restored_host_tokens, "disk": metrics.num_restored_disk_tokens}
    assert metrics.num_cached_tokens == 36 and restored[tier] > 0 and sum(restored.values()) == restored[tier]
    stats = engine.stats
    assert (stats.restored_host_tokens, stats.restored_disk_tokens) == tuple(restored.values())
    assert (stats.restores_chosen, stats.recomputes_chosen, stats.tier_faults) == (1, 0, 0)
    assert ask(engine, [*SHARED, 11], windows).num_restored_host_tokens == 0, "it is in the pool again"


def test_without_tiers_nothing_is_moved() -> None:
    engine = engine_of(model=moving_model(pages=14))
    ask(engine, [*SHARED, 5])
    flood(engine)
    assert ask(engine, [*SHARED, 9]).num_cached_tokens == 0
    assert engine.model.session.exported == 0 and not engine.kv.pool.evicted


def test_where_computing_is_quicker_it_is_computed_and_counted() -> None:
    engine = tiered(pages=14, kv_host_bytes=BIG, restore=False)
    ask(engine, [*SHARED, 5])
    flood(engine)
    metrics = ask(engine, [*SHARED, 9])
    assert metrics.num_cached_tokens == 0
    assert (engine.stats.restores_chosen, engine.stats.recomputes_chosen) == (0, 1)


def test_the_choice_follows_what_was_measured() -> None:
    tiers = tiered(pages=14, kv_host_bytes=BIG).kv.tiers
    assert tiers is not None
    del tiers.prefill.seconds  # type: ignore[method-assign]
    keys = [(b"x" * 32, 0)] * 9
    for _ in range(30):
        tiers.prefill.add(100, 1.0)
        tiers.importing.add(32 * 9, 0.2)
    assert tiers.worth(keys, 36)
    for _ in range(30):
        tiers.importing.add(32 * 9, 0.5)
    assert not tiers.worth(keys, 36)


def test_a_full_host_tier_spills_to_disk(tmp_path: Path) -> None:
    engine = tiered(pages=14, kv_host_bytes=32 * 4, kv_disk_path=tmp_path)
    ask(engine, [*SHARED, 5])
    flood(engine)
    metrics = ask(engine, [*SHARED, 9])
    assert metrics.num_restored_disk_tokens > 0 and metrics.num_cached_tokens == 36
    assert engine.stats.tier_faults == 0


def test_a_restart_finds_the_folder_and_only_equals_hit(tmp_path: Path) -> None:
    first = tiered(pages=40, kv_disk_path=tmp_path)
    ask(first, [*SHARED, 5], cache_salt="a")
    first.close()
    assert len(list(tmp_path.glob("*.kvpage"))) == 10
    for options, salt, hit in (
        ({}, "a", 36), ({}, "b", 0), ({}, "", 0), ({"page_size": 2}, "a", 0), ({"fingerprint": "other"}, "a", 0), ({}, "a", 36),
    ):  # fmt: skip
        again = tiered(**{"pages": 40, "kv_disk_path": tmp_path, **options})
        assert ask(again, [*SHARED, 9], cache_salt=salt).num_restored_disk_tokens == hit


def test_a_restart_with_the_host_tier_keeps_it_too(tmp_path: Path) -> None:
    first = tiered(pages=14, kv_host_bytes=BIG, kv_disk_path=tmp_path)
    ask(first, [*SHARED, 5])
    flood(first)
    first.close()
    assert ask(tiered(pages=14, kv_disk_path=tmp_path), [*SHARED, 9]).num_restored_disk_tokens == 36


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _swap(path: Path) -> None:
    """Another page's content, whole and well-formed, under this page's name."""
    other = next(p for p in sorted(path.parent.glob("*.kvpage")) if p != path)
    path.write_bytes(other.read_bytes())


@pytest.mark.parametrize("damage", [_cut, _flip, _swap, lambda p: p.write_bytes(b""), lambda p: p.unlink()])
def test_a_file_that_is_not_what_it_should_be_is_computed_again(damage: Any, tmp_path: Path, caplog: Any) -> None:
    first = tiered(pages=40, kv_disk_path=tmp_path)
    ask(first, [*SHARED, 5])
    first.close()
    again = tiered(pages=40, kv_disk_path=tmp_path)
    names = {key: again.kv.tiers._disk._name(key) for key in first.kv.pool._pages}  # type: ignore[union-attr]
    victims = sorted(tmp_path.glob("*.kvpage"))[2:4]
    for path in victims:
        damage(path)
    assert set(names.values()) >= {path.name for path in victims}
    with caplog.at_level(logging.WARNING):
        metrics = ask(again, [*SHARED, 9])
        ask(again, [*SHARED[:20], 9])
    assert metrics.num_cached_tokens < 36
    gone = not any(p.exists() for p in victims[:1]) or not any(p.exists() for p in victims[1:])
    assert gone, "the first one that was read is removed"
    deleted = damage.__name__ == "<lambda>" and again.stats.tier_faults == 0
    assert len(caplog.records) == (0 if deleted else 1)


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "model.kvpage").write_text("mine too")
    first = tiered(pages=40, kv_disk_path=tmp_path, kv_disk_bytes=1)
    ask(first, [*SHARED, 5])
    first.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.kvpage", "notes.txt"]


def test_the_folder_stays_within_its_size(tmp_path: Path) -> None:
    engine = tiered(pages=14, kv_disk_path=tmp_path, kv_disk_bytes=8000)
    for seed in range(6):
        flood(engine, seed=seed)
    engine.close()
    size = sum(p.stat().st_size for p in tmp_path.iterdir())
    assert 4000 < size <= 8000


def test_two_engines_share_a_folder(tmp_path: Path) -> None:
    engines = [tiered(pages=14, kv_host_bytes=64, kv_disk_path=tmp_path, kv_disk_bytes=12000) for _ in range(2)]
    for seed in range(8):
        ask(engines[seed % 2], [*SHARED, 5 + seed])
        flood(engines[seed % 2], seed=seed % 3)
    for engine in engines:
        engine.close()
        assert engine.stats.tier_faults == 0
    assert sum(p.stat().st_size for p in tmp_path.iterdir()) <= 2 * 12000


@pytest.mark.parametrize("bad", [{"kv_host_bytes": -1}, {"kv_disk_bytes": 0}, {"kv_disk_path": ""}, {"kv_host_bytes": 1.5}])
def test_bad_options_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        engine_of(model=moving_model(), **bad)
    assert caught.value.param == next(iter(bad))


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequestError, match="can't be used") as caught:
        engine_of(model=moving_model(), kv_disk_path=tmp_path / "file" / "folder")
    assert caught.value.param == "kv_disk_path"


@given(
    windows=st.sampled_from(KINDS), seed=st.integers(0, 2**32), pages=st.integers(20, 60), budget=st.integers(1, 40),
    host=st.sampled_from([0, 300, BIG]), disk=st.booleans(), faults=st.sampled_from([0.0, 0.1]),
)  # fmt: skip
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_tiers_change_no_token_whatever_fails(
    windows: Any, seed: int, pages: int, budget: int, host: int, disk: bool, faults: float, tmp_path_factory: Any
) -> None:
    rng = random.Random(seed)
    path = tmp_path_factory.mktemp("pages") if disk else None
    model = moving_model(windows, pages=pages)
    engine = always(engine_of(
        model=model, max_num_seqs=6, max_num_batched_tokens=budget, kv_host_bytes=host or (0 if disk else BIG), kv_disk_path=path
    ))  # fmt: skip

    def hook(point: str) -> None:
        if rng.random() < faults:
            raise Fault(point)

    model.session.hook = hook
    if disk and faults:
        _break_disk(engine, rng, faults)
    for asked in life(engine, windows, rng, 20, stems=3):
        asked.check(windows)
    assert not model.executable.violations
    engine.close()


def _break_disk(engine: Engine, rng: random.Random, faults: float) -> None:
    disk = engine.kv.tiers._disk  # type: ignore[union-attr]
    whole = Path.write_bytes

    class Broken(type(disk._folder)):  # type: ignore[misc, name-defined]
        """A folder on a disk that is full, or tears files, now and then."""

        def write_bytes(self, data: bytes) -> int:
            if rng.random() < faults:
                whole(self, data[: len(data) // 2])
                raise OSError(28, "no space left on device")
            return whole(self, data[:-3] if rng.random() < faults else data)

    disk._folder = Broken(disk._folder)
