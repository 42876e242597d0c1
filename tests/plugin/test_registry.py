"""Plugins as strangers write them: found, used, and never able to harm another."""

from __future__ import annotations

import json
import subprocess
import sys

import fake_plugins
import pytest

from tiny_checkpoints import make_checkpoint

from trivium import LLM, SamplingParams
from trivium.errors import BackendNotFoundError, BackendUnavailableError, PluginError, UnsupportedError
from trivium.plugin import API_VERSION, find_backends, find_plugins, resolve


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def status(name):
    return next(s for s in find_backends() if s.name == name)


def test_a_plugin_is_found_and_resolved_by_name_index_and_device(site):
    fake_plugins.install(site, "mychip", fake_plugins.healthy("mychip", probe="return Probe((Device(0, 'a'), Device(1, 'b')))"))
    assert [d.name for d in status("mychip").devices] == ["a", "b"]
    assert resolve("mychip")[1].name == "a"
    assert resolve("mychip:1")[1].name == "b"
    assert resolve("mychip:b")[1].index == 1
    with pytest.raises(BackendNotFoundError, match=r"no device '2'.*mychip:0 \(a\), mychip:1 \(b\)"):
        resolve("mychip:2")


def test_finding_plugins_imports_none_of_them(site):
    fake_plugins.install(site, "lazychip", "raise RuntimeError('imported too early')")
    assert "lazychip" in find_plugins()
    assert resolve("reference")[0].name == "reference"


@pytest.mark.faults
def test_o51_an_unknown_backend_is_an_error_with_the_near_match_and_the_list():
    with pytest.raises(BackendNotFoundError, match=r"'referense'; did you mean 'reference'\? \(installed: auto, .*reference"):
        resolve("referense")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise RuntimeError('driver missing')", "RuntimeError: driver missing"),
        ("import a_library_that_is_not_there", "a_library_that_is_not_there"),
        ("raise SystemExit(3)", "SystemExit"),
        ("x = 1", "must implement the hook trivium_backend"),
        (fake_plugins.healthy("othername"), "calls its backend 'othername'"),
        (fake_plugins.healthy("badchip", probe="raise OSError('no bus')"), "probe failed: OSError: no bus"),
        (fake_plugins.healthy("badchip", probe="return Probe((), 'no chip on the bus')"), "no chip on the bus"),
        ("from trivium.plugin import hookimpl\n@hookimpl\ndef trivium_backend(): return 7", "version None"),
        (
            "import types\nfrom trivium.plugin import hookimpl\n@hookimpl\ndef trivium_backend():"
            "\n    return types.SimpleNamespace(api_version=1, name='badchip')",
            "returned a SimpleNamespace",
        ),
    ],
)
def test_a_faulty_plugin_is_listed_with_its_reason_and_harms_no_other(site, source, reason):
    fake_plugins.install(site, "badchip", source)
    bad = status("badchip")
    assert reason in bad.reason
    assert bad.devices == ()
    assert status("reference").devices
    assert resolve("auto")[1] is not None
    with pytest.raises((PluginError, BackendUnavailableError), match="badchip"):
        resolve("badchip")


@pytest.mark.faults
@pytest.mark.parametrize("version", ["0", str(API_VERSION + 1), "None", "'1'", "True"])
def test_o50_a_plugin_for_another_api_version_is_refused_with_both_numbers(site, version):
    fake_plugins.install(site, "oldchip", fake_plugins.healthy("oldchip", api_version=version))
    with pytest.raises(PluginError, match=rf"API version {version.strip(chr(39))}; this trivium accepts .*{API_VERSION}"):
        resolve("oldchip")


@pytest.mark.faults
def test_o50_the_current_version_is_accepted(site):
    fake_plugins.install(site, "newchip", fake_plugins.healthy("newchip"))
    assert resolve("newchip")[0].name == "newchip"


@pytest.mark.faults
def test_o50_the_version_before_runs_unchanged_with_a_warning_that_says_what_it_lacks(site, tmp_path):
    fake_plugins.install(
        site, "oldchip", "from old_chip import trivium_backend"
    )  # fmt: skip
    model = str(make_checkpoint(tmp_path / "model", "llama"))
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    with pytest.warns(
        DeprecationWarning, match=r"trivium-oldchip 1.0\) was written for plugin API version 1.*version 2, embeddings"
    ):
        old = LLM(model, "oldchip", progress=False, num_kv_blocks=20)
    with old, LLM(model, "reference", progress=False, num_kv_blocks=20) as new:
        assert old.generate([[5, 6, 7]], params)[0].outputs == new.generate([[5, 6, 7]], params)[0].outputs
        assert not hasattr(old, "embed") or refuses_embeddings(old)


@pytest.mark.faults
@pytest.mark.parametrize("field", [{"typical_p": 0.9}, {"top_n_sigma": 1.5}, {"xtc_probability": 0.5}])
def test_o50_sampling_parameters_younger_than_the_plugin_are_refused_by_name(site, tmp_path, field):
    fake_plugins.install(site, "oldchip", "from old_chip import trivium_backend")
    model = str(make_checkpoint(tmp_path / "model", "llama"))
    with pytest.warns(DeprecationWarning, match="later sampling parameters"):
        old = LLM(model, "oldchip", progress=False, num_kv_blocks=20)
    known = SamplingParams(
        temperature=0.9, top_k=9, top_p=0.9, min_p=0.01, seed=3, repetition_penalty=1.1, presence_penalty=0.1, bad_words=["x"],
        frequency_penalty=0.1, logit_bias={7: 1.0}, max_tokens=5, min_tokens=1, ignore_eos=True, logprobs=1, prompt_logprobs=1,
    )  # fmt: skip
    with old, LLM(model, "reference", progress=False, num_kv_blocks=20) as new:
        with pytest.raises(UnsupportedError, match=f"oldchip can't do {next(iter(field))}") as refusal:
            old.generate([[5, 6, 7]], SamplingParams(temperature=1.0, **field))
        assert refusal.value.param == next(iter(field))
        assert old.generate([[5, 6, 7]], known)[0].outputs == new.generate([[5, 6, 7]], known)[0].outputs
        new.generate([[5, 6, 7]], SamplingParams(temperature=1.0, **field))


def refuses_embeddings(llm):
    with pytest.raises(UnsupportedError, match="oldchip"):
        llm.embed([[5, 6, 7]])
    return True


def test_two_plugins_with_one_name_are_an_error_that_names_both(site):
    fake_plugins.install(site, "samechip", fake_plugins.healthy("samechip"), distribution="vendor-a")
    fake_plugins.install(site, "samechip", fake_plugins.healthy("samechip"), distribution="vendor-b")
    with pytest.raises(PluginError, match=r"vendor-a 1\.0 and vendor-b 1\.0|vendor-b 1\.0 and vendor-a 1\.0"):
        resolve("samechip")
    assert "vendor-a" in status("samechip").reason
    assert resolve("reference")[0].name == "reference"


def test_auto_takes_the_available_backend_of_the_highest_priority(site):
    fake_plugins.install(site, "bestchip", fake_plugins.healthy("bestchip", priority=10_000))
    fake_plugins.install(site, "lostchip", fake_plugins.healthy("lostchip", priority=20_000, probe="return Probe((), 'unplugged')"))
    assert resolve("auto")[0].name == "bestchip"


def test_a_plugin_really_installed_with_pip_is_found(tmp_path):
    """Built and installed by pip into a folder of its own; needs no network."""
    project = tmp_path / "project"
    project.mkdir()
    (project / "pipchip_mod.py").write_text(fake_plugins.healthy("pipchip"))
    (project / "pyproject.toml").write_text(
        '[project]\nname="trivium-pipchip"\nversion="0.3"\n[project.entry-points.trivium]\npipchip="pipchip_mod"\n'
        '[build-system]\nrequires=[]\nbuild-backend="setuptools.build_meta"\n[tool.setuptools]\npy-modules=["pipchip_mod"]\n'
    )
    target = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", str(target), str(project)]
    subprocess.run(pip, capture_output=True, text=True, check=True)
    script = (
        "import json, sys; sys.path.insert(0, sys.argv[1]); from trivium.plugin import find_backends; "
        "print(json.dumps([s.to_json() for s in find_backends()]))"
    )
    out = subprocess.run([sys.executable, "-c", script, str(target)], capture_output=True, text=True, check=True).stdout
    found = {s["name"]: s for s in json.loads(out)}
    assert found["pipchip"]["available"] is True
    assert found["pipchip"]["distribution"] == "trivium-pipchip 0.3"
