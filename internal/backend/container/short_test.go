package container

import (
	"fmt"
	"testing"

	"golang.org/x/sys/unix"

	"dsec/api/v1/errs"
)

// What the kernel is out of is named, not taken for a full disk or our own fault.
func TestCreateSaysWhatTheNodeIsOutOf(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		err      error
		code     errs.Code
		resource string
	}{
		{fmt.Errorf("step clone: %w", fmt.Errorf("%w: %w", errClone, unix.ENOSPC)), errs.NodeFull, "namespaces"},
		{fmt.Errorf("%w: %w", errClone, unix.EAGAIN), errs.NodeFull, "process ids"},
		{fmt.Errorf("socket pair: %w", unix.EMFILE), errs.NodeFull, "open files"},
		{fmt.Errorf("make directory: %w", unix.ENOSPC), errs.DiskFull, ""},
	} {
		x := errs.Of((&creation{}).explain(c.err))
		if x.Code != c.code || x.Details["resource"] != c.resource || (c.resource != "") != (x.Details["hint"] != "") {
			t.Errorf("%v: %s %v", c.err, x.Code, x.Details)
		}
	}
}
