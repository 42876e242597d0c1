"""Every command and Python example of the documents runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "plugin-guide.md"  # whose blocks build on each other: test_plugin_guide.py runs them
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
# Installing, and running the tests or CI from within a test, would recurse: CI itself runs these lines.
BY_CI = re.compile(r"pip install|python -m venv|pytest|ruff|\.ci/run|tests/\w+/run\.sh")


def blocks(language: str) -> list[tuple[str, str]]:
    """(document, content) of every fenced block in `language`."""
    pattern = re.compile(rf"^```{language} *\n(.*?)^```", re.MULTILINE | re.DOTALL)
    return [(d.name, m) for d in DOCUMENTS if d != GUIDE for m in pattern.findall(d.read_text())]


def commands() -> list[str]:
    text = "\n".join(block for language in ("sh", "bash") for _, block in blocks(language))
    lines = [line.partition("  #")[0].strip() for line in text.splitlines()]
    return [line for line in lines if line and not BY_CI.search(line)]


def test_the_documents_have_commands_and_the_readme_opens_with_its_two():
    readme = [b for d, b in blocks("sh") if d == "README.md"]
    assert len(readme) == 2
    assert "trivium run" in readme[0]
    assert "pytest" in readme[1]
    assert len(commands()) >= 5


@pytest.mark.weights
@pytest.mark.parametrize("command", commands())
def test_a_documented_command_runs(command):
    env_first = f'PATH="{Path(sys.executable).parent}:$PATH" ; '
    done = subprocess.run(["bash", "-ec", env_first + command], cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.weights
@pytest.mark.parametrize("code", [pytest.param(b, id=f"{d}-{i}") for i, (d, b) in enumerate(blocks("python"))])
def test_a_documented_example_runs(code):
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=600)


def test_relative_links_lead_somewhere():
    broken = [
        f"{d.name}: {target}"
        for d in DOCUMENTS
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", re.sub(r"^```.*?^```", "", d.read_text(), flags=re.M | re.S))
        if not (d.parent / target).exists()
    ]
    assert broken == []


def test_every_parser_is_documented():
    from trivium.text.syntaxes import REASONING, TOOLS

    text = (ROOT / "docs" / "chat.md").read_text()
    assert [name for name in [*TOOLS, *REASONING] if f"`{name}`" not in text] == []


def test_the_page_of_models_is_what_its_tool_writes():
    subprocess.run([sys.executable, "tools/models_page.py", "--check"], cwd=ROOT, check=True)
