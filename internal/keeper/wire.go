package keeper

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"time"

	"dsec/api/v1/errs"

	"golang.org/x/sys/unix"
)

// The protocol: one request, one answer, each one packet of a SOCK_SEQPACKET Unix
// socket, descriptors beside it.
//
//	request: op, then its text
//	answer:  0 and text, or 1 and what went wrong
const (
	version = 1

	opHello   = 'h' // version, role
	opPut     = 'p' // name, descriptors
	opTake    = 't' // name; answered with descriptors
	opList    = 'l' // the name after which to go on; answered with names, NUL between
	opDrop    = 'd' // name
	opStatus  = 's' // answered with a line
	opQuiesce = 'q' // do not restart others any more
	opStop    = 'x' // drop all and end

	roleEdge = 'e' // whose readers depend on what is held
	rolePeer = 'p' // another keeper, or a tool

	maxPacket = 32 << 10
	maxName   = 255
	maxFiles  = 64

	phase = "keeper"
)

type request struct {
	op   byte
	role byte   // hello
	text string // a name, except for hello
}

func (r request) encode() []byte {
	if r.op == opHello {
		return []byte{opHello, version, r.role}
	}
	return append([]byte{r.op}, r.text...)
}

func parseRequest(p []byte) (request, error) {
	if len(p) == 0 {
		return request{}, errors.New("empty request")
	}
	r := request{op: p[0]}
	switch r.op {
	case opHello:
		if len(p) != 3 || p[1] != version || p[2] != roleEdge && p[2] != rolePeer {
			return r, fmt.Errorf("hello of another version (this one is %d)", version)
		}
		r.role = p[2]
	case opPut, opTake, opDrop:
		if len(p) < 2 || len(p) > 1+maxName || strings.Contains(string(p[1:]), "\x00") {
			return r, errors.New("bad name")
		}
		r.text = string(p[1:])
	case opList:
		if len(p) > 1+maxName {
			return r, errors.New("bad name")
		}
		r.text = string(p[1:])
	case opStatus, opQuiesce, opStop:
		if len(p) != 1 {
			return r, errors.New("request with too much in it")
		}
	default:
		return r, fmt.Errorf("unknown request %q", p[0])
	}
	return r, nil
}

// send writes one packet with descriptors.
func send(c *net.UnixConn, p []byte, fds []int) error {
	var oob []byte
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	_, _, err := c.WriteMsgUnix(p, oob, nil)
	return err
}

// receive reads one packet. The descriptors are the caller's.
func receive(c *net.UnixConn) ([]byte, []int, error) {
	p := make([]byte, maxPacket+1)
	oob := make([]byte, unix.CmsgSpace(4*maxFiles))
	n, on, flags, _, err := c.ReadMsgUnix(p, oob)
	if err != nil {
		return nil, nil, err
	}
	fds, err := parseRights(oob[:on])
	if n == 0 && err == nil {
		err = net.ErrClosed
	}
	if err == nil && flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 {
		err = errors.New("packet too long")
	}
	if err != nil {
		closeAll(fds)
		return nil, nil, err
	}
	return p[:n], fds, nil
}

func parseRights(oob []byte) (fds []int, err error) {
	if len(oob) == 0 {
		return nil, nil
	}
	list, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, err
	}
	for i := range list {
		if list[i].Header.Level != unix.SOL_SOCKET || list[i].Header.Type != unix.SCM_RIGHTS {
			continue
		}
		if len(list[i].Data)%4 != 0 { // the library would run off its end
			return fds, errors.New("descriptors cut short")
		}
		more, err := unix.ParseUnixRights(&list[i])
		fds = append(fds, more...)
		if err != nil {
			return fds, err
		}
	}
	return fds, nil
}

func closeAll(fds []int) {
	for _, fd := range fds {
		unix.Close(fd)
	}
}

// peer returns the process at the other end. It must be ours.
func peer(c *net.UnixConn) (int, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, err
	}
	var cred *unix.Ucred
	var cerr error
	if err := raw.Control(func(fd uintptr) { cred, cerr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); err != nil {
		return 0, err
	}
	if cerr != nil {
		return 0, cerr
	}
	if cred.Uid != 0 && int(cred.Uid) != os.Geteuid() {
		return 0, fmt.Errorf("process %d of user %d may not", cred.Pid, cred.Uid)
	}
	return int(cred.Pid), nil
}

// dial connects to the keeper of a slot.
func dial(dir *os.File, slot int) (*net.UnixConn, int, error) {
	c, err := net.DialUnix("unixpacket", nil, address(dir, slot))
	if err != nil {
		return nil, 0, err
	}
	pid, err := peer(c)
	if err != nil {
		c.Close()
		return nil, 0, err
	}
	return c, pid, nil
}

// address is short however long the directory's path is.
func address(dir *os.File, slot int) *net.UnixAddr {
	return &net.UnixAddr{Net: "unixpacket", Name: fmt.Sprintf("/proc/self/fd/%d/keeper-%d.sock", rawFD(dir), slot)}
}

func rawFD(f *os.File) int {
	fd := -1
	if c, err := f.SyscallConn(); err == nil {
		c.Control(func(p uintptr) { fd = int(p) })
	}
	return fd
}

// call does one request on a connection that nothing else uses.
func call(ctx context.Context, c *net.UnixConn, r request, fds []int) (text []byte, got []int, err error) {
	deadline, ok := ctx.Deadline()
	if !ok {
		deadline = time.Now().Add(30 * time.Second)
	}
	c.SetDeadline(deadline)
	if err := send(c, r.encode(), fds); err != nil {
		return nil, nil, err
	}
	p, got, err := receive(c)
	if err != nil {
		return nil, nil, err
	}
	if len(p) == 0 || p[0] != 0 {
		closeAll(got)
		what := "no answer"
		if len(p) > 0 {
			what = string(p[1:])
		}
		return nil, nil, errs.New(errs.InternalError, phase, what)
	}
	return p[1:], got, nil
}

// slotFree says whether no process has a slot. It only looks: a lock taken for
// looking could turn a keeper away.
func slotFree(dir *os.File, slot int) bool {
	fd, err := unix.Openat(rawFD(dir), lockName(slot), unix.O_RDWR|unix.O_CREAT|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return false
	}
	defer unix.Close(fd)
	l := unix.Flock_t{Type: unix.F_WRLCK}
	return unix.FcntlFlock(uintptr(fd), unix.F_OFD_GETLK, &l) == nil && l.Type == unix.F_UNLCK
}

func lockName(slot int) string { return fmt.Sprintf("keeper-%d.lock", slot) }

// names splits an answer to opList.
func names(p []byte) []string {
	if len(p) == 0 {
		return nil
	}
	return strings.Split(string(p), "\x00")
}

func status(p []byte) (s Status, err error) {
	if len(p) != 16 {
		return s, errors.New("status not understood")
	}
	le := binary.LittleEndian
	return Status{PID: int(le.Uint32(p)), Names: int(le.Uint32(p[4:])), Files: int(le.Uint32(p[8:])), Edges: int(le.Uint32(p[12:]))}, nil
}
