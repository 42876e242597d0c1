"""The reader of entry points against the standard library's, over what is installed here and what strangers leave."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys

import pytest

from trivium.entrypoints import entry_points


def theirs(group):
    return {(e.name, e.value, f"{e.dist.name} {e.dist.version}") for e in importlib.metadata.entry_points(group=group)}


def install(site, folder, entries, metadata="Metadata-Version: 2.1\nName: My.Chip\nVersion: 1.0\n", file="METADATA"):
    info = site / folder
    info.mkdir(parents=True)
    (info / file).write_text(metadata)
    (info / "entry_points.txt").write_bytes(entries)


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_every_group_installed_here_reads_as_the_standard_library_reads_it():
    groups = {e.group for d in importlib.metadata.distributions() for e in d.entry_points}
    assert len(groups) > 3
    for group in groups:
        assert set(map(tuple, entry_points(group))) == theirs(group)


@pytest.mark.parametrize("entries", [
    b"[trivium]\nchip = a_chip\n",
    b"#1\n[other]\nx = y\n\n[trivium]\n # 2\n  chip=a_chip:made.here [extra, more]  \r\n\r\nsecond = b\n[trivium.more]\nz = q\n",
    b"[trivium]\nchip = a\n[other]\nx = y\n[trivium]\nlater = b = c\n",
    b"chip = lost\n[trivium",
    b"",
    "[trivium]\nch\u00efp = \u00e4\n".encode(),
])  # fmt: skip
def test_entries_read_as_the_standard_library_reads_them(site, entries):
    install(site, "my_chip-1.0.dist-info", entries)
    assert set(map(tuple, entry_points("trivium"))) == theirs("trivium")


def test_metadata_of_development_installs_and_long_descriptions(site):
    install(site, "My.Chip.egg-info", b"[trivium]\nchip = a\n", "Name: My.Chip\nVersion:  1.0\n\nName: another\n", "PKG-INFO")
    assert ("chip", "a", "My.Chip 1.0") in entry_points("trivium")
    assert set(map(tuple, entry_points("trivium"))) == theirs("trivium")


def test_of_a_distribution_installed_twice_the_first_on_the_path_counts(site, monkeypatch):
    monkeypatch.syspath_prepend(str(site / "before"))
    install(site, "my_chip-1.0.dist-info", b"[trivium]\nchip = old\n")
    install(site / "before", "My.Chip-2.0.dist-info", b"[trivium]\nchip = new\n", "Name: my-chip\nVersion: 2.0\n")
    assert [tuple(e) for e in entry_points("trivium") if e.name == "chip"] == [("chip", "new", "my-chip 2.0")]
    assert set(map(tuple, entry_points("trivium"))) == theirs("trivium")


def test_files_that_are_no_metadata_harm_nothing(site, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(site / "missing"), str(site / "a.zip"), ""])
    (site / "a.zip").write_bytes(b"no archive")
    (site / "flat-1.0.egg-info").write_text("Name: flat\nVersion: 1\n")
    (site / "empty-1.0.dist-info").mkdir()
    install(site, "nameless-1.0.dist-info", b"[trivium]\nnameless = a\n", "Keywords: none\n")
    install(site, "broken-1.0.dist-info", b"[trivium]\nbroken = \xff\xfe\n")
    found = {e.name: e for e in entry_points("trivium")}
    assert found["nameless"].distribution == "unknown" and {"broken", "reference"} <= found.keys()


def test_what_an_entry_names_is_imported(site):
    (site / "a_chip_to_load.py").write_text("class made:\n    here = 7\n")
    install(site, "my_chip-1.0.dist-info", b"[t]\nwhole = a_chip_to_load\npart = a_chip_to_load : made.here [extra]\n")
    whole, part = entry_points("t")
    assert whole.load() is sys.modules["a_chip_to_load"] and part.load() == 7


def test_a_start_does_not_import_the_standard_librarys_reader():
    script = "import sys, trivium.plugin as p; p.resolve('reference'); print('importlib.metadata' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment).stdout == "False\n"
