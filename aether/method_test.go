package aether

import "testing"

func TestGuestGroup(t *testing.T) {
	t.Parallel()
	for method, want := range map[string]string{
		"process.exec": "process", "session.run": "session", "file.stat": "file", "port.dial": "port", "guest.info": "guest",
		"": "", "process": "", "process.": "", ".exec": "", "processes.exec": "", "Process.exec": "", " process.exec": "",
		MethodBatch: "", "sandbox.create": "", "edge.watch": "", "image.import": "",
	} {
		if got := GuestGroup(method); got != want {
			t.Errorf("%q is of group %q, want %q", method, got, want)
		}
	}
}
