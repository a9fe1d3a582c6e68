#!/bin/bash
# Every test, as root, and an audit of the machine at the end.
set -euo pipefail
cd "$(dirname "$0")/.."
[ "$(id -u)" = 0 ] || { echo "the tests need root: they make namespaces, mounts and control groups" >&2; exit 1; }
make -s build
export DSEC_BIN=$PWD/bin/dsec
before=$("$DSEC_BIN" doctor --audit --data /nonexistent --json 2>/dev/null | sha256sum || true)

CGO_ENABLED=1 go test -race -timeout 14m "$@" ./...

after=$("$DSEC_BIN" doctor --audit --data /nonexistent --json 2>/dev/null | sha256sum || true)
if [ "$before" != "$after" ]; then
	echo "the tests left something behind:" >&2
	"$DSEC_BIN" doctor --audit --data /nonexistent >&2
	exit 1
fi
echo "leak audit: as before the tests"
