package up

import (
	"errors"
	"io/fs"
	"log/slog"

	"dsec/internal/doctor"
)

// raiseSettings raises the kernel's settings that sandboxes share to what they need together, and
// says which. One that it may not raise keeps no node from its work, and is worth a warning if
// it is too low for that many.
func raiseSettings(dir string, sandboxes int64, log *slog.Logger) {
	for _, s := range doctor.Settings() {
		from, to, err := s.Raise(dir)
		switch {
		case errors.Is(err, fs.ErrNotExist):
		case err != nil && from >= s.Need(sandboxes):
			log.Debug("a setting of the kernel stays as it is", "setting", s.Name, "value", from, "wanted", s.Want, "err", err)
		case err != nil:
			log.Warn("raise a setting of the kernel; see 'dsec doctor'", "setting", s.Name, "value", from, "wanted", s.Want, "why", s.Why, "err", err)
		case to > from:
			log.Info("raised a setting of the kernel", "setting", s.Name, "from", from, "to", to, "why", s.Why)
		}
	}
}
