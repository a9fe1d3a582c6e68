package proc

import (
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"dsec/api/v1/errs"
	"dsec/internal/guest/clock"
	"dsec/internal/guest/user"
)

// DefaultPath is the PATH of a process whose environment has none.
const DefaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// Size is a terminal's.
type Size struct{ Cols, Rows uint16 }

// Spec says what to start and how.
type Spec struct {
	Cmd         string
	Name        string   // argv[0]; empty: Cmd
	Args        []string // without argv[0]
	Env         map[string]string
	Cwd         string // empty: the table's
	User        string // empty: the table's
	PTY         *Size
	Tag         string
	Keep        bool          // what ended is given up after that of others
	Stdin       bool          // false: /dev/null
	Timeout     time.Duration // that it runs; that the sandbox is paused does not count
	IdleTimeout time.Duration // the same, without output
	OutputLimit int64
	SpillLimit  int64
	Session     string
	Input       int   // a descriptor that the process gets as stdin; 0: as Stdin says
	Inherit     []int // further descriptors, from 3 on; -1: closed
}

// Exit is how a process ended.
type Exit struct {
	Code        int // 128+n after signal n
	Exited      bool
	Signal      syscall.Signal
	TimedOut    bool
	IdleTimeout bool
	ErrorCode   errs.Code // command_not_found, command_not_executable
	Error       string
	StdoutBytes int64
	StderrBytes int64
	Duration    time.Duration // from start to end, the sandbox's pauses included
	CPU         time.Duration
	MaxRSS      int64 // bytes
	OOM         OOM
}

// Process is one started process. Pid is 0 when its command could not be started: then
// it has already ended.
type Process struct {
	Pid     int
	Spec    Spec
	User    *user.User
	Started time.Time
	Log     *Log

	table   *Table
	order   uint64        // of the starts, from 1
	left    bool          // it ended while nobody followed it
	oom     int64         // the memory limit's kills before it started
	waited  time.Duration // of its time limit, for the image's data
	given   bool          // its output was given up
	sources []*source
	done    chan struct{}

	mu     sync.Mutex
	exit   Exit
	over   bool     // exit is set
	stdin  *os.File // nil: closed, or none
	pty    *os.File
	timers []*clock.Timer
	killed atomic.Uint32 // why the guest killed it
}

// Reasons of killed.
const (
	killTimeout = 1
	killIdle    = 2
	killAsked   = 3 // by a client
)

// Start starts a process. A command that does not exist or cannot be executed is not an
// error: the process that is returned has ended, with the reason in its Exit and its
// stderr log. The caller must Release the process. Errors: errs.UserNotFound, errs.CwdNotFound, errs.TagInUse,
// errs.BadRequest, errs.PermissionDenied, errs.InternalError; errs.StoreUnavailable and errs.DeadlineExceeded if
// data of the image cannot be had, or not within the process's time limits.
func (t *Table) Start(spec Spec) (*Process, error) {
	if err := checkSpec(&spec); err != nil {
		return nil, err
	}
	if spec.User == "" {
		spec.User = t.cfg.User
	}
	begun := t.cfg.Clock.Now()
	f, err := t.find(spec)
	if err != nil {
		return nil, err
	}
	p := &Process{
		Spec: spec, User: f.user, table: t, done: make(chan struct{}), waited: t.cfg.Clock.Since(begun),
		Log: newLog(spec.OutputLimit, spec.SpillLimit, t.cfg.SpillDir, t.cfg.Stall, t.cfg.Clock),
	}
	if err := t.reserveTag(spec.Tag, p); err != nil {
		return nil, err
	}
	missing := f.missing
	switch {
	case missing != nil:
	case f.unread != nil:
		missing, err = p.explain(f.path, f.cwd, f.unread)
	default:
		missing, err = p.spawn(f.path, f.cwd, f.env)
	}
	switch {
	case err != nil:
		t.releaseTag(spec.Tag, p)
		return nil, err
	case missing != nil:
		t.releaseTag(spec.Tag, p)
		p.failed(missing)
	}
	return p, nil
}

// found is what a start needs of the image's files.
type found struct {
	user      *user.User
	cwd, path string
	env       []string
	missing   *errs.Error // the command is at fault
	unread    error       // of the program's head
}

// maxStuck is how many starts whose time was over may still wait for the image's data: each has
// a thread of the kernel's.
const maxStuck = 32

// find looks at the image's files, which may take as long as their data takes to come, within the
// process's time limits.
func (t *Table) find(spec Spec) (*found, error) {
	limit := spec.Timeout
	if idle := spec.IdleTimeout; idle > 0 && (limit <= 0 || idle < limit) {
		limit = idle
	}
	if limit <= 0 {
		return t.look(spec)
	}
	if t.stuck.Load() >= maxStuck {
		return nil, errs.New(errs.StoreUnavailable, "guest.start", strconv.Itoa(maxStuck)+" earlier starts still wait for data of the image: its store does not answer")
	}
	var f *found
	var err error
	done := make(chan struct{})
	go func() {
		f, err = t.look(spec)
		close(done)
	}()
	over := make(chan struct{})
	timer := t.cfg.Clock.AfterFunc(limit, func() { close(over) })
	defer timer.Stop()
	select {
	case <-done:
		return f, err
	case <-over:
	}
	t.stuck.Add(1)
	go func() {
		<-done
		t.stuck.Add(-1)
	}()
	e := errs.New(errs.DeadlineExceeded, "guest.start", "the time limit of "+limit.String()+" passed while the program's data was waited for: the image's store does not answer in time").
		Advise("retry, or look at the store; the sandbox goes on")
	e.Infra = true
	return nil, e
}

func (t *Table) look(spec Spec) (*found, error) {
	u, err := t.cfg.Users.Lookup(spec.User)
	if err != nil {
		return nil, err
	}
	f := &found{user: u, env: t.environ(&spec, u)}
	if f.cwd, err = t.workdir(&spec, u); err != nil {
		return nil, err
	}
	if f.path, f.missing = lookup(spec.Cmd, f.cwd, f.env); f.missing == nil {
		f.unread = t.readHead(f.path)
	}
	return f, nil
}

func checkSpec(s *Spec) error {
	bad := func(field string) error {
		return errs.New(errs.BadRequest, "guest.start", field)
	}
	if s.Cmd == "" {
		return bad("cmd is empty")
	}
	for _, a := range s.Args {
		if strings.IndexByte(a, 0) >= 0 {
			return bad("args holds a NUL byte")
		}
	}
	for k, v := range s.Env {
		if k == "" || strings.IndexByte(k, '=') >= 0 || strings.IndexByte(k, 0) >= 0 || strings.IndexByte(v, 0) >= 0 {
			return bad("envs holds a name or value that an environment cannot: " + strconv.Quote(k))
		}
	}
	if strings.IndexByte(s.Cmd, 0) >= 0 || strings.IndexByte(s.Cwd, 0) >= 0 {
		return bad("cmd or cwd holds a NUL byte")
	}
	return nil
}

// workdir resolves and checks the working directory.
func (t *Table) workdir(spec *Spec, u *user.User) (string, error) {
	cwd := spec.Cwd
	switch {
	case cwd == "":
		if cwd = t.cfg.Cwd; cwd == "" {
			cwd = u.Home
		}
		var st syscall.Stat_t
		if syscall.Stat(cwd, &st) != nil && cwd == u.Home {
			cwd = "/" // a home that the image lacks is no reason to refuse
		}
	case cwd == "~":
		cwd = u.Home
	case strings.HasPrefix(cwd, "~/"):
		cwd = u.Home + cwd[1:]
	case cwd[0] != '/':
		cwd = u.Home + "/" + cwd
	}
	var st syscall.Stat_t
	if err := syscall.Stat(cwd, &st); err != nil {
		return "", errs.New(errs.CwdNotFound, "guest.start", "working directory "+strconv.Quote(cwd)).Because(err)
	}
	if st.Mode&syscall.S_IFMT != syscall.S_IFDIR {
		return "", errs.New(errs.CwdNotFound, "guest.start", "working directory "+strconv.Quote(cwd)+" is not a directory")
	}
	return cwd, nil
}

// environ builds the environment: nothing of the guest's own, the user's, the sandbox's,
// the process's; the last wins.
func (t *Table) environ(spec *Spec, u *user.User) []string {
	env := make([]string, 0, 6+len(t.cfg.Env)+len(spec.Env))
	set := func(k, v string) {
		for i, e := range env {
			if len(e) > len(k) && e[len(k)] == '=' && e[:len(k)] == k {
				env[i] = k + "=" + v
				return
			}
		}
		env = append(env, k+"="+v)
	}
	set("PATH", DefaultPath)
	set("HOME", u.Home)
	set("USER", u.Name)
	set("LOGNAME", u.Name)
	if spec.PTY != nil {
		set("TERM", "xterm")
	}
	for k, v := range t.cfg.Env {
		set(k, v)
	}
	for k, v := range spec.Env {
		set(k, v)
	}
	return env
}

// failed ends p, whose command could not be started.
func (p *Process) failed(why *errs.Error) {
	code := 126
	if why.Code == errs.CommandNotFound {
		code = 127
	}
	p.Started = p.table.cfg.Now()
	p.Log.Append(Stderr, []byte(why.Message+"\n"))
	n, m := p.Log.Sizes()
	p.exit = Exit{Code: code, Exited: true, ErrorCode: why.Code, Error: why.Message, StdoutBytes: n, StderrBytes: m}
	p.Log.end()
	close(p.done)
}

// spawn forks and executes. It returns missing when the command is at fault.
func (p *Process) spawn(path, cwd string, env []string) (missing *errs.Error, err error) {
	var io stdio
	if err := io.open(p); err != nil {
		io.closeAll()
		return nil, errs.Wrap(errs.InternalError, "guest.start", "make the process's descriptors", err)
	}
	name := p.Spec.Name
	if name == "" {
		name = p.Spec.Cmd
	}
	argv := append([]string{name}, p.Spec.Args...)
	attr := &syscall.ProcAttr{Dir: cwd, Env: env, Files: io.child, Sys: &syscall.SysProcAttr{Setsid: true}}
	if syscall.Geteuid() == 0 {
		attr.Sys.Credential = &syscall.Credential{Uid: p.User.UID, Gid: p.User.GID, Groups: p.User.Groups}
	}
	if p.Spec.PTY != nil {
		attr.Sys.Setctty = true // Ctty 0: the child's stdin
	}
	p.oom = p.table.cfg.Memory.Kills()
	fork := func() (int, error) {
		// A thread that the runtime's monitor started has its slack, which a child would inherit.
		_ = OwnTimerSlack()
		for wait := time.Millisecond; ; wait *= 2 {
			pid, err := syscall.ForkExec(path, argv, attr)
			// Another child that is between fork and exec may hold the program
			// open for writing: a moment later it does not.
			if err != syscall.ETXTBSY || wait > 32*time.Millisecond {
				return pid, err
			}
			time.Sleep(wait)
		}
	}
	err = p.table.reaper.Start(func() (int, error) { return p.table.pin.fork(fork) }, func(pid int) {
		p.Started = p.table.cfg.Now()
		p.Log.lastWrite.Store(int64(p.table.cfg.Clock.Now()))
		p.stdin, p.pty = io.stdin, io.pty
		p.sources = io.sources
		p.table.add(p, pid)
		p.arm()
	}, p.exited)
	io.closeChild()
	if err != nil {
		io.closeParent()
		return p.explain(path, cwd, err)
	}
	for _, s := range io.sources {
		go s.run()
	}
	return nil, nil
}

// explain turns the failure of an exec into who is to blame.
func (p *Process) explain(path, cwd string, err error) (*errs.Error, error) {
	errno, ok := err.(syscall.Errno)
	if !ok {
		return nil, errs.Wrap(errs.InternalError, "guest.start", "start "+path, err)
	}
	switch errno {
	case syscall.EAGAIN, syscall.ENOMEM: // the limits of its control group
		return nil, errs.Wrap(errs.SandboxLimit, "guest.start", "start "+path, err)
	case syscall.EIO: // the image's data cannot be had: no fault of the command
		return nil, errs.Wrap(errs.StoreUnavailable, "guest.start", "read the program "+path, err)
	case syscall.EMFILE, syscall.ENFILE, syscall.EINVAL, syscall.EPERM:
		return nil, errs.Wrap(errs.InternalError, "guest.start", "start "+path, err)
	case syscall.E2BIG:
		return nil, errs.New(errs.BadRequest, "guest.start", "the arguments and environment are too long for the kernel")
	case syscall.EACCES:
		// From the change of directory or from the exec.
		cant := p.User.Do(func() error {
			var st syscall.Stat_t
			return syscall.Stat(cwd+"/.", &st)
		})
		if cant != nil {
			return nil, errs.New(errs.PermissionDenied, "guest.start", "user "+p.User.Name+" may not enter the working directory "+strconv.Quote(cwd)).
				Advise("choose another --cwd, such as /tmp")
		}
	}
	return notExecutable(p.Spec.Cmd, path, errno), nil
}
