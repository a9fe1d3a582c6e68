package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"dsec/client"
	"dsec/internal/doctor"
	"dsec/internal/guest/bin"
	"dsec/internal/up"
)

func (a *app) doctorCmd() *cobra.Command {
	var data string
	var save, compare string
	var audit, asJSON, fix, dry, persist bool
	var sandboxes int
	c := &cobra.Command{
		Use: "doctor", Short: "Check this machine, or audit it for leaks",
		Long: `Tries what a node needs on this machine, and of the file system of its data directory, and
says how to mend what is missing and which backends can be used. Fails if a node could
not work.

With --fix, raises the kernel's settings that are lower than a node wants, as 'dsec up' does
too, and prints each with its old and new value and the line that makes it last; it never
lowers one. With --persist it writes those lines to /etc/sysctl.d/90-dsec.conf. With --dry-run
it changes nothing. Fails if something is left to do.

With --audit, counts everything of sandboxes that the kernel and the disk hold: processes,
threads, namespaces, control groups, mounts, loop devices, swap files, network devices,
directories, sockets, and what the server has open (fd). SERVER are the
node's own, which it keeps while it runs; SANDBOXES are of those that it knows; LEAKS
are of nobody, or left by a node that does not run: then it fails. OTHERS, if there are
any, belong to nodes that run on another data directory. --save keeps an audit, and
--compare fails if there is more of anything now, but for what is of others: leaks that
were there before do not fail it.`,
		Example: "  dsec doctor --sandboxes 10000\n  dsec doctor --fix --dry-run\n  dsec doctor --audit --json\n  dsec doctor --audit --save before.json\n  dsec doctor --audit --compare before.json", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if sandboxes < 1 {
				return usagef("--sandboxes must be at least 1")
			}
			if (dry || persist) && !fix {
				return usagef("--dry-run and --persist go with --fix")
			}
			if (save != "" || compare != "") && !audit {
				return usagef("--save and --compare go with --audit")
			}
			if fix && audit {
				return usagef("--fix and --audit do not go together")
			}
			if fix {
				if os.Geteuid() != 0 && !dry {
					return errors.New("--fix changes the kernel's settings and needs root: run it as root, or with --dry-run")
				}
				return a.fix(doctor.SettingsDir, doctor.PersistFile, dry, persist, asJSON)
			}
			dir, err := a.dataDir(cmd, data)
			var elsewhere *usageError
			if errors.As(err, &elsewhere) && !audit && !cmd.Flags().Changed("data") {
				dir, err = up.DefaultData, nil // whatever server is used, it is this machine that is looked at
			}
			if err != nil {
				return err
			}
			if audit {
				return a.audit(cmd.Context(), dir, save, compare, asJSON)
			}
			return a.doctor(cmd.Context(), dir, sandboxes, asJSON)
		},
	}
	c.Flags().StringVar(&data, "data", "", dataUsage)
	c.Flags().BoolVar(&audit, "audit", false, "look for leaks")
	c.Flags().StringVar(&save, "save", "", "with --audit: write it to this file, for --compare")
	c.Flags().StringVar(&compare, "compare", "", "with --audit: fail if there is more of anything than in this file of --save")
	c.Flags().BoolVar(&fix, "fix", false, "raise the kernel's settings that are too low")
	c.Flags().BoolVar(&dry, "dry-run", false, "with --fix: change nothing, and say what would change")
	c.Flags().BoolVar(&persist, "persist", false, "with --fix: write "+doctor.PersistFile+" too")
	c.Flags().IntVar(&sandboxes, "sandboxes", 2000, "how many sandboxes the limits should allow")
	c.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return c
}

func (a *app) doctor(ctx context.Context, data string, sandboxes int, asJSON bool) error {
	guest, err := bin.Guest()
	if err != nil {
		return err
	}
	checks := doctor.Checks(ctx, data, guest, sandboxes)
	if info, err := up.Find(data); err == nil {
		checks = append(checks, doctor.Check{Name: "server", Status: doctor.OK, Detail: fmt.Sprintf("runs at %s; images on demand by %s: %s", info.URL, info.Lazy, info.LazyWhy)})
	}
	backends := doctor.Backends(checks)
	failed := 0
	for _, c := range checks {
		if c.Status == doctor.Fail {
			failed++
		}
	}
	if asJSON {
		err = a.json(map[string]any{"ok": failed == 0, "checks": checks, "backends": backends})
	} else {
		var rows [][]string
		for _, c := range checks {
			rows = append(rows, []string{c.Name, string(c.Status), c.Detail, orDash(c.Fix)})
		}
		err = table(a.stdout, []string{"CHECK", "STATUS", "DETAIL", "FIX"}, rows)
		if err == nil {
			rows = nil
			for _, b := range backends {
				usable := "no"
				if b.Usable {
					usable = "yes"
				}
				rows = append(rows, []string{string(b.Name), usable, b.Detail})
			}
			fmt.Fprintln(a.stdout)
			err = table(a.stdout, []string{"BACKEND", "USABLE", "DETAIL"}, rows)
		}
	}
	if err == nil && failed > 0 {
		err = fmt.Errorf("%s failed: a node cannot run sandboxes here", count(failed, "check"))
	}
	return err
}

// fix raises the settings below dir, and with persist writes them to file.
func (a *app) fix(dir, file string, dry, persist, asJSON bool) error {
	changes := doctor.Fix(dir, dry)
	left := 0
	for _, c := range changes {
		if dry || c.Error != "" {
			left++
		}
	}
	wrote, err := false, error(nil)
	if persist {
		if wrote, err = doctor.Persist(dir, file, dry); err != nil {
			return fmt.Errorf("write %s: %w", file, err)
		}
		if dry && wrote {
			left++
		}
	}
	if asJSON {
		err = a.json(map[string]any{"ok": left == 0, "dry_run": dry, "changes": changes, "file_changed": wrote})
	} else {
		var rows [][]string
		for _, c := range changes {
			rows = append(rows, []string{c.Name, strconv.FormatInt(c.Old, 10), strconv.FormatInt(c.New, 10), c.Line, orDash(c.Error)})
		}
		switch {
		case len(rows) > 0:
			err = table(a.stdout, []string{"SETTING", "OLD", "NEW", "LINE TO MAKE IT LAST", "ERROR"}, rows)
		default:
			fmt.Fprintln(a.stdout, "every setting is as high as a node wants it")
		}
		if wrote {
			verb := "wrote"
			if dry {
				verb = "would write"
			}
			fmt.Fprintln(a.stdout, verb, file)
		}
	}
	if err == nil && left > 0 {
		err = fmt.Errorf("%s left to do", count(left, "change"))
	}
	return err
}

func (a *app) audit(ctx context.Context, data, save, compare string, asJSON bool) error {
	node := doctor.Node{Data: data}
	info, err := up.Find(data)
	served := err == nil
	if served {
		c, err := a.clientOf(data, info)
		if err != nil {
			return err
		}
		defer c.Close()
		known := map[string]bool{}
		for s, err := range c.All(ctx, client.ListOptions{}) {
			if err != nil {
				return fmt.Errorf("ask the server at %s for its sandboxes: %w", info.URL, err)
			}
			known[s.ID] = true
		}
		node.Known = func(id string) bool { return known[id] }
	}
	var before *doctor.Audit
	if compare != "" {
		if before, err = doctor.Load(compare); err != nil {
			return err
		}
	}
	report, err := doctor.Run(node)
	if err != nil {
		return err
	}
	if save != "" {
		if err := report.Save(save); err != nil {
			return err
		}
	}
	var grown []doctor.Growth
	if before != nil {
		grown = report.Compare(before)
	}
	switch {
	case asJSON && before != nil:
		err = a.json(struct {
			*doctor.Audit
			Grown []doctor.Growth `json:"grown"`
		}{report, grown})
	case asJSON:
		err = a.json(report)
	default:
		err = a.printAudit(report)
		for _, g := range grown {
			fmt.Fprintf(a.stdout, "more: %s of %s: %d, were %d\n", g.Kind, g.Owner, g.Now, g.Before)
		}
	}
	switch {
	case err != nil:
		return err
	case len(grown) > 0:
		return fmt.Errorf("there is more than in %s of %s", compare, count(len(grown), "kind"))
	case before != nil:
		return nil
	case len(report.Leaks) > 0 && served:
		return &nextError{errors.New("there are leaks: the objects above belong to no sandbox that a running server knows"), "'dsec down --data DIR' of their node removes them"}
	}
	if err := report.Empty(); err != nil {
		return &nextError{err, fmt.Sprintf("'dsec up --data %s' adopts what its sandboxes left, 'dsec down --data %s' removes it; likewise for another node's directory", data, data)}
	}
	return nil
}

// clientOf is a client of a data directory's own server: the context file may name another.
func (a *app) clientOf(data string, info up.Info) (*client.Client, error) {
	o, err := a.clientOptions()
	if err != nil {
		return nil, err
	}
	if a.url == "" {
		if o.URL = info.URL; a.token == "" {
			if o.Token, err = up.Token(data); err != nil {
				return nil, err
			}
		}
	}
	return client.New(o)
}

func (a *app) printAudit(report *doctor.Audit) error {
	owners := []doctor.Owner{doctor.OfServer, doctor.OfSandboxes, doctor.Leak}
	if len(report.Owners[doctor.OfOthers]) > 0 {
		owners = append(owners, doctor.OfOthers)
	}
	head := []string{"KIND"}
	for _, o := range owners {
		head = append(head, strings.ToUpper(string(o)))
	}
	var rows [][]string
	for _, k := range doctor.Kinds {
		row := []string{k}
		for _, o := range owners {
			row = append(row, strconv.Itoa(report.Owners[o][k]))
		}
		rows = append(rows, row)
	}
	err := table(a.stdout, head, rows)
	for _, i := range report.Leaks {
		of := "no sandbox"
		if i.Sandbox != "" {
			of = "sandbox " + i.Sandbox
		}
		fmt.Fprintf(a.stdout, "leak: %s %s (%s)\n", i.Kind, i.Name, of)
	}
	return err
}
