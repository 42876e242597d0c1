"""A .gguf file as a folder of safetensors of the same numbers, which is what compressed-tensors are made from.

Keys of config.json and names of tensors are transformers'. What the folder says is read again, and must be the same Program and the
same tokens.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from trivium.errors import CheckpointError, UnsupportedError
from trivium.models import arrange, build
from trivium.ops import Program
from trivium.ops.rope import rope_from_config
from trivium.text import Tokenizer, Vocabulary
from trivium.weights import Checkpoint, open_checkpoint
from trivium.weights.checkpoint import HEAD
from trivium_formats.gguf import Config, Writing

from trivium_compress.convert import SOURCE, check_program, check_words, class_of, converted, writers
from trivium_compress.floats import FLOATS, bits, rounded
from trivium_compress.parts import flush, write_safetensors
from trivium_compress.stored import Later
from trivium_compress.walk import LAYER

Array = npt.NDArray[Any]
_ROLES = {"bos_token_id": "bos_token", "eos_token_id": "eos_token", "pad_token_id": "pad_token"}
_ENDS = ("bos_token", "eos_token")
INDEX = "model.safetensors.index.json"
_READ_ONLY = {"rope_parameters", "partial_rotary_factor"}
"""Keys of a configuration that is read of a file, which config.json has otherwise or not at all."""


def to_folder(file: Path, folder: Path) -> None:
    """Writes the model in `file` to the new `folder`, one tensor in memory at a time. Blocks become float32, which holds their
    numbers; other numbers keep their type. UnsupportedError for an architecture, rotation or tokenizer that can't be said in a
    folder, and wherever it would be read as another model."""
    checkpoint = open_checkpoint(file)
    how, words = _architecture(checkpoint), _words(checkpoint)
    new = folder.with_name(folder.name + ".new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    try:
        config = {**_config(checkpoint, how), **dict.fromkeys(_ROLES), **_roles(words)}
        _write_tensors(new, checkpoint, config, how)
        _write_json(new / "config.json", {**config, "dtype": _main_type(checkpoint)})
        _write_words(new, words, checkpoint.config["max_position_embeddings"])
        written = open_checkpoint(new)
        _check(checkpoint, written, how)
        _check_words(words.tokenizer, written)
        for path in new.iterdir():
            flush(path)
        new.rename(folder)
        flush(folder.parent)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def made_of(folder: Path) -> str | None:
    """The fingerprint of the file that a folder was made of by to_folder(); None for any other folder."""
    try:
        found = json.loads((folder / INDEX).read_text("utf-8"))["metadata"][SOURCE]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return str(found)


def _architecture(checkpoint: Checkpoint) -> Writing:
    wanted, known = class_of(checkpoint), {m.hf_class: m.writing for m in writers().values() if m.writing and m.writing.classes}
    how = known.get(wanted)
    if how is None or (how.change is not None and how.back is None):
        raise UnsupportedError(f"a .gguf file of {wanted} can't become a folder; {', '.join(known)} can", param="output")
    return how


# The configuration.


def _config(checkpoint: Checkpoint, how: Writing) -> Config:
    """config.json, but for its dtype and what the tokenizer says."""
    found = checkpoint.config
    if "partial_rotary_factor" in found:
        message = f"only a part of each head is rotated, for which config.json of {class_of(checkpoint)} has no key"
        raise UnsupportedError(message, param="output")
    plain = {key: value for key, value in found.items() if key not in _READ_ONLY | how.alike.keys() and value is not None}
    scaling = {"rope_scaling": _as_llama3(found)} if "rope_parameters" in found else {}
    return dict(_short({**plain, **scaling, **how.config(found)}))


def _short(value: Any) -> Any:
    """Numbers of a file's float32 as they were before, which is the shortest decimal that means them."""
    if isinstance(value, Mapping):
        return {key: _short(item) for key, item in value.items()}
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _as_llama3(config: Config) -> Config:
    """Divisors of the rotated pairs as the rope scaling llama3 that makes them: long waves are divided by `factor`, short ones
    kept, and between them 1 / divisor is linear in the frequency. Three numbers say where; one may be chosen, and
    low_freq_factor is 1 as in Llama's own. UnsupportedError if there are none such."""
    parameters = config["rope_parameters"]
    if parameters.get("rope_type") != "factors":
        raise UnsupportedError(f"rope parameters of the type {parameters.get('rope_type')!r} can't be written", param="output")
    divisors = np.array(parameters["factors"])
    factor = float(divisors.max())
    inv_freq = rope_from_config({**config, "rope_parameters": {"rope_theta": config["rope_theta"]}}, config["head_dim"]).inv_freq
    kept = (1 / divisors - 1 / factor) / (1 - 1 / factor) if factor > 1 else divisors
    between = (kept > 1e-5) & (kept < 1 - 1e-5)
    if factor <= 1 or not between.any():
        raise UnsupportedError("rope_freqs.weight is no scaling of the type llama3, the only one a folder has", param="output")
    high, original = _band(inv_freq[between].astype(np.float64), kept[between])
    return {
        "rope_type": "llama3", "factor": _exact(factor), "low_freq_factor": 1.0, "high_freq_factor": _exact(high),
        "original_max_position_embeddings": round(original),
    }  # fmt: skip


def _band(inv_freq: Array, kept: Array) -> tuple[float, float]:
    """high_freq_factor and original_max_position_embeddings so that kept = (original / 2 pi * inv_freq - 1) / (high - 1). One pair
    between does not say both: high is then 4, as in Llama's own."""
    if len(kept) == 1:
        return 4.0, float((3 * kept[0] + 1) / inv_freq[0] * 2 * math.pi)
    slope, less = np.polyfit(inv_freq, kept, 1)
    if less >= 0 or slope <= 0:
        raise UnsupportedError("rope_freqs.weight is no scaling of the type llama3, the only one a folder has", param="output")
    return float(1 - 1 / less), float(-2 * math.pi * slope / less)


def _exact(number: float) -> float:
    """Without what float32 divisors blur."""
    return float(f"{number:.5g}")


# The tensors.


def _main_type(checkpoint: Checkpoint) -> str:
    """The float type of all matrices; float32 where they have several, or blocks."""
    weights = [make() for make in checkpoint.tensors.values()]
    kinds = {weight.format for weight in weights if len(weight.shape) > 1}
    return kinds.pop() if len(kinds) == 1 and kinds <= FLOATS.keys() else "float32"


def _write_tensors(folder: Path, checkpoint: Checkpoint, config: Config, how: Writing) -> None:
    """A shard a layer, one for the rest, and the index."""
    shards: dict[str, list[str]] = {}
    for name in sorted(checkpoint.tensors):
        match = LAYER.search(name)
        shards.setdefault(f"{int(match[1]):05}" if match else "", []).append(name)
    weight_map, size, main = dict[str, str](), 0, _main_type(checkpoint)
    for i, names in enumerate((shards[key] for key in sorted(shards)), 1):
        shard = f"model-{i:05}-of-{len(shards):05}.safetensors"
        tensors = {name: _later(checkpoint, name, main, config, how) for name in names}
        write_safetensors(folder / shard, tensors)
        weight_map |= dict.fromkeys(names, shard)
        size += sum(tensor.nbytes for tensor in tensors.values())
    metadata = {"total_size": size, SOURCE: checkpoint.fingerprint}
    _write_json(folder / INDEX, {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))})


def _later(checkpoint: Checkpoint, name: str, main: str, config: Config, how: Writing) -> Later:
    """A tensor that is made when it is written. Vectors, which files have in float32, are of the matrices' type again where that
    holds them."""
    weight = checkpoint.tensor(name)
    kind = weight.format if weight.format in FLOATS else "float32"
    if len(weight.shape) == 1:
        numbers = converted(checkpoint, name, "float32", config, how.back)
        kind = main if np.array_equal(rounded(numbers, main), numbers) else "float32"
    nbytes = math.prod(weight.shape) * bits(np.zeros(1, np.float32), kind).itemsize
    return Later(weight.shape, FLOATS[kind], nbytes, partial(converted, checkpoint, name, kind, config, how.back))


# The tokenizer.


class Words(NamedTuple):
    """A file's tokenizer: what it is made from, made; and its default chat template."""

    known: Vocabulary
    tokenizer: Tokenizer
    template: str | None


def _words(checkpoint: Checkpoint) -> Words:
    data = checkpoint.tokenizer_data()
    known: Vocabulary = data["read"]()
    known = known._replace(build=cache(known.build))
    return Words(known, Tokenizer(known, data["chat_template"]), data["chat_template"])


def _write_words(folder: Path, words: Words, length: int) -> None:
    """tokenizer.json, tokenizer_config.json, the chat template and generation_config.json."""
    known, tokenizer, template = words
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer_json(words), ensure_ascii=False), "utf-8")
    config = {key: value for key, value in known.config.items() if key != "chat_template"}
    named = list(known.config.get("chat_template") or ())
    if named:  # a list in tokenizer_config.json is the only place for several
        config["chat_template"] = [*([{"name": "default", "template": template}] if template else []), *named]
    elif template:
        (folder / "chat_template.jinja").write_text(template, "utf-8")
    more = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": length, "clean_up_tokenization_spaces": False}
    _write_json(folder / "tokenizer_config.json", {**config, **more})
    roles = _roles(words)
    ends = [roles["eos_token_id"]] if "eos_token_id" in roles else []
    ends += sorted(tokenizer.eos_ids - {*ends})
    _write_json(folder / "generation_config.json", {**roles, **({"eos_token_id": ends} if len(ends) > 1 else {})})


def _roles(words: Words) -> Config:
    """Ids of the tokens that have a role in config.json."""
    named = words.tokenizer.named_tokens
    return {key: words.known.token_id(named[role]) for key, role in _ROLES.items() if role in named}


def _tokenizer_json(words: Words) -> Config:
    """What cuts and joins, without the unused tokens behind the last one, and with the tokens it puts around a text."""
    import tokenizers
    from tokenizers.processors import TemplateProcessing

    content: Config = json.loads(words.known.build().to_str())
    vocab = content["model"]["vocab"].items()
    content["model"]["vocab"] = {word: i for word, i in vocab if i < words.known.size}
    content["decoder"] = _decoder(words.known.decoder)
    try:
        backend = tokenizers.Tokenizer.from_str(json.dumps(content))
    except Exception as error:  # the package raises plain Exception
        raise CheckpointError(f"the file's tokenizer can't be written as a tokenizer.json: {error}") from error
    bos, eos = (words.tokenizer.named_tokens.get(role) if words.known.config.get(f"add_{role}") else None for role in _ENDS)
    around = [[*([f"{bos}:{i}"] if bos else []), f"${part}:{i}", *([f"{eos}:{i}"] if eos else [])] for i, part in enumerate("AB")]
    special = [(end, backend.token_to_id(end)) for end in (bos, eos) if end]
    backend.post_processor = TemplateProcessing(single=around[0], pair=around[0] + around[1], special_tokens=special)
    return dict(json.loads(backend.to_str()))


def _decoder(known: Mapping[str, Any]) -> Config:
    """With the fields that tokenizer.json must have."""
    if "decoders" in known:
        return {"type": "Sequence", **known}
    return {**known, "add_prefix_space": True, "trim_offsets": True, "use_regex": True}


# Whether it is the same.


def _check(checkpoint: Checkpoint, written: Checkpoint, how: Writing) -> None:
    """UnsupportedError unless the folder is read as the same Program, with all of its tensors and no others."""
    check_program({**checkpoint.config, **how.alike}, written.config, "a folder")
    wanted, there = _sources(build(written.config)), set(arrange(written.config, written.tensors))
    if differ := sorted(wanted ^ there - ({HEAD} if written.config["tie_word_embeddings"] else set())):
        what = "has no place for" if differ[0] in there else "would lack"
        raise UnsupportedError(f"a folder of {class_of(written)} {what} the tensor {differ[0]!r}", param="output")


def _check_words(mine: Tokenizer, written: Checkpoint) -> None:
    """UnsupportedError unless the folder has the same tokens, and cuts texts alike."""
    theirs = Tokenizer.from_data(written.tokenizer_data())
    check_words(mine, theirs, "a folder")
    alike: dict[str, Callable[[Tokenizer], Any]] = {
        "ids": lambda t: t.vocab_size, "BOS": lambda t: t.bos_id, "special tokens": lambda t: t.special_ids,
        "tokens": lambda t: [t.token_bytes(i) for i in range(t.vocab_size)], "chat template": lambda t: t.chat_template,
    }  # fmt: skip
    for name, of in alike.items():
        if of(mine) != of(theirs):
            raise UnsupportedError(f"the tokenizer of a folder would have other {name}", param="output")
    said = written.generation_config.get("eos_token_id")
    if not mine.eos_ids <= theirs.eos_ids | {*(said if isinstance(said, list) else [said])}:
        raise UnsupportedError("a folder would not know all tokens that end an answer", param="output")


def _sources(program: Program) -> set[str]:
    return {constant.source for constant in program.constants if constant.array is None}


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")
