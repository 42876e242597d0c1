"""Plugins installed by pip into a folder of their own; no network is needed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path


def pip_install(target: Path, project: Path) -> None:
    """Builds and installs `project` (a copy of it, which the build may write to) into the folder `target`."""
    flags = ["-q", "--no-deps", "--no-index", "--no-build-isolation", "--target", str(target)]
    copied = target.with_name(f"{target.name}-source") / project.name
    shutil.copytree(project, copied)
    subprocess.run([sys.executable, "-m", "pip", "install", *flags, str(copied)], capture_output=True, text=True, check=True)


def beside(site: Path) -> dict[str, str]:
    """The environment of a process that also sees what is installed in `site`."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), *filter(None, sys.path)])}
