package session

import "strings"

// Descriptors of the shell besides its script (0) and output (1, 2). One digit each:
// not every shell takes more in a redirection.
const (
	nullFD   = 8
	statusFD = 9
)

// script is what the shell gets to read for one command. The command sees none of the
// descriptors above, and /dev/null as its stdin. "command" keeps a shell that treats
// eval as special from ending at a syntax error, and functions of these names away.
func script(text, nonce string) string {
	var b strings.Builder
	b.Grow(len(text) + len(nonce) + 96)
	b.WriteString("command eval ")
	quote(&b, text)
	b.WriteString(" <&8 8<&- 9>&-\ncommand printf '%s %d\\n' ")
	b.WriteString(nonce)
	b.WriteString(" \"$?\" >&9\n")
	return b.String()
}

// quote writes s as one word of shell.
func quote(b *strings.Builder, s string) {
	b.WriteByte('\'')
	for {
		i := strings.IndexByte(s, '\'')
		if i < 0 {
			break
		}
		b.WriteString(s[:i])
		b.WriteString(`'\''`)
		s = s[i+1:]
	}
	b.WriteString(s)
	b.WriteByte('\'')
}
