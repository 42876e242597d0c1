"""What the last minutes are made of: quantiles, slices, readings, and that all of it stays bounded."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trivium_server.meters import Ended
from trivium_server.recent import KEPT, POINTS, REQUESTS, STEP, Digest, Recent

from trivium import Metrics

TIMES = st.lists(st.floats(1e-5, 1e3), min_size=1, max_size=200)
SHARES = [0.5, 0.9, 0.99]


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


def metrics(first=0.1, gaps=(0.01,), cached=0, end=1.0):
    gap = sum(gaps) / len(gaps) if gaps else None
    return Metrics(0.02, 0.08, sum(gaps), first, gap, gap, end, 0.0, cached, 0, inter_token_latencies=tuple(gaps))


def ended(name="a", prompt=10, made=2, began=0.0, **times):
    return Ended(SimpleNamespace(name=name, version=name), "chat", None, began, ["length"], prompt, made, metrics(**times))


def stats(**totals):
    fields = ("running", "computed_tokens", "generated_tokens", "draft_tokens", "accepted_tokens", "device_seconds")
    return SimpleNamespace(**{**dict.fromkeys(fields, 0), **totals})


def digest_of(times):
    digest = Digest(np.zeros(Digest.BUCKETS, np.int32))
    for value in times:
        digest.add(value)
    return digest


@given(TIMES)
@settings(max_examples=60, deadline=None)
def test_quantiles_are_at_most_two_per_cent_off(times):
    want = np.quantile(times, SHARES, method="inverted_cdf")
    digest = digest_of(times)
    assert digest.count == len(times)
    assert digest.quantiles(SHARES) == pytest.approx(want, rel=0.0201)


def test_nothing_has_no_quantiles_and_any_time_has_a_place():
    assert digest_of([]).quantiles(SHARES) is None
    assert digest_of([0.0]).quantiles([0.5])[0] < 2e-5
    assert digest_of([1e9]).quantiles([0.5])[0] > 3e4


@pytest.mark.parametrize("minutes", [1, 5, 15])
def test_a_window_has_equal_slices_up_to_now(minutes):
    recent = Recent(Clock())
    window = recent.window(minutes * 60, ["a"])
    assert len(window.slices) * window.span == minutes * 60 and len(window.slices) <= POINTS


def test_what_ended_is_in_its_slice_and_leaves_the_window_with_it():
    clock = Clock()
    recent = Recent(clock)
    recent.add(ended(first=0.2, gaps=(0.01, 0.03), cached=5))
    clock.now += 30
    recent.add(ended(first=0.4, prompt=30))
    recent.add(ended("b", first=9.0))
    window = recent.window(60, ["a"])
    places = [i for i, one in enumerate(window.slices) if one.ended]
    assert places == [len(window.slices) - 1 - 30 / STEP, len(window.slices) - 1]
    whole = window.whole()
    assert (whole.ended, whole.prompt_tokens, whole.cached_tokens) == (2, 40, 5)
    assert whole.digests["inter_token_latency"].count == 3
    assert whole.digests["time_to_first_token"].quantiles([1.0]) == pytest.approx([0.4], rel=0.02)
    assert recent.window(60, ["a", "b"]).whole().ended == 3
    clock.now += 45
    assert recent.window(60, ["a"]).whole().ended == 1 and recent.window(300, ["a"]).whole().ended == 2


def test_rates_are_growth_by_the_wall_clock_even_over_missing_readings():
    clock = Clock()
    recent = Recent(clock)
    recent.read({"a": stats(generated_tokens=100, computed_tokens=1000)})
    clock.now += 2
    recent.read({"a": stats(generated_tokens=140, computed_tokens=1340, draft_tokens=30, accepted_tokens=10)})
    clock.now += 8
    recent.read({"a": stats(generated_tokens=160, computed_tokens=1360, draft_tokens=30, accepted_tokens=10)})
    window = recent.window(60, ["a"])
    made = window.rate(lambda reading: reading.total("generated_tokens", window.models))
    prompts = window.rate(lambda reading: reading.prefilled(window.models))
    assert [rate for rate in made if rate is not None] == [20.0, 2.5]
    assert [rate for rate in prompts if rate is not None] == [(340 - 40 - 20) / 2, 0.0]


def test_a_model_that_is_not_loaded_counts_as_nothing():
    clock = Clock()
    recent = Recent(clock)
    recent.read({"a": stats(running=2)})
    assert recent.last.total("running", ["a", "b"]) == 2
    clock.now += STEP
    recent.read({"b": stats(running=1)})
    assert recent.last.total("running", ["a", "b"]) == 1
    assert recent.window(60, ["a", "b"]).gauge("running")[-2:] == [2, 1]


def test_a_request_that_nobody_waited_for_has_no_times_and_is_left_out():
    recent = Recent(Clock())
    recent.add(Ended(SimpleNamespace(name="a", version="a"), "chat", None, 0.0, ["abort"]))
    assert recent.window(60, ["a"]).whole().ended == 0 and recent.ran(["a"]) == []


def test_memory_is_bounded_and_the_newest_requests_come_first():
    clock = Clock()
    recent = Recent(clock)
    for i in range(3 * int(KEPT / STEP)):
        clock.now += STEP
        recent.read({"a": stats()})
        recent.add(ended(began=float(i)))
    assert len(recent._slices["a"]) <= KEPT / STEP + 1 and len(recent._readings) <= KEPT / STEP + 2
    assert all(one.times.inter_token_latencies == () for one in recent.ran(["a"]))
    shown = [one.began for one in recent.ran(["a", "b"])]
    assert len(shown) == REQUESTS and shown == sorted(shown, reverse=True)
    assert recent.window(KEPT, ["a"]).whole().ended == pytest.approx(KEPT / STEP, abs=math.ceil(KEPT / STEP / POINTS))
