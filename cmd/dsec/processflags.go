package main

import "github.com/spf13/cobra"

// processFlags are the flags of verbs that start a process in a sandbox.
type processFlags struct {
	user, cwd     string
	env, envFiles []string
}

func (p *processFlags) add(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVarP(&p.user, "user", "u", "", "user, name or uid, with :group if wanted")
	f.StringVarP(&p.cwd, "cwd", "w", "", "working directory")
	addEnv(cmd, &p.env, &p.envFiles)
}
