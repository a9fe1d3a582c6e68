package e2e

import (
	"errors"
	"io"
	"strings"
	"sync"
	"testing"

	"dsec/test/bed"
)

// screen collects what a program prints on its terminal.
type screen struct {
	mu   sync.Mutex
	text strings.Builder
	seen int
}

func newScreen(r io.Reader) *screen {
	s := &screen{}
	go func() {
		buf := make([]byte, 4096)
		for {
			n, err := r.Read(buf)
			s.mu.Lock()
			s.text.Write(buf[:n])
			s.mu.Unlock()
			if err != nil { // EIO: the program closed its terminal
				return
			}
		}
	}()
	return s
}

// await waits for text after what was awaited before.
func (s *screen) await(t *testing.T, text string) {
	t.Helper()
	bed.Eventually(t, "the terminal shows "+text, func() error {
		s.mu.Lock()
		defer s.mu.Unlock()
		rest := s.text.String()[s.seen:]
		i := strings.Index(rest, text)
		if i < 0 {
			return errors.New(rest)
		}
		s.seen += i + len(text)
		return nil
	})
}

func (s *screen) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.String()
}
