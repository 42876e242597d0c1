"""open_checkpoint: a Hugging Face folder, or a file that a plugin reads, as one configuration and named, memory-mapped tensors."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from trivium.errors import CheckpointError, UnsupportedError
from trivium.extensions import blame, expect, find, installed
from trivium.ops import Weight
from trivium.weights.safetensors import find_tensors, parse_json

PICKLED = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})
MAX_JSON = 256 << 20
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

# The text model within a multimodal one, in both orders of the prefix; and a checkpoint of the model without its head.
_PREFIXES = (
    (re.compile(r"(?:model\.)?language_model\.(?:model\.)?(lm_head\.)"), r"\1"),
    (re.compile(r"(?:model\.)?language_model\.(?:model\.)?"), "model."),
    (re.compile(r"(?=layers\.\d|embed_tokens\.weight|norm\.weight)"), "model."),
)

Json = dict[str, Any]
Tensors = Mapping[str, Callable[[], Weight]]


@dataclass(frozen=True)
class Checkpoint:
    """A model as it lies on disk. Tensors are memory-mapped and read only when they are used.

    config and generation_config: as in config.json and generation_config.json. fingerprint: SHA-256 over configuration, headers and
    samples of the data; cheap, and it tells models apart. tensors: by canonical name, each made when it is called. tokenizer: gives
    tokenizer_data(). modules: those of sentence-transformers that a folder's modules.json lists, by class, each with its
    configuration.
    """

    path: Path
    config: Json
    generation_config: Json
    fingerprint: str
    tensors: Tensors
    tokenizer: Callable[[], Json]
    modules: Mapping[str, Json] = field(default_factory=dict)

    def tensor(self, name: str) -> Weight:
        """One tensor. A tied lm_head.weight is the embedding. CheckpointError if the checkpoint has none of that name."""
        if name == HEAD and name not in self.tensors and self.config["tie_word_embeddings"]:
            name = EMBEDDING
        if name not in self.tensors:
            raise CheckpointError(f"{self.path} has no tensor {name!r}; an incomplete checkpoint, or another architecture?")
        return self.tensors[name]()

    def tokenizer_data(self) -> Json:
        """What a tokenizer is made of: {"kind": "json", "tokenizer_json", "config", "chat_template"}, {"kind": "plugin", "path",
        "config", "chat_template"} or {"kind": "vocabulary", "read", "chat_template"}, where read() gives a trivium.text.Vocabulary;
        CheckpointError if there is none."""
        return self.tokenizer()


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Opens and checks a folder with config.json and safetensors, a file that a plugin reads (.gguf), or a folder with one such.

    Raises CheckpointError for what is missing, short or contradictory, naming file and tensor, and UnsupportedError for pickled
    weights and other kinds of file.
    """
    path = Path(path)
    try:
        return _open(path)
    except OSError as e:
        raise CheckpointError(f"{path} can't be read: {e.strerror or e}") from e


def _open(path: Path) -> Checkpoint:
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    suffixes = [f".{suffix}" for suffix in installed("checkpoint")]
    if path.is_file() and path.suffix.lower() in suffixes:
        return _open_file(path)
    if any(path.glob("*.safetensors")) or any(path.glob("*.safetensors.index.json")):
        return _open_folder(path)
    files = sorted(p for p in path.glob("*") if p.suffix.lower() in suffixes)
    if len(files) == 1:
        return _open_file(files[0])
    if files:
        raise CheckpointError(f"{path} holds several models ({', '.join(p.name for p in files)}); give the path of one of them")
    if PICKLED & {p.suffix for p in (path, *path.glob("*"))}:
        message = f"{path}: pickled weights (.bin, .pt, .pth) can run any code when they are loaded, so they never are"
        raise UnsupportedError(f"{message}; get the model as {' or '.join(['safetensors', *suffixes])}, or convert it")
    if path.is_dir():
        none = "neither a .safetensors" + "".join(f" nor a {suffix}" for suffix in suffixes)
        raise CheckpointError(f"{path} holds no model: there is {none} file; an incomplete download?")
    others = "".join(f", or a {suffix} file" for suffix in suffixes)
    raise UnsupportedError(f"{path} is no model file; give the folder that has config.json and .safetensors files{others}")


def _open_file(path: Path) -> Checkpoint:
    """A model in one file, read by the plugin for its suffix, which is to blame for whatever goes wrong in it later, too."""
    read, what = find("checkpoint", path.suffix.lower().removeprefix("."))
    blamed = blame(what)

    def tokenizer() -> Json:
        words = expect(Mapping, blamed(found.tokenizer_data)(), f"{what}: tokenizer").items()
        return {key: blamed(value) if callable(value) else value for key, value in words}

    found: Checkpoint = expect(Checkpoint, blamed(read)(path), what)
    for part, kind in (("config", dict), ("generation_config", Mapping), ("fingerprint", str), ("tensors", Mapping)):
        expect(kind, getattr(found, part), f"{what}: {part}")
    return replace(found, tensors=_blamed(found.tensors, what), tokenizer=tokenizer)


def _open_folder(folder: Path) -> Checkpoint:
    config, files, modules = read_json(folder / "config.json"), find_tensors(folder), _modules(folder)
    if "LogitScore" in modules:  # a decoder that ranks by the logits of two words
        config["architectures"] = [
            str(a).replace("ForCausalLM", "ForSequenceClassification") for a in config.get("architectures") or ()
        ]
        config["logit_score"] = modules["LogitScore"]
    tensors: dict[str, Callable[[], Weight]] = {}
    for stored, file in files.items():
        name = canonical_name(stored)
        if name in tensors:
            raise CheckpointError(f"{folder}: two tensors are {name!r}; one of them is called {stored!r}")
        tensors[name] = partial(file.weight, stored, name)
    if config.get("quantization_config") is None:
        config |= _described(folder)
    if (quantised := config.get("quantization_config")) is not None:
        tensors = _quantised(folder, quantised, tensors)
    text_config = config.get("text_config")
    levels = {"tie_word_embeddings": HEAD not in tensors} | config | (text_config if isinstance(text_config, dict) else {})
    config["tie_word_embeddings"] = levels["tie_word_embeddings"]
    generation = folder / "generation_config.json"
    parts = sorted({(file.path.name, file.fingerprint) for file in files.values()})
    fingerprint = hashlib.sha256(json.dumps([config, parts], sort_keys=True).encode()).hexdigest()
    generation_config = read_json(generation) if generation.exists() else {}
    return Checkpoint(folder, config, generation_config, fingerprint, tensors, partial(_folder_tokenizer, folder), modules)


def _described(folder: Path) -> Json:
    """A quantization_config made of the file in the folder by which an installed plugin is called; {} where there is none."""
    name = next((n for n in installed("weight_format") if n.endswith(".json") and (folder / n).is_file()), None)
    if name is None:
        return {}
    described = {canonical_name(key): value for key, value in read_json(folder / name).items()}
    return {"quantization_config": {**described, "quant_method": name}}


def _quantised(folder: Path, quantised: Any, tensors: Tensors) -> dict[str, Callable[[], Weight]]:
    """The weights of a checkpoint whose format only a plugin can read. UnsupportedError if there is none."""
    method = str(quantised.get("quant_method") if isinstance(quantised, dict) else quantised)
    read, what = find("weight_format", method)
    if read is None:
        known, message = ", ".join(installed("weight_format")), f"{folder} is quantised by {method}, which can't be read"
        raise UnsupportedError(f"{message}; take its unquantised files, a GGUF file, or a plugin (there is {known or 'none'})")
    return _blamed(blame(what)(lambda: dict(read(quantised, tensors)))(), what)


def _blamed(tensors: Tensors, what: str) -> dict[str, Callable[[], Weight]]:
    """The weights of a plugin, which is to blame for what making or decoding one raises."""
    blamed = blame(what)

    def make(name: str, weight: Callable[[], Weight]) -> Weight:
        found: Weight = copy(expect(Weight, blamed(weight)(), f"{what}: {name}"))
        vars(found).update(name=name, decoder=blamed(found.decoder))  # not replace(): that would ask for the data
        return found

    return {name: partial(make, name, weight) for name, weight in tensors.items()}


def canonical_name(name: str) -> str:
    """A tensor's name without the prefixes that multimodal and headless checkpoints put before or leave off it."""
    return next((pattern.sub(new, name, count=1) for pattern, new in _PREFIXES if pattern.match(name)), name)


def read_json(path: Path) -> Json:
    """A JSON object from a file; CheckpointError if it is missing, larger than MAX_JSON, or anything else."""
    return parse_json(_read_text(path), str(path))


def _modules(folder: Path) -> dict[str, Json]:
    path = folder / "modules.json"
    if not path.is_file():
        return {}
    listed = parse_json(f'{{"modules": {_read_text(path)}}}', str(path))["modules"]
    try:
        files = {str(m["type"]).rpartition(".")[2]: folder / Path(m["path"]).name / "config.json" for m in listed}
    except (TypeError, KeyError) as e:
        raise CheckpointError(f"{path} is no list of modules with type and path") from e
    return {name: read_json(file) if name != "Transformer" and file.is_file() else {} for name, file in files.items()}


def _read_text(path: Path) -> str:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; an incomplete download?")
    if path.stat().st_size > MAX_JSON:
        raise CheckpointError(f"{path} has {path.stat().st_size} bytes; at most {MAX_JSON} are read")
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError:
        raise CheckpointError(f"{path} is not UTF-8 text") from None


def _folder_tokenizer(folder: Path) -> Json:
    config: Json = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / name).exists():
            config |= read_json(folder / name)
    jinja = folder / "chat_template.jinja"
    template = _read_text(jinja) if jinja.exists() else config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default", next(iter(named.values()), None))
    data: Json = {"config": config, "chat_template": template}
    if not (folder / "tokenizer.json").exists() and config.get("tokenizer_class") in installed("tokenizer"):
        return data | {"kind": "plugin", "path": folder}
    return data | {"kind": "json", "tokenizer_json": _read_text(folder / "tokenizer.json")}
