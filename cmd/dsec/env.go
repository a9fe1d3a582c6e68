package main

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"dsec/api/v1/errs"
)

// addEnv adds the flags that environment reads.
func addEnv(cmd *cobra.Command, env, files *[]string) {
	f := cmd.Flags()
	f.StringArrayVarP(env, "env", "e", nil, "environment, KEY=VALUE, or KEY to pass the caller's (repeatable)")
	f.StringArrayVar(files, "env-file", nil, "file of such lines; # begins a comment line (repeatable; --env wins)")
	cmd.MarkFlagFilename("env-file")
}

// environment parses --env-file and --env, of which the latter wins; KEY alone passes the
// caller's value on, if there is one.
func environment(in, files []string) (map[string]string, error) {
	var lines []string
	for _, file := range files {
		l, err := envLines(file)
		if err != nil {
			return nil, err
		}
		lines = append(lines, l...)
	}
	var full []string
	for _, s := range append(lines, in...) {
		if s != "" && !strings.Contains(s, "=") {
			v, ok := os.LookupEnv(s)
			if !ok {
				continue
			}
			s += "=" + v
		}
		full = append(full, s)
	}
	return keyValues("env", full)
}

// maxEnvLine bounds a line of an --env-file; the kernel takes no longer variable.
const maxEnvLine = 128 << 10

// envLines reads KEY=VALUE and KEY as they stand: quotes are part of the value.
func envLines(file string) ([]string, error) {
	bad := func(err error) error {
		return errs.New(errs.LocalFile, "env-file", "read the environment of "+file).Because(err)
	}
	f, err := os.Open(file)
	if err != nil {
		return nil, bad(err)
	}
	defer f.Close()
	var lines []string
	r := bufio.NewScanner(f)
	r.Buffer(nil, maxEnvLine)
	for n := 1; r.Scan(); n++ {
		line := strings.TrimLeft(strings.TrimSuffix(r.Text(), "\r"), " \t")
		if line == "" || line[0] == '#' {
			continue
		}
		if key, _, _ := strings.Cut(line, "="); key == "" || strings.ContainsAny(key, " \t") {
			return nil, errs.New(errs.BadRequest, "env-file", fmt.Sprintf("line %d of %s is not of the form KEY=VALUE", n, file)).Advise("correct the file; export and quotes are a shell's, not its")
		}
		lines = append(lines, line)
	}
	if errors.Is(r.Err(), bufio.ErrTooLong) {
		return nil, bad(fmt.Errorf("a line is longer than %s", size(maxEnvLine)))
	}
	if r.Err() != nil {
		return nil, bad(r.Err())
	}
	return lines, nil
}

// secretFlags are environment that is kept nowhere but in the sandbox.
type secretFlags struct{ env, files []string }

func (s *secretFlags) add(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringArrayVar(&s.env, "secret", nil, "environment that nothing shows and no snapshot has: KEY to pass the caller's, or KEY=VALUE (repeatable)")
	f.StringArrayVar(&s.files, "secret-file", nil, "file of such lines, as of --env-file (repeatable; --secret wins)")
	cmd.MarkFlagFilename("secret-file")
}

// values are the flags'. Unlike other environment, one that is not there is an error.
func (s *secretFlags) values() (map[string]string, error) {
	for _, kv := range s.env {
		key, _, given := strings.Cut(kv, "=")
		if _, there := os.LookupEnv(key); key == "" || !given && !there {
			return nil, usagef("--secret: write KEY=VALUE, or KEY of a variable that is set") // not what was given: it may be the secret
		}
	}
	return environment(s.env, s.files)
}
