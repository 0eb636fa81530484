/* The launch child: born as PID 1 of the sandbox, still host root; does all the slow work, then becomes the init.
 *
 * clone3 makes only the pid and time namespaces, which a process can't enter itself; the child makes the others, so that
 * many starts share the processors instead of waiting for the supervisor's one thread. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/sched.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>

#include "supervisor.h"

#define TIME_NAMESPACE 0x00000080 /* CLONE_NEWTIME; clone3 only */
#define LISTEN_BACKLOG 16
#define PORT_START "sys/net/ipv4/ip_unprivileged_port_start"

int init_binary_fd = -1;
static enum stage current_stage;
static int report_fd = -1;

void report_to(int fd)
{
	report_fd = fd;
}

int report_socket(void)
{
	return report_fd;
}

void enter_stage(enum stage stage)
{
	current_stage = stage;
}

int send_report(enum stage stage, int error, int passed_fd)
{
	struct launch_report report = {(int32_t)stage, error};
	struct iovec vector = {&report, sizeof(report)};
	union {
		struct cmsghdr header;
		char space[CMSG_SPACE(sizeof(int))];
	} control;
	struct msghdr message = {.msg_iov = &vector, .msg_iovlen = 1};

	if (passed_fd >= 0) {
		message.msg_control = &control;
		message.msg_controllen = sizeof(control);
		control.header = (struct cmsghdr){.cmsg_len = CMSG_LEN(sizeof(int)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
		memcpy(CMSG_DATA(&control.header), &passed_fd, sizeof(int));
	}
	return sendmsg(report_fd, &message, MSG_NOSIGNAL) == sizeof(report) ? 0 : -1;
}

/* 1: a report came; 0: the child's end is closed; -1: nothing yet (EAGAIN) or an error. */
int receive_report(int fd, struct launch_report *report, int *passed_fd)
{
	struct iovec vector = {report, sizeof(*report)};
	union {
		struct cmsghdr header;
		char space[CMSG_SPACE(sizeof(int))];
	} control;
	struct msghdr message = {.msg_iov = &vector, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control)};

	*passed_fd = -1;
	ssize_t length = recvmsg(fd, &message, MSG_CMSG_CLOEXEC);
	if (length <= 0)
		return (int)length;
	struct cmsghdr *header = CMSG_FIRSTHDR(&message);
	if (header && header->cmsg_type == SCM_RIGHTS)
		memcpy(passed_fd, CMSG_DATA(header), sizeof(int));
	return length == sizeof(*report) ? 1 : (errno = EPROTO, -1);
}

/* In a child: what can't fail without the whole failing. */
int must(int result)
{
	if (result >= 0)
		return result;
	/* A lost report is seen as an exit without one. */
	send_report(current_stage, errno, -1);
	_exit(1);
}

void make_namespaces(void)
{
	int flags = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWCGROUP;

	must(unshare(options.no_netns ? flags : flags | CLONE_NEWNET));
}

int listen_for_proxy(void)
{
	struct sockaddr_in address = {
		.sin_family = AF_INET, .sin_port = htons(PROXY_PORT), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	int fd = must(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));

	must(bind(fd, (struct sockaddr *)&address, sizeof(address)));
	must(listen(fd, 128));
	return fd;
}

/* Through a /proc of its own: in one that all share, the kernel finds the name only after those of all other network namespaces,
 * which takes 0.5 us for each. Who may not mount one goes that way. */
static int open_low_ports(void)
{
	CLEANUP_FD int proc_fd = mount_new("proc", MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC, NULL);
	int fd = proc_fd < 0 && errno == EPERM ? AT_FDCWD : proc_fd;

	return write_at(fd, fd == AT_FDCWD ? "/proc/" PORT_START : PORT_START, "0");
}

/* Loopback up, and no low ports: no guest has the capability to bind them. Returns the proxy's listener or -1. */
int make_network(const struct spec *spec)
{
	struct ifreq request = {.ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING};

	must(sethostname(spec->hostname, strlen(spec->hostname)));
	if (options.no_netns)
		return -1;
	int fd = must(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
	must(ioctl(fd, SIOCSIFFLAGS, &request));
	close(fd);
	must(open_low_ports());
	return spec->network == NETWORK_PROXY ? listen_for_proxy() : -1;
}

static int make_init_socket(void)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX, .sun_path = INIT_SOCKET};
	struct mount_attr readonly = {.attr_set = MOUNT_ATTR_RDONLY};
	int fd = must(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));

	must(bind(fd, (struct sockaddr *)&address, sizeof(address)));
	must(listen(fd, LISTEN_BACKLOG));
	/* Its name is there to stay: a guest's root may have a right to change the directory. */
	must(mount_setattr(AT_FDCWD, INIT_SOCKET_DIR, 0, &readonly, sizeof(readonly)));
	return fd;
}

/* 0-2 the sandbox's null, 3 the socket, 4 the spool. The supervisor keeps these numbers free of anything else. */
static void place_descriptors(int socket_fd, int spool_fd)
{
	int null_fd = must(open("/dev/null", O_RDWR | O_CLOEXEC));

	for (int fd = 0; fd <= 2; fd++)
		must(dup2(null_fd, fd));
	must(dup2(socket_fd, INIT_LISTEN_FD));
	must(dup2(spool_fd, INIT_SPOOL_FD));
	must(close_range(INIT_SPOOL_FD + 1, ~0U, CLOSE_RANGE_CLOEXEC));
}

void reset_signals(void)
{
	sigset_t none;

	sigemptyset(&none);
	must(signal(SIGPIPE, SIG_DFL) == SIG_ERR ? -1 : 0);
	must(sigprocmask(SIG_SETMASK, &none, NULL));
	umask(022);
}

/* The rest of the way, from root of the sandbox's user namespace. */
_Noreturn void exec_init(const struct sandbox *sandbox, int spool_fd, int proxy_fd)
{
	char root[24];
	char *const arguments[] = {"barchan-init", "--listen-fd", "3", "--spool-fd", "4", "--spool-max-bytes", INIT_SPOOL_BYTES,
				   "--root-capabilities", root, NULL};
	char *const environment[] = {NULL};

	/* Only now: the socket must lie in a mount of the last mount namespace, and belong to an id of the sandbox. */
	enter_stage(STAGE_SOCKET);
	place_descriptors(make_init_socket(), spool_fd);
	enter_stage(STAGE_PRIVILEGES);
	reset_signals();
	snprintf(root, sizeof(root), "%llu", (unsigned long long)root_capabilities(&sandbox->spec));
	must(drop_privileges(&sandbox->spec));
	enter_stage(STAGE_SECCOMP);
	must(seccomp_install(&sandbox->spec));
	/* The init accepts once it runs; the supervisor may connect and answer the node meanwhile. */
	must(send_report(STAGE_READY, 0, proxy_fd));
	enter_stage(STAGE_EXEC);
	must((int)syscall(SYS_execveat, init_binary_fd, "", arguments, environment, AT_EMPTY_PATH));
	_exit(1);
}

static _Noreturn void become_init(const struct sandbox *sandbox, int userns_fd)
{
	struct root_parts parts;
	int upper_fd = -1;

	/* Its session must not begin outside the sandbox: a memory snapshot can't take such a one. */
	must(setsid());
	enter_stage(STAGE_CGROUP);
	must(cgroup_make_guest(sandbox));
	if (options.init_in_guest_leaf)
		must(cgroup_enter_guest(sandbox));
	enter_stage(STAGE_POOL);
	must(pool_make(sandbox, &upper_fd));
	enter_stage(STAGE_SPOOL);
	int spool_fd = must(pool_make_spool(sandbox));
	enter_stage(STAGE_LAYERS);
	must(root_collect(sandbox, userns_fd, upper_fd, &parts));
	enter_stage(STAGE_NAMESPACES);
	make_namespaces();
	enter_stage(STAGE_NETWORK);
	int proxy_fd = make_network(&sandbox->spec);
	must(root_assemble(sandbox, &parts));
	enter_stage(STAGE_PRIVILEGES);
	must(leave_host(userns_fd));
	must(own_namespaces());
	if (sandbox->as_slot.is_slot)
		must(root_loosen());
	exec_init(sandbox, spool_fd, proxy_fd);
}

/* Fills pid and status_fd. */
int launch(struct sandbox *sandbox, int userns_fd, int cgroup_fd)
{
	struct clone_args arguments = {.flags = CLONE_NEWPID | CLONE_INTO_CGROUP | TIME_NAMESPACE,
				       .exit_signal = SIGCHLD,
				       .cgroup = (uint64_t)cgroup_fd};
	int pair[2];

	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) < 0)
		return -1;
	pid_t pid = (pid_t)syscall(SYS_clone3, &arguments, sizeof(arguments));
	if (pid < 0 && errno == EINVAL) {
		/* A kernel without time namespaces. */
		arguments.flags &= ~(uint64_t)TIME_NAMESPACE;
		pid = (pid_t)syscall(SYS_clone3, &arguments, sizeof(arguments));
	}
	if (pid == 0) {
		report_fd = pair[1];
		become_init(sandbox, userns_fd);
	}
	int error = errno;
	close(pair[1]);
	if (pid < 0) {
		close(pair[0]);
		return errno = error, -1;
	}
	sandbox->pid = pid;
	sandbox->status_fd = pair[0];
	return 0;
}
