"""Tiny random encoders and cross-encoders as transformers and tokenizers write them, with the folder that trivium opens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizers import WORDS

SIZES: dict[str, Any] = {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 130,
}  # fmt: skip

CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("Bert", "wordpiece", {"type_vocab_size": 2}),
    "bert-tanh": ("Bert", "wordpiece", {"hidden_act": "gelu_new", "layer_norm_eps": 1e-6}),
    "roberta": ("Roberta", "bytes", {"type_vocab_size": 1, "pad_token_id": 1}),
    "xlm-roberta": ("XLMRoberta", "unigram", {"type_vocab_size": 1, "pad_token_id": 1}),
    "modernbert": ("ModernBert", "bytes", {"local_attention": 12, "num_hidden_layers": 5}),
    "modernbert-biased": (
        "ModernBert", "bytes",
        {"local_attention": 7, "norm_bias": True, "attention_bias": True, "mlp_bias": True, "classifier_bias": True,
         "classifier_pooling": "mean", "global_attn_every_n_layers": 2, "hidden_activation": "gelu_pytorch_tanh"},
    ),
}  # fmt: skip
"""transformers' name of the family, the kind of its tokenizer and what the case adds to the sizes."""

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]


def tokenizer_of(kind: str) -> Any:
    """A trained `tokenizers.Tokenizer` that puts its family's special tokens around texts and pairs."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    if kind == "wordpiece":
        made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
        made.decoder, special = decoders.WordPiece(), ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        made.train_from_iterator(
            [WORDS] * 3, trainers.WordPieceTrainer(vocab_size=200, special_tokens=special, show_progress=False)
        )
        around = ("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1")
    elif kind == "unigram":
        made = Tokenizer(models.Unigram())
        made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=150, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
        made.train_from_iterator([WORDS] * 3, trainer)
        around = ("<s> $A </s>", "<s> $A </s> </s> $B </s>")
    else:
        made = Tokenizer(models.BPE())
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
        made.train_from_iterator([WORDS] * 3, trainer)
        around = ("<s> $A </s>", "<s> $A </s> </s> $B </s>")
    used = [(token, made.token_to_id(token)) for token in ("[CLS]", "[SEP]", "<s>", "</s>") if made.token_to_id(token) is not None]
    made.post_processor = processors.TemplateProcessing(single=around[0], pair=around[1], special_tokens=used)
    return made


def encoder(name: str, folder: Path, head: str = "Model", **more: Any) -> tuple[Any, Any]:
    """(transformers' model of the case with seeded numbers, its tokenizer), both saved to `folder`."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.set_num_threads(1)
    family, kind, sizes = CASES[name]
    words = tokenizer_of(kind)
    own = {"pad_token_id": words.token_to_id("[PAD]" if kind == "wordpiece" else "<pad>")}
    config = getattr(transformers, f"{family}Config")(**{**SIZES, "vocab_size": words.get_vocab_size(), **own, **sizes, **more})
    return seeded(getattr(transformers, f"{family}{head}")(config), folder, len(name)), write_tokenizer(words, kind, folder)


def seeded(model: Any, folder: Path, seed: int) -> Any:
    """The model with numbers large enough that every part of it matters, saved."""
    import torch

    model.eval()
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.empty_like(parameter).normal_(generator=generator)
        flat = parameter.dim() < 2
        parameter.data.copy_(parameter.data * flat + noise * (0.2 if flat else 1.2 * parameter.shape[-1] ** -0.5))
    model.save_pretrained(folder)
    return model


def write_tokenizer(words: Any, kind: str, folder: Path) -> Any:
    """transformers' tokenizer around `words`, whose files are in `folder`."""
    from transformers import PreTrainedTokenizerFast

    names = ("[CLS]", "[SEP]", "[PAD]", "[UNK]") if kind == "wordpiece" else ("<s>", "</s>", "<pad>", "<unk>")
    roles = dict(zip(("cls_token", "sep_token", "pad_token", "unk_token"), names, strict=True))
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(roles))
    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **roles)


def hidden_of(model: Any, tokenizer: Any, *texts: str) -> Any:
    """float32[tokens, hidden]: the oracle's last hidden states of a text (or of a pair), alone and without padding."""
    import torch

    with torch.no_grad():
        return model(**inputs_of(tokenizer, *texts)).last_hidden_state[0].numpy()


def logits_of(model: Any, tokenizer: Any, *texts: str) -> Any:
    """float32[labels]: a classifier's numbers for a text or a pair."""
    import torch

    with torch.no_grad():
        return model(**inputs_of(tokenizer, *texts)).logits[0].numpy()


def inputs_of(tokenizer: Any, *texts: str) -> Any:
    kept = ("input_ids", "token_type_ids") if tokenizer.cls_token == "[CLS]" else ("input_ids",)
    encoded = tokenizer(*texts, return_tensors="pt", return_token_type_ids=True)
    return {key: encoded[key] for key in kept}


def write_modules(folder: Path, modules: dict[str, dict[str, Any]]) -> None:
    """modules.json of sentence-transformers, by class, each with its configuration."""
    listed = []
    for i, (name, config) in enumerate(modules.items()):
        path = "" if name == "Transformer" else f"{i}_{name}"
        listed.append({"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"})
        if path:
            (folder / path).mkdir()
            (folder / path / "config.json").write_text(json.dumps(config))
    (folder / "modules.json").write_text(json.dumps(listed))
