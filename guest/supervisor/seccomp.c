/* The allow-list of system calls, compiled once into a search tree: installing it is cheap, and so is the kernel's own scan
 * of which numbers it always allows.
 *
 * Anything not listed is EPERM; numbers newer than this list ENOSYS, so that programs fall back as on an older kernel; clone3 ENOSYS,
 * since its flags lie in memory; another architecture's calls kill. What a program could ask to be forbidden to itself, and would not be
 * any more when it comes back from disk (mseal, PR_SET_MDWE), is not there either: it is to know that. */
#define _GNU_SOURCE
#include <linux/filter.h>
#include <linux/netlink.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <stddef.h>
#include <stdlib.h>
#include <sys/personality.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#include "../common/native.h"
#include "supervisor.h"

#define NUMBERS_END 512
#define NEWEST_KNOWN 469 /* file_setattr, Linux 6.17 */
#define NEW_NAMESPACES                                                                                                     \
	(CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET)
#define NEW_TIME_NAMESPACE 0x80u
#define MSEAL 462
#define DENY_WRITE_EXECUTE 65 /* PR_SET_MDWE */
#define TERMINAL_INJECT 0x5412u	  /* TIOCSTI */
#define CONSOLE_SELECT 0x541cu	  /* TIOCLINUX */
#define QUERY_PERSONALITY 0xffffffffu
#define ERRNO(number) (SECCOMP_RET_ERRNO | (number))

/* What a worker's keeper makes for each call (docs/decisions/0022-calls.md), from the rights that it has in its own sandbox. */
#define NAMESPACES_OF_CALLS (CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWNET)

enum action { DENY, ALLOW, ABSENT, ENTER, MOUNT, CHECK_CLONE, CHECK_UNSHARE, CHECK_IOCTL, CHECK_SOCKET, CHECK_PERSONALITY, CHECK_PRCTL };

static const short allowed[] = {
#if defined(__x86_64__)
	SYS_access, SYS_alarm, SYS_arch_prctl, SYS_chmod, SYS_chown, SYS_creat, SYS_dup2, SYS_epoll_create, SYS_epoll_ctl_old,
	SYS_epoll_wait, SYS_epoll_wait_old, SYS_eventfd, SYS_fork, SYS_futimesat, SYS_getdents, SYS_getpgrp, SYS_get_thread_area,
	SYS_inotify_init, SYS_lchown, SYS_link, SYS_lstat, SYS_mkdir, SYS_mknod, SYS_open, SYS_pause, SYS_pipe, SYS_poll,
	SYS_readlink, SYS_rename, SYS_rmdir, SYS_select, SYS_set_thread_area, SYS_signalfd, SYS_stat, SYS_symlink, SYS_time,
	SYS_unlink, SYS_utime, SYS_utimes, SYS_vfork,
#endif
	SYS_accept, SYS_accept4, SYS_bind, SYS_brk, SYS_capget, SYS_capset, SYS_chdir, SYS_chroot, SYS_clock_getres, SYS_clock_gettime,
	SYS_clock_nanosleep, SYS_close, SYS_close_range, SYS_connect, SYS_copy_file_range, SYS_dup, SYS_dup3, SYS_epoll_create1,
	SYS_epoll_ctl, SYS_epoll_pwait, SYS_epoll_pwait2, SYS_eventfd2, SYS_execve, SYS_execveat, SYS_exit, SYS_exit_group,
	SYS_faccessat, SYS_faccessat2, SYS_fadvise64, SYS_fallocate, SYS_fchdir, SYS_fchmod, SYS_fchmodat, SYS_fchown,
	SYS_fchownat, SYS_fcntl, SYS_fdatasync, SYS_fgetxattr, SYS_flistxattr, SYS_flock, SYS_fremovexattr, SYS_fsetxattr,
	SYS_fstat, SYS_fstatfs, SYS_fsync, SYS_ftruncate, SYS_futex, SYS_futex_waitv, SYS_getcpu, SYS_getcwd, SYS_getdents64,
	SYS_getegid, SYS_geteuid, SYS_getgid, SYS_getgroups, SYS_getitimer, SYS_get_mempolicy, SYS_getpeername, SYS_getpgid,
	SYS_getpid, SYS_getppid, SYS_getpriority, SYS_getrandom, SYS_getresgid, SYS_getresuid, SYS_getrlimit, SYS_get_robust_list,
	SYS_getrusage, SYS_getsid, SYS_getsockname, SYS_getsockopt, SYS_gettid, SYS_gettimeofday, SYS_getuid, SYS_getxattr,
	SYS_inotify_add_watch, SYS_inotify_init1, SYS_inotify_rm_watch, SYS_io_cancel, SYS_io_destroy, SYS_io_getevents,
	SYS_io_pgetevents, SYS_ioprio_get, SYS_ioprio_set, SYS_io_setup, SYS_io_submit, SYS_kcmp, SYS_kill,
	SYS_landlock_add_rule, SYS_landlock_create_ruleset, SYS_landlock_restrict_self, SYS_lgetxattr, SYS_linkat, SYS_listen,
	SYS_listxattr, SYS_llistxattr, SYS_lremovexattr, SYS_lseek, SYS_lsetxattr, SYS_madvise, SYS_mbind, SYS_membarrier,
	SYS_memfd_create, SYS_memfd_secret, SYS_mincore, SYS_mkdirat, SYS_mknodat, SYS_mlock, SYS_mlock2, SYS_mlockall, SYS_mmap,
	SYS_mprotect, SYS_mq_getsetattr, SYS_mq_notify, SYS_mq_open, SYS_mq_timedreceive, SYS_mq_timedsend, SYS_mq_unlink,
	SYS_mremap, SYS_msgctl, SYS_msgget, SYS_msgrcv, SYS_msgsnd, SYS_msync, SYS_munlock, SYS_munlockall, SYS_munmap,
	SYS_name_to_handle_at, SYS_nanosleep, SYS_newfstatat, SYS_openat, SYS_openat2, SYS_pidfd_getfd, SYS_pidfd_open, SYS_pidfd_send_signal,
	SYS_pipe2, SYS_pkey_alloc, SYS_pkey_free, SYS_pkey_mprotect, SYS_ppoll, SYS_pread64, SYS_preadv, SYS_preadv2,
	SYS_prlimit64, SYS_process_madvise, SYS_process_mrelease, SYS_process_vm_readv, SYS_process_vm_writev, SYS_pselect6,
	SYS_ptrace, SYS_pwrite64, SYS_pwritev, SYS_pwritev2, SYS_read, SYS_readahead, SYS_readlinkat, SYS_readv, SYS_recvfrom,
	SYS_recvmmsg, SYS_recvmsg, SYS_remap_file_pages, SYS_removexattr, SYS_renameat, SYS_renameat2, SYS_restart_syscall,
	SYS_rseq, SYS_rt_sigaction, SYS_rt_sigpending, SYS_rt_sigprocmask, SYS_rt_sigqueueinfo, SYS_rt_sigreturn,
	SYS_rt_sigsuspend, SYS_rt_sigtimedwait, SYS_rt_tgsigqueueinfo, SYS_sched_getaffinity, SYS_sched_getattr,
	SYS_sched_getparam, SYS_sched_get_priority_max, SYS_sched_get_priority_min, SYS_sched_getscheduler,
	SYS_sched_rr_get_interval, SYS_sched_setaffinity, SYS_sched_setattr, SYS_sched_setparam, SYS_sched_setscheduler,
	SYS_sched_yield, SYS_seccomp, SYS_semctl, SYS_semget, SYS_semop, SYS_semtimedop, SYS_sendfile, SYS_sendmmsg, SYS_sendmsg,
	SYS_sendto, SYS_setfsgid, SYS_setfsuid, SYS_setgid, SYS_setgroups, SYS_setitimer, SYS_set_mempolicy, SYS_setpgid,
	SYS_setpriority, SYS_setregid, SYS_setresgid, SYS_setresuid, SYS_setreuid, SYS_setrlimit, SYS_set_robust_list, SYS_setsid,
	SYS_setsockopt, SYS_set_tid_address, SYS_setuid, SYS_setxattr, SYS_shmat, SYS_shmctl, SYS_shmdt, SYS_shmget, SYS_shutdown,
	SYS_sigaltstack, SYS_signalfd4, SYS_socketpair, SYS_splice, SYS_statfs, SYS_statx, SYS_symlinkat, SYS_sync,
	SYS_sync_file_range, SYS_syncfs, SYS_sysinfo, SYS_tee, SYS_tgkill, SYS_timer_create, SYS_timer_delete,
	SYS_timer_getoverrun, SYS_timer_gettime, SYS_timer_settime, SYS_timerfd_create, SYS_timerfd_gettime, SYS_timerfd_settime,
	SYS_times, SYS_tkill, SYS_truncate, SYS_umask, SYS_uname, SYS_unlinkat, SYS_utimensat, SYS_vmsplice, SYS_wait4,
	SYS_waitid, SYS_write, SYS_writev,
	/* The same numbers everywhere, newer than some headers: set_mempolicy_home_node, cachestat, fchmodat2, map_shadow_stack,
	 * futex_wake, futex_wait, futex_requeue, setxattrat, getxattrat, listxattrat, removexattrat. */
	450, 451, 452, 453, 454, 455, 456, 463, 464, 465, 466,
};

static struct sock_filter program[1024];
/* Where the answers to setns and mount stand, and the mask of unshare. */
static unsigned length, enter_at, mount_at, unshare_at;
static enum action actions[NUMBERS_END];
static struct {
	unsigned first;
	enum action action;
} segments[NUMBERS_END];
static unsigned segment_count;

static void emit(uint16_t code, uint32_t k, unsigned if_true, unsigned if_false)
{
	/* A tree too large for the 8 bits of a jump is a mistake of whoever changed the list. */
	if (length == COUNT(program) || if_true > 255 || if_false > 255)
		abort();
	program[length++] = (struct sock_filter){code, (uint8_t)if_true, (uint8_t)if_false, k};
}

static void emit_return(uint32_t value)
{
	emit(BPF_RET | BPF_K, value, 0, 0);
}

/* The low half of an argument: the kernel looks at no more of those checked here. */
static void emit_load_argument(unsigned index)
{
	emit(BPF_LD | BPF_W | BPF_ABS, (uint32_t)(offsetof(struct seccomp_data, args) + 8 * index), 0, 0);
}

static void emit_mask_check(uint32_t forbidden)
{
	emit_load_argument(0);
	emit(BPF_JMP | BPF_JSET | BPF_K, forbidden, 0, 1);
	emit_return(ERRNO(EPERM));
	emit_return(SECCOMP_RET_ALLOW);
}

/* `match` when the loaded value is one of `values`, else `otherwise`. */
static void emit_value_check(const uint32_t *values, unsigned count, uint32_t match, uint32_t otherwise)
{
	for (unsigned i = 0; i < count; i++)
		emit(BPF_JMP | BPF_JEQ | BPF_K, values[i], count - i, 0);
	emit_return(otherwise);
	emit_return(match);
}

static void emit_socket_check(void)
{
	static const uint32_t families[] = {AF_UNIX, AF_INET, AF_INET6};
	static const uint32_t protocols[] = {NETLINK_ROUTE};

	emit_load_argument(0);
	emit(BPF_JMP | BPF_JEQ | BPF_K, AF_NETLINK, 0, 4);
	emit_load_argument(2);
	emit_value_check(protocols, COUNT(protocols), SECCOMP_RET_ALLOW, ERRNO(EAFNOSUPPORT));
	emit_value_check(families, COUNT(families), SECCOMP_RET_ALLOW, ERRNO(EAFNOSUPPORT));
}

static void emit_action(enum action action)
{
	static const uint32_t unknown[] = {DENY_WRITE_EXECUTE};
	static const uint32_t terminal[] = {TERMINAL_INJECT, CONSOLE_SELECT};
	static const uint32_t harmless[] = {PER_LINUX, PER_LINUX32, UNAME26, PER_LINUX32 | UNAME26, ADDR_NO_RANDOMIZE, QUERY_PERSONALITY};

	switch (action) {
	case DENY: emit_return(ERRNO(EPERM)); break;
	case ALLOW: emit_return(SECCOMP_RET_ALLOW); break;
	case ABSENT: emit_return(ERRNO(ENOSYS)); break;
	case ENTER:
		enter_at = length;
		emit_return(ERRNO(EPERM));
		break;
	case MOUNT:
		mount_at = length;
		emit_return(ERRNO(EPERM));
		break;
	case CHECK_CLONE: emit_mask_check(NEW_NAMESPACES); break;
	case CHECK_UNSHARE:
		unshare_at = length + 1;
		emit_mask_check(NEW_NAMESPACES | NEW_TIME_NAMESPACE);
		break;
	case CHECK_IOCTL:
		emit_load_argument(1);
		emit_value_check(terminal, COUNT(terminal), ERRNO(EPERM), SECCOMP_RET_ALLOW);
		break;
	case CHECK_SOCKET: emit_socket_check(); break;
	case CHECK_PERSONALITY:
		emit_load_argument(0);
		emit_value_check(harmless, COUNT(harmless), SECCOMP_RET_ALLOW, ERRNO(EPERM));
		break;
	case CHECK_PRCTL:
		emit_load_argument(0);
		emit_value_check(unknown, COUNT(unknown), ERRNO(EINVAL), SECCOMP_RET_ALLOW);
		break;
	}
}

/* Binary search over the segments low..high; the number is in the accumulator. */
static void emit_tree(unsigned low, unsigned high)
{
	if (low == high) {
		emit_action(segments[low].action);
		return;
	}
	unsigned middle = (low + high + 1) / 2, jump = length;
	emit(BPF_JMP | BPF_JGE | BPF_K, segments[middle].first, 0, 0);
	emit_tree(low, middle - 1);
	if (length - jump - 1 > 255)
		abort();
	program[jump].jt = (uint8_t)(length - jump - 1);
	emit_tree(middle, high);
}

static void decide(void)
{
	for (unsigned number = 0; number < NUMBERS_END; number++)
		actions[number] = number > NEWEST_KNOWN ? ABSENT : DENY;
	for (size_t i = 0; i < COUNT(allowed); i++)
		actions[allowed[i]] = ALLOW;
	actions[SYS_clone] = CHECK_CLONE;
	actions[SYS_setns] = ENTER;
	actions[SYS_mount] = MOUNT;
	actions[SYS_clone3] = ABSENT;
	actions[SYS_unshare] = CHECK_UNSHARE;
	actions[SYS_ioctl] = CHECK_IOCTL;
	actions[SYS_socket] = CHECK_SOCKET;
	actions[SYS_personality] = CHECK_PERSONALITY;
	actions[SYS_prctl] = CHECK_PRCTL;
	actions[MSEAL] = ABSENT;
	for (unsigned number = 0; number < NUMBERS_END; number++)
		if (number == 0 || actions[number] != actions[number - 1]) {
			segments[segment_count].first = number;
			segments[segment_count++].action = actions[number];
		}
}

int seccomp_compile(void)
{
	if (options.no_seccomp)
		return 0;
	decide();
	emit(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, arch), 0, 0);
	emit(BPF_JMP | BPF_JEQ | BPF_K, NATIVE_ARCH, 1, 0);
	emit_return(SECCOMP_RET_KILL_PROCESS);
	emit(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr), 0, 0);
	emit(BPF_JMP | BPF_JGE | BPF_K, X32_BIT, 0, 1);
	emit_return(SECCOMP_RET_KILL_PROCESS);
	emit_tree(0, segment_count - 1);
	return 0;
}

/* A zygote's has setns, which reaches no namespace but those of its own sandboxes, and one whose forks keep calls has what they make a
 * call's place with. The calling process is about to execute something: the program is its own copy. */
int seccomp_install(const struct spec *spec)
{
	struct sock_fprog filter = {(unsigned short)length, program};

	if (options.no_seccomp)
		return 0;
	if (spec->is_zygote)
		program[enter_at].k = SECCOMP_RET_ALLOW;
	if (spec->keeps_calls) {
		program[mount_at].k = SECCOMP_RET_ALLOW;
		program[unshare_at].k &= ~(uint32_t)NAMESPACES_OF_CALLS;
	}
	return (int)syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &filter);
}
