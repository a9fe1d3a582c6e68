#include "textflag.h"

#define SYS_read 0
#define SYS_write 1
#define SYS_rt_sigprocmask 14
#define SYS_clone 56
#define SYS_exit 60
#define SYS_waitid 247
#define EINTR 4

// A thread of this process in all but the Go runtime's eyes:
// CLONE_VM|CLONE_FS|CLONE_FILES|CLONE_SIGHAND|CLONE_THREAD|CLONE_SYSVSEM
#define CLONE_FLAGS 0x50f00
#define WAIT_OPTIONS 0x01000004 // WEXITED|WNOWAIT

DATA ·allSignals+0(SB)/8, $-1
GLOBL ·allSignals(SB), NOPTR, $8
DATA ·one+0(SB)/8, $1
GLOBL ·one(SB), NOPTR, $8
// The thread makes system calls only, and those need no stack of ours.
GLOBL ·waiterStack(SB), NOPTR, $64
GLOBL ·waiterBuffer(SB), NOPTR, $8

// func startWaiter(told, ack int) (tid int)
TEXT ·startWaiter(SB), NOSPLIT, $16-24
	MOVQ	told+0(FP), R12
	MOVQ	ack+8(FP), R13

	// It must never run a signal handler of the runtime: it has no goroutine.
	MOVQ	$SYS_rt_sigprocmask, AX
	MOVQ	$2, DI // SIG_SETMASK
	LEAQ	·allSignals(SB), SI
	LEAQ	0(SP), DX
	MOVQ	$8, R10
	SYSCALL

	MOVQ	$SYS_clone, AX
	MOVQ	$CLONE_FLAGS, DI
	LEAQ	·waiterStack+64(SB), SI
	XORL	DX, DX
	XORL	R10, R10
	XORL	R8, R8
	SYSCALL
	TESTQ	AX, AX
	JEQ	wait
	MOVQ	AX, tid+16(FP)

	MOVQ	$SYS_rt_sigprocmask, AX
	MOVQ	$2, DI
	LEAQ	0(SP), SI
	XORL	DX, DX
	MOVQ	$8, R10
	SYSCALL
	RET

wait:
	MOVQ	$SYS_waitid, AX
	XORL	DI, DI // P_ALL
	XORL	SI, SI
	XORL	DX, DX
	MOVQ	$WAIT_OPTIONS, R10
	XORL	R8, R8
	SYSCALL
	CMPQ	AX, $-EINTR
	JEQ	wait

	// A child has ended, or there is none: the reaper looks.
	MOVQ	$SYS_write, AX
	MOVQ	R12, DI
	LEAQ	·one(SB), SI
	MOVQ	$8, DX
	SYSCALL
acknowledged:
	MOVQ	$SYS_read, AX
	MOVQ	R13, DI
	LEAQ	·waiterBuffer(SB), SI
	MOVQ	$8, DX
	SYSCALL
	CMPQ	AX, $8
	JEQ	wait
	CMPQ	AX, $-EINTR
	JEQ	acknowledged
	MOVQ	$SYS_exit, AX
	XORL	DI, DI
	SYSCALL
	INT	$3
