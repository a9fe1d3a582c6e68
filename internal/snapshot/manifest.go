package snapshot

import (
	"fmt"
	"sort"
)

// maxLeftOut is how many paths a manifest lists; all are counted.
const maxLeftOut = 1000

// Manifest says what is in a layer and what is not.
type Manifest struct {
	Entries   int64 `json:"entries"` // names, the root not counted
	Bytes     int64 `json:"bytes"`   // of regular files, holes included, hard links once
	Regular   int64 `json:"regular"` // inodes
	Dirs      int64 `json:"dirs"`
	Symlinks  int64 `json:"symlinks"`
	Special   int64 `json:"special"`    // devices, fifos, sockets
	HardLinks int64 `json:"hard_links"` // further names
	Whiteouts int64 `json:"whiteouts"`
	Opaque    int64 `json:"opaque"`    // directories that hide what is below
	Redirects int64 `json:"redirects"` // directories whose lower part is elsewhere

	LeftOutCount int64    `json:"left_out_count"`
	LeftOut      []string `json:"left_out,omitempty"` // paths, the first thousand; a directory stands for all in it
	// Notes say what could not be kept as it was, with counts.
	Notes []string `json:"notes,omitempty"`
}

func (m *Manifest) leaveOut(d *dir, name string) {
	m.LeftOutCount++
	if len(m.LeftOut) < maxLeftOut {
		m.LeftOut = append(m.LeftOut, shown(d.path()+"/"+name))
	}
}

func (m *Manifest) addNotes(counts map[string]int64) {
	kinds := make([]string, 0, len(counts))
	for k := range counts {
		kinds = append(kinds, k)
	}
	sort.Strings(kinds)
	for _, k := range kinds {
		m.Notes = append(m.Notes, fmt.Sprintf("%s: %d", k, counts[k]))
	}
}
