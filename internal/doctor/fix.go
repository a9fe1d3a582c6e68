package doctor

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// PersistFile is where settings are kept that outlast a restart of the machine.
const PersistFile = "/etc/sysctl.d/90-dsec.conf"

// Change of one setting that was lower than wanted. Those that are not are not told of.
type Change struct {
	Name  string `json:"name"`
	Old   int64  `json:"old"`
	New   int64  `json:"new"`             // what it is now; in a dry run, what it would be
	Line  string `json:"line"`            // of a file in /etc/sysctl.d, which makes it last
	Error string `json:"error,omitempty"` // why it is lower still
}

// Raise sets the setting to what is wanted, and never lowers it: the kernel may have more
// already, or have taken less than it was told.
func (s Setting) Raise(dir string) (from, to int64, err error) {
	if from, err = s.Value(dir); err != nil || from >= s.Want {
		return from, from, err
	}
	// Without O_CREATE: what the kernel does not have cannot be made.
	f, err := os.OpenFile(s.Path(dir), os.O_WRONLY|os.O_TRUNC, 0)
	if err != nil {
		return from, from, err
	}
	_, err = f.WriteString(strconv.FormatInt(s.Want, 10))
	if err = errors.Join(err, f.Close()); err != nil {
		return from, from, err
	}
	to, err = s.Value(dir)
	if err == nil && to <= from {
		err = fmt.Errorf("it stays at %d", to)
	}
	return from, to, err
}

// Fix raises every setting below dir that is lower than wanted, or with dry only says so.
func Fix(dir string, dry bool) []Change {
	changes := []Change{}
	for _, s := range Settings() {
		from, err := s.Value(dir)
		if errors.Is(err, fs.ErrNotExist) || err == nil && from >= s.Want {
			continue
		}
		c := Change{Name: s.Name, Old: from, New: s.Want, Line: s.line(s.Want)}
		if err == nil && !dry {
			c.Old, c.New, err = s.Raise(dir)
			if err == nil && c.New < s.Want {
				err = fmt.Errorf("the kernel took no more than %d of %d", c.New, s.Want)
			}
		}
		if err != nil {
			c.Error = err.Error()
		}
		changes = append(changes, c)
	}
	return changes
}

func (s Setting) line(value int64) string { return fmt.Sprintf("%s = %d", s.Name, value) }

// Persist writes the settings that the kernel below dir has to a file for sysctl, and says
// whether the file changed, or with dry would. A value that is higher in the kernel or in
// the file already stays; so does a line that is not about one of Settings.
func Persist(dir, file string, dry bool) (changed bool, err error) {
	before, err := os.ReadFile(file)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return false, err
	}
	least := map[string]int64{}
	for _, s := range Settings() {
		have, err := s.Value(dir)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return false, err
		}
		least[s.Name] = max(have, s.Want)
	}
	var kept []string
	for line := range strings.Lines(string(before)) {
		line = strings.TrimSuffix(line, "\n")
		name, value, _ := strings.Cut(line, "=")
		name = strings.TrimSpace(name)
		if least[name] == 0 {
			kept = append(kept, line)
		} else if n, err := strconv.ParseInt(strings.TrimSpace(value), 10, 64); err == nil {
			least[name] = max(least[name], n)
		}
	}
	if len(before) == 0 {
		kept = []string{"# Written by 'dsec doctor --fix --persist': what the sandboxes of a node share."}
	}
	for _, s := range Settings() {
		if n := least[s.Name]; n > 0 {
			kept = append(kept, s.line(n))
		}
	}
	after := []byte(strings.Join(kept, "\n") + "\n")
	if bytes.Equal(before, after) || dry {
		return !bytes.Equal(before, after), nil
	}
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		return false, err
	}
	temporary := file + ".new" // sysctl reads only names that end in .conf
	if err := os.WriteFile(temporary, after, 0o644); err != nil {
		return false, err
	}
	return true, os.Rename(temporary, file)
}
