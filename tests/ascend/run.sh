#!/usr/bin/env bash
# The Ascend backend without an NPU: torch-npu's own package on an emulated CANN (see tests/ascend/bed/emulated_cann).
# Makes an environment of its own (the CPU build of torch 2.13.0, torch-npu 2.13.0, this checkout) and runs each suite in a process of
# its own. Usage: tests/ascend/run.sh [pytest arguments]     Needs Linux on x86-64 and gcc. TRIVIUM_ASCEND_VENV: one to keep and reuse.
set -euo pipefail
cd "$(dirname "$0")/../.."
export TORCH_DEVICE_BACKEND_AUTOLOAD=0  # torch must not open torch-npu by itself: without CANN that breaks `import torch`
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} TOKENIZERS_PARALLELISM=false
venv=${TRIVIUM_ASCEND_VENV:-}
if [ -z "$venv" ]; then
  venv=$(mktemp -d)
  trap 'rm -rf "$venv"' EXIT
fi
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
. "$venv/bin/activate"
pip install -q "torch==2.13.0" "torch-npu==2.13.0" "pytest>=8" "hypothesis>=6.100" "safetensors>=0.5" "pillow>=11"
pip install -q -C wheel.cmake=false .  # without the native kernels of another backend

status=0
for suite in bed schema shapes emulated; do
  echo "== tests/ascend/$suite"
  python -m pytest "tests/ascend/$suite" "$@" || status=1
done
exit $status
