#!/usr/bin/env bash
# Fail when the committed Python code of the protocol is not what its .proto files generate.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
fresh="$(mktemp -d)"
trap 'rm -rf "$fresh"' EXIT
"$here/generate.sh" "$fresh"
for file in "$fresh"/diffusion_rollout/v1/*; do
  diff -u "$here/diffusion_rollout/v1/$(basename "$file")" "$file" || {
    echo "the generated code is out of date: run 'make proto' and commit it" >&2
    exit 1
  }
done
echo "generated code is up to date"
