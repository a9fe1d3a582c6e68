package main

import (
	"fmt"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	v1 "dsec/api/v1"
)

// specFlags are the flags of run and create that make a spec.
type specFlags struct {
	backend, user, cwd, hostname string
	workspace                    string
	toolkits                     []string
	cpu                          cpuValue
	memory                       bytesValue
	pids                         int64
	env, envFiles, labels        []string
	ttl, idleTTL                 time.Duration
	qos, onIdle                  string
	priority                     int
	flags                        *pflag.FlagSet
}

// onceValue is a string that is given once: a second one would silently take the first one's place.
type onceValue string

func (v *onceValue) String() string { return string(*v) }
func (v *onceValue) Type() string   { return "string" }

func (v *onceValue) Set(s string) error {
	if *v != "" {
		return fmt.Errorf("there is one already, %s; what lies on top of it is given by --toolkit", *v)
	}
	*v = onceValue(s)
	return nil
}

func (s *specFlags) add(cmd *cobra.Command) {
	f := cmd.Flags()
	s.flags = f
	f.StringVar(&s.backend, "backend", "", "kind of isolation: container, hollow (default container)")
	f.Var((*onceValue)(&s.workspace), "workspace", "image whose files lie over the base image: a repository with what it needs")
	f.StringArrayVar(&s.toolkits, "toolkit", nil, "image whose files lie on top of that (repeatable; a later one over an earlier)")
	f.Var(&s.cpu, "cpu", "CPU limit: 2, 0.5 or 500m (default 1)")
	f.VarP(&s.memory, "memory", "m", "memory limit: 512MiB, 1g (default 512MiB)")
	f.Int64Var(&s.pids, "pids", 0, "limit of processes and threads (default 1024)")
	f.StringVarP(&s.user, "user", "u", "", "default user of processes, name or uid, with :group if wanted (default the image's)")
	f.StringVarP(&s.cwd, "cwd", "w", "", "default working directory (default the image's)")
	f.StringVar(&s.hostname, "hostname", "", "host name (default the sandbox id)")
	dockerNames(cmd)
	addEnv(cmd, &s.env, &s.envFiles)
	f.StringArrayVarP(&s.labels, "label", "l", nil, "label, KEY=VALUE (repeatable)")
	cmd.RegisterFlagCompletionFunc("backend", cobra.FixedCompletions([]cobra.Completion{string(v1.BackendContainer), string(v1.BackendHollow)}, cobra.ShellCompDirectiveNoFileComp))
	f.Var(newDuration(&s.ttl), "ttl", "remove the sandbox after this time, such as 2h")
	f.Var(newDuration(&s.idleTTL), "idle-ttl", "time without use, such as 10m, after which --on-idle happens (default never)")
	f.StringVar(&s.onIdle, "on-idle", "", "what happens then: stop removes it, pause frees its memory until the next request (default stop)")
	f.StringVar(&s.qos, "qos", "", "ls: latency-sensitive, or be: best effort, gets what others leave of CPU and memory (default ls)")
	f.IntVar(&s.priority, "priority", 0, "-1000 to 1000: of a qos, the lower one is evicted first when the node is short of memory")
	for flag, values := range map[string][]cobra.Completion{
		"qos":     {cobra.CompletionWithDesc(string(v1.QoSLatency), "latency-sensitive"), cobra.CompletionWithDesc(string(v1.QoSBest), "best effort")},
		"on-idle": {cobra.CompletionWithDesc(string(v1.OnIdleStop), "remove it"), cobra.CompletionWithDesc(string(v1.OnIdlePause), "pause it until the next request")},
	} {
		cmd.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp))
	}
}

func (s *specFlags) spec(image string) (v1.Spec, error) {
	env, err := environment(s.env, s.envFiles)
	if err != nil {
		return v1.Spec{}, err
	}
	labels, err := keyValues("label", s.labels)
	if err != nil {
		return v1.Spec{}, err
	}
	// Zero would silently mean the default.
	for name, given := range map[string]bool{"cpu": s.cpu > 0, "memory": s.memory > 0, "pids": s.pids > 0} {
		if f := s.flags.Lookup(name); f != nil && f.Changed && !given {
			return v1.Spec{}, usagef("--%s must be more than 0; leave it out for the default", name)
		}
	}
	return v1.Spec{
		Backend: v1.Backend(s.backend), Image: image, Workspace: s.workspace, Toolkits: s.toolkits, CPUMillis: int64(s.cpu), MemoryBytes: int64(s.memory), PIDs: s.pids,
		User: s.user, WorkDir: s.cwd, Hostname: s.hostname, Env: env, Labels: labels, MaxTTL: v1.Seconds(s.ttl.Seconds()),
		QoS: v1.QoS(s.qos), Priority: s.priority, IdleTTL: v1.Seconds(s.idleTTL.Seconds()), OnIdle: v1.OnIdle(s.onIdle),
	}, nil
}
