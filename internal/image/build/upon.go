package build

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os/exec"

	"dsec/api/v1/errs"
)

// upon makes the root file system that of an image.
func (b *builder) upon(ctx context.Context, name string) error {
	if b.image == nil {
		return errs.New(errs.ImageNotFound, phase, fmt.Sprintf("from %q: images are not known here", name))
	}
	config, files, err := b.image(ctx, name)
	if err != nil {
		if e := errs.Of(err); e.Code == errs.ImageNotFound {
			hint := "name an image of 'dsec image ls', or debian (with a suite), busybox or scratch"
			if name == FromDebian {
				hint = "give a suite, such as bookworm, to make a Debian; or import an image of this name"
			}
			e.Advise(hint)
		}
		return fmt.Errorf("from %s: %w", name, err)
	}
	b.tell("unpacking image " + name)
	b.recipe.inherit(config)
	// As root, whom all of the image belongs to: owners, modes, devices and attributes stay.
	cmd := exec.CommandContext(ctx, "tar", "--extract", "--file=-", "--directory="+b.root, "--numeric-owner", "--same-owner", "--same-permissions",
		"--xattrs", "--xattrs-include=*", "--acls", "--delay-directory-restore", "--warning=no-timestamp")
	pr, pw := io.Pipe()
	cmd.Stdin = pr
	sent := make(chan error, 1)
	go func() {
		err := files(pw)
		pw.CloseWithError(err) // of nil: the end
		sent <- err
	}()
	err = b.tool(ctx, "tar", cmd)
	pr.CloseWithError(errUnpacked)
	if serr := <-sent; serr != nil && !errors.Is(serr, errUnpacked) {
		return fmt.Errorf("from %s: %w", name, serr) // tar only saw that it broke off
	}
	return err
}

var errUnpacked = errors.New("the unpacking has ended")
