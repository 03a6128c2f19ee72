#!/usr/bin/env bash
# Regenerate the Python code of the protocol into a folder (default: beside the .proto files).
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
out="${1:-$here}"
cd "$here"
python -m grpc_tools.protoc -I. --python_out="$out" --pyi_out="$out" --grpc_python_out="$out" diffusion_rollout/v1/*.proto
