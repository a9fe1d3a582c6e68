package lazy

// Guarded says whether readers of the blob are still stopped.
func Guarded(h *Blob) bool { return h.b.guarded() }
