package apiserver

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"time"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
)

// Builds keep what they start from and the result of each step as images, for later builds. When they were
// last used is in the catalogue; a collection of garbage begins with removing those that were not
// for too long, or the oldest while all together are too large.

const (
	// usedStep is how exact the time of a last use is, so that a build costs few writes.
	usedStep = time.Hour
	// buildGrace is how long they stay in any case: a build that is under way needs them.
	buildGrace = 2 * usedStep
)

// buildUsed notes that sandboxes are made of what builds keep.
func (s *Server) buildUsed(ctx context.Context, refs ...string) {
	for _, ref := range refs {
		if !v1.KeptByBuild(ref) {
			continue
		}
		img, err := s.catalog.resolve(ref)
		now := s.cfg.Now()
		if err != nil || img.UsedAt != nil && now.Sub(*img.UsedAt) < usedStep {
			continue
		}
		next := img
		next.UsedAt = &now
		if err := s.catalog.swap(ctx, img, next); err != nil && !errors.Is(err, errs.StateConflict) && !errors.Is(err, errs.ImageNotFound) {
			s.cfg.Log.Warn("the use of a build's image is not noted", "image", ref, "err", err)
		}
	}
}

// kept is an image that builds keep. Its use counts for what it was made on, too.
type kept struct {
	v1.Image
	used time.Time
}

// buildsKept returns what builds keep, what was not used for longest first, of two the one with more
// layers; and what each layer takes that no other image has.
func (s *Server) buildsKept() (list []kept, sizes map[string]int64) {
	others := map[string]bool{}
	sizes = map[string]int64{}
	used := map[string]time.Time{} // by layer
	for _, img := range s.catalog.list("") {
		if !v1.KeptByBuild(img.Name) {
			for _, l := range img.Layers {
				others[l.MetaDigest] = true
			}
			continue
		}
		k := kept{img, img.CreatedAt}
		if img.UsedAt != nil {
			k.used = *img.UsedAt
		}
		list = append(list, k)
		for _, l := range img.Layers {
			sizes[l.MetaDigest] = l.MetaBytes + l.DataBytes
			if k.used.After(used[l.MetaDigest]) {
				used[l.MetaDigest] = k.used
			}
		}
	}
	for d := range others {
		delete(sizes, d)
	}
	for n := range list {
		if l := list[n].Layers; len(l) > 0 { // whoever has its topmost layer was made on it
			list[n].used = used[l[len(l)-1].MetaDigest]
		}
	}
	slices.SortStableFunc(list, func(a, b kept) int {
		return cmp.Or(a.used.Compare(b.used), cmp.Compare(len(b.Layers), len(a.Layers)))
	})
	return list, sizes
}

// buildUsage says what builds keep, and how much of it may stay.
func (s *Server) buildUsage() v1.BuildUsage {
	list, sizes := s.buildsKept()
	u := v1.BuildUsage{Images: len(list), LimitBytes: s.cfg.BuildCacheBytes, AgeSeconds: int64(s.cfg.BuildCacheAge / time.Second)}
	for _, n := range sizes {
		u.Bytes += n
	}
	return u
}

// trimBuilds removes what is too old or too much of what builds keep, but nothing that is needed.
func (s *Server) trimBuilds(ctx context.Context) (removed int, err error) {
	list, sizes := s.buildsKept()
	having := map[string]int{} // layers, by how many of the list
	var total int64
	for _, k := range list {
		for _, l := range k.Layers {
			if having[l.MetaDigest]++; having[l.MetaDigest] == 1 {
				total += sizes[l.MetaDigest]
			}
		}
	}
	for _, k := range list {
		age := s.cfg.Now().Sub(k.used)
		old := s.cfg.BuildCacheAge > 0 && age >= s.cfg.BuildCacheAge
		var frees int64
		for _, l := range k.Layers {
			if having[l.MetaDigest] == 1 {
				frees += sizes[l.MetaDigest]
			}
		}
		much := s.cfg.BuildCacheBytes > 0 && total > s.cfg.BuildCacheBytes && frees > 0
		if age < buildGrace || !old && !much {
			continue
		}
		switch err := s.removeImage(ctx, k.Name); {
		case errors.Is(err, errs.ImageInUse), errors.Is(err, errs.ImageNotFound):
			continue
		case err != nil:
			return removed, err
		}
		removed++
		for _, l := range k.Layers {
			if having[l.MetaDigest]--; having[l.MetaDigest] == 0 {
				total -= sizes[l.MetaDigest]
			}
		}
	}
	return removed, nil
}
