#!/usr/bin/env bash
# Builds a source distribution and, from it, a manylinux wheel for each Python given: wheels.sh PYTHON...
#
# Python 3.12 or later makes a wheel of the stable ABI, which all of these use; Python 3.11 makes one for itself.
# auditwheel finds the oldest manylinux that has the symbols a wheel needs. Build on an older system for an older one.
set -euo pipefail
cd "$(dirname "$0")/.."

dist=out/dist
raw=$(mktemp -d)
trap 'rm -rf "$raw"' EXIT
export PIP_CONSTRAINT=$PWD/constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1

rm -rf "$dist"
echo "Building the source distribution"
python -m build --sdist --outdir "$dist" >"$raw/log" 2>&1 || { cat "$raw/log" >&2; exit 1; }
for interpreter in "$@"; do
  echo "Building a wheel with $("$interpreter" -V)"
  rm -rf "$raw/wheel"
  pip --python "$interpreter" wheel -q --no-deps -w "$raw/wheel" "$dist"/*.tar.gz
  auditwheel repair -w "$dist" "$raw"/wheel/*.whl >"$raw/log" 2>&1 || { cat "$raw/log" >&2; exit 1; }
done
twine check --strict "$dist"/* >"$raw/log" || { cat "$raw/log" >&2; exit 1; }
du -h --apparent-size "$dist"/*
