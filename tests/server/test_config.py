"""Settings of `trivium serve` from flags, the environment and a file: one list, one meaning, one line where they are wrong."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from http_server import CHAT
from trivium.cli.main import build_parser
from trivium_server.config import ConfigError, settled

pytestmark = pytest.mark.http


def resolved(argv=(), environ=None):
    args = build_parser("serve").parse_args(["serve", *map(str, argv)])
    return settled(args.flags, args.defaults, vars(args), environ or {}, args.closed)


def written(tmp_path, text):
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    return path


ARGS = build_parser("serve").parse_args(["serve"])
FLAGS = {flag.dest: flag for flag in ARGS.flags if flag.dest != "config"}
VALUES = {"threads": "3", "port": "8123", "request_timeout": "2.5"}


def text_of(flag):
    """A value that the flag takes: the first that its type does not refuse."""
    if flag.choices:
        return str(next(iter(flag.choices)))
    for text in (VALUES.get(flag.dest), "17", "key=17", "name=model"):
        try:
            if text is not None:
                (flag.type or str)(text)
                return text
        except (argparse.ArgumentTypeError, ValueError):
            continue
    raise AssertionError(f"no value for {flag.dest} in this test")


@pytest.mark.parametrize("dest", FLAGS)
def test_each_flag_means_the_same_from_every_source(dest, tmp_path):
    flag = FLAGS[dest]
    switch, name = flag.nargs == 0, dest.replace("_", "-")
    text = "true" if switch else text_of(flag)
    argv = [text] if not flag.option_strings else [flag.option_strings[0]] if switch else [flag.option_strings[0], text]
    want = resolved(argv)[dest]
    path = written(tmp_path, f"# a file\n{name}: {text}\n")
    assert resolved(["--config", path])[dest] == want
    variable = f"TRIVIUM_{dest.upper()}"
    if dest in ARGS.closed:
        with pytest.raises(ConfigError, match=rf"^{variable}: .*decides what is computed"):
            resolved((), {variable: text})
    else:
        assert resolved((), {variable: text})[dest] == want


def test_what_decides_what_is_computed_is_no_variable():
    assert {"model", "backend", "dtype", "quantize", "option", "seed", "kv_cache_dtype", "max_model_len"} <= ARGS.closed
    assert not {"port", "host", "api_key", "config", "max_waiting_requests"} & ARGS.closed


def test_a_flag_goes_before_a_variable_and_that_before_the_file(tmp_path):
    path = written(tmp_path, "port: 1\nmax-body: 1\nserved_model_name: [file, other]\nmodel: m\n")
    environ = {"TRIVIUM_PORT": "2", "TRIVIUM_MAX_BODY": "2", "TRIVIUM_CONFIG": str(path), "PATH": "x"}
    found = resolved(["--port", "3", "--served-model-name", "flag"], environ)
    assert (found["port"], found["max_body"], found["served_model_name"], found["model"]) == (3, 2, ["flag"], ["m"])
    assert found["host"] == "127.0.0.1" and found["shutdown_timeout"] == 30.0
    assert resolved(["--config", path], {"TRIVIUM_PORT": "2"})["port"] == 2


def test_lists_and_mappings(tmp_path):
    path = written(tmp_path, "model: [a, b=c]\noption: {x: 1, deep: [1, {y: true}], word: w}\nenable-prefix-caching: off\n")
    found = resolved(["--config", path])
    assert found["model"] == ["a", "b=c"] and found["enable_prefix_caching"] is False
    assert found["option"] == [("x", 1), ("deep", [1, {"y": True}]), ("word", "w")]
    assert resolved((), {"TRIVIUM_API_KEY": "a, b,"})["api_key"] == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("model: m\nprot: 1\n", 2, "there is no setting 'prot'; did you mean port?"), ("config: x\n", 1, "no setting 'config'"),
        ("\nport: 70000\n", 2, "port: must be an integer from 0 to 65535, not '70000'"), ("port: 1.5\n", 1, "must be an integer"),
        ("port: yes\n", 1, "must be a number or text, not true"), ("dtype: no\n", 1, "text in quotes"), ("port:\n", 1, "not null"),
        ("request-metrics: 3\n", 1, "must be true or false, not 3"), ("port: [1]\n", 1, "not \\[1\\]"),
        ("- port\n", 1, "a mapping"),
        ("port: 1\nport: 2\n", 2, "twice"), ("max-body: 1\nmax_body: 2\n", 2, "twice"), ("port: 1\n  host: x\n", 2, "no YAML"),
        ("api-key: {a: 1}\n", 1, "must be a list"), ("host: 2024-13-45\n", 1, "month"),
        ("port: !!python/name:os.system\n", 1, "port"),
        ("model: ['']\n", 1, "must not be empty"), ("a: \x01\n", 1, "no YAML"), ("? [1, 2]\n: 3\n", 1, "no setting"),
        ("option: [x]\n", 1, "KEY=VALUE"),
    ],
)  # fmt: skip
def test_a_bad_file_is_refused_with_its_line(tmp_path, text, line, words):
    path = written(tmp_path, text)
    with pytest.raises(ConfigError, match=rf"^{re.escape(str(path))}:{line}: .*{words}"):
        resolved(["--config", path])


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("TRIVIUM_PROT", "1", "did you mean TRIVIUM_PORT"), ("TRIVIUM_PORT", "many", "must be an integer"),
        ("TRIVIUM_API_KEY", "", "is empty"), ("TRIVIUM_API_KEY", " , ", "is empty"),
        ("TRIVIUM_REQUEST_METRICS", "2", "true or false"),
        ("TRIVIUM_PORT", "tcp://10.0.0.1:8000", "enableServiceLinks"), ("TRIVIUM_SERVICE_HOST", "10.0.0.1", "enableServiceLinks"),
        ("TRIVIUM_CONFIG", "/nothing", "/nothing: No such file"),
    ],
)  # fmt: skip
def test_a_bad_variable_is_refused_by_its_name(name, value, words):
    with pytest.raises(ConfigError, match=words) as caught:
        resolved((), {name: value})
    assert str(caught.value).startswith(name if name != "TRIVIUM_CONFIG" else "/nothing")


def run(*flags, **environ):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environ}
    line = [sys.executable, "-m", "trivium.cli", "serve", *map(str, flags)]
    return subprocess.Popen(line, stderr=subprocess.PIPE, text=True, env=env)


def test_the_command_says_in_one_line_what_is_wrong_and_serves_what_a_file_says(folder, tmp_path):
    import httpx

    for flags, environ, words in (
        ([], {}, "name a MODEL"), (["m"], {"TRIVIUM_MODEL": "m"}, "TRIVIUM_MODEL"),
        (["m", "--ssl-keyfile", "x"], {}, "certificate"), (["m", "--ssl-certfile", written(tmp_path, "x")], {}, "certificate"),
    ):  # fmt: skip
        with run(*flags, **environ) as process:
            said = process.stderr.read().strip()
            assert process.wait(30) == 2 and words in said and "\n" not in said
    path = written(tmp_path, f"model: tiny={json.dumps(str(folder))[1:-1]}\nbackend: reference\nport: 0\n")
    with run("--config", path, TRIVIUM_API_KEY="k7") as process:
        url = re.search(r"at (http://\S+)", next(line for line in process.stderr if "serving" in line))[1]
        try:
            assert httpx.post(f"{url}/v1/chat/completions", json=CHAT, timeout=60).status_code == 401
            assert httpx.post(f"{url}/v1/chat/completions", json=CHAT, headers={"x-api-key": "k7"}, timeout=60).status_code == 200
        finally:
            process.terminate()
        assert process.wait(30) == 0


def test_the_documented_file_is_valid(tmp_path):
    document = (Path(__file__).parents[2] / "docs" / "server.md").read_text()
    [text] = re.findall(r"```yaml\n(.*?)```", document, re.DOTALL)
    assert resolved(["--config", written(tmp_path, text)])["speculative"] == [("method", "ngram")]
