#!/usr/bin/env bash
# Checks this machine's GPU with gpu_check.py, in at most 8 minutes; builds nothing and needs no network.
#
#   bash benchmarks/gpu_check.sh --json gpu.json
#   WHEELS=/path/to/wheels bash benchmarks/gpu_check.sh --json gpu.json
#
# WHEELS: a folder with a wheel of each package that the machine's Python lacks. They go into a folder of their own,
# beside the packages that are there (a virtual environment would not see those of another one). To fill it elsewhere,
# for the Python of the machine (here 3.12):
#
#   pip download -d wheels --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux_2_28_x86_64 \
#     --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
#     vizdoom ale-py gymnasium farama-notifications tyro docstring-parser typeguard tomli-w imageio-ffmpeg
#
# PYTHON: the interpreter with torch (python3). All arguments go to gpu_check.py.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
site=$(mktemp -d "${TMPDIR:-/tmp}/pronghorn-gpu-XXXXXX")
trap 'rm -rf "$site"' EXIT
if [ -n "${WHEELS:-}" ]; then
  "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$WHEELS"/*.whl
fi
export PYTHONPATH="$root/src:$site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
timeout --kill-after=30 480 "$python" "$root/benchmarks/gpu_check.py" "$@"
