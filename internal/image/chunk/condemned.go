package chunk

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"sort"
	"strings"
	"time"

	"dsec/api/v1/errs"
	"dsec/internal/image/object"
)

// A condemnation lists objects that a collector means to delete. It goes through
// stages, each an object condemned/ID.N; earlier ones stay until the end, so that
// no listing can miss it between two.
const (
	stageListed  = 1 // everyone who begins to write now will see it
	stageWaiting = 2 // waits for the leases that were there, whose holders may not have seen it
	stageDone    = 3 // what had to be deleted is; kept until no other collector can be acting on the stage before
)

type condemnation struct {
	Keys   []string `json:"keys"`
	Leases []string `json:"leases,omitempty"`

	id       string
	stage    int
	modified time.Time // of the object of its stage
	bad      error     // it could not be read
}

func condemnedKey(id string, stage int) string {
	return fmt.Sprintf("%s%s.%d", condemnedClass, id, stage)
}

func (c *condemnation) put(ctx context.Context, s object.Store, stage int) error {
	b, err := json.Marshal(c)
	if err != nil {
		return errs.Wrap(errs.InternalError, phase, "encode a list of objects to delete", err)
	}
	sum := sha256.Sum256(b)
	b = append(b, sum[:]...)
	if err := s.Put(ctx, condemnedKey(c.id, stage), int64(len(b)), bytes.NewReader(b)); err != nil {
		return fmt.Errorf("list objects to delete: %w", err)
	}
	c.stage = stage
	return nil
}

func parseCondemnation(key string, b []byte) (*condemnation, error) {
	var c condemnation
	if len(b) < sha256.Size {
		return nil, corrupt(key, "it is too short", nil)
	}
	body := b[:len(b)-sha256.Size]
	if sum := sha256.Sum256(body); !bytes.Equal(sum[:], b[len(body):]) {
		return nil, corrupt(key, "its checksum is wrong", nil)
	}
	if err := json.Unmarshal(body, &c); err != nil {
		return nil, corrupt(key, "it cannot be decoded", err)
	}
	return &c, nil
}

const maxCondemnation = 256 << 20

// loadCondemned reads all condemnations, each in its last stage. One that cannot be
// understood has bad set.
func loadCondemned(ctx context.Context, s object.Store) ([]*condemnation, error) {
	last := map[string]*condemnation{}
	err := s.List(ctx, condemnedClass, func(i object.Info) error {
		id, stage, ok := strings.Cut(strings.TrimPrefix(i.Key, condemnedClass), ".")
		if !ok || len(stage) != 1 || stage[0] < '0'+stageListed || stage[0] > '0'+stageDone {
			return nil
		}
		if n := int(stage[0] - '0'); last[id] == nil || last[id].stage < n {
			last[id] = &condemnation{id: id, stage: n, modified: i.Modified}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	all := make([]*condemnation, 0, len(last))
	for _, c := range last {
		key := condemnedKey(c.id, c.stage)
		var read *condemnation
		_, err := readTwice(ctx, s, key, maxCondemnation, func(b []byte) (err error) {
			read, err = parseCondemnation(key, b)
			return err
		})
		switch e := errs.Of(err); {
		case err == nil:
			c.Keys, c.Leases = read.Keys, read.Leases
		case e.Code == errs.ObjectNotFound:
			continue // it has come to its end
		case e.Code == errs.StoreCorrupt:
			c.bad = err
		default:
			return nil, err
		}
		all = append(all, c)
	}
	sort.Slice(all, func(i, j int) bool { return all[i].id < all[j].id })
	return all, nil
}
