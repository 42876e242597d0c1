"""Pages that show images: equal keys mean equal tokens and equal rows of equal tiles, wherever a page begins."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from hypothesis import given, strategies as st
from trivium.kv import KVCache, Stream, root_key
from trivium.ops import Group, KVSpec, PagedKV, Span, Tile

SIZE = 4
TILES = [Tile(bytes([i]) * 32, np.zeros((1, 1), np.uint8)) for i in range(3)]


def cache() -> KVCache:
    return KVCache(KVSpec(SIZE, "float32", (Group(PagedKV(1, 4), (0,)),)), 40, 4)


def keys(tokens: list[int], media: list[Span]) -> list[bytes]:
    stream = Stream(tokens, root_key("m"))
    stream.media = media
    kv = cache()
    return [kv._key(stream, block) for block in range(len(tokens) // SIZE)]


@st.composite
def prompts(draw):
    """Tokens with runs of placeholders (9), each standing for rows of a tile from one on; also what each token really is."""
    tokens, media, means = [], [], []
    for _ in range(draw(st.integers(1, 4))):
        text = draw(st.lists(st.integers(1, 2), max_size=5))
        tokens += text
        means += text
        tile, row, length = draw(st.integers(0, 2)), draw(st.integers(0, 1)), draw(st.integers(0, 6))
        if length:
            media.append(Span(len(tokens), len(tokens) + length, TILES[tile], row))
            tokens += [9] * length
            means += [(tile, row + i) for i in range(length)]
    return tokens, media, means


@given(prompts(), prompts())
def test_keys_are_equal_exactly_where_everything_before_is(one, two):
    a, b = keys(*one[:2]), keys(*two[:2])
    for block, (x, y) in enumerate(zip(a, b)):
        stop = (block + 1) * SIZE
        same = one[2][:stop] == two[2][:stop]
        if x == y:
            assert same
        elif same:  # two runs of one tile side by side may be one run: then a page may be computed again, and nothing is wrong
            assert [s[:2] for s in one[1] if s.start < stop] != [s[:2] for s in two[1] if s.start < stop]


def test_pages_of_text_have_the_keys_that_they_always_had():
    tokens = list(range(12))
    content = np.arange(12, dtype=np.int32)
    key, want = root_key("m"), []
    for block in range(3):
        key = blake2b(key + content[block * SIZE : (block + 1) * SIZE].tobytes(), digest_size=32).digest()
        want.append(key)
    assert keys(tokens, []) == want
    assert keys(tokens, [Span(11, 12, TILES[0], 0)])[:2] == want[:2] != keys(tokens, [Span(7, 8, TILES[0], 0)])[:2]
