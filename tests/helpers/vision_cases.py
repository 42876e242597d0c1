"""Tiny random models that see, made by transformers with its own processor: what the vision families are judged against."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_checkpoints import byte_tokenizer

TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
MARKS = ["<|im_start|>", "<end_of_utterance>", "<fake_token_around_image>", "<image>", "<global-img>"]
WORDS = [*MARKS, *(f"<row_{r}_col_{c}>" for r in range(1, 7) for c in range(1, 7))]
FIRST = 259
IMAGE = FIRST + WORDS.index("<image>")
SIDE, PATCH, SCALE = 32, 4, 2
TOKENS = (SIDE // PATCH // SCALE) ** 2
_SIGHT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": SIDE,
    "patch_size": PATCH,
}  # fmt: skip
_TEXT = {
    "model_type": "llama", "vocab_size": FIRST + len(WORDS), "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024, "bos_token_id": 256, "eos_token_id": 257,
    "pad_token_id": 258,
}  # fmt: skip


def tokenizer_json() -> dict[str, Any]:
    """The byte tokenizer with the words that stand around images."""
    data = byte_tokenizer()
    flags = {k: v for k, v in data["added_tokens"][0].items() if k not in ("id", "content")}
    data["added_tokens"] += [{"id": FIRST + i, "content": word, **flags} for i, word in enumerate(WORDS)]
    return data


def processor_config(**changes: Any) -> dict[str, Any]:
    """preprocessor_config.json of the tiny models."""
    return {
        "do_convert_rgb": True, "do_image_splitting": True, "do_normalize": True, "do_pad": True, "do_rescale": True,
        "do_resize": True, "image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.6, 0.7], "max_image_size": {"longest_edge": SIDE},
        "resample": 1, "rescale_factor": 1 / 255, "size": {"longest_edge": 2 * SIDE}, **changes,
    }  # fmt: skip


def photo(width: int, height: int, seed: int = 0, mode: str = "RGB") -> Any:
    """A picture of Pillow: smooth areas with some noise, the same for the same arguments."""
    image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    waves = [np.sin(x / (3 + c) + seed) + np.cos(y / (2 + c)) for c in range(4)]
    pixels = np.clip(np.stack(waves, -1) * 60 + 128 + rng.normal(0, 12, (height, width, 4)), 0, 255).astype(np.uint8)
    if mode == "L":
        return image.fromarray(pixels[..., 0])
    return image.fromarray(pixels[..., : len(mode)], mode if mode == "RGBA" else None)


def png(picture: Any) -> bytes:
    """The bytes of a PNG file."""
    out = io.BytesIO()
    picture.save(out, "PNG")
    return out.getvalue()


def oracle_processor(**changes: Any) -> Any:
    """transformers' processor with the tiny tokenizer."""
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    inner = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json()))
    words = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    images = Idefics3ImageProcessorPil(**processor_config(**changes))
    return transformers.Idefics3Processor(images, words, image_seq_len=TOKENS, chat_template=TEMPLATE)


def make_vision_model(folder: Path, family: str = "Idefics3", **text: Any) -> Any:
    """transformers' model with seeded numbers, saved to `folder` with tokenizer, chat template and processor."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.set_num_threads(1)
    config = getattr(transformers, f"{family}Config")(
        vision_config=_SIGHT, text_config={**_TEXT, **text}, scale_factor=SCALE, image_token_id=IMAGE, pad_token_id=258
    )
    config._attn_implementation = "eager"
    torch.manual_seed(5)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config).eval()
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        noise = torch.empty_like(parameter).normal_(generator=generator)
        flat = parameter.dim() < 2
        parameter.data.copy_(parameter.data * flat + noise * (0.1 if flat else 1.2 * parameter[0].numel() ** -0.5))
    model.model.text_model.embed_tokens.weight.data.mul_(3)
    model.lm_head.weight.data[256:] *= 0.2  # special tokens have no text that a client could compare
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**names, "chat_template": TEMPLATE}))
    (folder / "preprocessor_config.json").write_text(json.dumps(processor_config()))
    (folder / "processor_config.json").write_text(json.dumps({"image_seq_len": TOKENS}))
    return model


def oracle_inputs(processor: Any, messages: list[dict[str, Any]]) -> Any:
    """What transformers' model is given for a chat; images stand in parts as {"type": "image", "image": picture}."""
    pictures = [part["image"] for message in messages for part in message["content"] if part["type"] == "image"]
    plain = [{**m, "content": [{"type": "image"} if p["type"] == "image" else p for p in m["content"]]} for m in messages]
    text = processor.tokenizer.apply_chat_template(plain, chat_template=TEMPLATE, add_generation_prompt=True, tokenize=False)
    return processor(text=text, images=pictures or None, return_tensors="pt")


def make_seeing_checkpoint(folder: Path, seed: int = 0) -> Path:
    """A model of the same sizes without transformers: for what is compared between backends."""
    from tiny_checkpoints import make_weights, weight_shapes, write_safetensors
    from trivium.models import sight

    config = {
        "architectures": ["Idefics3ForConditionalGeneration"], "model_type": "idefics3", "scale_factor": SCALE,
        "image_token_id": IMAGE, "tie_word_embeddings": False, "vision_config": _SIGHT, "text_config": _TEXT,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "tokenizer_class": "PreTrainedTokenizerFast"}
    files = {
        "config": config, "tokenizer": tokenizer_json(), "tokenizer_config": {**names, "chat_template": TEMPLATE},
        "preprocessor_config": processor_config(), "processor_config": {"image_seq_len": TOKENS},
    }  # fmt: skip
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    rng = np.random.default_rng(seed)
    vision = sight(config, folder)
    assert vision is not None and weight_shapes(config)
    weights = make_weights(config, seed)
    for constant in vision.tower(1).constants:
        if constant.array is None:
            *_, width = shape = constant.value.shape
            flat = len(shape) == 1
            numbers = rng.normal(float(flat and "norm" in constant.source), 0.1 if flat else 1.2 * width**-0.5, shape)
            conv = "patch_embedding.weight" in constant.source
            weights[constant.source] = numbers.reshape(-1, 3, PATCH, PATCH) if conv else numbers
    write_safetensors(folder / "model.safetensors", {k: v.astype(np.float32) for k, v in weights.items()})
    return folder
