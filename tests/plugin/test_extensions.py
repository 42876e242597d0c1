"""Plugins of every kind beside backends: those of docs/plugins.md, each used end to end, and broken ones."""

from __future__ import annotations

import json
import sys

import documented_plugins
import numpy as np
import pytest
from chat_models import TEMPLATE, make_chat_model
from tiny_checkpoints import byte_tokenizer, make_checkpoint, make_weights, tiny_config, write_safetensors
from weight_files import safetensors_bytes, write_gguf

from trivium import LLM, SamplingParams
from trivium.cli.main import build_parser, main
from trivium.errors import CheckpointError, InvalidRequestError, ModelNotFoundError, PluginError, UnsupportedError
from trivium.extensions import KINDS, find, installed
from trivium.models import build
from trivium.plugin.hooks import Hooks
from trivium.text import Tokenizer
from trivium.text.parser import OutputParser
from trivium.text.syntaxes import REASONING, TOOLS, choose
from trivium.weights import open_checkpoint, resolve

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPT = [5, 77, 130, 9, 200, 41]
BACKENDS = ["reference", "cpu"]


@pytest.fixture
def plugins(tmp_path, monkeypatch):
    """The documented ones, installed; returns their entry points by group."""
    site = tmp_path / "site"
    site.mkdir()
    return documented_plugins.install(site, monkeypatch)


@pytest.fixture
def site(tmp_path, monkeypatch):
    folder = tmp_path / "other"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    return folder


def offer(site, kind, name, source, *, distribution="vendor"):
    """A distribution with one plugin of that kind."""
    module = f"{distribution.replace('-', '_')}_{kind}_{abs(hash((str(site), name, source)))}"
    (site / f"{module}.py").write_text("from trivium.plugin import hookimpl\n" + source)
    documented_plugins.distribution(site, distribution, {f"trivium.{kind}s": {name: module}})


def hook(kind, body="return 7"):
    return f"@hookimpl\ndef trivium_{kind}():\n    {body}\n"


def ids(path, backend="reference", **options):
    with LLM(str(path), backend, progress=False, num_kv_blocks=20, **options) as llm:
        return llm.generate([PROMPT], GREEDY)[0].outputs[0].token_ids


def greedy(logits, count=8):
    """`count` tokens, each the one for which `logits` of everything before it are largest."""
    known = list(PROMPT)
    for _ in range(count):
        known.append(int(np.argmax(logits(known)[:259])))  # what the tokenizer knows
    return known[len(PROMPT) :]


def parallel_logits(weights, tokens):
    """The parallel family's last logits in plain float64, straight from its description."""
    c = tiny_config("llama")
    heads, kv_heads, dim = c["num_attention_heads"], c["num_key_value_heads"], c["hidden_size"] // c["num_attention_heads"]
    w = {name: array.astype(np.float64) for name, array in weights.items()}
    norm = lambda x, name: x / np.sqrt((x**2).mean(-1, keepdims=True) + c["rms_norm_eps"]) * w[name]
    n = len(tokens)
    angles = np.arange(n)[:, None] * c["rope_theta"] ** (-np.arange(0, dim, 2) / dim)

    def turn(x):
        a, b = np.split(x, 2, axis=-1)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    x = w["model.embed_tokens.weight"][tokens]
    for i in range(c["num_hidden_layers"]):
        name = f"model.layers.{i}"
        y = norm(x, f"{name}.input_layernorm.weight")
        parts = ((f"{p}_proj", h) for p, h in (("q", heads), ("k", kv_heads), ("v", kv_heads)))
        q, k, v = ((y @ w[f"{name}.self_attn.{p}.weight"].T).reshape(n, h, dim) for p, h in parts)
        q, k = turn(q), turn(k)
        k, v = (np.repeat(t, heads // kv_heads, axis=1) for t in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) * dim**-0.5 + np.triu(np.full((n, n), -np.inf), 1)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        attended = np.einsum("hqk,khd->qhd", shares, v).reshape(n, -1) @ w[f"{name}.self_attn.o_proj.weight"].T
        gate, up = (y @ w[f"{name}.mlp.{p}_proj.weight"].T for p in ("gate", "up"))
        x = x + attended + (gate / (1 + np.exp(-gate)) * up) @ w[f"{name}.mlp.down_proj.weight"].T
    return norm(x, "model.norm.weight")[-1] @ w["lm_head.weight"].T


def parallel_folder(folder):
    """A checkpoint of the parallel family, and its arrays."""
    make_checkpoint(folder, "llama", architectures=["ParallelForCausalLM"], model_type="parallel")
    return make_weights(tiny_config("llama", architectures=["ParallelForCausalLM"]))


def test_every_kind_has_a_hook_a_place_in_the_document_and_an_example(plugins):
    asked_by_the_core = {f"trivium_{kind}" for kind in KINDS if kind not in ("moderation", "command")}  # asked by others
    assert {name for name in vars(Hooks) if name.startswith("trivium_")} == asked_by_the_core
    text = documented_plugins.DOCUMENT.read_text()
    assert all(f"| `trivium.{kind}s` |" in text for kind in KINDS if kind != "backend")
    assert plugins.keys() == {f"trivium.{kind}s" for kind in KINDS if kind != "backend"}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_family_from_a_plugin_generates_what_its_formula_says(plugins, tmp_path, backend):
    weights = parallel_folder(tmp_path / "model")
    assert "mlp.down_proj" in str(build(tiny_config("llama", architectures=["ParallelForCausalLM"])))
    assert ids(tmp_path / "model", backend) == greedy(lambda known: parallel_logits(weights, known))


def test_a_family_that_writes_its_sizes_otherwise_reads_them_itself(site, tmp_path):
    """The llama under other keys, from outside: the same tokens."""
    source = """
from trivium.models import Decoder, Family, read_info
KEYS = {"n_embd": "hidden_size", "n_head": "num_attention_heads", "n_inner": "intermediate_size", "n_layer": "num_hidden_layers"}
def read(architecture, config):
    return read_info(architecture, {**config, **{new: config[old] for old, new in KEYS.items()}, "hidden_act": "silu"})
def build(info, max_model_len):
    return Decoder(info, max_model_len).pre_norm((None,) * info.layers)
"""
    offer(site, "model", "OddForCausalLM", source + hook("model", "return Family(build, {'rms_norm_eps': 1e-6}, read)"))
    make_checkpoint(tmp_path / "plain", "llama")
    make_checkpoint(tmp_path / "odd", "llama")
    config = tiny_config("llama", architectures=["OddForCausalLM"])
    renamed = {
        "hidden_size": "n_embd",
        "num_attention_heads": "n_head",
        "intermediate_size": "n_inner",
        "num_hidden_layers": "n_layer",
    }
    config = {renamed.get(key, key): value for key, value in config.items() if key != "hidden_act"}
    (tmp_path / "odd" / "config.json").write_text(json.dumps(config))
    assert ids(tmp_path / "odd") == ids(tmp_path / "plain")


def test_an_architecture_of_gguf_files_from_a_plugin_is_the_folders_model(plugins, tmp_path):
    weights = parallel_folder(tmp_path / "model")
    outer = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    from trivium_formats.gguf import LAYER

    inner = {new: old for old, new in LAYER.items()}
    tensors = {}
    for name, array in weights.items():
        stem = name.removesuffix(".weight")
        layer = stem.removeprefix("model.layers.").partition(".")
        tensors[f"{outer[stem] if stem in outer else f'blk.{layer[0]}.{inner[layer[2]]}'}.weight"] = array
    c = tiny_config("llama")
    sizes = {
        "context_length": c["max_position_embeddings"], "embedding_length": c["hidden_size"],
        "block_count": c["num_hidden_layers"], "feed_forward_length": c["intermediate_size"],
        "attention.head_count": c["num_attention_heads"], "attention.head_count_kv": c["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": c["rms_norm_eps"], "rope.freq_base": float(c["rope_theta"]),
    }  # fmt: skip
    vocab = sorted(byte_tokenizer()["model"]["vocab"].items(), key=lambda item: item[1])
    tokens = [*(t for t, _ in vocab), *(f"<x{i}>" for i in range(3))]
    words = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.eos_token_id": 257}
    path = write_gguf(tmp_path / "m.gguf", "parallel", {f"parallel.{k}": v for k, v in sizes.items()} | words, tensors)
    assert open_checkpoint(path).config["architectures"] == ["ParallelForCausalLM"]
    assert ids(path) == ids(tmp_path / "model")


def npz_file(path):
    """The llama checkpoint as one file."""
    folder = make_checkpoint(path.parent / "llama", "llama")
    texts = {name: np.array((folder / name).read_text()) for name in ("config.json", "tokenizer.json")}
    np.savez(path, **texts, **make_weights(tiny_config("llama")))
    return path


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_kind_of_file_from_a_plugin_is_the_folders_model(plugins, tmp_path, backend):
    path = npz_file(tmp_path / "m.npz")
    assert ids(path, backend) == ids(tmp_path / "llama", backend)
    (tmp_path / "folder").mkdir()
    path = path.rename(tmp_path / "folder" / path.name)
    assert open_checkpoint(tmp_path / "folder").path == path
    (tmp_path / "folder" / "m.gguf").write_bytes(b"?")
    with pytest.raises(CheckpointError, match=r"several models \(m\.gguf, m\.npz\)"):
        open_checkpoint(tmp_path / "folder")


def test_a_file_of_a_kind_that_nobody_reads_is_refused_with_the_kinds_there_are(plugins, tmp_path):
    with pytest.raises(UnsupportedError, match=r"no model file.* or a \.gguf file, or a \.npz file$"):
        open_checkpoint(write_bytes(tmp_path / "m.onnx"))
    with pytest.raises(CheckpointError, match=r"neither a \.safetensors nor a \.gguf nor a \.npz file"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("part", ["tensors", "tokenizer"])
def test_a_kind_of_file_is_blamed_for_what_fails_after_it_was_opened(site, tmp_path, part):
    parts = "{'a': lambda: 1 / 0}, lambda: {'kind': 'vocabulary', 'read': lambda: 1 / 0}"
    source = f"from trivium.weights import Checkpoint\ndef read(path):\n    return Checkpoint(path, {{}}, {{}}, '', {parts})\n"
    offer(site, "checkpoint", "torn", source + hook("checkpoint", "return read"))
    checkpoint = open_checkpoint(write_bytes(tmp_path / "m.torn"))
    with pytest.raises(PluginError, match=r"^checkpoint 'torn' \(vendor 1\.0\) failed: ZeroDivisionError"):
        checkpoint.tensor("a") if part == "tensors" else Tokenizer.from_data(checkpoint.tokenizer_data())


def quantised_folder(folder):
    """The llama checkpoint with its matrices as int8 codes and scales of rows; returns the arrays that these stand for."""
    make_checkpoint(folder, "llama")
    weights, stored, meant = make_weights(tiny_config("llama")), {}, {}
    for name, array in weights.items():
        if array.ndim == 1:
            stored[name] = meant[name] = array
            continue
        scale = np.abs(array).max(1, keepdims=True) / 127
        codes = np.rint(array / scale).astype(np.int8)
        stem = name.removesuffix(".weight")
        stored[f"{stem}.codes"], stored[f"{stem}.scale"] = codes.view(np.uint8), scale
        meant[name] = scale * codes
    (folder / "model.safetensors").write_bytes(safetensors_bytes(stored))
    config = tiny_config("llama", quantization_config={"quant_method": "rowscale", "bits": 8})
    (folder / "config.json").write_text(json.dumps(config))
    return meant


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_weight_format_from_a_plugin_is_read_as_the_numbers_it_stands_for(plugins, tmp_path, backend):
    meant = quantised_folder(tmp_path / "quantised")
    make_checkpoint(tmp_path / "plain", "llama")
    write_safetensors(tmp_path / "plain" / "model.safetensors", meant)
    checkpoint = open_checkpoint(tmp_path / "quantised")
    assert set(checkpoint.tensors) == set(meant)
    for name, array in meant.items():
        np.testing.assert_array_equal(checkpoint.tensor(name).decode(), array)
    weight = checkpoint.tensor("model.layers.0.mlp.up_proj.weight")
    assert weight.format == "rowscale"
    np.testing.assert_array_equal(weight.slice_rows(3, 9).decode(), meant[weight.name][3:9])
    assert ids(tmp_path / "quantised", backend) == ids(tmp_path / "plain", backend)


def test_a_quantised_checkpoint_that_nobody_reads_is_refused_with_the_formats_there_are(plugins, tmp_path):
    make_checkpoint(tmp_path / "model", "llama", quantization_config={"quant_method": "rowscales"})
    with pytest.raises(UnsupportedError, match=r"quantised by rowscales, which can't be read.*\(there is .*rowscale.*\)"):
        open_checkpoint(tmp_path / "model")


def test_a_tokenizer_from_a_plugin_encodes_decodes_and_generates(plugins, tmp_path):
    folder = make_checkpoint(tmp_path / "model", "llama")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        open_checkpoint(folder).tokenizer_data()
    named = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "BytesTokenizer", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    tokenizer = Tokenizer.from_data(open_checkpoint(folder).tokenizer_data())
    text = "Füße, 日本 <s>"
    found = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, found)) == text.encode()
    assert len(found) == len("Füße, 日本 ".encode()) + 1
    assert tokenizer.decode(found, skip_special_tokens=False) == text
    assert (tokenizer.bos_id, tokenizer.vocab_size, tokenizer.eos_ids) == (256, 258, {257})
    with LLM(str(folder), "reference", progress=False, num_kv_blocks=20) as llm:
        assert llm.chat([{"role": "user", "content": "hi"}], GREEDY)[0].prompt_token_ids == tokenizer.encode(
            "[user]hi[assistant]", add_special_tokens=False
        )


ANSWER = '<<muse>>I look it up.<</muse>>One moment. <<call>>{"name": "now", "arguments": {"zone": "UTC"}}<</call>>'


def events(pieces):
    parser = OutputParser(
        choose(TOOLS, "angle", "", "tool_parser"), choose(REASONING, "angle", "", "reasoning_parser"), schemas={"now": {}}
    )
    found = [event for piece in pieces for event in parser.push(piece)] + parser.finish()
    return (
        "".join(e.text for e in found if type(e).__name__ == "ReasoningDelta"),
        [(type(e).__name__, getattr(e, "name", None)) for e in found if type(e).__name__ in ("CallStart", "CallEnd")],
        "".join(e.text for e in found if type(e).__name__ == "CallArguments"),
        "".join(e.text for e in found if type(e).__name__ == "ContentDelta"),
    )


def test_syntaxes_from_a_plugin_read_a_stream_as_they_read_the_whole(plugins):
    whole = events([ANSWER])
    assert whole == ("I look it up.", [("CallStart", "now"), ("CallEnd", None)], '{"zone": "UTC"}', "One moment.")
    assert events(ANSWER) == whole
    assert all(events([ANSWER[:i], ANSWER[i:]]) == whole for i in range(len(ANSWER)))


def test_a_chat_with_syntaxes_from_a_plugin_moves_to_another_engine(plugins, tmp_path):
    folder = make_chat_model(tmp_path / "model", template="{% for t in tools or [] %}{{ t.function.name }}{% endfor %}" + TEMPLATE)
    tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
    options = {"tool_parser": "angle", "reasoning_parser": "angle", "progress": False, "num_kv_blocks": 20}
    with LLM(str(folder), "reference", **options) as llm, LLM(str(folder), "cpu", **options) as other:
        [request] = llm._chats([{"role": "user", "content": "hi"}], GREEDY, [tool], None, {})
        number = llm.engine.add_request(request.ids, request.params, **request.options)
        llm.engine.step()
        state = llm.engine.export_request(number)
        moved = other.engine.import_request(type(state).from_bytes(state.to_bytes()))
        reader = other.engine._requests[moved].reader
        assert reader.names == ("angle", "angle")
        assert reader.tools.forms[0].open == "<<call>>"
        other.engine.abort(moved)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_logits_processor_from_a_plugin_keeps_words_out(plugins, tmp_path, backend):
    folder = make_checkpoint(tmp_path / "model", "llama")
    with LLM(str(folder), backend, progress=False, num_kv_blocks=20) as llm:
        said = llm.generate([PROMPT], GREEDY)[0].outputs[0]
        words = sorted({llm.tokenizer.token_text(i).strip() for i in said.token_ids[:3]})
        kept = llm.generate(
            [PROMPT], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logits_processors={"never": words})
        )
        assert not {llm.tokenizer.token_text(i).strip() for i in kept[0].outputs[0].token_ids} & set(words)
        with pytest.raises(InvalidRequestError, match="never takes a list of words"):
            llm.generate([PROMPT], SamplingParams(logits_processors={"never": "the"}))


def test_a_model_source_from_a_plugin_opens_models(plugins, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SHELF", str(tmp_path))
    make_checkpoint(tmp_path / "mine", "llama")
    assert resolve("shelf:mine") == tmp_path / "mine"
    assert ids("shelf:mine") == ids(tmp_path / "mine")
    assert main(["pull", "shelf:mine"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "mine")
    with pytest.raises(ModelNotFoundError, match="no model 'yours' on the shelf"):
        resolve("shelf:yours")
    with pytest.raises(ModelNotFoundError, match="shelf:NAME"):
        resolve("shelve:mine")


def test_nothing_is_imported_before_it_is_asked_for(plugins, tmp_path):
    modules = {value for points in plugins.values() for value in points.values()}
    ids(make_checkpoint(tmp_path / "model", "llama"))
    assert all(list(installed(kind)) for kind in KINDS)
    assert not modules & sys.modules.keys()
    find("tool_parser", "angle", object)
    assert modules & sys.modules.keys() == {"angle_syntax"}


def write_bytes(path, data=b"?"):
    path.write_bytes(data)
    return path


ASK = {
    "model": lambda name, folder: build(tiny_config("llama", architectures=[name])),
    "gguf_model": lambda name, folder: open_checkpoint(write_gguf(folder / "a.gguf", name, {}, {"a": np.zeros(1, np.float32)})),
    "checkpoint": lambda name, folder: open_checkpoint(write_bytes(folder / f"a.{name}")),
    "weight_format": lambda name, folder: open_checkpoint(
        make_checkpoint(folder / "w", "llama", quantization_config={"quant_method": name})
    ),
    "tokenizer": lambda name, folder: Tokenizer.from_data(
        {"kind": "plugin", "path": folder, "config": {"tokenizer_class": name}, "chat_template": None}
    ),
    "tool_parser": lambda name, folder: choose(TOOLS, name, "", "tool_parser"),
    "reasoning_parser": lambda name, folder: choose(REASONING, name, "", "reasoning_parser"),
    "model_source": lambda name, folder: resolve(f"{name}:x"),
    "command": lambda name, folder: build_parser(name),
}


@pytest.mark.parametrize("kind", ASK)
@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise RuntimeError('no licence')", "RuntimeError: no licence"),
        ("import a_library_that_is_not_there", "a_library_that_is_not_there"),
        ("x = 1", r"must implement the hook trivium_KIND\(\) once"),
        ("HOOK", "returned a int, not a "),
    ],
)
def test_a_faulty_plugin_is_blamed_by_name_whatever_it_offers(site, tmp_path, kind, source, reason):
    offer(site, kind, "bad", hook(kind) if source == "HOOK" else source)
    with pytest.raises(PluginError, match=rf"{kind.replace('_', ' ')} 'bad' \(vendor 1\.0\)") as fault:
        ASK[kind]("bad", tmp_path)
    fault.match(reason.replace("KIND", kind))


@pytest.mark.parametrize("kind", ASK)
def test_one_name_from_two_distributions_is_an_error_that_names_both(site, tmp_path, kind, capsys):
    for vendor in ("vendor-a", "vendor-b"):
        offer(site, kind, "same", hook(kind), distribution=vendor)
    with pytest.raises(PluginError, match=r"called 'same': vendor-[ab] 1\.0 and vendor-[ab] 1\.0; uninstall one"):
        ASK[kind]("same", tmp_path)


FAULTS = {
    "model": "from trivium.models import Family\n"
    + hook("model", "return Family(lambda info, length: 1 / 0, {'hidden_act': 'silu'})"),
    "gguf_model": "from trivium_formats.gguf import GGUFModel\n"
    + hook("gguf_model", "return GGUFModel('LlamaForCausalLM', 'llama', {}, read=lambda keys: 1 / 0)"),
    "checkpoint": hook("checkpoint", "return lambda path: 1 / 0"),
    "weight_format": hook("weight_format", "return lambda config, tensors: 1 / 0"),
    "tokenizer": hook("tokenizer", "return lambda folder, config: 1 / 0"),
    "model_source": hook("model_source", "return lambda name, folder, progress, verify: 1 / 0"),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_what_a_plugin_raises_while_it_works_is_blamed_on_it(site, tmp_path, kind):
    offer(site, kind, "bad", FAULTS[kind])
    with pytest.raises(PluginError, match=rf"{kind.replace('_', ' ')} 'bad' \(vendor 1\.0\) failed: ZeroDivisionError"):
        ASK[kind]("bad", tmp_path)


def test_a_weight_that_fails_while_it_is_decoded_is_the_formats_fault_not_the_backends(site, tmp_path):
    source = "from dataclasses import replace\ndef fail(data):\n    raise KeyError('scale')\n"
    source += "def read(config, tensors):\n    torn = lambda make: lambda: replace(make(), decoder=fail)\n"
    source += "    return {name: torn(make) for name, make in tensors.items()}\n"
    offer(site, "weight_format", "torn", source + hook("weight_format", "return read"))
    folder = make_checkpoint(tmp_path / "model", "llama", quantization_config={"quant_method": "torn"})
    with pytest.raises(PluginError, match=r"^weight format 'torn' \(vendor 1\.0\) failed: KeyError: 'scale'"):
        LLM(str(folder), "reference", progress=False, num_kv_blocks=20)


BUILTIN = {
    "model": ("LlamaForCausalLM", lambda name, folder: str(build(tiny_config("llama")))),
    "tool_parser": ("hermes", lambda name, folder: choose(TOOLS, name, "", "tool_parser")),
    "reasoning_parser": ("think", lambda name, folder: choose(REASONING, name, "", "reasoning_parser")),
}


@pytest.mark.parametrize("kind", BUILTIN)
def test_a_name_of_triviums_own_is_not_a_plugins_to_take(site, tmp_path, kind):
    name, ask = BUILTIN[kind]
    before = ask(name, tmp_path)
    offer(site, kind, name, "raise RuntimeError('this was imported')")
    assert ask(name, tmp_path) == before


def test_the_list_shows_what_is_there_and_what_is_never_used(plugins, site, capsys):
    for vendor in ("vendor-a", "vendor-b"):
        offer(site, "tokenizer", "SameTokenizer", hook("tokenizer"), distribution=vendor)
    offer(site, "model", "LlamaForCausalLM", hook("model"), distribution="vendor-c")
    assert main(["plugin", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split() == ["tool", "parser", "angle", "trivium-examples", "1.0"] for line in lines)
    assert any("SameTokenizer" in line and "uninstall all but one" in line for line in lines)
    assert any("LlamaForCausalLM" in line and "trivium itself has this name" in line for line in lines)
    assert main(["plugin", "list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["plugins"]
    assert {p["name"] for p in found if p["kind"] == "backend"} >= {"reference", "cpu"}


def test_a_command_from_a_plugin_is_run_listed_and_can_not_take_a_command_of_triviums_own(plugins, site, capsys):
    offer(site, "command", "run", "raise RuntimeError('this was imported')", distribution="vendor-d")
    offer(site, "command", "broken", "raise RuntimeError('no such luck')", distribution="vendor-e")
    assert main(["shout", "hey", "you"]) == 0
    assert capsys.readouterr().out == "HEY YOU\n"
    assert main(["shout", "--loud"]) == 2
    assert "trivium shout" in capsys.readouterr().err
    for asked in (["--help"], ["run", "--help"]):
        with pytest.raises(SystemExit):
            main(asked)
    told = " ".join(capsys.readouterr().out.split())
    assert "shout say a text in capitals" in told and "can't be used: command 'broken' (vendor-e 1.0)" in told
    assert main(["broken"]) == 1
    assert "no such luck" in capsys.readouterr().err
