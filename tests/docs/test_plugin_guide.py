"""docs/plugin-guide.md, done as a reader would: files written, changes applied and commands run, in the order of the page."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pip_sites import beside, pip_install

GUIDE = Path(__file__).parents[2] / "docs" / "plugin-guide.md"
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL)


def environment(site):
    """With the plugin installed, and the kit as a pytest plugin by its module."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    plugins = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "-p trivium.conformance.pytest_plugin -p no:cacheprovider"}
    return {**beside(site), **plugins, "PATH": path}


def run(command, where):
    """One line of a shell block; pip installs into a folder of its own, anew each time."""
    if command.startswith("pip install"):
        for old in ("site", "site-source"):
            shutil.rmtree(where / old, ignore_errors=True)
        pip_install(where / "site", where / command.split()[-1])
        return
    done = subprocess.run(
        ["bash", "-ec", command], cwd=where, env=environment(where / "site"), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-2000:]}"
    assert done.stdout.strip(), command


def apply(diff, folder):
    """Each hunk of a unified diff: what it shows of the old text must be there once, wherever."""
    for part in re.split(r"^--- .*\n", diff, flags=re.MULTILINE)[1:]:
        name, *hunks = re.split(r"^@@.*\n", part, flags=re.MULTILINE)
        path = folder / name.split()[1].removeprefix("b/")
        text = path.read_text()
        for hunk in hunks:
            lines = [line or " " for line in hunk.splitlines()]
            old, new = ("".join(f"{line[1:]}\n" for line in lines if line[0] in kinds) for kinds in (" -", " +"))
            assert text.count(old) == 1, f"{path.name} has {text.count(old)} times\n{old}"
            text = text.replace(old, new)
        path.write_text(text)


def test_everything_on_the_page_is_of_a_kind_that_is_run():
    assert {kind for kind, _ in BLOCKS} == {"sh", "python", "diff"}
    assert sum(kind == "sh" for kind, _ in BLOCKS) >= 6


@pytest.mark.slow
def test_a_reader_who_does_what_the_page_says_ends_with_a_backend_that_passes(tmp_path):
    for kind, block in BLOCKS:
        if kind == "sh":
            for line in block.splitlines():
                run(line, tmp_path)
        elif kind == "python":
            comment, _, code = block.partition("\n")
            (tmp_path / "mychip" / comment.removeprefix("# ")).write_text(code)
        else:
            apply(block, tmp_path / "mychip")
