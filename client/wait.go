package client

import "context"

// Wait waits until a process that was started before has ended, also across lost
// connections and restarts of the server. How one ended before is known for long.
func (s *Sandbox) Wait(ctx context.Context, sel Selector) (Exit, error) {
	p, err := s.Attach(ctx, sel, IO{}, AttachOptions{FromEnd: true})
	if err != nil {
		return Exit{}, err
	}
	return p.Wait()
}
