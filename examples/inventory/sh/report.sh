#!/bin/sh
# report.sh FILE: prints the items of a stock list whose quantity is zero, sorted, and
# their number.
file=$1
empty=$(grep -v '^#' $file | awk -F';' '$2 = 0 { print $1 }' | sort)
echo "$empty"
echo "out of stock: $(echo "$empty" | wc -l)"
