#!/usr/bin/env bash
# Regenerate the Python code beside the .proto files. `make check` fails when what is committed differs.
set -euo pipefail
cd "$(dirname "$0")"
"${PYTHON:-python}" -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. diffusion_rollout/v1/*.proto
