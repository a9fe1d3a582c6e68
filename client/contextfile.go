package client

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"dsec/api/v1/errs"
)

// Context is the content of a context file: which server to talk to, as whom.
type Context struct {
	URL   string `json:"url"`
	Token string `json:"token"`
	// Data is the server's data directory if 'dsec up' wrote the file: that of this machine
	// which 'dsec down' and 'dsec doctor' look at.
	Data string `json:"data,omitempty"`
}

// ContextPath returns where the context file is: $XDG_CONFIG_HOME/dsec/context.json,
// or below ~/.config.
func ContextPath() (string, error) {
	dir := os.Getenv("XDG_CONFIG_HOME")
	if dir == "" {
		home, err := os.UserHomeDir()
		if err != nil {
			return "", fmt.Errorf("find the context file: %w", err)
		}
		dir = filepath.Join(home, ".config")
	}
	return filepath.Join(dir, "dsec", "context.json"), nil
}

// LoadContext reads a context file. A file that does not exist is an fs.ErrNotExist.
func LoadContext(path string) (Context, error) {
	var c Context
	b, err := os.ReadFile(path)
	if err != nil {
		return c, badContext(path, err)
	}
	if err := json.Unmarshal(b, &c); err != nil {
		return c, badContext(path, err)
	}
	if c.URL == "" {
		return c, badContext(path, errors.New("it has no url"))
	}
	return c, nil
}

func badContext(path string, err error) error {
	hint := "remove it, and 'dsec up' writes it again; or set DSEC_URL and DSEC_TOKEN"
	switch {
	case errors.Is(err, fs.ErrPermission):
		hint = "act as its owner, name another one with --context, or set DSEC_URL and DSEC_TOKEN"
	case errors.Is(err, fs.ErrNotExist):
		hint = "'dsec up --context FILE' writes it; or set DSEC_URL and DSEC_TOKEN"
	}
	return errs.New(errs.LocalFile, "context", "read the context file "+path).Because(err).Advise(hint)
}

// SaveContext replaces a context file; only its owner can read it, since it holds a token.
func SaveContext(path string, c Context) error {
	b, err := json.MarshalIndent(c, "", "  ")
	if err != nil {
		return fmt.Errorf("write context: %w", err)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return fmt.Errorf("write context: %w", err)
	}
	f, err := os.CreateTemp(filepath.Dir(path), ".context-*") // mode 0600
	if err != nil {
		return fmt.Errorf("write context: %w", err)
	}
	_, err = f.Write(append(b, '\n'))
	if err := errors.Join(err, f.Close()); err != nil {
		os.Remove(f.Name())
		return fmt.Errorf("write context: %w", err)
	}
	if err := os.Rename(f.Name(), path); err != nil {
		os.Remove(f.Name())
		return fmt.Errorf("write context: %w", err)
	}
	return nil
}

// RemoveContext removes a context file if it still is c: another server's is left alone.
func RemoveContext(path string, c Context) error {
	now, err := LoadContext(path)
	if errors.Is(err, fs.ErrNotExist) || err == nil && now != c {
		return nil
	}
	if err != nil {
		return err
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove context: %w", err)
	}
	return nil
}

// OptionsFromEnv reads DSEC_URL and DSEC_TOKEN, and what they leave open from the
// context file. contextFile "" means [ContextPath]; a missing default file is no error.
func OptionsFromEnv(contextFile string) (Options, error) {
	o := Options{URL: os.Getenv("DSEC_URL"), Token: os.Getenv("DSEC_TOKEN")}
	if o.URL != "" && o.Token != "" && contextFile == "" {
		return o, nil
	}
	path, named := contextFile, contextFile != ""
	if !named {
		var err error
		if path, err = ContextPath(); err != nil {
			return o, nil
		}
	}
	c, err := LoadContext(path)
	switch {
	case errors.Is(err, fs.ErrNotExist) && !named:
		return o, nil
	case err != nil:
		return o, err
	case named:
		return Options{URL: c.URL, Token: c.Token}, nil
	}
	// A token is for the server it was written for: never send it to another one.
	if o.URL == "" || SameURL(o.URL, c.URL) {
		o.URL = c.URL
		if o.Token == "" {
			o.Token = c.Token
		}
	}
	return o, nil
}

// SameURL says whether two URLs are written for one server: a slash at the end means nothing.
func SameURL(a, b string) bool { return strings.TrimRight(a, "/") == strings.TrimRight(b, "/") }
