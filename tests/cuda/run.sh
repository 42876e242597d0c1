#!/usr/bin/env bash
# The CUDA backend without a GPU, in an environment of its own: kernels in Triton's interpreter, kernels compiled ahead of time for six
# chips, and what else is in these folders. A process for each: the interpreter is chosen when a kernel is defined. One line each.
set -euo pipefail
cd "$(dirname "$0")/../.."
env=${TRIVIUM_CUDA_ENV:-$(mktemp -d)}
[ -x "$env/bin/python" ] || python3 -m venv "$env"
. "$env/bin/activate"
# trivium itself is read from its sources, with its entry points written beside them: no native code is needed here.
python - > "$env/needed" <<'PYTHON'
import sysconfig
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
packages = Path(sysconfig.get_path("purelib"))
info = packages / f"trivium-{project['version']}.dist-info"
info.mkdir(exist_ok=True)
(info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: trivium\nVersion: {project['version']}\n")
groups = [f"[{name}]\n" + "".join(f"{k} = {v}\n" for k, v in found.items()) for name, found in project["entry-points"].items()]
(info / "entry_points.txt").write_text("\n".join(groups))
found = [*Path.cwd().glob("*/trivium*/__init__.py"), *Path.cwd().glob("backends/*/trivium_*/__init__.py")]
(packages / "trivium-sources.pth").write_text("".join(f"{package.parents[1]}\n" for package in found))
print("\n".join(project["dependencies"]))
PYTHON
pip install -q torch==2.13.0 triton==3.7.1 "pytest>=8" "hypothesis>=6.100" "pillow>=11" -r "$env/needed"
failed=0
for part in interpreter aot emulated ranks; do
  [ -d "tests/cuda/$part" ] || continue
  [ "$part" = aot ] && interpret=0 || interpret=1
  TRITON_INTERPRET=$interpret python -m pytest -p no:cacheprovider "tests/cuda/$part" > "$env/$part.log" 2>&1 || failed=1
  echo "$part: $(tail -1 "$env/$part.log")"
  grep -q " passed" <(tail -1 "$env/$part.log") || failed=1
done
[ "$failed" = 0 ] || tail -n 80 "$env"/*.log
exit "$failed"
