package main

import (
	"strings"
	"testing"
	"unicode"
)

// What others chose the text of cannot move the cursor, change colours or add lines.
func TestTableIsSafeForATerminal(t *testing.T) {
	var out strings.Builder
	rows := [][]string{{"id", "a\x1b[31m\n\tb\x7f\u009b2J"}, {"second", "é…"}}
	if err := table(&out, []string{"ID", "LABELS"}, rows); err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(out.String(), "\n"); n != 3 {
		t.Errorf("%d lines of a head and two rows: %q", n, out.String())
	}
	for _, r := range strings.ReplaceAll(out.String(), "\n", "") {
		if unicode.IsControl(r) {
			t.Errorf("%U is printed: %q", r, out.String())
		}
	}
	if !strings.Contains(out.String(), "é…") {
		t.Errorf("letters are lost: %q", out.String())
	}
}
