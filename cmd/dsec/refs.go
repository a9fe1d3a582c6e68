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

// ids returns those that arguments name.
func (a *app) ids(ctx context.Context, c *client.Client, refs []string) ([]string, error) {
	found, err := c.Resolve(ctx, refs...)
	if err != nil {
		return nil, err
	}
	ids := make([]string, len(found))
	for i, r := range found {
		if r.Err != nil {
			return nil, r.Err
		}
		ids[i] = r.ID
	}
	return ids, nil
}
