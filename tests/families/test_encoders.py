"""Encoders and cross-encoders through the whole engine against transformers, float32, in company and alone."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from encoder_cases import CASES, SIZES, encoder, hidden_of, logits_of, seeded, tokenizer_of, write_modules, write_tokenizer

from trivium import LLM, PoolingParams
from trivium.errors import CheckpointError, ContextLengthError, InvalidRequestError, NoCacheError, UnsupportedError

pytestmark = pytest.mark.oracles
pytest.importorskip("transformers")

TEXTS = [
    "the quick brown fox", "Paris is the capital of France. " * 4, "a", "some more words follow, with numbers 1 2 3 10 200 " * 2,
    "jumps over the lazy dog", "don't",
]  # fmt: skip
PAIRS = [("the quick fox", "Paris is the capital of France."), ("dog", "over the lazy dog " * 3), ("France", "the capital")]
KINDS = {"mean": lambda h: h.mean(0), "cls": lambda h: h[0], "last": lambda h: h[-1]}
BACKENDS = ["reference", "cpu", "torch:cpu"]


def close(got, want):
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def opened(folder, backend="reference", **more):
    if backend == "cpu":
        pytest.importorskip("trivium_cpu._native")
        more["strict"] = True  # every operator of an encoder has a kernel there
    return LLM(folder, backend, **{"dtype": "float32", "kv_dtype": "float32", "progress": False, **more})


def vectors(llm, prompts, kind=None, normalize=False):
    return [output.embedding for output in llm.embed(prompts, PoolingParams(kind, normalize=normalize))]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_hidden_states_equal_the_oracle_in_company(name, backend, tmp_path):
    model, tokenizer = encoder(name, tmp_path)
    with opened(tmp_path, backend, max_num_batched_tokens=128, max_num_seqs=4) as llm:
        for kind, pooled in KINDS.items():
            for got, text in zip(vectors(llm, TEXTS, kind), TEXTS, strict=True):
                close(got, pooled(hidden_of(model, tokenizer, text)))
        assert llm.engine.stats.steps < 3 * len(TEXTS)  # several in a step
        llm.engine.check()


@pytest.mark.parametrize("head", ["ForMaskedLM", "ForSequenceClassification"])
@pytest.mark.parametrize("name", CASES)
def test_bodies_of_models_with_heads_and_their_classes_equal_the_oracle(name, head, tmp_path):
    model, tokenizer = encoder(name, tmp_path, head, num_labels=3)
    with opened(tmp_path, max_num_seqs=4) as llm:
        found = vectors(llm, TEXTS + PAIRS, "cls")
        for got, texts in zip(found, [*((text,) for text in TEXTS), *PAIRS], strict=True):
            body = getattr(model, model.base_model_prefix)
            close(got, hidden_of(body, tokenizer, *texts)[0] if head == "ForMaskedLM" else logits_of(model, tokenizer, *texts))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["bert", "xlm-roberta", "modernbert"])
def test_a_cross_encoder_scores_pairs_as_the_oracle_does(name, backend, tmp_path):
    model, tokenizer = encoder(name, tmp_path, "ForSequenceClassification", num_labels=1)
    with opened(tmp_path, backend) as llm:
        assert llm.cross_encoder
        want = [1 / (1 + math.exp(-logits_of(model, tokenizer, *pair).item())) for pair in PAIRS]
        close(llm.score(PAIRS), want)


@pytest.mark.parametrize(("name", "backend"), [("modernbert", "reference"), ("modernbert", "cpu"), ("bert", "cpu")])
def test_a_text_has_the_same_bits_alone_and_in_company(name, backend, tmp_path):
    encoder(name, tmp_path)
    with opened(tmp_path, backend) as llm:
        together = vectors(llm, TEXTS)
        for text, vector in zip(TEXTS, together, strict=True):
            np.testing.assert_array_equal(vectors(llm, text)[0], vector)


def test_a_text_is_never_cut_and_one_too_long_is_refused(tmp_path):
    encoder("bert", tmp_path)
    with opened(tmp_path, max_num_batched_tokens=64) as llm:
        assert llm.loaded.max_model_len == 64
        ids = [3 + i % 60 for i in range(64)]
        assert len(llm.embed([ids, ids[:40], ids[:30]])) == 3
        assert llm.engine.stats.steps == 3  # none of them leaves room for another
        with pytest.raises(ContextLengthError, match="64"):
            llm.embed([[*ids, 3]])
    with opened(tmp_path) as llm:
        assert llm.loaded.max_model_len == 130 <= llm.loaded.max_num_batched_tokens
    with pytest.raises(InvalidRequestError, match="max_num_batched_tokens"):
        opened(tmp_path, max_num_batched_tokens=64, max_model_len=100)


def test_an_encoder_makes_no_tokens(tmp_path):
    encoder("bert", tmp_path)
    with opened(tmp_path) as llm:
        with pytest.raises(UnsupportedError, match="makes no tokens"):
            llm.generate("the dog")
        with pytest.raises(UnsupportedError, match="does not score pairs"):
            llm.score(PAIRS)
        assert not llm.engine.has_unfinished()


LEGACY = {"word_embedding_dimension": 48, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": False}


@pytest.mark.parametrize(
    ("modules", "kind", "unit"),
    [
        (None, "mean", True),
        ({"Transformer": {}, "Pooling": {**LEGACY, "pooling_mode_cls_token": True}, "Normalize": {}}, "cls", True),
        ({"Transformer": {}, "Pooling": {**LEGACY, "pooling_mode_mean_tokens": True}}, "mean", False),
        ({"Transformer": {}, "Pooling": {"embedding_dimension": 48, "pooling_mode": "lasttoken"}, "Normalize": {}}, "last", True),
    ],
)
def test_embeddings_are_pooled_as_sentence_transformers_configuration_says(modules, kind, unit, tmp_path):
    model, tokenizer = encoder("bert", tmp_path)
    if modules:
        write_modules(tmp_path, modules)
    with opened(tmp_path) as llm:
        for output, text in zip(llm.embed(TEXTS), TEXTS, strict=True):
            want = KINDS[kind](hidden_of(model, tokenizer, text))
            close(output.embedding, want / np.linalg.norm(want) if unit else want)
        close(
            vectors(llm, TEXTS[:1], "last")[0], KINDS["last"](hidden_of(model, tokenizer, TEXTS[0]))
        )  # a request's own word counts


@pytest.mark.parametrize(
    ("modules", "error", "match"),
    [
        ({"Transformer": {}, "Pooling": {"pooling_mode": "max"}}, UnsupportedError, "max"),
        ({"Transformer": {}, "Pooling": {"pooling_mode": ["cls", "mean"]}}, UnsupportedError, "cls"),
        ({"Transformer": {}, "Pooling": {**LEGACY, "pooling_mode_mean_sqrt_len_tokens": True}}, UnsupportedError, "mean_sqrt"),
        ({"Transformer": {}, "Pooling": {"pooling_mode": "mean"}, "Dense": {}}, UnsupportedError, "Dense"),
    ],
)
def test_other_ways_of_pooling_are_refused_by_name(modules, error, match, tmp_path):
    encoder("bert", tmp_path)
    write_modules(tmp_path, modules)
    with pytest.raises(error, match=match):
        opened(tmp_path)


@pytest.mark.parametrize("text", ["[1]", "[{}]", '{"a": 1}', "[", '[{"type": "x.Pooling"}]'])
def test_a_damaged_list_of_modules_is_named(text, tmp_path):
    encoder("bert", tmp_path)
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"modules\.json"):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"), ({"is_decoder": True}, "is_decoder"),
        ({"type_vocab_size": "two"}, "type_vocab_size"), ({"layer_norm_eps": -1}, "layer_norm_eps"),
    ],
)  # fmt: skip
def test_what_an_encoder_can_t_be_is_refused_by_its_key(changes, match, tmp_path):
    encoder("bert", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises((CheckpointError, UnsupportedError), match=match):
        opened(tmp_path)


def decoder(folder, words, causal=True, **more):
    """A tiny Qwen3 with or without a head of classes, and the files of its tokenizer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3ForSequenceClassification

    sizes = {**SIZES, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": words.get_vocab_size(), "pad_token_id": 1}
    kind = Qwen3ForCausalLM if causal else Qwen3ForSequenceClassification
    return seeded(kind(Qwen3Config(**sizes, **more)), folder, 5)


PAIR_TEMPLATE = (
    "{{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }} = "
    "{{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }} ?"
)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_decoder_with_a_head_of_classes_equals_the_oracle_in_chunks_and_behind_cached_prefixes(backend, tmp_path):
    words = tokenizer_of("bytes")
    model, tokenizer = decoder(tmp_path, words, causal=False, num_labels=3), write_tokenizer(words, "bytes", tmp_path)
    with opened(tmp_path, backend, max_num_batched_tokens=16, num_kv_blocks=60) as llm:
        assert not llm.cross_encoder
        for _ in range(2):
            for got, text in zip(vectors(llm, TEXTS), TEXTS, strict=True):
                close(got, logits_of(model, tokenizer, text))
        assert llm.engine.stats.cached_tokens > 0


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("both", [True, False])
def test_a_reranker_by_yes_and_no_scores_as_its_logits_say(tied, both, tmp_path):
    import torch

    words = tokenizer_of("bytes")
    model, tokenizer = decoder(tmp_path, words, tie_word_embeddings=tied), write_tokenizer(words, "bytes", tmp_path)
    yes, no = 17, 23
    write_modules(tmp_path, {"Transformer": {}, "LogitScore": {"true_token_id": yes, "false_token_id": no if both else None}})
    (tmp_path / "chat_template.jinja").write_text(PAIR_TEMPLATE)
    with opened(tmp_path) as llm:
        for got, (query, document) in zip(llm.score(PAIRS), PAIRS, strict=True):
            ids = tokenizer(f"{query} = {document} ?", add_special_tokens=False, return_tensors="pt")["input_ids"]
            with torch.no_grad():
                logits = model(ids).logits[0, -1].numpy()
            close(got, 1 / (1 + math.exp(-(logits[yes] - both * logits[no]))))


@pytest.mark.parametrize("token", [None, "yes", -1, 10**6])
def test_a_reranker_whose_word_is_no_token_is_refused(token, tmp_path):
    words = tokenizer_of("bytes")
    decoder(tmp_path, words)
    write_tokenizer(words, "bytes", tmp_path)
    write_modules(tmp_path, {"Transformer": {}, "LogitScore": {"true_token_id": token}})
    with pytest.raises(CheckpointError, match="true_token_id"):
        opened(tmp_path)


def test_a_separator_has_the_id_that_the_tokenizer_gives_it_and_a_model_without_one_is_refused(tmp_path):
    encoder("bert", tmp_path)
    path = tmp_path / "config.json"
    assert json.loads(path.read_text()).get("sep_token_id") is None
    with opened(tmp_path) as llm:
        [call] = [call for call in llm.loaded.program.calls if call.name == "segment_embedding"]
        assert call.attrs["separator"] == llm.tokenizer.encode("the")[-1]
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text().replace("[SEP]", "[END]"))
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(CheckpointError, match="sep_token_id"):
        opened(tmp_path)


def test_ranks_share_the_heads_of_an_encoder(tmp_path):
    model, tokenizer = encoder("bert", tmp_path)
    with opened(tmp_path, "torch:cpu", backend_options={"tensor_parallel": 2}) as llm:
        for got, text in zip(vectors(llm, TEXTS, "mean"), TEXTS, strict=True):
            close(got, hidden_of(model, tokenizer, text).mean(0))


@pytest.mark.parametrize(("more", "most"), [({"dtype": "bfloat16"}, 0.02), ({"quantize": "int8"}, 0.05)])
def test_weights_and_activations_in_fewer_bits_change_embeddings_little(more, most, tmp_path):
    model, tokenizer = encoder("modernbert", tmp_path)
    with opened(tmp_path, "cpu", **more) as llm:
        for output, text in zip(llm.embed(TEXTS), TEXTS, strict=True):
            want = hidden_of(model, tokenizer, text).mean(0)
            np.testing.assert_allclose(output.embedding, want / np.linalg.norm(want), atol=most)


def test_a_prompt_is_embedded_by_the_backend_that_computes_prompts(tmp_path):
    model, tokenizer = encoder("bert", tmp_path)
    with opened(tmp_path, "reference", prefill="torch:cpu") as llm:
        close(vectors(llm, TEXTS[:2], "cls"), [hidden_of(model, tokenizer, text)[0] for text in TEXTS[:2]])


CACHED = {
    "speculative": {"method": "ngram"}, "kv_host_bytes": 1 << 20, "kv_disk_path": "pages", "enable_prefix_caching": True,
    "block_size": 16, "num_kv_blocks": 8,
}  # fmt: skip


@pytest.mark.parametrize("option", CACHED)
def test_an_option_of_the_cache_that_an_encoder_lacks_is_refused_by_name(option, tmp_path, monkeypatch):
    encoder("bert", tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NoCacheError, match=f"without a KV cache: leave {option} out") as refused:
        opened(tmp_path, **{option: CACHED[option]})
    assert (refused.value.param, refused.value.code) == (option, "no_cache")
    assert not (tmp_path / "pages").exists()


def test_an_encoder_takes_what_turns_the_cache_off(tmp_path):
    encoder("bert", tmp_path)
    with opened(tmp_path, enable_prefix_caching=False, kv_host_bytes=0, speculative=None) as llm:
        assert len(llm.embed(TEXTS)) == len(TEXTS)
