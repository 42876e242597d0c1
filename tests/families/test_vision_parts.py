"""Images on their way to a model: pixel values and token ids are transformers' own, and nothing in a request reaches the disk, the
network or more memory than it may."""

from __future__ import annotations

import base64
import io
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trivium.errors import CheckpointError, InvalidRequestError, UnsupportedError
from trivium_families.vision import parts
from trivium_families.vision.siglip import TowerInfo, places
from trivium_families.vision.tiling import Tiling
from vision_cases import photo, png, processor_config

pytest.importorskip("PIL")

SHAPES = [(64, 64), (32, 32), (10, 7), (200, 33), (33, 200), (1, 90), (61, 64), (640, 480), (37, 1)]


@pytest.mark.oracles
@pytest.mark.parametrize("changes", [
    {}, {"do_image_splitting": False}, {"size": {"longest_edge": 150}}, {"do_resize": False}, {"resample": 3},
    {"size": {"height": 70, "width": 40}}, {"do_rescale": False, "do_normalize": False}, {"size": {"longest_edge": 4100}},
], ids=str)  # fmt: skip
def test_pixels_are_those_of_transformers_processor(changes: dict[str, Any]) -> None:
    pytest.importorskip("transformers")
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    side = 2048 if "size" in changes and changes["size"].get("longest_edge", 0) > 4096 else 32
    config = processor_config(max_image_size={"longest_edge": side}, **changes)
    oracle, ours = Idefics3ImageProcessorPil(**config), Tiling.of(config)
    for width, height in SHAPES if side == 32 else [(48, 40)]:
        picture = photo(width, height)
        want = oracle([picture], return_row_col_info=True)
        tiles = ours.cut(picture)
        assert (tiles.rows, tiles.columns) == (want["rows"][0][0], want["cols"][0][0])
        got = np.stack([ours.values(pixels).transpose(2, 0, 1) for pixels in tiles.pixels])
        np.testing.assert_array_equal(got, np.stack(want["pixel_values"][0]), err_msg=f"{width}x{height}")


@pytest.mark.oracles
@pytest.mark.parametrize(("side", "learned"), [(26, 26), (27, 27), (32, 32), (16, 32), (8, 8), (4, 8), (64, 16)])
def test_patches_of_a_tile_stand_where_the_oracle_puts_them(side: int, learned: int) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from transformers.models.idefics3.configuration_idefics3 import Idefics3VisionConfig
    from transformers.models.idefics3.modeling_idefics3 import Idefics3VisionEmbeddings

    oracle = Idefics3VisionEmbeddings(Idefics3VisionConfig(hidden_size=1, image_size=learned, patch_size=1))
    oracle.patch_embedding.weight.data.zero_()
    oracle.patch_embedding.bias.data.zero_()
    oracle.position_embedding.weight.data.copy_(torch.arange(learned * learned)[:, None])
    ones = torch.ones(1, 3, side, side), torch.ones(1, side, side, dtype=torch.bool)
    np.testing.assert_array_equal(oracle(*ones).detach().numpy().ravel(), places(side, learned).ravel())


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA"])
def test_an_image_is_the_same_as_picture_as_bytes_as_path_and_as_data_url(mode: str, tmp_path: Path) -> None:
    picture = photo(20, 30, mode=mode)
    data = png(picture)
    (tmp_path / "a.png").write_bytes(data)
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    given = [
        {"type": "image", "image": picture}, {"type": "image", "image": data}, {"type": "image", "image": tmp_path / "a.png"},
        {"type": "image_url", "image_url": {"url": url}}, {"type": "image_url", "image_url": url},
        {"type": "input_image", "image_url": url},
    ]  # fmt: skip
    messages, images = parts.take([{"role": "user", "content": [*given, {"type": "text", "text": "which?"}]}], lambda image: image)
    assert messages == [{"role": "user", "content": [{"type": "image"}] * 6 + [{"type": "text", "text": "which?"}]}]
    assert len(images) == 6 and len({image.tobytes() for image in images}) == 1 and images[0].mode == "RGB"


def test_what_is_transparent_lies_on_white() -> None:
    picture = photo(4, 4, mode="RGBA")
    picture.putalpha(0)
    assert set(parts.read(picture).tobytes()) == {255}


@pytest.mark.oracles
@pytest.mark.parametrize("orientation", range(9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_a_photo_is_the_way_up_that_its_camera_was_held(kind: str, orientation: int) -> None:
    image, loaded = pytest.importorskip("PIL.Image"), pytest.importorskip("transformers.image_utils").load_image
    exif, out = image.Exif(), io.BytesIO()
    exif[0x0112] = orientation
    photo(20, 30).save(out, kind, exif=exif.tobytes())
    want = loaded(image.open(out))
    for source in (out.getvalue(), image.open(out)):
        np.testing.assert_array_equal(np.array(parts.read(source)), np.array(want))
    assert want.size == ((30, 20) if orientation >= 5 else (20, 30))


@pytest.mark.parametrize("big", [False, True])
def test_shades_of_16_bits_keep_their_eight_highest(big: bool) -> None:
    image = pytest.importorskip("PIL.Image")
    shades = np.linspace(0, 65535, 600).astype(np.uint16).reshape(20, 30)
    picture = image.frombytes("I;16B", (30, 20), shades.astype(">u2").tobytes()) if big else image.fromarray(shades)
    for source in (picture,) if big else (picture, png(picture)):
        np.testing.assert_array_equal(np.array(parts.read(source)), np.repeat(shades[..., None] >> 8, 3, axis=-1))


def test_one_image_at_a_time_is_in_memory_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    events, read = [], parts.read
    monkeypatch.setattr(parts, "read", lambda *given: events.append("read") or read(*given))
    content = [{"type": "image", "image": png(photo(8, 8))}] * 3
    parts.take([{"role": "user", "content": content}, {"role": "user", "content": content}], lambda image: events.append("cut"))
    assert events == ["read", "cut"] * 6


@pytest.mark.parametrize("kind", ["truncated", "closed", "premultiplied", "long path"])
def test_a_picture_or_path_that_can_t_be_read_is_a_typed_error(kind: str, tmp_path: Path) -> None:
    image, data = pytest.importorskip("PIL.Image"), png(photo(40, 40))
    source: Any = tmp_path / ("x" * 300)
    if kind == "premultiplied":
        source = image.new("La", (4, 4))
    elif kind != "long path":
        source = image.open(io.BytesIO(data[:300] if kind == "truncated" else data))
        source.close() if kind == "closed" else None
    with pytest.raises(InvalidRequestError, match="can't be read"):
        parts.read(source)


@pytest.mark.parametrize("url", [
    "https://example.org/a.png", "http://169.254.169.254/latest", "file:///etc/passwd", "/etc/passwd",
    "data:text/plain;base64,AAAA",
    "data:image/png,AAAA", "data:image/png;base64,%%%", "data:image/png;base64,AAAA\n", "", None, 7, ["data:image/png;base64,AAAA"],
])  # fmt: skip
def test_an_address_is_refused_whatever_it_names(url: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"nothing is fetched|base64|is no image that is"):
        parts.take([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}], np.array)


@pytest.mark.parametrize("image", ["/etc/hostname", None, {"path": "/etc/passwd"}, ["x"], 5, b"", b"GIF89a", b"\x89PNG\r\n"])
def test_no_json_value_and_no_broken_file_is_an_image(image: Any) -> None:
    with pytest.raises(InvalidRequestError, match="image"):
        parts.take([{"role": "user", "content": [{"type": "image", "image": image}]}], np.array)


@pytest.mark.parametrize("kind", [["image"], {}, None, 5])
def test_a_part_whose_type_is_no_text_is_left_for_others_to_judge(kind: Any) -> None:
    messages = [{"role": "user", "content": [{"type": kind, "image": b""}]}]
    assert parts.take(messages, np.array) == (messages, [])


def bomb(width: int, height: int) -> bytes:
    """A PNG that says it is so large, and holds nothing."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    head = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 2, 0, 0, 0])
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize("size", [(7072, 7072), (60000, 60000), (2**31 - 1, 1)])
def test_a_decompression_bomb_is_refused_before_it_is_unpacked(size: tuple[int, int]) -> None:
    with pytest.raises(InvalidRequestError, match=r"pixels|can't be read"):
        parts.read(bomb(*size))


def test_a_line_of_pixels_is_not_blown_up_to_tiles_without_end() -> None:
    image = pytest.importorskip("PIL.Image").new("RGB", (4_000_000, 1))
    with pytest.raises(InvalidRequestError, match="enlarged"):
        Tiling.of(processor_config(do_resize=False)).cut(image)
    assert len(Tiling.of(processor_config()).cut(image).pixels) == 3


def test_a_file_that_ends_too_soon_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="can't be read"):
        parts.read(png(photo(80, 80))[:-2000])


def test_limits_hold_for_bytes_paths_addresses_and_numbers_of_images(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    data = png(photo(20, 20))
    (tmp_path / "a.png").write_bytes(data)
    monkeypatch.setattr(parts, "MAX_BYTES", len(data) - 100)
    for source in (data, tmp_path / "a.png"):
        with pytest.raises(InvalidRequestError, match="bytes"):
            parts.read(source)
    with pytest.raises(InvalidRequestError, match="larger"):
        parts.data_url("data:image/png;base64," + base64.b64encode(data).decode(), "url")
    monkeypatch.setattr(parts, "MAX_BYTES", 1 << 20)
    monkeypatch.setattr(parts, "MAX_IMAGES", 2)
    with pytest.raises(InvalidRequestError, match="2 images"):
        parts.take([{"role": "user", "content": [{"type": "image", "image": data}] * 3}], np.array)


def test_only_formats_of_images_are_opened(tmp_path: Path) -> None:
    out = io.BytesIO()
    photo(8, 8).save(out, "PPM")
    with pytest.raises(InvalidRequestError, match="PNG, JPEG") as said:
        parts.read(out.getvalue())
    assert "object at" not in str(said.value)


def test_without_pillow_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(UnsupportedError, match=r"trivium\[vision\]"):
        parts.read(b"x")


@pytest.mark.parametrize(("key", "value"), [
    ("max_image_size", {"longest_edge": 0}), ("size", {"width": 5}), ("size", {"longest_edge": "x"}), ("image_mean", [1, 2]),
    ("image_std", "x"), ("resample", 9), ("rescale_factor", 0), ("do_resize", 1),
])  # fmt: skip
def test_a_processor_that_can_t_be_true_is_refused_by_its_key(key: str, value: Any) -> None:
    with pytest.raises((CheckpointError, UnsupportedError)) as refused:
        Tiling.of(processor_config(**{key: value}))
    assert refused.value.param in (key, "longest_edge", "height")


@pytest.mark.oracles
def test_what_a_configuration_leaves_out_is_as_in_the_oracle() -> None:
    pytest.importorskip("transformers")
    from transformers.models.smolvlm.configuration_smolvlm import SmolVLMVisionConfig

    small = {"hidden_size": 768, "image_size": 512, "num_attention_heads": 12, "patch_size": 16, "model_type": "idefics3"}
    for said in ({}, small):
        whole = SmolVLMVisionConfig(**{k: v for k, v in said.items() if k != "model_type"}).to_dict()
        assert TowerInfo.of(said) == TowerInfo.of(whole)


@pytest.mark.parametrize("change", [
    {"num_channels": 1}, {"hidden_size": 33}, {"hidden_act": "tanh"}, {"image_size": [32, 32]}, {"image_size": 2},
    {"layer_norm_eps": 0},
])  # fmt: skip
def test_a_tower_that_is_not_known_is_refused(change: dict[str, Any]) -> None:
    config = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32}
    with pytest.raises((CheckpointError, UnsupportedError)):
        TowerInfo.of({**config, "patch_size": 4, **change})
