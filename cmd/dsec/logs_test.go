package main

import (
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// The last lines are those that splitting the whole gives, however it came in pieces.
func TestTailBufferKeepsTheLastLines(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		b := tailBuffer{lines: rapid.IntRange(0, 4).Draw(t, "lines")}
		var all string
		for _, p := range rapid.SliceOf(rapid.StringOfN(rapid.SampledFrom([]rune("ab\n")), 0, 12, -1)).Draw(t, "pieces") {
			if rapid.Bool().Draw(t, "long") {
				p += strings.Repeat("x", maxLine)
			}
			b.Write([]byte(p))
			all += p
		}
		lines := strings.SplitAfter(all, "\n")
		if lines[len(lines)-1] == "" {
			lines = lines[:len(lines)-1]
		}
		if want := strings.Join(lines[max(0, len(lines)-b.lines):], ""); string(b.content()) != want {
			t.Fatalf("%d lines: kept %d bytes, want %d", b.lines, len(b.content()), len(want))
		}
	})
}
