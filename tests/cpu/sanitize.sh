#!/usr/bin/env bash
# Builds the native module with address and undefined-behaviour sanitizers and runs the CPU tests on it.
# Usage: tests/cpu/sanitize.sh [pytest arguments; default: tests/cpu tests/cpu_linear]
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT

# A package of its own beside the sources, so that the module of the working tree stays as it is.
mkdir -p "$build/path"
cp -r backends/cpu/trivium_cpu "$build/path/"
rm -f "$build"/path/trivium_cpu/_native*
cmake -G Ninja -S backends/cpu/native -B "$build/native" -DCMAKE_BUILD_TYPE=RelWithDebInfo \
  -DTRIVIUM_SANITIZE=address,undefined -DPython_EXECUTABLE="$(command -v "$python")" > "$build/cmake.log"
cmake --build "$build/native"
cp "$build"/native/_native*.so "$build/path/trivium_cpu/"

# The interpreter itself is not instrumented: the sanitizer must be loaded first, and what the interpreter leaks is its own business.
compiler=$(sed -n 's/^CMAKE_CXX_COMPILER:[^=]*=//p' "$build/native/CMakeCache.txt")
preload="$("$compiler" -print-file-name=libasan.so) $("$compiler" -print-file-name=libubsan.so) $("$compiler" -print-file-name=libstdc++.so)"
export ASAN_OPTIONS=detect_leaks=0:abort_on_error=1:symbolize=1 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
export PYTHONPATH="$build/path:$PWD/core"
[ $# -gt 0 ] || set -- tests/cpu tests/cpu_linear
LD_PRELOAD="$preload" "$python" -m pytest -x -p no:cacheprovider "$@"
