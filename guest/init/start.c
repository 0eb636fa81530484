/* START: decode it, make the descriptors, fork. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>

#include "init.h"

/* Skip `count` strings; where the first one's length stands, or NULL when one does not decode. */
static uint8_t *skip_strings(struct reader *r, uint32_t count)
{
	uint8_t *first = (uint8_t *)(uintptr_t)r->at;

	while (count-- > 0 && !r->bad)
		get_str(r);
	return first;
}

static bool limits_are_valid(struct start *start, struct reader *r)
{
	for (uint32_t i = 0; i < start->limit_count && !r->bad; i++) {
		uint32_t resource = get_u32(r);
		uint64_t soft = get_u64(r), hard = get_u64(r);

		if (resource >= RLIM_NLIMITS || soft > hard)
			return false;
	}
	return !r->bad;
}

/* False when the body does not decode exactly. The body must stay as it is while `start` is used. */
bool start_decode(struct start *start, uint8_t *body, size_t len)
{
	struct reader r = reader_of(body, len);

	start->id = get_str(&r);
	start->kind = get_u8(&r);
	start->flags = get_u16(&r);
	start->spool_bytes = get_u32(&r);
	start->backstop_ms = get_u32(&r);
	start->rows = get_u16(&r);
	start->cols = get_u16(&r);
	start->user = get_str(&r);
	start->cwd = get_str(&r);
	start->argc = get_u32(&r);
	start->argv_at = skip_strings(&r, start->argc);
	start->envc = get_u32(&r);
	start->env_at = skip_strings(&r, start->envc);
	start->limit_count = get_u32(&r);
	start->limits_at = (uint8_t *)(uintptr_t)r.at;
	if (!limits_are_valid(start, &r))
		return false;
	start->script = get_bytes(&r);
	start->input = get_bytes(&r);
	return reader_done(&r) && start->id.len >= 1 && start->id.len <= PROCESS_ID_MAX && start->argc >= 1 &&
	       start->kind <= KIND_LAST && (start->flags & ~START_FLAGS_ALL) == 0;
}

/* A pipe whose end number `ours` does not block; -1 with errno set when there are no descriptors left even after
 * giving up old spool files. */
static int make_pipe(int fds[2], int ours)
{
	while (pipe2(fds, O_CLOEXEC) != 0)
		if ((errno != EMFILE && errno != ENFILE) || !process_evict_oldest())
			return -1;
	return fcntl(fds[ours], F_SETFL, O_NONBLOCK);
}

static int open_pty(const struct start *start)
{
	const struct winsize size = {.ws_row = start->rows, .ws_col = start->cols};
	const int flags = O_RDWR | O_NOCTTY | O_NONBLOCK | O_CLOEXEC;
	int unlock = 0, number, master = -1;

	if (settings.dev_pts >= 0)
		master = openat(settings.dev_pts, "ptmx", flags | O_NOFOLLOW);
	if (master < 0)
		master = open("/dev/ptmx", flags);
	if (master < 0)
		return -1;
	/* /dev is the guest's: what opened must answer as a pty. */
	if (ioctl(master, TIOCGPTN, &number) != 0 || ioctl(master, TIOCSPTLCK, &unlock) != 0 ||
	    ioctl(master, TIOCSWINSZ, &size) != 0) {
		close_fd(&master);
		errno = ENODEV;
	}
	return master;
}

/* The other end; by its name only where the kernel knows no better way. */
static int open_peer(int master)
{
	int fd = ioctl(master, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC);
	unsigned number;
	char name[12];

	if (fd >= 0 || !settings.is_gvisor || ioctl(master, TIOCGPTN, &number) != 0)
		return fd;
	snprintf(name, sizeof name, "%u", number);
	return openat(settings.dev_pts, name, O_RDWR | O_NOCTTY | O_CLOEXEC);
}

static int set_up_pty(struct process *process, struct launch *launch)
{
	struct stream *out = &process->out[0];
	int keyboard;

	process->out[1].eof = true;
	out->tty = true;
	out->source.fd = open_pty(launch->request);
	if (out->source.fd < 0)
		return errno;
	/* The epoll set knows one registration per descriptor: writing gets a duplicate. */
	keyboard = fcntl(out->source.fd, F_DUPFD_CLOEXEC, 3);
	if (keyboard < 0)
		return errno;
	process->input = input_new(process, keyboard, true);
	if (process->input == NULL) {
		close(keyboard);
		return ENOMEM;
	}
	launch->in = open_peer(out->source.fd);
	if (launch->in < 0)
		return errno;
	/* A program closes its streams before it exits. Nobody would hold the terminal then, which reads as its end, and
	 * the hang-up would kill the program on its way out. */
	process->input->peer = fcntl(launch->in, F_DUPFD_CLOEXEC, 3);
	return process->input->peer < 0 ? errno : 0;
}

static int set_up_pipes(struct process *process, struct launch *launch)
{
	const struct start *start = launch->request;
	int fds[2];

	if (make_pipe(fds, 0) != 0)
		return errno;
	process->out[0].source.fd = fds[0];
	launch->out = fds[1];
	if (start->flags & START_MERGE) {
		process->out[1].eof = true;
	} else {
		if (make_pipe(fds, 0) != 0)
			return errno;
		process->out[1].source.fd = fds[0];
		launch->err = fds[1];
	}
	if (start->flags & START_STDIN) {
		if (make_pipe(fds, 1) != 0)
			return errno;
		launch->in = fds[0];
		process->input = input_new(process, fds[1], false);
		if (process->input == NULL) {
			close(fds[1]);
			return ENOMEM;
		}
	}
	return 0;
}

static int check_start(const struct start *start)
{
	const struct leaf *leaf = &leaves[start->flags & START_PLATFORM ? LEAF_PLATFORM : LEAF_GUEST];

	if (!hello_seen)
		return ENOTCONN;
	if ((start->flags & START_PLATFORM) && !leaf->given)
		return ENOENT;
	if (start->kind == KIND_MACHINE && settings.upper < 0 && !settings.is_agent)
		return EOPNOTSUPP;
	if (counters.total >= PROCESSES_MAX)
		return ENOSPC;
	return counters.running >= RUNNING_MAX ? EAGAIN : 0;
}

static void watch_descriptors(struct process *process, const struct start *start)
{
	for (int i = 0; i < 2; i++)
		if (process->out[i].source.fd >= 0)
			loop_add(&process->out[i].source, EPOLLIN);
	if (process->input == NULL)
		return;
	loop_add(&process->input->source, 0);
	if (start->input.len > 0)
		input_frame(process->input, 0, 0, false, start->input, false);
}

/* Start what was asked. Returns 0 and the process, or the errno to answer with. */
int start_process(const struct start *start, const struct digest *digest, struct process **out)
{
	struct launch launch = {.request = start, .in = -1, .out = -1, .err = -1};
	struct process *process;
	pid_t pid = -1;
	int error = check_start(start);

	if (error != 0)
		return error;
	process = process_new(start, digest);
	if (process == NULL)
		return ENOMEM;
	launch.handle = process->handle;
	launch.leaf = &leaves[process->leaf];
	error = start->flags & START_PTY ? set_up_pty(process, &launch) : set_up_pipes(process, &launch);
	if (error == 0) {
		process->started_ns = now_ns();
		if (start->backstop_ms != 0)
			process->backstop_ns = process->started_ns + (uint64_t)start->backstop_ms * 1000000u;
		pid = _Fork();
		if (pid == 0)
			child_main(&launch);
		error = pid < 0 ? errno : 0;
	}
	close_fd(&launch.in);
	close_fd(&launch.out);
	close_fd(&launch.err);
	if (error != 0) {
		process_discard(process);
		return error;
	}
	watch_descriptors(process, start);
	process_started(process, pid);
	*out = process;
	return 0;
}
