#!/usr/bin/env bash
# Says what is missing before anything is installed: check_system.sh PYTHON
set -euo pipefail

python=${1:-python3}
fail() {
  echo "$1" >&2
  exit 1
}

command -v "$python" >/dev/null || fail "Karvan needs Python 3.11 or later, but there is no '$python': make PYTHON=/path/to/python3."
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
  fail "Karvan needs Python 3.11 or later, but '$python' is $("$python" -V 2>&1 | head -n 1): make PYTHON=/path/to/python3."

# What cmake would take.
compilers=(c++ g++ clang++)
if [ -n "${CXX:-}" ]; then compilers=("$CXX"); fi
for compiler in "${compilers[@]}"; do
  if command -v "${compiler%% *}" >/dev/null; then
    echo 'int main() {}' | $compiler -std=c++20 -fsyntax-only -x c++ - 2>/dev/null && exit 0
    fail "Karvan needs a compiler for C++20, but '$compiler' refuses -std=c++20: set CXX to a newer one."
  fi
done
fail "Karvan needs a C++ compiler, but found none of: ${compilers[*]}. Install one or set CXX."
