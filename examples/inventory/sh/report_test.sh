#!/bin/sh
# Tests of report.sh.
here=$(cd "$(dirname "$0")" && pwd)
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
failed=0
check() { # what got want
	if [ "$2" != "$3" ]; then
		printf 'FAIL %s: got <%s>, want <%s>\n' "$1" "$2" "$3"
		failed=1
	fi
}
printf 'nut;0;1\n# old;0;1\nbolt;12;2\nanchor;0;3\n' >"$dir/stock list"
check "report" "$(sh "$here/report.sh" "$dir/stock list" 2>&1)" "anchor
nut
out of stock: 2"
printf 'bolt;12;2\n' >"$dir/full"
check "nothing out of stock" "$(sh "$here/report.sh" "$dir/full" 2>&1)" "out of stock: 0"
sh "$here/report.sh" "$dir/absent" >/dev/null 2>&1
check "exit status without a file" "$?" 1
[ $failed = 0 ] && echo "sh: ok"
exit $failed
