/* Source that the sandbox's warm interpreter runs. This process stands for the one that runs it: it has joined the cgroups and lets the
 * other join, hands its streams over, passes on the signals it gets, and ends as the other ends. docs/formats/zygote-protocol.md has the
 * messages. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>

#include "init.h"

enum {
	SOURCE_FD = 3,
	FDS_MAX = 6,
	NAME_MAX_BYTES = 64,
	ANSWER_BYTES = 32,
	NUMBER_BYTES = 16,
	EXIT_CANNOT = 126,
	SERVER_END_MS = 2000,	/* which it has for closing all it had */
};

_Noreturn static void give_up(const char *what)
{
	dprintf(2, "barchan: the warm interpreter of this sandbox can't run this: %s: %s\n", what, strerror(errno));
	_exit(EXIT_CANNOT);
}

/* It listens in the abstract namespace, where any guest process may: only one of the same user is believed. */
static int connect_to(const char *name)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	size_t len = strlen(name);
	struct ucred peer;
	socklen_t size = sizeof peer;
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

	if (fd < 0 || len > NAME_MAX_BYTES)
		give_up("socket");
	memcpy(address.sun_path + 1, name, len);
	if (connect(fd, (struct sockaddr *)&address, (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + len)) != 0)
		give_up("connect");
	if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0 || peer.uid != geteuid()) {
		errno = EPERM;
		give_up("it belongs to another user");
	}
	return fd;
}

static void put_string(FILE *file, const char *text)
{
	fputs(text, file);
	fputc(0, file);
}

/* Directory, number of arguments, arguments, environment: each with a NUL behind it. */
static int write_request(char **argv, char **env, const char *cwd)
{
	int fd = memfd_create("request", MFD_CLOEXEC);
	FILE *file = fd < 0 ? NULL : fdopen(fcntl(fd, F_DUPFD_CLOEXEC, FDS_MAX), "w");
	uint32_t count = 0;

	if (file == NULL)
		give_up("request");
	while (argv[count] != NULL)
		count++;
	put_string(file, cwd);
	fprintf(file, "%u%c", count, 0);
	for (uint32_t i = 0; i < count; i++)
		put_string(file, argv[i]);
	for (; *env != NULL; env++)
		put_string(file, *env);
	if (fclose(file) != 0)
		give_up("request");
	return fd;
}

static void send_request(int socket_fd, const int *fds, unsigned count)
{
	struct iovec vector = {"run", 3};
	union {
		struct cmsghdr header;
		char space[CMSG_SPACE(sizeof(int) * FDS_MAX)];
	} control = {.header = {.cmsg_len = CMSG_LEN(sizeof(int) * count), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS}};
	struct msghdr message = {
		.msg_iov = &vector, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = CMSG_SPACE(sizeof(int) * count)};

	memcpy(CMSG_DATA(&control.header), fds, sizeof(int) * count);
	if (sendmsg(socket_fd, &message, MSG_NOSIGNAL) < 0)
		give_up("send");
}

/* One that was killed closes what it had piece by piece, its line to the node among the last; who is told of this end before that would ask
 * the same one again. */
static void wait_gone(int socket_fd)
{
	struct ucred peer;
	socklen_t size = sizeof peer;

	if (getsockopt(socket_fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0 || peer.pid <= 1)
		return;
	struct pollfd ended = {.fd = (int)syscall(SYS_pidfd_open, peer.pid, 0), .events = POLLIN};
	if (ended.fd >= 0)
		poll(&ended, 1, SERVER_END_MS);
}

_Noreturn static void end_as(const char *answer)
{
	const struct rlimit no_core = {0};
	sigset_t set;
	int number;

	if (sscanf(answer, "exit %d", &number) == 1)
		_exit(number & 255);
	if (sscanf(answer, "signal %d", &number) != 1) {
		errno = EPROTO;
		give_up("answer");
	}
	setrlimit(RLIMIT_CORE, &no_core);
	sigemptyset(&set);
	sigaddset(&set, number);
	sigprocmask(SIG_UNBLOCK, &set, NULL);
	kill(getpid(), number);
	_exit(128 + (number & 127));
}

static void pass_signal(int signal_fd, int socket_fd)
{
	struct signalfd_siginfo info;
	char text[ANSWER_BYTES];

	if (read(signal_fd, &info, sizeof info) != sizeof info)
		return;
	snprintf(text, sizeof text, "signal %u", info.ssi_signo);
	/* When it can't be told, its end is seen at once, too. */
	send(socket_fd, text, strlen(text), MSG_NOSIGNAL);
}

/* Who sent the message, as the kernel has it; 0 when it can't be told. */
static pid_t receive_sender(int fd, uid_t user)
{
	char text[NUMBER_BYTES];
	struct iovec vector = {text, sizeof text};
	union {
		struct cmsghdr header;
		char space[CMSG_SPACE(sizeof(struct ucred))];
	} control = {0};
	struct msghdr message = {
		.msg_iov = &vector, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
	struct ucred sender;

	if (recvmsg(fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC) <= 0)
		return 0;
	struct cmsghdr *header = CMSG_FIRSTHDR(&message);
	if (header == NULL || header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_CREDENTIALS)
		return 0;
	memcpy(&sender, CMSG_DATA(header), sizeof sender);
	return sender.uid == user ? sender.pid : 0;
}

/* The program asks to join the cgroup, and is answered once it is in. That it has not ended, and its number not become that of another
 * user's, is looked at last. */
static void let_join(int fd, int procs_fd, uid_t user)
{
	char path[32], number[NUMBER_BYTES];
	pid_t pid = receive_sender(fd, user);
	struct stat st;

	snprintf(path, sizeof path, "/proc/%d", pid);
	snprintf(number, sizeof number, "%d", pid);
	if (pid > 1 && stat(path, &st) == 0 && st.st_uid == user && write(procs_fd, number, strlen(number)) > 0)
		send(fd, "go", 2, MSG_NOSIGNAL);
}

/* One end of a pair, on which messages come with who sent them; the other one is the program's. */
static int open_join(int *theirs)
{
	int pair[2], on = 1;

	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0 ||
	    setsockopt(pair[0], SOL_SOCKET, SO_PASSCRED, &on, sizeof on) != 0)
		give_up("socket");
	*theirs = pair[1];
	return pair[0];
}

_Noreturn static void stand_in(int socket_fd, int join_fd, int procs_fd, uid_t user)
{
	struct pollfd polled[3] = {
		{.fd = socket_fd, .events = POLLIN}, {.events = POLLIN}, {.fd = join_fd, .events = POLLIN}};
	char answer[ANSWER_BYTES];
	sigset_t all;

	sigfillset(&all);
	polled[1].fd = signalfd(-1, &all, SFD_CLOEXEC);
	if (polled[1].fd < 0)
		give_up("signals");
	for (;;) {
		if (poll(polled, COUNT_OF(polled), -1) < 0) {
			if (errno != EINTR)
				give_up("poll");
			continue;
		}
		if (polled[1].revents & POLLIN)
			pass_signal(polled[1].fd, socket_fd);
		if (polled[2].revents) {
			let_join(join_fd, procs_fd, user);
			/* Once: it is in, or is told by the end that it can't be. */
			close_fd(&polled[2].fd);
			close_fd(&procs_fd);
		}
		if (!polled[0].revents)
			continue;
		ssize_t n = recv(socket_fd, answer, sizeof answer - 1, 0);
		if (n <= 0) {
			int why = n == 0 ? EPIPE : errno;
			wait_gone(socket_fd);
			errno = why;
			give_up("it has ended");
		}
		answer[n] = 0;
		end_as(answer);
	}
}

/* `procs_fd`: of the cgroup of this start, or -1. argv[0] is the interpreter's socket, the rest the program's arguments. */
_Noreturn void python_main(int procs_fd, char **argv, char **env, const char *cwd)
{
	int fds[FDS_MAX] = {0, 1, 2, SOURCE_FD};
	unsigned count = 4;
	int socket_fd, join_fd = -1;
	uid_t user = geteuid();

	/* What it has of the init's: descriptors, which others wait for the end of, and a copy of its memory. */
	unsigned kept = procs_fd < 0 ? SOURCE_FD : (unsigned)procs_fd;
	close_between(SOURCE_FD + 1, kept - 1);
	close_between(kept + 1, ~0u);
	if (prctl(PR_SET_DUMPABLE, 0) != 0)
		give_up("memory");
	socket_fd = connect_to(argv[0]);
	/* From here on nobody in the guest can signal, stop or slow it down. */
	if (seteuid(getuid()) != 0)
		give_up("user");
	fds[count++] = write_request(argv + 1, env, cwd);
	if (procs_fd >= 0)
		join_fd = open_join(&fds[count++]);
	send_request(socket_fd, fds, count);
	/* Whoever reads these is to see their end when the program has closed them. */
	close(0);
	close(1);
	for (unsigned i = SOURCE_FD; i < count; i++)
		close(fds[i]);
	stand_in(socket_fd, join_fd, procs_fd, user);
}
