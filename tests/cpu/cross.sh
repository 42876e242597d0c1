#!/usr/bin/env bash
# Builds the native kernels for another processor and, where an emulator is installed, runs a check of the linear kernels on it.
# Usage: tests/cpu/cross.sh [processor; default: aarch64]     Debian and Ubuntu: apt install g++-aarch64-linux-gnu qemu-user
set -euo pipefail
cd "$(dirname "$0")/../.."
cpu=${1:-aarch64}
compiler=$cpu-linux-gnu-g++
command -v "$compiler" > /dev/null || { echo "skipped: no $compiler"; exit 0; }
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT

cmake -G Ninja -S backends/cpu/native -B "$build" -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR="$cpu" -DCMAKE_CXX_COMPILER="$compiler" \
  -DCMAKE_BUILD_TYPE=None -DCMAKE_CXX_FLAGS="-O1 -Werror" -DTRIVIUM_MODULE=OFF > "$build/cmake.log"
cmake --build "$build" --target trivium_kernels
"$compiler" -std=c++20 -O2 -Wall -Wextra -Werror -Ibackends/cpu/native tests/cpu/cross_check.cpp "$build"/libtrivium_kernels.a -pthread -static -o "$build/check"
command -v "qemu-$cpu" > /dev/null || { echo "compiled for $cpu; not run: no qemu-$cpu"; exit 0; }
for model in cortex-a53 cortex-a76 max; do  # without and with dot products
  echo "on $model: $("qemu-$cpu" -cpu "$model" "$build/check")"
done
