"""The `trivium` command through main(argv): what it prints, where, and its exit codes."""

from __future__ import annotations

import json
import math

import pytest
from chat_models import make_chat_model

from trivium import LLM, SamplingParams, __version__
from trivium.cli import main
from trivium.cli.main import COMMANDS
from trivium.cli.show import _explained
from trivium.plugin import Choice
from trivium.plugin.contract import Kernel


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def plain(models):
    return str(make_chat_model(models / "plain", template=None))


@pytest.fixture
def trivium(capsys):
    """Runs a command line: (exit code, standard output, standard error)."""

    def run(*argv: str):
        code = main([str(a) for a in argv])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def in_one_line(err: str) -> bool:
    return err.count("\n") == 1 and "Traceback" not in err


@pytest.mark.parametrize("argv", [[], *([c] for c in COMMANDS), ["bench", "latency"], ["bench", "throughput"]], ids=" ".join)
def test_help(argv, capsys):
    with pytest.raises(SystemExit) as done:
        main([*argv, "--help"])
    out = capsys.readouterr().out
    assert done.value.code == 0 and out.startswith(" ".join(["usage: trivium", *argv]))
    if not argv:
        assert all(command in out for command in COMMANDS)


def test_version(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"trivium {__version__}\n"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["runn", "m"], "did you mean run?"),
        (["bench", "latncy", "m"], "did you mean latency?"),
        (["run", "m", "--max-tokns", "5"], "unknown argument --max-tokns; did you mean --max-tokens?"),
        (["run", "m", "--temp", "1"], "unknown argument --temp"),
        (["backends", "--jsn"], "did you mean --json?"),
        (["run", "m", "hi", "--max-tokens", "0"], "must be an integer from 1, not '0'"),
        (["run", "m", "hi", "--max-tokens", "x"], "must be an integer from 1, not 'x'"),
        (["run", "m", "hi", "--temperature", "warm"], "--temperature"),
        (["run", "m", "hi", "--temperature", "-1"], "temperature must be a number from 0"),
        (["run", "m", "hi", "--temperature", "nan"], "temperature must be"),
        (["run", "m", "hi", "--top-p", "1.5"], "top_p must be"),
        (["run", "m", "hi", "--stop", ""], "stop must be a non-empty string"),
        (["run", "m", "hi", "--option", "x"], "must be KEY=VALUE, not 'x'"),
        (["bench", "latency", "m", "--input-len", "0"], "must be an integer from 1"),
        (["bench", "latency", "m", "--repeat", "1e9"], "must be an integer from 1"),
        (["run", "", "hi"], "MODEL: must not be empty"),
        (["pull", " "], "MODEL: must not be empty"),
        (["run", "m", "hi", "--seed", str(2**80)], "from -2**63, at most 2**64 - 1"),
        (["run"], "MODEL"),
        (["bench"], "KIND"),
        ([], "COMMAND"),
    ],
)
def test_bad_flags_and_values_are_one_line_and_code_2(trivium, argv, words):
    code, out, err = trivium(*argv)
    assert code == 2 and out == "" and in_one_line(err) and words in err


def test_bad_loading_options_are_one_line_and_code_2(trivium, plain):
    for flags, words in (
        (["--backend", "reference", "--dtype", "float3"], "float32"),
        (["--backend", "reference", "--quantize", "int3"], "quantize"),
        (["--backend", "reference:7"], "no device '7'"),
        (["--backend", "reference", "--max-model-len", "100000"], "512 positions"),
        (["--backend", "reference", "--option", "magic=1"], "magic"),
        (["--backend", "reference", "--system", "x"], "no chat template"),
    ):
        code, out, err = trivium("run", plain, "hi", *flags)
        assert code == 2 and out == "" and in_one_line(err) and words in err, (flags, err)


def test_an_unknown_model_is_one_line_and_code_1(trivium):
    for command in (
        ["run", "no-such-model-anywhere", "hi"],
        ["inspect", "no-such-model-anywhere"],
        ["pull", "no-such-model-anywhere"],
    ):
        code, out, err = trivium(*command)
        assert code == 1 and out == "" and in_one_line(err) and "no-such-model-anywhere" in err


@pytest.mark.faults
def test_o51_a_misspelt_backend_is_code_2_and_named(trivium, plain):
    for command in (["run", plain, "hi"], ["explain", plain], ["inspect", plain], ["bench", "latency", plain]):
        code, out, err = trivium(*command, "--backend", "referense")
        assert code == 2 and out == "" and in_one_line(err) and "did you mean 'reference'" in err


def test_run_prints_the_completion_and_its_figures(trivium, plain):
    code, out, err = trivium("run", plain, "hello", "--backend", "reference", "--max-tokens", "9")
    with LLM(plain, backend="reference") as llm:
        [want] = llm.generate("hello", SamplingParams(temperature=0, max_tokens=9))
    assert code == 0 and out == want.outputs[0].text + "\n"
    assert err.startswith("(this model has no chat template: the text is continued)\n")
    assert f"[{len(want.outputs[0].token_ids)} tokens, " in err and "tokens/s, first token after" in err


def test_an_answer_that_the_limit_cut_off_says_so(trivium, plain):
    for limit, words in ((1, "[1 token, first"), (5, "[5 tokens, ")):
        _, _, err = trivium("run", plain, "hello", "--backend", "reference", "--max-tokens", limit, "--ignore-eos")
        assert words in err and err.endswith("ms, cut off at the limit of tokens]\n")
    text = trivium("run", plain, "hello", "--backend", "reference", "--max-tokens", 5, "--ignore-eos")[1]
    _, _, err = trivium("run", plain, "hello", "--backend", "reference", "--ignore-eos", "--stop", text[1:3])
    assert err.endswith(" ms]\n")


def test_run_uses_the_chat_template_unless_told_not_to(trivium, models):
    chat = str(make_chat_model(models / "chat"))
    with LLM(chat, backend="reference") as llm:
        params = SamplingParams(temperature=0, max_tokens=6)
        answer = llm.generate("[system]S[user]hi[assistant]", params)[0].outputs[0].text
        completion = llm.generate("hi", params)[0].outputs[0].text
    flags = ("--backend", "reference", "--max-tokens", "6")
    assert trivium("run", chat, "hi", *flags, "--system", "S")[1] == answer + "\n"
    assert trivium("run", chat, "hi", *flags, "--raw")[1] == completion + "\n"
    assert trivium("run", chat, "hi", *flags, "--raw", "--system", "S")[0] == 2


def test_run_repeats_also_where_the_model_asks_for_sampling(trivium, models):
    folder = make_chat_model(models / "sampling", template=None, generation={"do_sample": True, "temperature": 1.5})
    flags = ("run", folder, "hello", "--backend", "reference", "--max-tokens", "12")
    texts = [trivium(*flags, *extra)[1] for extra in ((), (), ("--seed", "1"), ("--temperature", "0"))]
    assert texts[0] == texts[1] and len(set(texts)) == 3


def test_backends(trivium):
    code, out, err = trivium("backends", "--json")
    found = {b["name"]: b for b in json.loads(out)["backends"]}
    assert code == 0 and err == "" and found["reference"]["available"] and found["reference"]["devices"][0]["name"] == "numpy"
    assert "cpu" in found
    code, out, _ = trivium("backends")
    assert code == 0 and "reference" in out and out.startswith("BACKEND")


def test_inspect(trivium, plain):
    code, out, err = trivium("inspect", plain, "--backend", "reference", "--json")
    found = json.loads(out)
    d, kv, f, v = 64, 32, 96, 320
    assert code == 0 and err == "" and found["architecture"] == "LlamaForCausalLM"
    assert found["parameters"] == 2 * v * d + 2 * (2 * d * d + 2 * d * kv + 3 * d * f + 2 * d) + d
    assert found["weight_bytes"] == 4 * found["parameters"] == sum(w["bytes"] for w in found["weights"])
    assert {w["resident"] for w in found["weights"]} == {"float32"} and all(w["lossless"] for w in found["weights"])
    assert any("paged_attention" in line for line in found["program"]["before"])
    names = {w["name"] for w in found["weights"]}
    code, out, _ = trivium("inspect", plain, "--backend", "reference")
    assert {"lm_head.weight", "model.layers.0.mlp.up_proj.weight"} <= names and "model.layers.*.mlp.up_proj.weight" in out
    assert code == 0 and "program as traced" in out and "program as fused for reference" in out and "lm_head.weight" in out


def test_inspect_counts_tied_weights_once(trivium, models):
    folder = make_chat_model(models / "tied", template=None, tie_word_embeddings=True)
    found = json.loads(trivium("inspect", folder, "--backend", "reference", "--json")[1])
    d, kv, f, v = 64, 32, 96, 320
    assert found["parameters"] == v * d + 2 * (2 * d * d + 2 * d * kv + 3 * d * f + 2 * d) + d
    assert found["weight_bytes"] == 4 * found["parameters"]


def test_explain(trivium, plain):
    code, out, err = trivium("explain", plain, "--backend", "reference", "--json")
    found = json.loads(out)
    inspected = json.loads(trivium("inspect", plain, "--backend", "reference", "--json")[1])
    calls = [line.partition(" = ")[2] for line in inspected["program"]["after"] if " = " in line and not line.startswith("output")]
    assert code == 0 and err == "" and [c["call"] for c in found["calls"]] == calls
    assert all(set(c) == {"call", "kernel", "why", "next"} for c in found["calls"])
    code, out, _ = trivium("explain", plain, "--backend", "reference")
    assert code == 0 and f"{len(calls)} calls on reference" in out


def test_explain_says_why_and_what_would_be_next(plain):
    from trivium.engine.loader import plan

    call = plan(plain, "reference").program.calls[0]
    fast, slow, picky = (Kernel("embedding", print, name, p) for name, p in (("fast", 9), ("slow", 1), ("picky", 10)))
    said = _explained(Choice(call, fast, (slow,), ((picky, "wants 128 columns"),)))
    assert said["kernel"] == "fast" and said["next"] == ["slow", "reference on the host"]
    assert said["why"] == "priority 9 over 1; picky refuses: wants 128 columns"
    host = _explained(Choice(call, None, (), ((picky, "wants 128 columns"),)))
    assert host["kernel"] == "reference on the host" and host["why"] == "picky refuses: wants 128 columns"


def spread(value):
    return set(value) == {"median", "min", "max", "n"} and 0 < value["min"] <= value["median"] <= value["max"] and value["n"] == 2


def test_bench_latency(trivium, plain):
    flags = ("--backend", "reference", "--input-len", "20", "--output-len", "5", "--repeat", "2", "--json")
    code, out, err = trivium("bench", "latency", plain, *flags)
    found = json.loads(out)
    assert code == 0 and err == ""
    assert all(spread(found[name]) for name in ("decode_tokens_per_s", "prefill_tokens_per_s", "ttft_s", "itl_s"))
    assert 0 < found["host_share"] < 1 and found["load_s"] > 0 and found["peak_rss_bytes"] > 1 << 20
    assert found["input_len"] == 20 and found["output_len"] == 5 and found["repeat"] == 2 and found["kind"] == "latency"


def test_bench_latency_with_a_profile(trivium, plain):
    flags = ("--input-len", "20", "--output-len", "5", "--repeat", "1", "--profile")
    code, out, _ = trivium("bench", "latency", plain, "--backend", "cpu", *flags, "--json")
    found = json.loads(out)["profile"]
    assert code == 0 and list(found) == ["prefill", "decode"]
    for steps, phase in zip((1, 4), found.values(), strict=True):
        assert sum(o["share"] for o in phase["operators"]) == pytest.approx(1)
        assert {o["calls"] for o in phase["operators"] if o["name"] == "embedding"} == {steps}
        assert all(rate > 0 for rate in phase["ceilings"].values())
    code, out, _ = trivium("bench", "latency", plain, "--backend", "cpu", *flags)
    assert code == 0 and "decode, " in out and "attention" in out and "OF CEILING" in out
    code, _, err = trivium("bench", "latency", plain, "--backend", "reference", *flags)
    assert code == 1 and "can't time its operations" in err


def test_bench_with_drafts(trivium, plain):
    flags = ("--backend", "reference", "--output-len", "8", "--input-len", "6", "--repeat", "1", "--json")
    code, out, _ = trivium(
        "bench", "latency", plain, *flags, "--speculative", "method=suffix", "--speculative", "prompt_lookup_min=1"
    )
    assert code == 0 and json.loads(out)["decode_tokens_per_s"]["n"] == 1
    code, out, err = trivium("bench", "latency", plain, *flags, "--speculative", "method=medusa")
    assert code != 0 and "ngram, suffix, draft" in err


def test_bench_of_a_single_token_has_no_decode_figures(trivium, plain):
    code, out, _ = trivium("bench", "latency", plain, "--backend", "reference", "--output-len", "1", "--input-len", "4", "--json")
    found = json.loads(out)
    assert code == 0 and "decode_tokens_per_s" not in found and math.isfinite(found["ttft_s"]["median"])


def test_bench_throughput(trivium, plain):
    flags = ("--backend", "reference", "--num-requests", "3", "--input-len", "6", "--output-len", "4", "--repeat", "2")
    code, out, err = trivium("bench", "throughput", plain, *flags, "--json")
    found = json.loads(out)
    assert code == 0 and err == "" and spread(found["output_tokens_per_s"]) and spread(found["ttft_s"])
    assert found["total_tokens_per_s"]["median"] == pytest.approx(found["output_tokens_per_s"]["median"] * 2.5)
    code, out, err = trivium("bench", "throughput", plain, *flags)
    assert code == 0 and "output_tokens_per_s" in out and "run 3 of 3" in err


def test_a_bench_longer_than_the_context_is_refused(trivium, plain):
    code, out, err = trivium("bench", "latency", plain, "--backend", "reference", "--input-len", "510", "--json")
    assert code == 2 and out == "" and in_one_line(err) and "512" in err


def test_pull_prints_where_a_model_lies(trivium, plain):
    assert trivium("pull", plain)[1].strip() == plain
    assert json.loads(trivium("pull", plain, "--json")[1]) == {"model": plain, "path": plain}
