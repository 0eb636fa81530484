/* One handler per request. A handler returns false when the body does not decode exactly; the connection then ends. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include "init.h"

enum { ENTROPY_MAX = 4096 };

struct leaf leaves[LEAF_COUNT] = {{.dir = -1}, {.dir = -1}};
bool hello_seen;

static void leaf_close(struct leaf *leaf)
{
	while (leaf->procs_count > 0)
		close(leaf->procs[--leaf->procs_count]);
	close_fd(&leaf->dir);
	leaf->given = false;
}

static void reply_hello(uint32_t tag)
{
	uint8_t *at = frame_begin(FRAME_REPLY | REQUEST_HELLO, tag, 16);

	if (at == NULL)
		return;
	at = put_u32(at, PROTOCOL_VERSION);
	at = put_u64(at, now_ns());
	frame_end(put_u32(at, counters.total), true);
}

static bool handle_hello(uint32_t tag, struct reader *r)
{
	uint32_t version = get_u32(r);
	uint8_t count = get_u8(r), procs[LEAF_COUNT] = {0}, has_dir[LEAF_COUNT] = {0}, which[LEAF_COUNT] = {0};
	int fds[LEAF_COUNT * (LEAF_PROCS_MAX + 1)], wanted = 0, at = 0;

	if (version != PROTOCOL_VERSION && !r->bad) {
		reply_hello(tag);	/* our version is in it: the host must not go on */
		return true;
	}
	if (count > LEAF_COUNT)
		return false;
	for (int i = 0; i < count; i++) {
		which[i] = get_u8(r);
		procs[i] = get_u8(r);
		has_dir[i] = get_u8(r);
		if (which[i] >= LEAF_COUNT || procs[i] > LEAF_PROCS_MAX || has_dir[i] > 1 || (i == 1 && which[0] == which[1]))
			return false;
		wanted += procs[i] + has_dir[i];
	}
	if (!reader_done(r) || conn_take_fds(fds, wanted) != 0)
		return false;
	for (int i = 0; i < LEAF_COUNT; i++)
		leaf_close(&leaves[i]);
	if (count == 0)
		machine_take_leaves();
	for (int i = 0; i < count; i++) {
		struct leaf *leaf = &leaves[which[i]];

		leaf->given = true;
		for (; leaf->procs_count < procs[i]; leaf->procs_count++)
			leaf->procs[leaf->procs_count] = fds[at++];
		if (has_dir[i])
			leaf->dir = fds[at++];
	}
	hello_seen = true;
	guard_memory();
	reply_hello(tag);
	return true;
}

static bool handle_ping(uint32_t tag, struct reader *r)
{
	uint8_t *at;

	if (!reader_done(r))
		return false;
	at = frame_begin(FRAME_REPLY | REQUEST_PING, tag, 28);
	if (at == NULL)
		return true;
	at = put_u64(at, now_ns());
	at = put_u32(at, counters.running);
	at = put_u32(at, counters.total);
	at = put_u64(at, spool_bytes_used());
	frame_end(put_u32(at, counters.orphans_reaped), true);
	return true;
}

static void reply_start(uint8_t type, uint32_t tag, const struct process *process, bool existing, bool urgent)
{
	uint8_t *at = frame_begin(FRAME_REPLY | type, tag, 9);

	if (at == NULL)
		return;
	at = put_u32(at, process->handle);
	at = put_u32(at, (uint32_t)process->pid);
	frame_end(put_u8(at, existing), urgent);
}

static bool handle_start(uint32_t tag, uint8_t *body, size_t len)
{
	const uint64_t from_start[2] = {0, 0};
	struct start start;
	struct digest digest;
	struct process *process;
	bool existing, follow;
	int error;

	if (!start_decode(&start, body, len))
		return false;
	follow = start.flags & START_FOLLOW;
	digest = siphash128(settings.key, body, len);
	process = process_by_id(start.id);
	existing = process != NULL;
	if (existing) {
		if (process->digest.low != digest.low || process->digest.high != digest.high) {
			reply_error(tag, EEXIST);
			return true;
		}
	} else {
		error = start_process(&start, &digest, &process);
		if (error != 0) {
			reply_error(tag, error);
			return true;
		}
	}
	reply_start(REQUEST_START, tag, process, existing, existing || !follow);
	if (follow)
		process_follow(process, from_start);
	return true;
}

static bool handle_follow(uint32_t tag, struct reader *r)
{
	struct process *process = process_by_handle(get_u32(r));
	uint64_t offsets[2];
	uint8_t *at;

	offsets[0] = get_u64(r);
	offsets[1] = get_u64(r);
	if (!reader_done(r))
		return false;
	if (process == NULL) {
		reply_error(tag, ENOENT);
		return true;
	}
	at = frame_begin(FRAME_REPLY | REQUEST_FOLLOW, tag, 33);
	if (at == NULL)
		return true;
	for (int i = 0; i < 2; i++) {
		at = put_u64(at, process->out[i].spool.tail);
		at = put_u64(at, process->out[i].spool.head);
	}
	frame_end(put_u8(at, process->exited), true);
	process_follow(process, offsets);
	return true;
}

static bool handle_ack(uint32_t tag, struct reader *r)
{
	struct process *process = process_by_handle(get_u32(r));
	uint8_t stream = get_u8(r);
	uint64_t offset = get_u64(r);

	if (!reader_done(r))
		return false;
	if (process == NULL || stream < STREAM_STDOUT || stream > STREAM_STDERR)
		reply_error(tag, ENOENT);
	else
		stream_ack(&process->out[stream - 1], offset);
	return true;
}

static bool handle_stdin(uint32_t tag, struct reader *r)
{
	struct process *process = process_by_handle(get_u32(r));
	uint64_t offset = get_u64(r);
	uint8_t eof = get_u8(r);
	struct span data = get_bytes(r);
	int error;

	if (!reader_done(r) || eof > 1 || data.len > STDIN_DATA_MAX)
		return false;
	if (process == NULL)
		error = ENOENT;
	else if (process->input == NULL)
		error = EPIPE;
	else
		error = input_frame(process->input, tag, offset, eof, data, true);
	if (error != 0)
		reply_error(tag, error);
	return true;
}

void reply_empty(uint8_t type, uint32_t tag)
{
	uint8_t *at = frame_begin(FRAME_REPLY | type, tag, 0);

	if (at != NULL)
		frame_end(at, true);
}

static bool handle_signal(uint32_t tag, struct reader *r)
{
	struct process *process = process_by_handle(get_u32(r));
	uint32_t signo = get_u32(r);
	uint8_t scope = get_u8(r), *at;

	if (!reader_done(r))
		return false;
	if (process == NULL || signo > 64 || scope > SCOPE_OTHERS) {
		reply_error(tag, process == NULL ? ENOENT : EINVAL);
		return true;
	}
	at = frame_begin(FRAME_REPLY | REQUEST_SIGNAL, tag, 4);
	if (at != NULL)
		frame_end(put_u32(at, signal_scope(process, (int)signo, scope)), true);
	return true;
}

/* gVisor tells nobody that a terminal has another size. */
static void reply_resized(uint32_t tag, const struct process *process)
{
	pid_t group = 0;

	if (settings.is_gvisor) {
		if (ioctl(process->out[0].source.fd, TIOCGPGRP, &group) != 0 || group <= 0)
			group = process->pid;
		kill(-group, SIGWINCH);
	}
	reply_empty(REQUEST_RESIZE, tag);
}

static bool handle_resize(uint32_t tag, struct reader *r)
{
	struct process *process = process_by_handle(get_u32(r));
	struct winsize size = {.ws_row = get_u16(r), .ws_col = get_u16(r)};

	if (!reader_done(r))
		return false;
	if (process == NULL)
		reply_error(tag, ENOENT);
	else if (!process->out[0].tty || process->out[0].source.fd < 0)
		reply_error(tag, ENOTTY);
	else if (ioctl(process->out[0].source.fd, TIOCSWINSZ, &size) != 0)
		reply_error(tag, errno);
	else
		reply_resized(tag, process);
	return true;
}

static bool handle_lookup(uint32_t tag, struct reader *r)
{
	struct span id = get_str(r);
	struct process *process;

	if (!reader_done(r))
		return false;
	process = process_by_id(id);
	if (process == NULL)
		reply_error(tag, ENOENT);
	else
		reply_start(REQUEST_LOOKUP, tag, process, true, true);
	return true;
}

static bool handle_list(uint32_t tag, struct reader *r)
{
	uint32_t first = get_u32(r), last;
	uint8_t *at;

	if (!reader_done(r))
		return false;
	if (first == 0)
		first = 1;
	last = first > counters.total ? first - 1 : (uint32_t)min_u64(counters.total, (uint64_t)first + LIST_MAX - 1);
	at = frame_begin(FRAME_REPLY | REQUEST_LIST, tag, 4 + LIST_MAX * (17 + PROCESS_ID_MAX));
	if (at == NULL)
		return true;
	at = put_u32(at, last - first + 1);
	for (uint32_t handle = first; handle <= last; handle++) {
		const struct process *process = process_by_handle(handle);

		at = put_u32(at, handle);
		at = put_bytes(at, process->id, (uint32_t)strlen(process->id));
		at = put_u32(at, (uint32_t)process->pid);
		at = put_u8(at, process->exited);
		at = put_u32(at, (uint32_t)process->wstatus);
	}
	frame_end(at, true);
	return true;
}

/* The guest may have put anything at /dev/urandom: only the device itself is written to. */
static int reseed(struct span entropy)
{
	CLEANUP_FD int fd = open("/dev/urandom", O_WRONLY | O_NONBLOCK | O_NOCTTY | O_NOFOLLOW | O_CLOEXEC);
	struct stat st;
	ssize_t n;

	if (entropy.len > ENTROPY_MAX)
		return EINVAL;
	if (settings.is_agent || settings.cgroup >= 0)
		return machine_reseed(entropy);
	if (fd < 0)
		return errno;
	if (fstat(fd, &st) != 0 || !S_ISCHR(st.st_mode) || st.st_rdev != makedev(1, 9))
		return ENODEV;
	n = write(fd, entropy.data, entropy.len);
	if (n < 0)
		return errno;
	return (uint32_t)n == entropy.len ? 0 : EIO;
}

static bool handle_reseed(uint32_t tag, struct reader *r)
{
	struct span entropy = get_bytes(r);
	int error;

	if (!reader_done(r))
		return false;
	error = reseed(entropy);
	if (error != 0)
		reply_error(tag, error);
	else
		reply_empty(REQUEST_RESEED, tag);
	return true;
}

static bool handle_setclock(uint32_t tag, struct reader *r)
{
	int64_t ns = (int64_t)get_u64(r);
	struct timespec ts = {.tv_sec = ns / 1000000000, .tv_nsec = ns % 1000000000};

	if (!reader_done(r))
		return false;
	if (clock_settime(CLOCK_REALTIME, &ts) != 0)
		reply_error(tag, errno);
	else
		reply_empty(REQUEST_SETCLOCK, tag);
	return true;
}

static bool handle_thaw(uint32_t tag, struct reader *r)
{
	uint64_t frozen_ns = get_u64(r);

	if (!reader_done(r))
		return false;
	machine_thaw();
	process_thaw(frozen_ns);
	reply_empty(REQUEST_THAW, tag);
	return true;
}

static bool handle_hold(uint32_t tag, struct reader *r)
{
	if (!reader_done(r))
		return false;
	process_hold();
	if (!machine_freeze(tag))
		reply_empty(REQUEST_HOLD, tag);
	return true;
}

static bool handle_counters(uint32_t tag, struct reader *r)
{
	struct machine_counters found;
	uint8_t *at;
	int error;

	if (!reader_done(r))
		return false;
	error = machine_count(&found);
	if (error != 0) {
		reply_error(tag, error);
		return true;
	}
	at = frame_begin(FRAME_REPLY | REQUEST_COUNTERS, tag, 40);
	if (at == NULL)
		return true;
	at = put_u64(at, found.oom_kills);
	at = put_u64(at, found.memory_bytes);
	at = put_u64(at, found.memory_peak_bytes);
	at = put_u64(at, found.cpu_us);
	frame_end(put_u64(at, found.pids), true);
	return true;
}

static bool handle_configure(uint32_t tag, struct reader *r)
{
	struct span hostname = get_str(r);
	uint64_t memory_bytes = get_u64(r), pids = get_u64(r);
	int error;

	if (!reader_done(r))
		return false;
	error = machine_configure(hostname, memory_bytes, pids);
	if (error != 0)
		reply_error(tag, error);
	else
		reply_empty(REQUEST_CONFIGURE, tag);
	return true;
}

static bool handle_detach(uint32_t tag, struct reader *r)
{
	if (!reader_done(r))
		return false;
	for (int i = 0; i < LEAF_COUNT; i++)
		leaf_close(&leaves[i]);
	hello_seen = false;
	/* CRIU looks at our namespaces from inside our user namespace, which it may only while we can be dumped. */
	prctl(PR_SET_DUMPABLE, 1);
	reply_empty(REQUEST_DETACH, tag);
	conn_close_after_flush();
	return true;
}

bool request_handle(uint8_t type, uint32_t tag, uint8_t *body, size_t len)
{
	static bool (*const handlers[])(uint32_t, struct reader *) = {
		[REQUEST_HELLO] = handle_hello,   [REQUEST_PING] = handle_ping,         [REQUEST_FOLLOW] = handle_follow,
		[REQUEST_ACK] = handle_ack,       [REQUEST_STDIN] = handle_stdin,       [REQUEST_SIGNAL] = handle_signal,
		[REQUEST_RESIZE] = handle_resize, [REQUEST_LOOKUP] = handle_lookup,     [REQUEST_LIST] = handle_list,
		[REQUEST_RESEED] = handle_reseed, [REQUEST_SETCLOCK] = handle_setclock, [REQUEST_THAW] = handle_thaw,
		[REQUEST_DETACH] = handle_detach, [REQUEST_HOLD] = handle_hold,         [REQUEST_COUNTERS] = handle_counters,
		[REQUEST_CONFIGURE] = handle_configure,
	};
	struct reader r = reader_of(body, len);

	return type == REQUEST_START ? handle_start(tag, body, len) : handlers[type](tag, &r);
}
