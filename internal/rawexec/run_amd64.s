#include "textflag.h"

// Offsets in struct op.
#define op_nr     0
#define op_args   8
#define op_flags  56
#define op_size   64

#define SYS_rt_sigprocmask 14
#define SYS_exit_group     231
#define SYS_clone3         435
#define SIG_SETMASK        2

// A result above -4096, unsigned, is an errno.
#define MAX_OK $-4096

// func run(args *cloneArgs, ops *op, n uintptr, r *report) uintptr
//
// Blocks all signals, clones, and unblocks them in the parent, which gets the
// child's pid or -errno. The child never returns: it uses registers and the
// ops alone, never the stack, which is its parent's.
//
// A system call keeps all registers but AX, CX and R11.
TEXT ·run(SB), NOSPLIT, $16-40
	MOVQ args+0(FP), R13
	MOVQ ops+8(FP), R12
	MOVQ n+16(FP), BX
	MOVQ r+24(FP), R15

	// rt_sigprocmask(SIG_SETMASK, {all}, old, 8)
	MOVQ $-1, AX
	MOVQ AX, all-8(SP)
	MOVL $SIG_SETMASK, DI
	LEAQ all-8(SP), SI
	LEAQ old-16(SP), DX
	MOVL $8, R10
	MOVL $SYS_rt_sigprocmask, AX
	SYSCALL

	MOVQ R13, DI
	MOVL $88, SI // sizeof(struct clone_args) of 5.7
	MOVL $SYS_clone3, AX
	SYSCALL
	TESTQ AX, AX
	JZ   child

	MOVQ AX, ret+32(FP)
	MOVL $SIG_SETMASK, DI
	LEAQ old-16(SP), SI
	XORL DX, DX
	MOVL $8, R10
	MOVL $SYS_rt_sigprocmask, AX
	SYSCALL
	RET

child:
	MOVQ R12, R13 // R12: this op, R13: the first, BX: how many are left

next:
	TESTQ BX, BX
	JZ    done

	MOVQ (op_args+0)(R12), DI
	MOVQ (op_args+8)(R12), SI
	MOVQ (op_args+16)(R12), DX
	MOVQ (op_args+24)(R12), R10
	MOVQ (op_args+32)(R12), R8
	MOVQ (op_args+40)(R12), R9
	MOVQ op_nr(R12), AX
	SYSCALL
	CMPQ AX, MAX_OK
	JHI  failed
	TESTL $2, op_flags(R12)
	JZ   advance
	TESTQ AX, AX
	JNZ  advance
	MOVQ $-32, AX // EPIPE

failed:
	TESTL $1, op_flags(R12)
	JZ    report

advance:
	ADDQ $op_size, R12
	DECQ BX
	JMP  next

report:
	NEGQ AX
	MOVQ AX, 8(R15)
	SUBQ R13, R12
	MOVQ R12, 0(R15)
	MOVL $127, DI
	JMP  exit
done:
	XORL DI, DI
exit:
	MOVL $SYS_exit_group, AX
	SYSCALL
	INT  $3
