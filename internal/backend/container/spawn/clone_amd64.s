#include "textflag.h"

// func cloneProgram(args *cloneArgs, size uintptr, prog *op, n uintptr, failure *failure) (pid uintptr)
//
// The child uses no stack: everything it needs stays in registers that system calls
// preserve (RBX, R12-R15).
TEXT ·cloneProgram(SB), NOSPLIT, $0-48
	MOVQ args+0(FP), DI
	MOVQ size+8(FP), SI
	MOVQ prog+16(FP), R12
	MOVQ n+24(FP), R13
	MOVQ failure+32(FP), R15
	MOVQ $435, AX // clone3
	SYSCALL
	TESTQ AX, AX
	JZ   child
	MOVQ AX, pid+40(FP)
	RET

child:
	XORQ BX, BX

next:
	CMPQ BX, R13
	JGE  done
	MOVQ 0(R12), AX
	MOVQ 8(R12), DI
	MOVQ 16(R12), SI
	MOVQ 24(R12), DX
	MOVQ 32(R12), R10
	MOVQ 40(R12), R8
	XORQ R9, R9
	SYSCALL
	CMPQ AX, $0xfffffffffffff001
	JCC  failed
	ADDQ $48, R12
	INCQ BX
	JMP  next

failed:
	MOVQ AX, 8(R15)

done:
	INCQ BX
	MOVQ BX, 0(R15) // 1 + index of the failed call
	MOVQ $60, AX    // exit
	MOVQ $127, DI
	SYSCALL
	INT  $3
