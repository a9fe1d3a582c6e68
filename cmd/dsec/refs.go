package main

import (
	"context"

	"dsec/client"
)

// sandbox returns the one that an argument names, by its id or a beginning of it.
func (a *app) sandbox(ctx context.Context, ref string) (*client.Sandbox, error) {
	c, err := a.client()
	if err != nil {
		return nil, err
	}
	r, err := c.Resolve(ctx, ref)
	if err == nil {
		err = r[0].Err
	}
	if err != nil {
		return nil, err
	}
	return c.Sandbox(r[0].ID), nil
}
