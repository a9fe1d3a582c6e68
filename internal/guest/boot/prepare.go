package boot

// Prepare sets the sandbox up around the guest before anything else runs. A guest that
// is started as an ordinary process has nothing to set up.
func Prepare() error { return nil }
