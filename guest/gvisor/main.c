/* barchan-gvisor: runs one gVisor guest in a container that exists for it (docs/decisions/0018-gvisor.md).
 *
 *     barchan-gvisor DIR UID RUNSC [GLOBAL_FLAG...] -- [BOOT_FLAG...]
 *
 * It starts runsc's two inner programs itself, with the descriptors that runsc would give them: the gofer, which opens files, as who
 * calls this, and the sentry, which is the guest's kernel, as UID with no capability. No namespaces are made: the container has
 * them. The container's specification is read from descriptor 3. Nothing runs in the guest until somebody asks for it over the
 * sentry's control socket.
 *
 * DIR is made. `door` in it answers who comes from outside the container and sends one of these letters, once a line `ready` was written:
 * `g` and `c` give a descriptor: the other end of the guest's standard input, which is one for all, or a new connection to
 * the sentry's control server. `p` stops every program of the guest, its init, too, and `r` lets them go on; repeating either is harmless, and
 * the answer is a byte, 0 when it is done. What is not done in time is done later, unless another wish has come by then. When one of the two programs ends, so does the other, and this: as the sentry did, or with 70. */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>

#include "../common/util.h"

enum {
	SPEC_FD = 3,
	FIRST_GIVEN_FD = 3,
	FDS_MAX = 16,
	ARGUMENTS_MAX = 96,
	MOUNTS = 3,		/* that the gofer serves: the root, the directory of this program, and TMP */
	DOOR_BACKLOG = 16,
	ASK_WAIT_MS = 500,	/* who comes says at once what it wants */
	SENTRY_WAIT_S = 10,
	ANSWER_BYTES_MAX = 4096,
	EXIT_BROKEN = 70,
	CLOSE_RANGE_CLOEXEC_FLAG = 4,
};

struct program {
	char *argv[ARGUMENTS_MAX];
	unsigned argc;
	int fds[FDS_MAX];	/* become FIRST_GIVEN_FD and up */
	unsigned fd_count;
	uid_t uid;
};

#define TMP "/tmp" /* where the sentry would otherwise mount a file system in memory, if it is empty */

#define FIRST_VICTIM "1000"

static const char confs[] = "--gofer-mount-confs=lisafs:none,lisafs:none,lisafs:none";
static int door_fd, guest_fd;
static struct sockaddr_un control_address = {.sun_family = AF_UNIX};

_Noreturn static void die(const char *what)
{
	dprintf(2, "barchan-gvisor: %s: %s\n", what, strerror(errno));
	exit(EXIT_BROKEN);
}

static int must(int result, const char *what)
{
	if (result < 0)
		die(what);
	return result;
}

static void add(struct program *program, const char *text)
{
	if (program->argc == ARGUMENTS_MAX - 1) {
		errno = E2BIG;
		die("arguments");
	}
	program->argv[program->argc++] = (char *)(uintptr_t)text;
}

/* The descriptor under its number in the program; a flag names it, unless `flag` is NULL. */
static void give(struct program *program, const char *flag, int fd)
{
	char *text;

	if (flag != NULL) {
		must(asprintf(&text, "--%s=%u", flag, FIRST_GIVEN_FD + program->fd_count), "memory");
		add(program, text);
	}
	program->fds[program->fd_count++] = fd;
}

/* Each reader has a position of its own. */
static int open_spec(void)
{
	return must(open("/proc/self/fd/3", O_RDONLY | O_CLOEXEC), "the specification");
}

static int listen_at(const char *dir, const char *name, struct sockaddr_un *address)
{
	int fd = must(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0), "socket");

	if (snprintf(address->sun_path, sizeof address->sun_path, "%s/%s", dir, name) >= (int)sizeof address->sun_path) {
		errno = ENAMETOOLONG;
		die(dir);
	}
	must(bind(fd, (struct sockaddr *)address, sizeof *address), address->sun_path);
	must(listen(fd, DOOR_BACKLOG), "listen");
	return fd;
}

/* Clear of the numbers that they are to have in the end, then there. */
static void place_descriptors(struct program *program)
{
	int null = must(open("/dev/null", O_RDWR | O_CLOEXEC), "/dev/null");

	for (unsigned i = 0; i < program->fd_count; i++)
		program->fds[i] = must(fcntl(program->fds[i], F_DUPFD_CLOEXEC, FIRST_GIVEN_FD + FDS_MAX), "descriptors");
	must(dup2(null, 0), "descriptors");
	must(dup2(2, 1), "descriptors");
	for (unsigned i = 0; i < program->fd_count; i++)
		must(dup2(program->fds[i], FIRST_GIVEN_FD + (int)i), "descriptors");
	must((int)syscall(SYS_close_range, FIRST_GIVEN_FD + program->fd_count, ~0u, CLOSE_RANGE_CLOEXEC_FLAG), "descriptors");
}

static pid_t start(struct program *program, const char *path)
{
	pid_t parent = getpid(), pid = must(fork(), "fork");
	sigset_t none;

	if (pid != 0)
		return pid;
	/* The sentry's user may not enter its directory. */
	int file = must(fcntl(must(open(path, O_PATH | O_CLOEXEC), path), F_DUPFD_CLOEXEC, FIRST_GIVEN_FD + 2 * FDS_MAX), "descriptors");
	place_descriptors(program);
	setsid();
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
	if (program->uid != 0 && (setresgid(program->uid, program->uid, program->uid) != 0 || setresuid(program->uid, program->uid, program->uid) != 0))
		die("user of the sentry");
	/* A change of user clears it, so it comes last. */
	if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0 || getppid() != parent)
		_exit(EXIT_BROKEN);
	program->argv[program->argc] = NULL;
	syscall(SYS_execveat, file, "", program->argv, environ, AT_EMPTY_PATH);
	die(path);
}

static void begin(struct program *program, const char *name, int flag_count, char **flags)
{
	add(program, name);
	for (int i = 0; i < flag_count; i++)
		add(program, flags[i]);
}

static pid_t start_gofer(const char *path, int flag_count, char **flags, const int io[MOUNTS][2])
{
	struct program gofer = {.uid = 0};

	begin(&gofer, "runsc-gofer", flag_count, flags);
	add(&gofer, "gofer");
	add(&gofer, "--bundle=/");
	add(&gofer, "--setup-root=false");
	add(&gofer, "--apply-caps=false");
	add(&gofer, confs);
	give(&gofer, "spec-fd", open_spec());
	give(&gofer, "mounts-fd", must(open("/dev/null", O_WRONLY | O_CLOEXEC), "/dev/null"));
	for (int i = 0; i < MOUNTS; i++)
		give(&gofer, "io-fds", io[i][0]);
	return start(&gofer, path);
}

static pid_t start_sentry(const char *path, int flag_count, char **flags, char **boot_flags, uid_t uid, const int io[MOUNTS][2], int control, int ready, int guest)
{
	struct program sentry = {.uid = uid};
	int null = must(open("/dev/null", O_RDWR | O_CLOEXEC), "/dev/null");

	begin(&sentry, "runsc-sandbox", flag_count, flags);
	add(&sentry, "boot");
	add(&sentry, "--bundle=/");
	add(&sentry, confs);
	for (; *boot_flags != NULL; boot_flags++)
		add(&sentry, *boot_flags);
	give(&sentry, "spec-fd", open_spec());
	give(&sentry, "controller-fd", control);
	give(&sentry, "start-sync-fd", ready);
	for (int i = 0; i < MOUNTS; i++)
		give(&sentry, "io-fds", io[i][1]);
	give(&sentry, "stdio-fds", guest);
	give(&sentry, "stdio-fds", null);
	give(&sentry, "stdio-fds", null);
	add(&sentry, "guest");
	return start(&sentry, path);
}

static void send_descriptor(int to, int fd)
{
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(sizeof(int))];
	} control = {.align = {.cmsg_len = CMSG_LEN(sizeof(int)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS}};
	char byte = 0;
	struct iovec iov = {&byte, 1};
	struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};

	memcpy(CMSG_DATA(&control.align), &fd, sizeof fd);
	sendmsg(to, &msg, MSG_NOSIGNAL | MSG_DONTWAIT);	/* who went away needs nothing */
}

static int connect_control(void)
{
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

	if (fd >= 0 && connect(fd, (struct sockaddr *)&control_address, sizeof control_address) != 0)
		close_fd(&fd);
	return fd;
}

static void send_control(int to)
{
	CLEANUP_FD int fd = connect_control();

	if (fd >= 0)
		send_descriptor(to, fd);
}

/* A call of the sentry's control server that has no answer yet, unless `fd` is -1. It may be carried out long after we gave it up, so no
 * other is made before. */
static struct {
	int fd;
	bool stop;
	size_t have;
	char answer[ANSWER_BYTES_MAX];
} asked = {.fd = -1};

static bool is_stopped, shall_stop;	/* as the sentry has answered, and as was wished last */

static bool ask_sentry(bool stop)
{
	char text[128];
	int len = snprintf(text, sizeof text, "{\"method\":\"containerManager.%s\",\"arg\":null}", stop ? "Pause" : "Resume");

	asked.fd = connect_control();
	asked.stop = stop;
	asked.have = 0;
	if (asked.fd >= 0 && send(asked.fd, text, (size_t)len, MSG_NOSIGNAL) == len)
		return true;
	close_fd(&asked.fd);
	return false;
}

/* Take what has come of the answer, a JSON object. */
static void hear_sentry(void)
{
	ssize_t n = recv(asked.fd, asked.answer + asked.have, sizeof asked.answer - 1 - asked.have, MSG_DONTWAIT);

	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return;
	if (n > 0) {
		asked.have += (size_t)n;
		asked.answer[asked.have] = 0;
		if (strchr(asked.answer, '}') == NULL && asked.have < sizeof asked.answer - 1)
			return;
		if (strstr(asked.answer, "\"success\":true") != NULL)
			is_stopped = asked.stop;
	}
	close_fd(&asked.fd);
}

/* Whether what was wished last is so, after at most that time. The sentry counts how often it was told to stop, and does not bear to be told
 * to go on once more often. */
static bool come_to_wish(uint64_t within_ns)
{
	uint64_t until = now_ns() + within_ns;
	bool was_asked = false;

	for (;;) {
		struct pollfd answering = {.fd = asked.fd, .events = POLLIN};
		uint64_t now = now_ns();

		if (asked.fd < 0 && (is_stopped == shall_stop || was_asked))
			return is_stopped == shall_stop;
		if (asked.fd < 0) {
			was_asked = true;
			if (!ask_sentry(shall_stop))
				return false;
			continue;
		}
		if (poll(&answering, 1, until > now ? (int)((until - now) / 1000000 + 1) : 0) == 0)
			return false;
		was_asked |= asked.stop == shall_stop;	/* a refusal is its answer */
		hear_sentry();
	}
}

static void set_stopped(int to, bool stop)
{
	char failed;

	shall_stop = stop;
	failed = !come_to_wish(UINT64_C(1000000000) * SENTRY_WAIT_S);
	send(to, &failed, 1, MSG_NOSIGNAL | MSG_DONTWAIT);
}

/* Only a process outside this pid namespace: it has no pid here. */
static bool is_outsider(int fd)
{
	struct ucred peer;
	socklen_t len = sizeof peer;

	return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &len) == 0 && peer.pid == 0;
}

static void open_door(void)
{
	CLEANUP_FD int fd = accept4(door_fd, NULL, NULL, SOCK_CLOEXEC);
	struct pollfd asking = {.fd = fd, .events = POLLIN};
	char wish = 0;

	if (fd < 0 || !is_outsider(fd) || poll(&asking, 1, ASK_WAIT_MS) <= 0 || recv(fd, &wish, 1, MSG_DONTWAIT) != 1)
		return;
	if (wish == 'g')
		send_descriptor(fd, guest_fd);
	else if (wish == 'c')
		send_control(fd);
	else if (wish == 'p' || wish == 'r')
		set_stopped(fd, wish == 'p');
}

/* The exit code when one of the two has ended; -1: neither has. */
static int reap(pid_t sentry, pid_t gofer)
{
	int wstatus;
	pid_t pid;

	while ((pid = waitpid(-1, &wstatus, WNOHANG)) > 0) {
		const char *who = pid == sentry ? "the sentry" : "the gofer";

		if (pid != sentry && pid != gofer)
			continue;
		if (WIFSIGNALED(wstatus))
			dprintf(2, "barchan-gvisor: %s was ended by signal %d\n", who, WTERMSIG(wstatus));
		else
			dprintf(2, "barchan-gvisor: %s ended with exit code %d\n", who, WEXITSTATUS(wstatus));
		if (pid == gofer)
			return EXIT_BROKEN;
		return WIFSIGNALED(wstatus) ? 128 + WTERMSIG(wstatus) : WEXITSTATUS(wstatus);
	}
	return -1;
}

static int serve(pid_t sentry, pid_t gofer, int signal_fd)
{
	for (;;) {
		struct pollfd wanted[] = {{.fd = signal_fd, .events = POLLIN}, {.fd = door_fd, .events = POLLIN}, {.fd = asked.fd, .events = POLLIN}};
		struct signalfd_siginfo info;

		if (poll(wanted, COUNT_OF(wanted), -1) < 0 && errno != EINTR)
			die("poll");
		if (wanted[2].revents)
			come_to_wish(0);
		if (wanted[1].revents)
			open_door();
		if (wanted[0].revents && read(signal_fd, &info, sizeof info) > 0) {
			int code = reap(sentry, gofer);

			if (code >= 0) {
				kill(sentry, SIGKILL);
				kill(gofer, SIGKILL);
				return code;
			}
		}
	}
}

/* What the host knows of the guest's programs are processes that descend from those that the sentry has begun with. If the host has to
 * kill for want of memory, it shall take the largest of these, not the sentry, at whose end they all end. */
static void spare_sentry(pid_t sentry)
{
	DIR *all = opendir("/proc");
	struct dirent *entry;

	while (all != NULL && (entry = readdir(all)) != NULL) {
		char path[300], text[512], *name_end;
		int pid = atoi(entry->d_name), parent = 0;
		ssize_t n = -1;

		snprintf(path, sizeof path, "/proc/%d/stat", pid);
		CLEANUP_FD int stat_fd = pid > 0 ? open(path, O_RDONLY | O_CLOEXEC) : -1;
		if (stat_fd >= 0)
			n = read(stat_fd, text, sizeof text - 1);
		text[n > 0 ? n : 0] = 0;
		name_end = strrchr(text, ')');
		if (name_end == NULL || sscanf(name_end + 1, " %*c %d", &parent) != 1 || parent != sentry)
			continue;
		snprintf(path, sizeof path, "/proc/%d/oom_score_adj", pid);
		CLEANUP_FD int adj_fd = open(path, O_WRONLY | O_CLOEXEC);
		if (adj_fd < 0 || write(adj_fd, FIRST_VICTIM, strlen(FIRST_VICTIM)) < 0)
			dprintf(2, "barchan-gvisor: %s: %s\n", path, strerror(errno));
	}
	if (all != NULL)
		closedir(all);
}

static void wait_for(int ready)
{
	char byte;

	if (read(ready, &byte, 1) != 1) {
		dprintf(2, "barchan-gvisor: the sentry did not start\n");
		exit(EXIT_BROKEN);
	}
	close(ready);
}

int main(int argc, char **argv)
{
	int io[MOUNTS][2], guest[2], ready[2], split = 4, control, signal_fd;
	pid_t gofer, sentry;
	sigset_t child;

	while (split < argc && strcmp(argv[split], "--") != 0)
		split++;
	if (argc < 4 || split >= argc) {
		dprintf(2, "usage: barchan-gvisor DIR UID RUNSC [GLOBAL_FLAG...] -- [BOOT_FLAG...]\n");
		return 2;
	}
	sigemptyset(&child);
	sigaddset(&child, SIGCHLD);
	sigprocmask(SIG_BLOCK, &child, NULL);
	signal_fd = must(signalfd(-1, &child, SFD_CLOEXEC), "signalfd");
	umask(077);
	must(mkdir(argv[1], 0700), argv[1]);
	control = listen_at(argv[1], "control", &control_address);
	for (int i = 0; i < MOUNTS; i++)
		must(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, io[i]), "socketpair");
	must(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, guest), "socketpair");
	must(pipe2(ready, O_CLOEXEC), "pipe");
	if (mkdir(TMP, 0) == 0)
		must(chmod(TMP, 01777), TMP);
	umask(022);
	gofer = start_gofer(argv[3], split - 4, argv + 4, (const int(*)[2])io);
	sentry = start_sentry(argv[3], split - 4, argv + 4, argv + split + 1, (uid_t)atoi(argv[2]), (const int(*)[2])io, control, ready[1], guest[0]);
	guest_fd = guest[1];
	close(SPEC_FD), close(control), close(guest[0]), close(ready[1]);
	for (int i = 0; i < MOUNTS; i++)
		close(io[i][0]), close(io[i][1]);
	wait_for(ready[0]);
	spare_sentry(sentry);
	door_fd = listen_at(argv[1], "door", &(struct sockaddr_un){.sun_family = AF_UNIX});
	must((int)write(1, "ready\n", 6), "ready");
	return serve(sentry, gofer, signal_fd);
}
