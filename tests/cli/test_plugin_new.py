"""`trivium plugin`: what `new` writes installs with pip and passes the kit; bad names and folders in use are refused."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from pip_sites import beside, pip_install

from trivium.cli import main
from trivium.cli.plugin import templates

ROOT = Path(__file__).parents[2]


def new(*argv):
    return main(["plugin", "new", *argv])


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A plugin as made, and the folder into which pip installed it."""
    where = tmp_path_factory.mktemp("new")
    assert new("my-chip", "--path", str(where)) == 0
    pip_install(where / "site", where / "my-chip")
    return where / "my-chip", where / "site"


def test_what_it_writes_is_named_throughout(installed):
    folder, _ = installed
    project = tomllib.loads((folder / "pyproject.toml").read_text())
    assert project["project"]["name"] == "trivium-my-chip"
    assert project["project"]["entry-points"]["trivium"] == {"my-chip": "trivium_my_chip.plugin"}
    files = [f for f in folder.rglob("*") if f.is_file() and "build" not in f.parts and not f.match("*.egg-info/*")]
    assert {"README.md", ".gitignore", "pyproject.toml", "ci.yml", "test_my_chip.py", "plugin.py", "session.py", "kernels.py"} <= {
        f.name for f in files
    }
    assert not [f for f in files if "newchip" in f.read_text().lower() or "newchip" in f.name]
    assert "class MyChipBackend" in (folder / "src" / "trivium_my_chip" / "plugin.py").read_text()


def test_it_passes_the_kit_and_its_own_tests(installed):
    folder, site = installed
    done = subprocess.run(
        [sys.executable, "-m", "trivium.cli", "conformance", "my-chip", "--json"],
        env=beside(site), cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    report = json.loads(done.stdout)
    assert done.returncode == 0 and report["failed"] == 0, [row for row in report["rows"] if row["status"] == "failed"]
    assert {row["area"] for row in report["rows"] if row["status"] == "passed"} >= {"rules", "fusions", "models", "serving"}


def test_its_tests_and_the_kit_as_a_pytest_plugin_run_in_its_folder(installed):
    folder, site = installed
    plugin = ["-p", "trivium.conformance.pytest_plugin", "-p", "no:cacheprovider", "--trivium-backend=my-chip"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", *plugin, "-k", "listed or cancelled or rules"],
        env={**beside(site), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}, cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_it_is_listed_with_its_device PASSED" in done.stdout
    assert "my-chip:serving:cancelled while decoding PASSED" in done.stdout


def test_what_starts_from_torch_passes_too(tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("trivium_torch")
    assert new("torchchip", "--from", "torch", "--path", str(tmp_path)) == 0
    pip_install(tmp_path / "site", tmp_path / "torchchip")
    areas = ["--area", "rules", "--area", "fusions", "--area", "pages", "--area", "serving"]
    command = [sys.executable, "-m", "trivium.cli", "conformance", "torchchip", *areas, "--json"]
    done = subprocess.run(command, env=beside(tmp_path / "site"), capture_output=True, text=True, check=False)
    report = json.loads(done.stdout)
    assert done.returncode == 0 and report["failed"] == 0, [row for row in report["rows"] if row["status"] == "failed"]
    assert "torchchip_sum_norm" in {row["name"] for row in report["rows"] if row["status"] == "passed"}


def test_the_template_is_in_the_wheel(tmp_path):
    pytest.importorskip("scikit_build_core")
    tree = tmp_path / "tree"
    for part in ("core", "backends", "plugins"):
        shutil.copytree(ROOT / part, tree / part, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for part in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / part, tree)
    flags = ["-q", "--no-deps", "--no-index", "--no-build-isolation", "-C", "wheel.cmake=false", "-w", str(tmp_path)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *flags, str(tree)], capture_output=True, text=True, check=True)
    names = set(zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist())
    for path in (p for p in (ROOT / "plugins" / "template").rglob("*") if p.is_file() and "__pycache__" not in p.parts):
        assert f"trivium/cli/template/{path.relative_to(ROOT / 'plugins' / 'template').as_posix()}" in names


@pytest.mark.parametrize("kind", [entry.name for entry in templates().iterdir()])
def test_every_template_is_complete_and_imports_the_public_surface_only(kind, tmp_path):
    assert new("chip7", "--from", kind, "--path", str(tmp_path), "--json") == 0
    folder = tmp_path / "chip7"
    assert (folder / ".github" / "workflows" / "ci.yml").is_file() and (folder / "README.md").is_file()
    allowed = ("trivium.plugin", "trivium.ops", "trivium.errors", "trivium_torch.plugin", "trivium_chip7.")
    for path in folder.glob("src/*/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("trivium"):
                assert f"{node.module}.".startswith(tuple(f"{a.rstrip('.')}." for a in allowed)), (path, node.module)


@pytest.mark.parametrize("name", ["", "My", "1chip", "a b", "a/b", "..", "-x", "x-", "x--y", "chip.one", "reference", "auto"])
def test_a_bad_or_taken_name_is_refused_and_nothing_is_written(name, tmp_path, capsys):
    assert new("--path", str(tmp_path), "--", name) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and list(tmp_path.iterdir()) == []


def test_a_folder_in_use_is_not_touched(tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    assert new("mine", "--path", str(tmp_path)) == 2
    assert "exists already" in capsys.readouterr().err
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["thesis.txt"]
    assert new("other", "--path", str(tmp_path / "nowhere")) == 2


def test_list_names_what_plugins_offer_of_every_kind(capsys):
    assert main(["plugin", "list", "--json"]) == 0
    found = {(p["kind"], p["name"]) for p in json.loads(capsys.readouterr().out)["plugins"]}
    assert {("backend", "reference"), ("backend", "cpu"), ("model_source", "pypi")} <= found
