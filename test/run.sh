#!/bin/bash
# Every test, as root, and a look for what they left behind.
set -euo pipefail
cd "$(dirname "$0")/.."
[ "$(id -u)" = 0 ] || { echo "the tests need root: they make namespaces, mounts and control groups" >&2; exit 1; }
make -s build
export DSEC_BIN=$PWD/bin/dsec
# Data directories of tests lie below here, which is how what they leave is known from what
# other nodes on this machine have.
tmp=$(mktemp -d /tmp/dt.XXXXXX)
trap 'rm -rf --one-file-system "$tmp"' EXIT
mkdir "$tmp/t"
go build -o "$tmp/leaks" ./test/leaks
"$tmp/leaks" note "$tmp/before"

TMPDIR=$tmp/t CGO_ENABLED=1 go test -race -timeout 14m "$@" ./...

"$tmp/leaks" check "$tmp/before" "$tmp/t"
if left=$(ls -A "$tmp/t" | grep -v '^go-build') && [ -n "$left" ]; then
	echo "the tests left files in their temporary directory: $left" >&2
	exit 1
fi
echo "leak audit: nothing is left of the tests"
