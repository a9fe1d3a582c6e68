package msg

// The two envelopes of every call are decoded by hand: their bodies stay parts of the
// input, which saves a copy of what may be a megabyte.

// ParseEnd decodes an End; body is part of b.
func ParseEnd(b []byte) (status *Status, body []byte, err error) {
	r := reader{b: b}
	for r.next() {
		switch r.num {
		case 1:
			if status == nil {
				status = new(Status)
			}
			r.message(status.merge)
		case 2:
			body = r.raw()
		default:
			r.skip()
		}
	}
	return status, body, r.err
}

// ParseOpen decodes an Open; its Body is part of b.
func ParseOpen(b []byte) (*Open, error) {
	m := new(Open)
	r := reader{b: b}
	for r.next() {
		switch r.num {
		case 1:
			m.Method = r.string()
		case 2:
			m.Target = r.string()
		case 3:
			m.TimeoutUs = r.uint()
		case 4:
			m.Body = r.raw()
		case 5:
			m.RequestId = r.string()
		default:
			r.skip()
		}
	}
	return m, r.err
}
