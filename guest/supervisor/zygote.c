/* Sandboxes of a zygote: a warm interpreter, itself in a sandbox, whose forks move into theirs by setns().
 *
 * A process may enter namespaces whose user namespace is a child of its own and belongs to its user; it needs no capability
 * for that. So a zygote's user namespace maps the ids of all slots beside its own, the user namespace of each of its sandboxes
 * is made inside, owned by the zygote's root, and all their other namespaces are made by a process that lives in that one.
 * Such a process can't mount what a root is made of: a helper that stays host root does, in the mount namespace that both share. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/sched.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>

#include "../criu/restore.h"
#include "supervisor.h"

#define TIME_NAMESPACE 0x00000080
#define ZYGOTE_SOCKET "barchan-zygote" /* abstract, in the zygote's network namespace */
#define SENT_FDS_MAX 16u
#define INSIDE_WAIT_S 10 /* for what the zygote could stop, as it could anything in its pid namespace */

/* In the order in which a fork enters them: the user namespace gives it the right to enter the others. */
static const char *const entered[] = {"user", "pid", "net", "uts", "cgroup", "time", "ipc", "mnt"};

bool zygote_is_possible(void)
{
	return !options.no_userns && !options.no_pidns && !options.no_netns && !options.no_exec_cgroup;
}

static int open_namespace(pid_t pid, const char *name)
{
	char path[64];

	snprintf(path, sizeof(path), "/proc/%d/ns/%s", pid, name);
	return open(path, O_RDONLY | O_CLOEXEC);
}

/* Whether its user namespace fits no other sandbox. */
bool zygote_has_userns(const struct sandbox *sandbox)
{
	return sandbox->spec.is_zygote || sandbox->spec.zygote[0];
}

/* The user namespace of a zygote, or of a sandbox of one: never used again, and the caller's. */
int zygote_userns(const struct sandbox *sandbox)
{
	if (sandbox->spec.is_zygote)
		return userns_make_wide(sandbox->slot);
	const struct sandbox *zygote = sandbox_by_id(sandbox->spec.zygote);
	CLEANUP_FD int outer_fd = zygote ? open_namespace(zygote->pid, "user") : (errno = ESRCH, -1);
	return outer_fd < 0 ? -1 : userns_make_inside(sandbox->slot, outer_fd);
}

/* --- messages, with up to one descriptor -------------------------------------------------------------------------- */

static int send_fds(int socket_fd, const void *data, size_t size, const int *fds, unsigned count)
{
	struct iovec vector = {(void *)data, size};
	union {
		struct cmsghdr header;
		char space[CMSG_SPACE(sizeof(int) * SENT_FDS_MAX)];
	} control;
	struct msghdr message = {
		.msg_iov = &vector, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = CMSG_SPACE(sizeof(int) * count)};

	memset(&control, 0, sizeof(control));
	control.header = (struct cmsghdr){.cmsg_len = CMSG_LEN(sizeof(int) * count), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
	memcpy(CMSG_DATA(&control.header), fds, sizeof(int) * count);
	return sendmsg(socket_fd, &message, MSG_NOSIGNAL) == (ssize_t)size ? 0 : -1;
}

/* Waits; EPIPE when the other side is gone, EAGAIN when the socket's patience is over. */
static int receive_fd(int socket_fd)
{
	char byte;
	struct iovec vector = {&byte, 1};
	union {
		struct cmsghdr header;
		char space[CMSG_SPACE(sizeof(int))];
	} control;
	struct msghdr message = {.msg_iov = &vector, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control)};
	int fd = -1;
	ssize_t length = recvmsg(socket_fd, &message, MSG_CMSG_CLOEXEC);
	struct cmsghdr *header = length < 1 ? NULL : CMSG_FIRSTHDR(&message);

	if (header && header->cmsg_type == SCM_RIGHTS)
		memcpy(&fd, CMSG_DATA(header), sizeof(int));
	return fd < 0 && length >= 0 ? (errno = EPIPE, -1) : fd;
}

/* --- launch ------------------------------------------------------------------------------------------------------- */

struct places {
	int userns_fd, pidns_fd, cgroup_fd;
	int report_fd;	/* to the supervisor's loop, which never waits: the zygote may stop what is in its pid namespace */
	int meeting[2]; /* between the helper, 0, and the init to be, 1 */
};

/* The helper: host root, and in the mount namespace of the init to be. */
static _Noreturn void put_together(const struct sandbox *sandbox, const struct places *places)
{
	struct root_parts parts;
	struct timeval patience = {.tv_sec = INSIDE_WAIT_S};
	int upper_fd = -1, status;

	close(places->meeting[1]);
	enter_stage(STAGE_NAMESPACES);
	must(setsockopt(places->meeting[0], SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience)));
	enter_stage(STAGE_CGROUP);
	must(cgroup_make_guest(sandbox));
	enter_stage(STAGE_POOL);
	must(pool_make(sandbox, &upper_fd));
	enter_stage(STAGE_SPOOL);
	int spool_fd = must(pool_make_spool(sandbox));
	enter_stage(STAGE_LAYERS);
	must(root_collect(sandbox, places->userns_fd, upper_fd, &parts));
	enter_stage(STAGE_NAMESPACES);
	int pidns_fd = receive_fd(places->meeting[0]);
	if (pidns_fd < 0 && errno == EPIPE)
		_exit(1); /* it has said why */
	must(pidns_fd);
	must(setns(pidns_fd, CLONE_NEWPID));
	/* /proc shows the pid namespace of whoever mounts it. */
	pid_t mounter = must(fork());
	if (mounter == 0) {
		must(root_assemble(sandbox, &parts));
		_exit(0);
	}
	if (waitpid(mounter, &status, 0) != mounter || status != 0)
		_exit(1);
	must(send_fds(places->meeting[0], "g", 1, &spool_fd, 1));
	/* Its end is closed when it executes the init, or dies. */
	if (receive_fd(places->meeting[0]) < 0 && errno != EPIPE)
		must(-1);
	_exit(0);
}

/* Process 1 of the sandbox: root of its user namespace, and nothing outside. */
static _Noreturn void become_inner_init(const struct sandbox *sandbox, const struct places *places)
{
	char pid[16] = "";

	close(places->meeting[0]);
	enter_stage(STAGE_NAMESPACES);
	/* /proc is still the host's, and names this process as the supervisor knows it. */
	must((int)readlink("/proc/self", pid, sizeof(pid) - 1));
	must(send_report((enum stage)RESTORE_DONE, atoi(pid), -1));
	must(setsid());
	must(unshare(CLONE_NEWUTS | CLONE_NEWCGROUP | CLONE_NEWNET));
	enter_stage(STAGE_NETWORK);
	int proxy_fd = make_network(&sandbox->spec);
	int pidns_fd = must(open("/proc/self/ns/pid", O_RDONLY | O_CLOEXEC));
	must(send_fds(places->meeting[1], "p", 1, &pidns_fd, 1));
	int spool_fd = receive_fd(places->meeting[1]);
	if (spool_fd < 0)
		_exit(1); /* the helper has said why */
	enter_stage(STAGE_PRIVILEGES);
	must(own_namespaces());
	exec_init(sandbox, spool_fd, proxy_fd);
}

/* In the zygote's pid namespace, where the one of the sandbox is made. */
static _Noreturn void make_inner_init(const struct sandbox *sandbox, const struct places *places)
{
	struct clone_args arguments = {.flags = CLONE_NEWPID | CLONE_PARENT | TIME_NAMESPACE};

	if (must((int)syscall(SYS_clone3, &arguments, sizeof(arguments))) == 0)
		become_inner_init(sandbox, places);
	_exit(0);
}

/* Each step leaves something that the next one needs behind: the helper stays root of the host, the maker leaves it. */
static _Noreturn void split(const struct sandbox *sandbox, const struct places *places)
{
	struct clone_args arguments = {.flags = CLONE_PARENT};

	report_to(places->report_fd);
	enter_stage(STAGE_CLONE);
	must(unshare(CLONE_NEWNS));
	pid_t helper = must(fork());
	if (helper == 0)
		put_together(sandbox, places);
	must(send_report((enum stage)REPORT_HELPER, helper, -1));
	/* Nobody in the zygote's pid namespace may look into what is a copy of the supervisor. */
	must(prctl(PR_SET_DUMPABLE, 0));
	must(setns(places->pidns_fd, CLONE_NEWPID));
	must(leave_host(places->userns_fd));
	pid_t maker = must((int)syscall(SYS_clone3, &arguments, sizeof(arguments)));
	if (maker == 0)
		make_inner_init(sandbox, places);
	must(send_report((enum stage)REPORT_HELPER, maker, -1));
	_exit(0);
}

static void close_pair(int pair[2])
{
	close_fd(&pair[0]);
	close_fd(&pair[1]);
}

/* Fills status_fd; the pid is reported there. The main loop reaps the processes in between. */
int launch_inside(struct sandbox *sandbox, int userns_fd, int cgroup_fd)
{
	struct clone_args arguments = {.flags = CLONE_INTO_CGROUP, .exit_signal = SIGCHLD, .cgroup = (uint64_t)cgroup_fd};
	struct places places = {.userns_fd = userns_fd, .meeting = {-1, -1}};
	const struct sandbox *zygote = sandbox_by_id(sandbox->spec.zygote);
	CLEANUP_FD int pidns_fd = zygote ? open_namespace(zygote->pid, "pid") : (errno = ESRCH, -1);
	int pair[2];

	if (pidns_fd < 0 || socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) < 0)
		return -1;
	places.pidns_fd = pidns_fd;
	places.report_fd = pair[1];
	pid_t pid = socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, places.meeting) < 0
			    ? -1
			    : (pid_t)syscall(SYS_clone3, &arguments, sizeof(arguments));
	if (pid == 0)
		split(sandbox, &places);
	int error = errno;
	close_pair(places.meeting), close_fd(&pair[1]);
	if (pid < 0) {
		close_fd(&pair[0]);
		return errno = error, -1;
	}
	child_helps(pid);
	sandbox->status_fd = pair[0];
	return 0;
}

/* Whether the process that has reported to be the init of one inside is there, dead or alive: its number is not another's then. */
bool zygote_child_exists(pid_t pid)
{
	siginfo_t info;

	return waitid(P_PID, (id_t)pid, &info, WEXITED | WNOHANG | WNOWAIT) == 0;
}

static bool is_member(int dir_fd, const char *path, long pid)
{
	char text[4096], *line, *rest = text;

	if (read_at(dir_fd, path, text, sizeof(text)) <= 0)
		return false;
	while ((line = strsep(&rest, "\n")))
		if (atol(line) == pid)
			return true;
	return false;
}

/* Looked for again once it can't be mistaken: by then the number could have become another's. */
static void end_members(int dir_fd, const char *path)
{
	char text[4096], *line, *rest = text;

	if (read_at(dir_fd, path, text, sizeof(text)) <= 0)
		return;
	while ((line = strsep(&rest, "\n"))) {
		CLEANUP_FD int pid_fd = atol(line) > 0 ? (int)syscall(SYS_pidfd_open, (pid_t)atol(line), 0) : -1;
		if (pid_fd >= 0 && is_member(dir_fd, path, atol(line)) && syscall(SYS_pidfd_send_signal, pid_fd, SIGKILL, NULL, 0) < 0 &&
		    errno != ESRCH)
			log_line("killing process %ld: %s", atol(line), strerror(errno));
	}
}

/* Of a sandbox inside a zygote's that is to go: forks that have joined its cgroups and not its pid namespace, where the end of its
 * init would be theirs. Part of those listed at a time; the removal is tried again. */
void zygote_end_strays(const struct sandbox *sandbox)
{
	char path[ID_MAX + 16];

	snprintf(path, sizeof(path), "%s/cgroup.procs", sandbox->id);
	for (int i = 0; i < UNIFIED; i++)
		if (cgroup_base(i) >= 0)
			end_members(cgroup_base(i), path);
	if (cgroup_kill(sandbox->id) < 0)
		log_line("%s: kill: %s", sandbox->id, strerror(errno));
}

/* --- enter -------------------------------------------------------------------------------------------------------- */

/* A socket of the zygote's network namespace, connected to the zygote. Never blocks. */
static int connect_to_zygote(const struct sandbox *zygote)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	socklen_t size = offsetof(struct sockaddr_un, sun_path) + 1 + strlen(ZYGOTE_SOCKET);
	CLEANUP_FD int own_fd = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
	CLEANUP_FD int their_fd = own_fd < 0 ? -1 : open_namespace(zygote->pid, "net");

	if (their_fd < 0 || setns(their_fd, CLONE_NEWNET) < 0)
		return -1;
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), error = errno;
	if (setns(own_fd, CLONE_NEWNET) < 0) {
		log_line("returning to the own network namespace: %s", strerror(errno));
		abort();
	}
	memcpy(address.sun_path + 1, ZYGOTE_SOCKET, strlen(ZYGOTE_SOCKET));
	if (fd >= 0 && connect(fd, (struct sockaddr *)&address, size) < 0) {
		error = errno;
		close_fd(&fd);
	}
	errno = error;
	return fd;
}

/* All that a fork needs to become a process of the sandbox's guest. Opened here, so that writing to the cgroups' files is
 * judged by the supervisor's rights. Returns how many, or -1 with those opened so far in `fds`. */
static int open_for_entering(const struct sandbox *sandbox, int *fds, unsigned *count)
{
	struct leaf_fds leaf;

	for (size_t i = 0; i < COUNT(entered); i++) {
		int fd = open_namespace(sandbox->pid, entered[i]);
		if (fd < 0)
			return -1;
		fds[(*count)++] = fd;
	}
	if (cgroup_open_leaf(sandbox, LEAF_GUEST, &leaf) < 0)
		return -1;
	for (unsigned i = 0; i < leaf.procs_count; i++)
		fds[(*count)++] = leaf.fds[i];
	CLEANUP_FD int dir_fd = leaf.fds[leaf.procs_count];
	int procs_fd = openat(dir_fd, "cgroup.procs", O_WRONLY | O_CLOEXEC);
	if (procs_fd < 0)
		return -1;
	fds[(*count)++] = procs_fd;
	return 0;
}

/* Ask the sandbox's zygote for a fork of it in the sandbox. `text` and `line_fd` are between the node and the fork. */
int zygote_enter(const struct sandbox *sandbox, const char *text, int line_fd)
{
	const struct sandbox *zygote = sandbox->spec.zygote[0] ? sandbox_by_id(sandbox->spec.zygote) : NULL;
	int fds[SENT_FDS_MAX] = {line_fd}, result = -1;
	unsigned count = 1;

	if (!zygote || zygote->state != SANDBOX_RUNNING)
		return errno = ESRCH, -1;
	CLEANUP_FD int socket_fd = connect_to_zygote(zygote);
	if (socket_fd >= 0 && open_for_entering(sandbox, fds, &count) == 0)
		result = send_fds(socket_fd, text, strlen(text), fds, count);
	int error = errno;
	for (unsigned i = 1; i < count; i++)
		close(fds[i]);
	return errno = error, result;
}
