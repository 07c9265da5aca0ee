#!/usr/bin/env bash
# Builds and runs the C++ tests once for each kind given: test_native.sh plain address,undefined thread
#
# A kind is "plain" or the sanitizers to build with. One whose run-time library the compiler lacks is left out,
# with a line that says so.
set -euo pipefail
cd "$(dirname "$0")/.."

# A random layout of memory can leave the thread sanitizer without the addresses it needs.
fixed_layout=()
if setarch "$(uname -m)" -R true 2>/dev/null; then fixed_layout=(setarch "$(uname -m)" -R); fi

has_sanitizer() {
  local compiler=${CXX:-c++}
  echo 'int main() {}' | $compiler -fsanitize="$1" -x c++ - -o "$2" 2>/dev/null && "${fixed_layout[@]}" "$2" 2>/dev/null
}

for kind in "$@"; do
  build=build/tests-${kind//,/-}
  if [ "$kind" = plain ]; then build=build/dev; fi  # where the package was built, with the same core
  mkdir -p "$build"
  sanitize=""
  if [ "$kind" != plain ]; then
    sanitize=$kind
    if ! has_sanitizer "$kind" "$build/probe"; then
      echo "C++ tests with -fsanitize=$kind: left out, this system cannot run such programs"
      continue
    fi
  fi
  side_by_side=2
  if [ "$kind" = thread ]; then side_by_side=1; fi  # its programs have more threads than there are cores
  printf 'C++ tests, %s: ' "$kind"
  log=$build/tests.log
  options=(-G Ninja -DKARVAN_PYTHON=OFF -DKARVAN_SANITIZE="$sanitize")
  if [ -e "$build/CMakeCache.txt" ]; then options=(); fi
  if ! { cmake -S . -B "$build" "${options[@]}" && cmake --build "$build" --target karvan_tests; } >"$log" 2>&1; then
    echo "does not build"
    cat "$log" >&2
    exit 1
  fi
  UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 "${fixed_layout[@]}" \
    ctest --test-dir "$build" -j "$side_by_side" --output-on-failure >"$log" 2>&1 || {
    echo failed
    cat "$log" >&2
    exit 1
  }
  echo ok
done
