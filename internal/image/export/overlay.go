package export

import (
	"fmt"
	"strings"

	"dsec/api/v1/errs"
	"dsec/internal/image/layer"

	"golang.org/x/sys/unix"
)

// overlayXattrs is where overlayfs keeps its marks in a layer.
const overlayXattrs = "trusted.overlay."

func isDir(e *layer.Entry) bool { return e.Type() == unix.S_IFDIR }

// opaque returns overlayfs' mark of a directory: "y" if it hides what is below,
// "x" if it may hold whiteouts in their second form.
func opaque(dir *layer.Entry) string {
	for _, x := range dir.Attr.Xattrs {
		if x.Name == overlayXattrs+"opaque" {
			return string(x.Value)
		}
	}
	return ""
}

// isWhiteout tells whether e, in dir, stands for a removed name.
func isWhiteout(dir, e *layer.Entry) bool {
	switch e.Type() {
	case unix.S_IFCHR:
		return e.Major == 0 && e.Minor == 0
	case unix.S_IFREG:
		if e.Size != 0 || opaque(dir) != "x" {
			return false
		}
		for _, x := range e.Attr.Xattrs {
			if x.Name == overlayXattrs+"whiteout" {
				return true
			}
		}
	}
	return false
}

// overlayXattr drops overlayfs' own marks and gives escaped ones, which are
// content, their names back.
func overlayXattr(path string, x *layer.Xattr) (keep bool, err error) {
	rest, ok := strings.CutPrefix(x.Name, overlayXattrs)
	if !ok {
		return true, nil
	}
	if inner, ok := strings.CutPrefix(rest, "overlay."); ok {
		x.Name = overlayXattrs + inner
		return true, nil
	}
	if rest == "redirect" || rest == "metacopy" {
		return false, errs.New(errs.ImageUnsupported, phase, fmt.Sprintf("%.200q needs the layer below for its content (overlayfs %s), which a tar cannot say", path, rest))
	}
	return false, nil
}
