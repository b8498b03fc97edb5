#include "textflag.h"

// func forkCall(nr uintptr, args *[6]uintptr, out *outcome) (pid uintptr)
//
// Forks, and makes one system call in the child, which then writes the result
// to out (shared memory) and ends. The child runs these instructions only.
TEXT ·forkCall(SB), NOSPLIT, $0-32
	MOVQ nr+0(FP), R12
	MOVQ args+8(FP), R13
	MOVQ out+16(FP), BX
	MOVQ $17, DI // SIGCHLD
	XORL SI, SI
	XORL DX, DX
	XORL R10, R10
	XORL R8, R8
	MOVQ $56, AX // clone
	SYSCALL
	TESTQ AX, AX
	JNE  parent
	MOVQ R12, AX
	MOVQ 0(R13), DI
	MOVQ 8(R13), SI
	MOVQ 16(R13), DX
	MOVQ 24(R13), R10
	MOVQ 32(R13), R8
	MOVQ 40(R13), R9
	SYSCALL
	MOVQ AX, 0(BX)
	MOVQ $1, 8(BX)
end:
	MOVQ $231, AX // exit_group
	XORL DI, DI
	SYSCALL
	JMP  end
parent:
	MOVQ AX, pid+24(FP)
	RET

// func forkInt80(nr uintptr, args *[6]uintptr, out *outcome) (pid uintptr)
//
// The same with the call made as a 32-bit program does.
TEXT ·forkInt80(SB), NOSPLIT, $0-32
	MOVQ nr+0(FP), R12
	MOVQ args+8(FP), R13
	MOVQ out+16(FP), R15
	MOVQ $17, DI
	XORL SI, SI
	XORL DX, DX
	XORL R10, R10
	XORL R8, R8
	MOVQ $56, AX
	SYSCALL
	TESTQ AX, AX
	JNE  parent
	MOVQ R12, AX
	MOVQ 0(R13), BX
	MOVQ 8(R13), CX
	MOVQ 16(R13), DX
	MOVQ 24(R13), SI
	MOVQ 32(R13), DI
	INT  $0x80
	MOVLQSX AX, AX
	MOVQ AX, 0(R15)
	MOVQ $1, 8(R15)
end:
	MOVQ $231, AX
	XORL DI, DI
	SYSCALL
	JMP  end
parent:
	MOVQ AX, pid+24(FP)
	RET
