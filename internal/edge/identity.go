package edge

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"os"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
)

// phaseIdentity is the phase of the error that says that the identity is damaged.
const phaseIdentity = "edge.identity"

// identity is what an edge keeps of itself.
type identity struct {
	Node   string `json:"node"`
	Epoch  uint64 `json:"epoch"` // the highest that this node has had
	BootID string `json:"boot_id"`
	Sum    uint32 `json:"sum"` // CRC-32 of the others
}

func (me *identity) sum() uint32 {
	return crc32.ChecksumIEEE(fmt.Appendf(nil, "%s\n%d\n%s", me.Node, me.Epoch, me.BootID))
}

// readIdentity returns nil if there is none.
func readIdentity(path string) (*identity, error) {
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	me := new(identity)
	if err = json.Unmarshal(data, me); err == nil && (me.Sum != me.sum() || me.Node == "" || me.Epoch == 0 || me.Epoch > v1.MaxEpoch) {
		err = errors.New("wrong checksum")
	}
	if err != nil {
		return nil, errs.New(errs.DataCorrupt, phaseIdentity, path+" is damaged").Because(err)
	}
	return me, nil
}

// identify loads the node's id, makes it at the first start, and takes a new epoch when
// the machine was restarted: what ran before is gone then, and its ids must say so.
func (e *Edge) identify(ctx context.Context) error {
	path := e.path("identity.json")
	me, err := readIdentity(path)
	if err != nil {
		return err
	}
	if me == nil {
		// Under another identity what runs would be removed as unexplained.
		if n, err := recorded(e.path("journal")); err != nil || n > 0 {
			return errs.New(errs.DataCorrupt, phaseIdentity, path+" is missing, but there are records of sandboxes").Because(err)
		}
		me = &identity{Node: v1.NodeID(e.cfg.Random())}
	}
	if me.BootID == e.cfg.BootID && me.Epoch != 0 {
		e.id, e.epoch = me.Node, me.Epoch
		return nil
	}
	// Above what is on record here too: the store may have been lost and begin anew.
	if me.Epoch, err = e.cfg.Cluster.AllocateEpoch(ctx, me.Node, me.Epoch); err != nil {
		return err
	}
	if me.Epoch > v1.MaxEpoch {
		return fmt.Errorf("epoch %d does not fit into sandbox ids", me.Epoch)
	}
	me.BootID = e.cfg.BootID
	me.Sum = me.sum()
	data, err := json.Marshal(me)
	if err != nil {
		return err
	}
	if err := writeSynced(path, data); err != nil {
		return err
	}
	e.id, e.epoch, e.anew = me.Node, me.Epoch, true
	return nil
}

func writeSynced(path string, data []byte) error {
	f, err := os.OpenFile(path+".new", os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err == nil {
		err = f.Sync()
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// IdentityDamaged tells whether errs.DataCorrupt of Start is about the edge's identity,
// not about its journal.
func IdentityDamaged(err error) bool { return errs.Of(err).Phase == phaseIdentity }
