#!/usr/bin/env bash
# Builds the native module with sanitizers and runs CPU tests on it.
# Usage: tests/cpu/sanitize.sh [memory|thread] [pytest arguments]
#   memory  address and undefined behaviour (the default); tests: tests/cpu tests/cpu_linear
#   thread  data races; tests: those in which several threads walk a tape
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT

kind=memory
case ${1:-} in memory | thread) kind=$1; shift ;; esac
if [ "$kind" = memory ]; then
  sanitizers=address,undefined libraries="asan ubsan"
  tests=(tests/cpu tests/cpu_linear)
else
  sanitizers=thread libraries=tsan
  tests=(tests/cpu/test_cpu_{pool,invariance,backend,whole,sparse}.py)
fi
[ $# -gt 0 ] || set -- "${tests[@]}"

# A package of its own beside the sources, so that the module of the working tree stays as it is.
mkdir -p "$build/path"
cp -r backends/cpu/trivium_cpu "$build/path/"
rm -f "$build"/path/trivium_cpu/_native*
cmake -G Ninja -S backends/cpu/native -B "$build/native" -DCMAKE_BUILD_TYPE=RelWithDebInfo \
  -DTRIVIUM_SANITIZE=$sanitizers -DPython_EXECUTABLE="$(command -v "$python")" > "$build/cmake.log"
cmake --build "$build/native"
cp "$build"/native/_native*.so "$build/path/trivium_cpu/"

# The interpreter itself is not instrumented: the sanitizer must be loaded first, and what the interpreter leaks is its own business.
compiler=$(sed -n 's/^CMAKE_CXX_COMPILER:[^=]*=//p' "$build/native/CMakeCache.txt")
preload=
for library in $libraries stdc++; do preload+="$("$compiler" -print-file-name=lib$library.so) "; done
export ASAN_OPTIONS=detect_leaks=0:abort_on_error=1:symbolize=1 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
export TSAN_OPTIONS=halt_on_error=1:ignore_noninstrumented_modules=1:second_deadlock_stack=1
export PYTHONPATH="$build/path:$PWD/core" OPENBLAS_NUM_THREADS=1
run=(env LD_PRELOAD="$preload" "$python" -m pytest -x -p no:cacheprovider "$@")
# The thread sanitizer wants the address space laid out in the plain order.
[ "$kind" = memory ] || run=(setarch "$(uname -m)" -R "${run[@]}")
"${run[@]}"
