package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/client"
	"dsec/internal/guest/bin"
	"dsec/internal/image/lazy"
	"dsec/internal/swap"
	"dsec/internal/up"
)

type upFlags struct {
	opts      up.Options
	detach    bool
	json      bool
	cert, key string
	level     string
	loading   string
	insecure  bool
	listen    bool // --listen was given
}

func (a *app) upCmd() *cobra.Command {
	var f upFlags
	c := &cobra.Command{
		Use: "up", Short: "Run a server on this machine",
		Long: `Runs everything on this machine: the API, the catalogue and one node for sandboxes.
Needs root. Writes a context file, from which the other verbs know the server. If one runs
on the data directory already, only writes that file and says so; asking it to listen
elsewhere (--listen) is an error then.

Whoever has a token may run anything here: listening on more than this machine's own
addresses needs --tls-cert and --tls-key, or --insecure where the network is trusted.

Sandboxes keep running when the server ends, however it ends; the next 'dsec up' on the
same data directory takes them over. 'dsec down' removes them.`,
		Example: "  dsec up\n  dsec up --detach\n  dsec up --data /srv/dsec --listen 0.0.0.0:7070 --tls-cert cert.pem --tls-key key.pem\n  dsec up --swap file:16GiB",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if f.opts.Slots < 1 || f.opts.CPUOvercommit <= 0 || f.opts.MemoryOvercommit <= 0 {
				return usagef("--slots, --cpu-overcommit and --memory-overcommit must be more than 0")
			}
			cpu, memory := up.Overcommit(f.opts.Slots)
			if !cmd.Flags().Changed("cpu-overcommit") {
				f.opts.CPUOvercommit = cpu
			}
			if !cmd.Flags().Changed("memory-overcommit") {
				f.opts.MemoryOvercommit = memory
			}
			if !listenable(f.opts.Listen) {
				return usagef("--listen %q: write HOST:PORT or unix:/path", f.opts.Listen)
			}
			if err := f.checkStore(); err != nil {
				return err
			}
			if f.opts.Loading = lazy.Mode(f.loading); !slices.Contains(lazy.Modes(), f.opts.Loading) {
				return usagef("--image-loading %q: write auto, fanotify or fuse", f.loading)
			}
			f.listen = cmd.Flags().Changed("listen")
			if socket, ok := strings.CutPrefix(f.opts.Listen, "unix:"); ok { // others look for it from elsewhere
				path, err := filepath.Abs(socket)
				if err != nil {
					return err
				}
				f.opts.Listen = "unix:" + path
			}
			if f.cert == "" && f.key == "" && exposed(cmd.Context(), f.opts.Listen) {
				if !f.insecure {
					return usagef("--listen %s: tokens would cross the network unencrypted; give --tls-cert and --tls-key, or --insecure if the network is trusted", f.opts.Listen)
				}
				fmt.Fprintf(a.stderr, "dsec: WARNING: %s is open to the network without TLS: whoever reads its traffic gets the token, and with it root's means on this machine\n", f.opts.Listen)
			}
			if f.detach {
				return a.upDetached(cmd.Context(), &f)
			}
			return a.up(cmd.Context(), &f)
		},
	}
	fl := c.Flags()
	fl.StringVar(&f.opts.Data, "data", up.DefaultData, "data directory")
	fl.StringVar(&f.opts.Listen, "listen", up.DefaultListen, "where the API listens: HOST:PORT or unix:/path")
	fl.BoolVar(&f.detach, "detach", false, "return once the server answers; it logs to DATA/server.log")
	fl.BoolVar(&f.json, "json", false, "print where the server answers as JSON")
	fl.StringVar(&f.cert, "tls-cert", "", "certificate of the API (PEM)")
	fl.StringVar(&f.key, "tls-key", "", "its key (PEM)")
	fl.BoolVar(&f.insecure, "insecure", false, "listen on the network without TLS")
	fl.StringVar(&f.level, "log-level", "info", "debug, info, warn or error")
	fl.Int64Var(&f.opts.Slots, "slots", up.DefaultSlots, "sandboxes at once")
	fl.Float64Var(&f.opts.CPUOvercommit, "cpu-overcommit", up.DefaultCPUOvercommit, "CPU limits of all sandboxes over the machine's CPUs (more, if --slots of the default size want it)")
	fl.Float64Var(&f.opts.MemoryOvercommit, "memory-overcommit", up.DefaultMemoryOvercommit, "memory limits of all sandboxes over the machine's memory (more, if --slots of the default size want it)")
	size := func(p *int64, name string, def int64, usage string) {
		*p = def
		fl.Var((*bytesValue)(p), name, usage)
	}
	fl.StringVar(&f.opts.Objects.Store, "store", "", "where images are kept: a directory or s3://BUCKET/PREFIX (default DATA/store)")
	fl.StringVar(&f.opts.Objects.Endpoint, "store-endpoint", "", "URL of the S3 service; keys are in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
	fl.StringVar(&f.opts.Objects.Region, "store-region", "", "region of the S3 service (default us-east-1)")
	fl.Var(newDuration(&f.opts.Objects.Latency), "store-latency", "delay each operation of the store, for tests")
	size(&f.opts.Objects.Rate, "store-rate", 0, "bytes per second that pass to and from the store, for tests (default no limit)")
	size(&f.opts.ImageCache, "image-cache", 0, "image data that this machine keeps of the store (default no limit)")
	fl.StringVar(&f.loading, "image-loading", "auto", "how image data is loaded on demand: auto, fanotify (Linux 6.14) or fuse")
	c.RegisterFlagCompletionFunc("image-loading", cobra.FixedCompletions([]string{"auto", "fanotify", "fuse"}, cobra.ShellCompDirectiveNoFileComp))
	size(&f.opts.ReadAhead, "image-read-ahead", up.DefaultReadAhead, "image data that is fetched ahead of a reader, at most; 0 is none")
	size(&f.opts.BuildCache, "build-cache", up.DefaultBuildCache, "what builds keep for later ones, uncompressed; 0: no limit")
	f.opts.BuildCacheAge = up.DefaultBuildCacheAge
	fl.Var(newDuration(&f.opts.BuildCacheAge), "build-cache-age", "how long that stays without use; 0: for ever")
	size(&f.opts.Collapse, "collapse-below", v1.DefaultCollapse, "merge neighbouring layers of images that are both smaller, in the background; 0: never")
	f.opts.Swap.Kind = swap.Auto
	fl.Var((*swapValue)(&f.opts.Swap), "swap", "where the memory of paused sandboxes goes, from the first pause on: auto (the machine's swap, else a file), none, host, file[:SIZE] or zram[:SIZE]")
	c.RegisterFlagCompletionFunc("swap", cobra.FixedCompletions(swapKinds(), cobra.ShellCompDirectiveNoFileComp))
	size(&f.opts.ReserveMemory, "reserve-memory", up.DefaultReserveMemory, "memory that must be free for another sandbox to be admitted")
	size(&f.opts.ReserveDisk, "reserve-disk", up.DefaultReserveDisk, "disk that must be free for another sandbox to be admitted")
	return c
}

// checkStore looks at what the flags say of the object store, and makes its directory
// absolute.
func (f *upFlags) checkStore() (err error) {
	o := &f.opts.Objects
	bucket, s3 := strings.CutPrefix(o.Store, "s3://")
	switch {
	case s3 && (bucket == "" || bucket[0] == '/'):
		return usagef("--store %q: write s3://BUCKET or s3://BUCKET/PREFIX", o.Store)
	case s3 && o.Endpoint == "":
		return usagef("--store %s: --store-endpoint says where the service is", o.Store)
	case !s3 && (o.Endpoint != "" || o.Region != ""):
		return usagef("--store-endpoint and --store-region are for --store s3://BUCKET")
	case !s3 && strings.Contains(o.Store, "://"):
		return usagef("--store %q: write a directory or s3://BUCKET/PREFIX", o.Store)
	case !s3 && o.Store != "":
		o.Store, err = filepath.Abs(o.Store)
	}
	return err
}

func (a *app) up(ctx context.Context, f *upFlags) error {
	if f.opts.Data == "" {
		return usagef("--data is empty")
	}
	var err error
	if f.opts.Data, err = filepath.Abs(f.opts.Data); err != nil {
		return err
	}
	var level slog.Level
	if err := level.UnmarshalText([]byte(f.level)); err != nil {
		return usagef("--log-level %q: use debug, info, warn or error", f.level)
	}
	f.opts.Log = slog.New(slog.NewTextHandler(a.stderr, &slog.HandlerOptions{Level: level}))
	if (f.cert == "") != (f.key == "") {
		return usagef("--tls-cert and --tls-key go together")
	}
	if f.cert != "" {
		pair, err := tls.LoadX509KeyPair(f.cert, f.key)
		if err != nil {
			return fmt.Errorf("load the certificate: %w", err)
		}
		f.opts.TLS = &tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12}
	}
	f.opts.Objects.AccessKey, f.opts.Objects.SecretKey = os.Getenv("AWS_ACCESS_KEY_ID"), os.Getenv("AWS_SECRET_ACCESS_KEY")
	if f.opts.Guest, err = bin.Guest(); err != nil {
		return err
	}
	f.opts.Version = buildVersion()
	err = up.Run(ctx, f.opts, func(info up.Info, token string) {
		if err := a.saveContext(info, token, f.opts.Data); err != nil {
			f.opts.Log.Warn("the context file was not written; use --url and --token", "err", err)
		}
		if err := a.printUp(f, info, "is up"); err != nil {
			f.opts.Log.Warn("print", "err", err)
		}
	})
	if errors.Is(err, errs.NodeRunning) {
		return a.alreadyUp(f, f.opts.Data, err)
	}
	return err
}

// alreadyUp writes the context file for a node that runs: whoever says "up" wants to use
// it, and the file may be lost or name another server.
func (a *app) alreadyUp(f *upFlags, data string, running error) error {
	info, err := up.Find(data)
	if err != nil {
		return running // it starts or ends just now
	}
	token, err := up.Token(data)
	if err == nil {
		err = a.saveContext(info, token, data)
	}
	what := fmt.Sprintf("a node already runs on %s, at %s (pid %d)", data, info.URL, info.PID)
	switch {
	case err != nil:
		return errs.New(errs.NodeRunning, "up", what+", and the context file could not be written").Because(err)
	case f.listen && f.opts.Listen != info.Listen:
		return errs.New(errs.NodeRunning, "up", what+", which is not --listen "+f.opts.Listen+"; the context file names it").
			Advise("use it as it is; or 'dsec down --keep --data " + data + "' first, which leaves its sandboxes running; or use another --data")
	}
	return a.printUp(f, info, "is up already")
}

func listenable(address string) bool {
	if path, ok := strings.CutPrefix(address, "unix:"); ok {
		return strings.Trim(path, "/") != ""
	}
	_, port, err := net.SplitHostPort(address)
	if err != nil {
		return false
	}
	_, err = net.LookupPort("tcp", port)
	return err == nil
}

// exposed tells whether others than this machine can connect to an address.
func exposed(ctx context.Context, address string) bool {
	if strings.HasPrefix(address, "unix:") {
		return false
	}
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return true
	}
	if host == "" {
		return true
	}
	ips, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
	return err != nil || slices.ContainsFunc(ips, func(ip netip.Addr) bool { return !ip.Unmap().IsLoopback() })
}

func (a *app) contextPath() (string, error) {
	if a.contextFile != "" {
		return a.contextFile, nil
	}
	return client.ContextPath()
}

func (a *app) saveContext(info up.Info, token, data string) error {
	path, err := a.contextPath()
	if err != nil {
		return err
	}
	if data, err = filepath.Abs(data); err != nil {
		return err
	}
	if old, err := client.LoadContext(path); err == nil && old.URL != info.URL {
		fmt.Fprintf(a.stderr, "dsec: the context file %s named %s and names this server now; --context keeps them apart\n", path, old.URL)
	}
	return client.SaveContext(path, client.Context{URL: info.URL, Token: token, Data: data})
}

func (a *app) printUp(f *upFlags, info up.Info, state string) error {
	if !slices.Contains(info.Backends, v1.BackendContainer) {
		fmt.Fprintln(a.stderr, "dsec: containers do not work on this machine; 'dsec doctor' says why")
	}
	if f.json {
		return a.jsonLine(info)
	}
	_, err := fmt.Fprintf(a.stdout, "dsec %s at %s (node %s, pid %d)\n%s", state, info.URL, info.Node, info.PID, a.whatNext(f, info))
	return err
}

// whatNext tells whoever started a server what to do with it.
func (a *app) whatNext(f *upFlags, info up.Info) string {
	with, down := "", "dsec down"
	if a.contextFile != "" {
		with = " --context " + a.contextFile
	}
	if path, err := a.contextPath(); err == nil {
		if _, err := client.LoadContext(path); err != nil {
			with = " --url " + info.URL + " --token $(cat " + filepath.Join(f.opts.Data, "root.token") + ")"
		}
	}
	if u := os.Getenv("DSEC_URL"); u != "" && u != info.URL && a.contextFile == "" {
		return fmt.Sprintf("  next: DSEC_URL names another server, %s: unset it to use this one\n", u)
	}
	if with != "" {
		down += " --data " + f.opts.Data
	}
	return fmt.Sprintf("  next: dsec%s image build NAME -f RECIPE   or: dsec%s image import NAME SRC\n"+
		"        dsec%s run NAME -- COMMAND\n"+
		"        %s   ends it and its sandboxes\n", with, with, with, down)
}

// startTime bounds the wait for a detached server.
const startTime = 60 * time.Second

// upDetached starts this program again as a server of its own and waits until it answers.
func (a *app) upDetached(ctx context.Context, f *upFlags) error {
	if f.opts.Data == "" {
		return usagef("--data is empty")
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	data, err := filepath.Abs(f.opts.Data)
	if err != nil {
		return err
	}
	if err := up.NeedRoot(); err != nil {
		return err
	}
	_, err = os.Lstat(data)
	existed := err == nil
	if err := os.MkdirAll(data, 0o700); err != nil {
		return err
	}
	if _, err := up.Find(data); err == nil {
		return a.alreadyUp(f, data, errs.New(errs.NodeRunning, "up", "a node already runs on "+data))
	}
	log, err := os.OpenFile(filepath.Join(data, "server.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	begin, err := log.Seek(0, io.SeekEnd)
	if err != nil {
		return err
	}
	args, err := f.args(data, a.contextFile)
	if err != nil {
		return err
	}
	cmd := exec.Command(self, args...) // not bound to ctx: it outlives us
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return err
	}
	exited := make(chan error, 1)
	go func() { exited <- cmd.Wait() }()
	deadline := time.After(startTime)
	for {
		if info, err := up.Find(data); err == nil && info.PID == cmd.Process.Pid {
			return a.printUp(f, info, "is up")
		}
		select {
		case err := <-exited:
			said := tail(log.Name(), begin)
			if err == nil { // it found another that started meanwhile, and says so
				err = errors.New("exit status 0")
			}
			if entries, rerr := os.ReadDir(data); !existed && rerr == nil && len(entries) == 1 { // the log
				return errors.Join(fmt.Errorf("the server ended at once (%w); it says:\n%s", err, said), os.RemoveAll(data))
			}
			return fmt.Errorf("the server ended at once (%w); its log %s says:\n%s", err, log.Name(), said)
		case <-deadline:
			return fmt.Errorf("the server does not answer after %v; look at %s", startTime, log.Name())
		case <-ctx.Done():
			return errors.Join(ctx.Err(), cmd.Process.Signal(syscall.SIGTERM))
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// args are those of a server with the same flags that does not detach.
func (f *upFlags) args(data, contextFile string) (args []string, err error) {
	args = []string{"up", "--data", data, "--listen", f.opts.Listen, "--log-level", f.level, "--slots", fmt.Sprint(f.opts.Slots),
		"--cpu-overcommit", fmt.Sprint(f.opts.CPUOvercommit), "--memory-overcommit", fmt.Sprint(f.opts.MemoryOvercommit),
		"--reserve-memory", fmt.Sprint(f.opts.ReserveMemory), "--reserve-disk", fmt.Sprint(f.opts.ReserveDisk),
		"--swap", f.opts.Swap.String()}
	args = append(args, "--store", f.opts.Objects.Store, "--store-endpoint", f.opts.Objects.Endpoint, "--store-region", f.opts.Objects.Region,
		"--store-rate", fmt.Sprint(f.opts.Objects.Rate), "--store-latency", f.opts.Objects.Latency.String(), "--image-cache", fmt.Sprint(f.opts.ImageCache),
		"--image-loading", f.loading, "--image-read-ahead", fmt.Sprint(f.opts.ReadAhead),
		"--collapse-below", fmt.Sprint(f.opts.Collapse), "--build-cache", fmt.Sprint(f.opts.BuildCache), "--build-cache-age", f.opts.BuildCacheAge.String())
	if f.insecure {
		args = append(args, "--insecure")
	}
	for name, value := range map[string]string{"--tls-cert": f.cert, "--tls-key": f.key, "--context": contextFile} {
		if value != "" {
			if value, err = filepath.Abs(value); err != nil {
				return nil, err
			}
			args = append(args, name, value)
		}
	}
	return args, nil
}

// tail returns the end of what was written to a log since an offset.
func tail(path string, from int64) string {
	b, err := os.ReadFile(path)
	if err != nil || int64(len(b)) < from {
		return ""
	}
	lines := strings.Split(strings.TrimSpace(string(b[from:])), "\n")
	return strings.Join(lines[max(0, len(lines)-12):], "\n")
}

func (a *app) downCmd() *cobra.Command {
	var data string
	var keep, asJSON bool
	c := &cobra.Command{
		Use: "down", Short: "Stop this machine's server and remove its sandboxes",
		Long: `Stops the server of a data directory, if one runs, removes all its sandboxes, what the
node held for them, and the context file that names it. Images, tokens and the node's
identity stay. With --keep, sandboxes go on running for the next 'dsec up' to take over
(an upgrade, say), and the context file stays.`,
		Example: "  dsec down\n  dsec down --data /srv/dsec --keep", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			dir, err := a.dataDir(cmd, data)
			if err != nil {
				return err
			}
			return a.down(cmd.Context(), dir, keep, asJSON)
		},
	}
	c.Flags().StringVar(&data, "data", "", dataUsage)
	c.Flags().BoolVar(&keep, "keep", false, "leave the sandboxes running")
	c.Flags().BoolVar(&asJSON, "json", false, "print what was done as JSON")
	return c
}

// keeperCmd is what the server runs to have its descriptors held beyond its death.
func (a *app) keeperCmd() *cobra.Command {
	return &cobra.Command{
		Use: "keeper", Hidden: true, DisableFlagParsing: true,
		Run: func(_ *cobra.Command, args []string) { os.Exit(up.Keeper(args)) },
	}
}

func (a *app) down(ctx context.Context, data string, keep, asJSON bool) error {
	if err := up.NeedRoot(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute) // thousands of sandboxes may have to end
	defer cancel()
	info, err := up.Find(data)
	running := err == nil
	switch {
	case running:
		if err := up.Stop(ctx, data, info); err != nil {
			return err
		}
	case !errors.Is(err, errs.NodeNotFound) || keep:
		return whichData(err)
	}
	removed := 0
	if !keep {
		if removed, err = up.RemoveSandboxes(ctx, data); err != nil {
			return whichData(err)
		}
	}
	if !keep {
		if err := a.forget(data, info); err != nil {
			return err
		}
	}
	if asJSON {
		return a.jsonLine(map[string]any{"stopped": running, "removed": removed, "data": data})
	}
	what := "no server was running on " + data
	if running {
		what = "stopped the server of " + data
	}
	if keep {
		_, err = fmt.Fprintf(a.stdout, "%s; sandboxes keep running\n", what)
	} else {
		_, err = fmt.Fprintf(a.stdout, "%s; removed %s\n", what, count(removed, "sandbox"))
	}
	return err
}

// whichData tells how to name another directory if there is no node on this one.
func whichData(err error) error {
	var e *errs.Error
	if errors.As(err, &e) && e.Code == errs.NodeNotFound {
		e.Advise("name the data directory of the node that is meant with --data DIR")
	}
	return err
}

// forget removes the context file if it names the server of a data directory.
func (a *app) forget(data string, info up.Info) error {
	path, err := a.contextPath()
	if err != nil {
		return nil // then there is none
	}
	c, err := client.LoadContext(path)
	if err != nil {
		return nil // nor is it of use to anybody
	}
	if c.Data == data || c.Data == "" && c.URL == info.URL {
		return client.RemoveContext(path, c)
	}
	return nil
}

const dataUsage = "data directory (default that of the server the context file names, else " + up.DefaultData + ")"

// dataDir is the directory that --data names, or that of the server which all other verbs
// use if it is of this machine.
func (a *app) dataDir(cmd *cobra.Command, flag string) (string, error) {
	if cmd.Flags().Changed("data") {
		if flag == "" {
			return "", usagef("--data is empty")
		}
		return filepath.Abs(flag)
	}
	o, err := a.clientOptions()
	if err != nil || o.URL == "" {
		return up.DefaultData, err
	}
	path, err := a.contextPath()
	if err != nil {
		return "", err
	}
	c, err := client.LoadContext(path)
	switch {
	case err == nil && c.URL == o.URL && c.Data != "":
		return c.Data, nil
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return "", err
	}
	if info, err := up.Find(up.DefaultData); err == nil && info.URL == o.URL {
		return up.DefaultData, nil
	}
	return "", usagef("the server at %s says nothing of its data directory: name it with --data DIR (%s --data %s is the default's)", o.URL, cmd.CommandPath(), up.DefaultData)
}
