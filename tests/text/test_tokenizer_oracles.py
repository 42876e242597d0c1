"""Ids, texts and rendered chats equal to `transformers` and `sentencepiece`, for every kind of tokenizer."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from awkward_strings import awkward_strings
from chat_templates import CONVERSATIONS, TEMPLATES, TOOLS
from tiny_tokenizers import WORDS, byte_level_data, byte_level_gguf, gguf_data, sentencepiece_gguf

from trivium.errors import TemplateError
from trivium.text import Tokenizer

pytestmark = pytest.mark.oracles
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")


def folder_tokenizer(folder: Path, data: dict[str, Any]) -> Any:
    (folder / "tokenizer.json").write_text(data["tokenizer_json"])
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | data["config"]))
    return transformers.AutoTokenizer.from_pretrained(folder)


def gguf_tokenizer(path: Path, architecture: str, data: dict[str, Any]) -> Any:
    """What transformers makes of a GGUF file with this metadata."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in data["read"].args[0].items():
        kinds = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            list: writer.add_array,
        }
        kinds[type(value)](key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return transformers.PreTrainedTokenizerFast(gguf_file=path.name, name_or_path=str(path.parent))


def compare(ours: Tokenizer, theirs: Any, texts: list[str]) -> None:
    adds_bos = theirs.encode("a")[:1] == [ours.bos_id]
    for text in texts:
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == theirs.encode(text, add_special_tokens=False), text
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip), text
        full = theirs.encode(text)
        doubled = adds_bos and full[:2] == [ours.bos_id] * 2  # ours never doubles BOS
        assert ours.encode(text) == full[doubled:], text


@pytest.mark.parametrize("flags", [{}, {"add_bos_token": True}, {"add_bos_token": True, "add_eos_token": True}])
def test_byte_level_from_tokenizer_json(tmp_path: Path, flags: dict[str, bool]) -> None:
    data = byte_level_data(additional_special_tokens=["</think>"])
    theirs = folder_tokenizer(tmp_path, data)
    for flag, value in flags.items():
        setattr(theirs, flag, value)
    ours = Tokenizer.from_data(data | {"config": data["config"] | flags})
    compare(ours, theirs, awkward_strings())


def test_what_tokenizer_json_puts_around_a_text_stays(tmp_path: Path) -> None:
    from tokenizers import processors

    data = byte_level_data()
    backend = tokenizers.Tokenizer.from_str(data["tokenizer_json"])
    start = ("<|endoftext|>", backend.token_to_id("<|endoftext|>"))
    backend.post_processor = processors.TemplateProcessing(single=[start[0], "$A"], special_tokens=[start])
    data["tokenizer_json"] = backend.to_str()
    assert Tokenizer.from_data(data).encode("the") == backend.encode("the").ids
    compare(Tokenizer.from_data(data), folder_tokenizer(tmp_path, data), awkward_strings())


@pytest.mark.parametrize(
    "pre", ["gpt-2", "default", "llama-bpe", "qwen2", "qwen35", "tekken", "gpt-4o", "llama4", "deepseek-r1-qwen"]
)
def test_byte_level_from_gguf(tmp_path: Path, pre: str) -> None:
    data = byte_level_gguf(pre, add_bos_token=True)
    ours, theirs = Tokenizer.from_data(data), gguf_tokenizer(tmp_path / "m.gguf", "llama", data)
    compare(ours, theirs, awkward_strings())


@pytest.mark.parametrize(("architecture", "prefix"), [("gemma3", False), ("phi3", True)])
def test_sentencepiece_from_gguf(tmp_path: Path, architecture: str, prefix: bool) -> None:
    data = sentencepiece_gguf(add_space_prefix=prefix, add_bos_token=True)
    texts = [text for text in awkward_strings() if not (prefix and "s>" in text)]  # there transformers adds <s> and </s> of its own
    compare(Tokenizer.from_data(data), gguf_tokenizer(tmp_path / "m.gguf", architecture, data), texts)


@pytest.fixture(scope="module")
def trained() -> Any:
    sentencepiece = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter((WORDS + "\n".join(awkward_strings(specials=()))).splitlines()),
        model_writer=model,
        model_type="bpe",
        vocab_size=1300,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        character_coverage=0.98,
        user_defined_symbols=["<think>"],
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def test_a_trained_sentencepiece_model(trained: Any) -> None:
    count = trained.get_piece_size()
    types = [
        2
        if trained.is_unknown(i)
        else 3
        if trained.is_control(i)
        else 6
        if trained.is_byte(i)
        else 4
        if trained.id_to_piece(i) == "<think>"
        else 1
        for i in range(count)
    ]
    tokens = [trained.id_to_piece(i) for i in range(count)]
    data = gguf_data(
        model="llama",
        tokens=tokens,
        scores=[trained.get_score(i) for i in range(count)],
        token_type=types,
        bos_token_id=trained.bos_id(),
        eos_token_id=trained.eos_id(),
        unknown_token_id=trained.unk_id(),
        add_space_prefix=True,
    )
    tokenizer = Tokenizer.from_data(data)
    for text in awkward_strings(specials=()):
        if not any(
            token in text for token in ("<unk>", "</s>", "<s>", "\0")
        ):  # those SentencePiece takes as plain text, or as its end
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert ids == trained.encode(text), text
            assert tokenizer.decode(ids) == trained.decode(ids)


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("prompt", [True, False])
def test_chats_are_rendered_alike(
    chat_pair: tuple[Tokenizer, Any], template: str, conversation: str, tools: Any, prompt: bool
) -> None:
    ours, theirs = chat_pair
    messages, source = CONVERSATIONS[conversation], TEMPLATES[template]
    tools = tools if "tools" in source else None  # else they are refused here, and ignored there
    arguments: dict[str, Any] = {"tools": tools, "add_generation_prompt": prompt, "enable_thinking": False}
    try:
        expected = theirs.apply_chat_template(messages, chat_template=source, tokenize=False, **arguments)
    except Exception:
        with pytest.raises(TemplateError):
            ours.render_chat(messages, template=source, **arguments)
        return
    assert ours.render_chat(messages, template=source, **arguments) == expected
    ids = theirs.apply_chat_template(messages, chat_template=source, return_dict=False, **arguments)
    assert ours.encode_chat(messages, template=source, **arguments) == ids


@pytest.fixture(scope="module")
def chat_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    data = byte_level_data()
    return Tokenizer.from_data(data), folder_tokenizer(tmp_path_factory.mktemp("chat"), data)
