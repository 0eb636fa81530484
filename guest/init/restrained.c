/* A program that may not kill: neither it nor whatever it starts has a way to bring about its SIGKILL. So one that it gets, and no limit asked
 * for, is known to come from outside the guest's programs. Beside the calls that name a signal there are those that have the kernel send one
 * later. Runs in the child only. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#include "../common/native.h"
#include "init.h"

enum { EXIT_SIGNAL_BITS = 0xff, PROGRAM_MAX = 128 };

/* Refused where this argument, or these bits of it, is this. The kernel takes each of them for a number of 32 bits, or refuses more. */
static const struct {
	uint32_t number;
	unsigned argument;
	uint32_t bits, refused;
} asked[] = {
	{SYS_kill, 1, UINT32_MAX, SIGKILL},
	{SYS_tkill, 1, UINT32_MAX, SIGKILL},
	{SYS_tgkill, 2, UINT32_MAX, SIGKILL},
	{SYS_rt_sigqueueinfo, 1, UINT32_MAX, SIGKILL},
	{SYS_rt_tgsigqueueinfo, 2, UINT32_MAX, SIGKILL},
	{SYS_pidfd_send_signal, 1, UINT32_MAX, SIGKILL},
	{SYS_clone, 0, EXIT_SIGNAL_BITS, SIGKILL},	/* to the parent, once the child ends */
	{SYS_fcntl, 1, UINT32_MAX, F_SETSIG},
	{SYS_prctl, 0, UINT32_MAX, PR_SET_PDEATHSIG},
	{SYS_setrlimit, 0, UINT32_MAX, RLIMIT_CPU},
	{SYS_setrlimit, 0, UINT32_MAX, RLIMIT_RTTIME},
};

/* Refused whatever the arguments: a tracer gives any signal, and dies taking its tracees along; a timer's, or a message queue's, signal
 * stands in memory, where a filter can't look. */
static const uint32_t never[] = {SYS_ptrace, SYS_timer_create, SYS_mq_notify};

/* As if the kernel had none: the C library makes do with `clone`. */
static const uint32_t unknown[] = {SYS_clone3, SYS_io_uring_setup};

static struct sock_filter program[PROGRAM_MAX];
static unsigned short length;

static void emit(uint16_t code, uint32_t k, uint8_t if_true, uint8_t if_false)
{
	program[length++] = (struct sock_filter)BPF_JUMP(code, k, if_true, if_false);
}

static void load(size_t at)
{
	emit(BPF_LD | BPF_W | BPF_ABS, (uint32_t)at, 0, 0);
}

static void answer(uint32_t with)
{
	emit(BPF_RET | BPF_K, with, 0, 0);
}

static void load_argument(unsigned argument)
{
	load(offsetof(struct seccomp_data, args) + 8 * argument);
}

static void refuse_all_of(const uint32_t *calls, size_t count, uint32_t with)
{
	for (size_t i = 0; i < count; i++) {
		emit(BPF_JMP | BPF_JEQ | BPF_K, calls[i], 0, 1);
		answer(SECCOMP_RET_ERRNO | with);
	}
}

/* The number of the call is loaded before and after. */
static void refuse_asked(void)
{
	for (size_t i = 0; i < COUNT_OF(asked); i++) {
		emit(BPF_JMP | BPF_JEQ | BPF_K, asked[i].number, 0, 5);
		load_argument(asked[i].argument);
		emit(BPF_ALU | BPF_AND | BPF_K, asked[i].bits, 0, 0);
		emit(BPF_JMP | BPF_JEQ | BPF_K, asked[i].refused, 0, 1);
		answer(SECCOMP_RET_ERRNO | EPERM);
		load(offsetof(struct seccomp_data, nr));
	}
}

/* Of prlimit only the setting of what ends in a SIGKILL: reading passes no new limit. */
static void refuse_prlimit(void)
{
	emit(BPF_JMP | BPF_JEQ | BPF_K, SYS_prlimit64, 0, 9);
	load_argument(1);
	emit(BPF_JMP | BPF_JEQ | BPF_K, RLIMIT_CPU, 1, 0);
	emit(BPF_JMP | BPF_JEQ | BPF_K, RLIMIT_RTTIME, 0, 5);
	load_argument(2);
	emit(BPF_JMP | BPF_JEQ | BPF_K, 0, 0, 2);
	load(offsetof(struct seccomp_data, args) + 8 * 2 + 4);
	emit(BPF_JMP | BPF_JEQ | BPF_K, 0, 1, 0);
	answer(SECCOMP_RET_ERRNO | EPERM);
	answer(SECCOMP_RET_ALLOW);
}

/* 0, or -1 with errno. That there is a filter keeps strict mode away, too, which kills by the same signal. */
int restrained_become(void)
{
	length = 0;
	load(offsetof(struct seccomp_data, arch));
	emit(BPF_JMP | BPF_JEQ | BPF_K, NATIVE_ARCH, 1, 0);
	answer(SECCOMP_RET_ERRNO | ENOSYS);
	load(offsetof(struct seccomp_data, nr));
	emit(BPF_JMP | BPF_JGE | BPF_K, X32_BIT, 0, 1);
	answer(SECCOMP_RET_ERRNO | ENOSYS);
	refuse_all_of(never, COUNT_OF(never), EPERM);
	refuse_all_of(unknown, COUNT_OF(unknown), ENOSYS);
	refuse_asked();
	refuse_prlimit();
	answer(SECCOMP_RET_ALLOW);
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0)
		return -1;
	return (int)syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &(struct sock_fprog){length, program});
}
