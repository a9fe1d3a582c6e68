#!/bin/bash
# The demo: builds dsec and a Debian image, starts a server, and lets eight sandboxes
# repair a repository with failing tests. State is kept in $1 for the next time.
set -euo pipefail
state=$(mkdir -p "$1" && cd "$1" && pwd)
cd "$(dirname "$0")/.."
begin=$(date +%s)
say() { printf '\n== %s\n' "$*"; }

say "build one static dsec"
make -s build
dsec=$PWD/bin/dsec
export XDG_CONFIG_HOME=$state/config DSEC_URL= DSEC_TOKEN=
unset DSEC_URL DSEC_TOKEN

say "start a server"
"$dsec" down --data "$state/data" >/dev/null 2>&1 || true # what an earlier demo left
"$dsec" up --detach --data "$state/data" --listen "unix:$state/api.sock"
trap '"$dsec" down --data "$state/data"' EXIT

recipe=images/debian-python/recipe.yaml
if [ "$(cat "$state/recipe.sum" 2>/dev/null)" != "$(sha256sum $recipe)" ] || ! "$dsec" image inspect debian >/dev/null 2>&1; then
	say "build a Debian image with python3, pytest, git and a C compiler (once, a minute or two)"
	"$dsec" image build debian -f $recipe
	sha256sum $recipe >"$state/recipe.sum"
fi
"$dsec" image ls

say "a command in a sandbox of its own"
"$dsec" run debian -- python3 -c 'import platform; print("hello from", platform.python_implementation(), platform.python_version())'

say "eight sandboxes at once: tests fail, a patch is applied, tests pass"
go run ./examples/repair -image debian -n 8

say "no sandbox and no leak is left; what the server holds is its own until it stops"
"$dsec" doctor --audit --data "$state/data"
echo "the demo took $(($(date +%s) - begin)) s"
