// Package bin carries the guest's binary inside dsec. The Makefile builds
// internal/guest/bin/dsec-guest (not committed) before anything that embeds it.
package bin

import (
	"embed"
	"errors"
)

//go:embed *
var files embed.FS

// Guest returns the guest's binary.
func Guest() ([]byte, error) {
	b, err := files.ReadFile("dsec-guest")
	if err != nil {
		return nil, errors.New("this dsec was built without its guest: build it with make")
	}
	return b, nil
}
