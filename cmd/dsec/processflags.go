package main

import (
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// processFlags are the flags of verbs that start a process in a sandbox.
type processFlags struct {
	user, cwd     string
	env, envFiles []string
}

func (p *processFlags) add(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVarP(&p.user, "user", "u", "", "user, name or uid, with :group if wanted")
	f.StringVarP(&p.cwd, "cwd", "w", "", "working directory")
	dockerNames(cmd)
	addEnv(cmd, &p.env, &p.envFiles)
}

// dockerNames lets --workdir, as docker has it, mean --cwd.
func dockerNames(cmd *cobra.Command) {
	cmd.Flags().SetNormalizeFunc(func(_ *pflag.FlagSet, name string) pflag.NormalizedName {
		if name == "workdir" {
			name = "cwd"
		}
		return pflag.NormalizedName(name)
	})
}
