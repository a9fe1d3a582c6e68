package doctor

import (
	"cmp"
	"encoding/json"
	"fmt"
	"os"
	"slices"
)

// Growth is what there is more of than there was, of one owner and kind.
type Growth struct {
	Owner  Owner  `json:"owner"`
	Kind   string `json:"kind"`
	Before int    `json:"before"`
	Now    int    `json:"now"`
}

// Save writes the audit to a file, for Load.
func (a *Audit) Save(file string) error {
	b, err := json.Marshal(a)
	if err != nil {
		return err
	}
	return os.WriteFile(file, append(b, '\n'), 0o600)
}

// Load reads an audit that Save wrote.
func Load(file string) (*Audit, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	a := &Audit{}
	if err := json.Unmarshal(b, a); err != nil {
		return nil, fmt.Errorf("%s is no saved audit: %w", file, err)
	}
	if a.Owners == nil {
		return nil, fmt.Errorf("%s is no saved audit: it counts nothing by owner", file)
	}
	return a, nil
}

// Compare returns what there is more of than in before. What is of other nodes does not count.
func (a *Audit) Compare(before *Audit) []Growth {
	grown := []Growth{}
	for owner, kinds := range a.Owners {
		if owner == OfOthers {
			continue
		}
		for kind, now := range kinds {
			if was := before.Owners[owner][kind]; now > was {
				grown = append(grown, Growth{owner, kind, was, now})
			}
		}
	}
	slices.SortFunc(grown, func(x, y Growth) int {
		return cmp.Or(cmp.Compare(x.Owner, y.Owner), cmp.Compare(x.Kind, y.Kind))
	})
	return grown
}
