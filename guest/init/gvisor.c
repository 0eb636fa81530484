/* What is different where the kernel is gVisor's: started as root, since a change of user by the starter would take the capabilities
 * along (it knows no ambient ones), with extended attributes that it can't tell of every file, and control groups of its own. */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include "init.h"

#define GROUPS "/sys/fs/cgroup"
#define GROUP GROUPS "/pids/programs"

/* Of links, and of files that the caller may not read, it answers with errors that programs like ls take for a failure. So there are none. */
static int refuse_attributes(void)
{
	static const uint32_t calls[] = {SYS_getxattr,	SYS_lgetxattr,	SYS_fgetxattr,	SYS_setxattr,	 SYS_lsetxattr,	   SYS_fsetxattr,
					 SYS_listxattr, SYS_llistxattr, SYS_flistxattr, SYS_removexattr, SYS_lremovexattr, SYS_fremovexattr};
	struct sock_filter program[2 * COUNT_OF(calls) + 2];
	unsigned short length = 0;

	program[length++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
	for (size_t i = 0; i < COUNT_OF(calls); i++) {
		program[length++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, calls[i], 0, 1);
		program[length++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EOPNOTSUPP);
	}
	program[length++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0)
		return -1;
	return (int)syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &(struct sock_fprog){length, program});
}

/* A control group for the guest's programs, of the only kind that this kernel enforces. Nobody but us may enter the directory of groups. */
static int make_group(uid_t uid)
{
	if (chmod(GROUPS, 0700) != 0 || chown(GROUPS, uid, uid) != 0)
		return -1;
	return chown(GROUPS "/pids", uid, uid);
}

/* Here every guest process may open what another one has as its descriptors, if it may the file; these are the host's, for whoever tells why
 * a guest did not start. */
int gvisor_let_go_of_host(void)
{
	for (int fd = 1; fd <= 2; fd++)
		if (dup2(settings.dev_null, fd) < 0)
			return -1;
	return 0;
}

/* What a program joins the group by; -1 with errno. */
int gvisor_open_group(void)
{
	return open(GROUP "/cgroup.procs", O_WRONLY | O_CLOEXEC);
}

/* Processes beside the init, and beside this user's. */
static uint64_t processes_but(uid_t uid)
{
	int fd = openat(settings.proc, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	DIR *all = fd >= 0 ? fdopendir(fd) : NULL;
	const struct dirent *entry;
	struct stat st;
	uint64_t count = 0;

	if (all == NULL) {
		close_fd(&fd);
		return UINT64_MAX;	/* it can't be told that there are none */
	}
	while ((entry = readdir(all)) != NULL)
		if (entry->d_name[0] >= '1' && entry->d_name[0] <= '9' && fstatat(fd, entry->d_name, &st, 0) == 0)
			count += st.st_uid != uid;
	closedir(all);
	return count > 0 ? count - 1 : UINT64_MAX;
}

/* The group's own count falls short after some were killed. */
uint64_t gvisor_processes(void)
{
	return processes_but((uid_t)-1);
}

/* For the same reason a program that is about to become this user is kept, by its user's limit, to what the others' have left of the
 * guest's by now. The caller is not of this user yet. */
int gvisor_leave_others(uid_t uid)
{
	uint64_t others = processes_but(uid);
	struct rlimit limit;

	if (others == UINT64_MAX || getrlimit(RLIMIT_NPROC, &limit) != 0)
		return -1;
	others -= others > 0;	/* the caller */
	if (limit.rlim_max == RLIM_INFINITY)
		return 0;
	limit.rlim_max = limit.rlim_max > others ? limit.rlim_max - (rlim_t)others : 0;
	limit.rlim_cur = (rlim_t)min_u64(limit.rlim_cur, limit.rlim_max);
	return setrlimit(RLIMIT_NPROC, &limit);
}

int gvisor_limit_pids(const char *text)
{
	CLEANUP_FD int fd = open(GROUP "/pids.max", O_WRONLY | O_CLOEXEC);

	return fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text) ? 0 : errno;
}

/* Its starter gives a guest's first program an environment, which everybody in the guest may read. */
static void empty_environment(char **argv)
{
	static char *const none[] = {NULL};

	if (environ[0] != NULL)
		execve(argv[0], argv, none);
}

/* Become this user with the capabilities that root was given. 0, or -1 with errno. */
int gvisor_become(uid_t uid, char **argv)
{
	struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
	struct __user_cap_data_struct data[2];

	empty_environment(argv);
	if (make_group(uid) != 0)
		return -1;
	if (prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0) != 0 || setresgid(uid, uid, uid) != 0 || setresuid(uid, uid, uid) != 0)
		return -1;
	if (prctl(PR_SET_KEEPCAPS, 0, 0, 0, 0) != 0 || syscall(SYS_capget, &header, data) != 0)
		return -1;
	for (int i = 0; i < 2; i++)
		data[i].effective = data[i].permitted;
	if (syscall(SYS_capset, &header, data) != 0)
		return -1;
	settings.is_gvisor = true;
	if (mkdir(GROUP, 0700) != 0)
		return -1;
	return refuse_attributes();
}
