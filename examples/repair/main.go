// Command repair is the main job of a training run in small, and an example of the Go
// SDK: in many sandboxes at once, a repository's tests run and fail, a patch is
// applied, and the tests run and pass. It fails if any sandbox behaves otherwise.
//
//	dsec up --detach
//	dsec image build debian -f images/debian-python/recipe.yaml
//	go run ./examples/repair -image debian -n 8
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"os"
	"os/signal"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"dsec/client"
)

func main() {
	log.SetFlags(0)
	var j job
	n := flag.Int("n", 8, "sandboxes at once")
	flag.StringVar(&j.image, "image", "debian", "image with python3, pytest, git, make and a C compiler")
	flag.StringVar(&j.repo, "repo", "examples/inventory", "repository whose 'make test' fails")
	flag.StringVar(&j.patch, "patch", "examples/inventory.patch", "patch that mends it")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, &j, *n); err != nil {
		log.Fatal("repair: ", err)
	}
}

// job is the same for every sandbox.
type job struct {
	client             *client.Client
	image, repo, patch string
}

// row is what one sandbox did.
type row struct {
	id                     string
	create, exec, copyIn   time.Duration
	failing, passing       time.Duration
	failCode, passCode     int
	failed, passed, memory string
	err                    error
}

func run(ctx context.Context, j *job, n int) (err error) {
	if j.client, err = client.FromEnv(); err != nil {
		return err
	}
	defer j.client.Close()
	start := time.Now()
	rows := make([]row, n)
	var wg sync.WaitGroup
	for i := range rows {
		wg.Go(func() { rows[i].err = j.one(ctx, &rows[i]) })
	}
	wg.Wait()
	took := time.Since(start)

	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "SANDBOX\tCREATE\tFIRST EXEC\tCOPY IN\tTESTS BEFORE\tEXIT\tTESTS AFTER\tEXIT\tPEAK MEMORY")
	for _, r := range rows {
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s  %s\t%d\t%s  %s\t%d\t%s\n", r.id, ms(r.create), ms(r.exec), ms(r.copyIn),
			ms(r.failing), r.failed, r.failCode, ms(r.passing), r.passed, r.passCode, r.memory)
		if r.err != nil {
			err = errors.Join(err, fmt.Errorf("sandbox %s: %w", r.id, r.err))
		}
	}
	if ferr := w.Flush(); err == nil {
		err = ferr
	}
	if err == nil {
		fmt.Printf("%d sandboxes: failing tests repaired in %.1f s\n", n, took.Seconds())
	}
	return err
}

func ms(d time.Duration) string { return fmt.Sprintf("%.1f ms", float64(d.Microseconds())/1000) }

// one does the job in a sandbox of its own.
func (j *job) one(ctx context.Context, r *row) (err error) {
	clock := func(d *time.Duration, f func() error) error {
		start := time.Now()
		defer func() { *d = time.Since(start) }()
		return f()
	}
	var sb *client.Sandbox
	if err := clock(&r.create, func() (err error) {
		sb, err = j.client.Create(ctx, client.Spec{Image: j.image, MemoryBytes: 512 << 20, Labels: map[string]string{"job": "repair"}, Lease: 60})
		return err
	}); err != nil {
		return err
	}
	r.id = sb.ID()
	go sb.KeepAlive(ctx) // if this program is killed, the sandbox goes within a minute
	defer func() {
		// Also when ctx has ended.
		dctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 30*time.Second)
		defer cancel()
		err = errors.Join(err, sb.Delete(dctx))
	}()
	if err := clock(&r.exec, func() error { return must(sb.Run(ctx, "true")) }); err != nil {
		return err
	}
	const dir = "/root/repo"
	if err := clock(&r.copyIn, func() error {
		if err := sb.Files().CopyIn(ctx, j.repo, dir, client.CopyOptions{}); err != nil {
			return err
		}
		return sb.Files().CopyIn(ctx, j.patch, "/root/fix.patch", client.CopyOptions{})
	}); err != nil {
		return err
	}
	if err := must(sb.Exec(ctx, client.Cmd{Path: "sh", Dir: dir, Args: []string{"-c",
		"git init -q . && git add -A && git -c user.name=a -c user.email=a@b commit -qm start"}})); err != nil {
		return err
	}
	test := client.Cmd{Path: "make", Args: []string{"test"}, Dir: dir, Timeout: 2 * time.Minute}
	var out *client.Result
	if err := clock(&r.failing, func() (err error) { out, err = sb.Exec(ctx, test); return err }); err != nil {
		return err
	}
	r.failCode, r.failed = out.Code, summary(out)
	if out.Code == 0 || out.Err != nil {
		return fmt.Errorf("the tests did not fail before the patch (exit %d, %v): %s", out.Code, out.Err, out.Stdout)
	}
	if err := must(sb.Exec(ctx, client.Cmd{Path: "git", Args: []string{"apply", "/root/fix.patch"}, Dir: dir})); err != nil {
		return err
	}
	if err := clock(&r.passing, func() (err error) { out, err = sb.Exec(ctx, test); return err }); err != nil {
		return err
	}
	r.passCode, r.passed = out.Code, summary(out)
	if out.Code != 0 {
		return fmt.Errorf("the tests fail after the patch (exit %d): %s%s", out.Code, out.Stdout, out.Stderr)
	}
	info, err := sb.Get(ctx)
	if err != nil {
		return err
	}
	r.memory = fmt.Sprintf("%.1f MiB", float64(info.Usage.PeakMemoryBytes)/(1<<20))
	return nil
}

// summary counts what the three parts of the test suite printed.
func summary(r *client.Result) string {
	out := string(r.Stdout)
	bad := strings.Count(out, "FAIL ") + strings.Count(out, "FAILED ")
	if bad > 0 {
		return fmt.Sprintf("%d failures", bad)
	}
	return fmt.Sprintf("%d of 3 ok", strings.Count(out, ": ok")+strings.Count(out, " passed"))
}

// must is for commands that have to succeed.
func must(r *client.Result, err error) error {
	if err != nil {
		return err
	}
	if r.Err != nil {
		return r.Err
	}
	if r.Code != 0 {
		return fmt.Errorf("exit code %d: %s%s", r.Code, r.Stdout, r.Stderr)
	}
	return nil
}
