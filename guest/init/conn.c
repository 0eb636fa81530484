/* The host's connection: at most one, replaced by a newer one. Bytes become frames here, and frames bytes.
 * Output is gathered and written once per round of the loop. Over a line (line.c) there are frames between a greeting and the next. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include "init.h"

enum {
	RX_BYTES = 64 << 10,		/* a larger frame gets memory of its own while it is read */
	TX_BYTES = 768 << 10,
	REPLY_ROOM = 192 << 10,		/* free before a request is looked at: the largest reply (LIST) is smaller */
	OUTPUT_ROOM = 256 << 10,	/* kept free of output, for replies */
	CONN_FDS_MAX = LEAF_COUNT * (LEAF_PROCS_MAX + 1),
	LAZY_ROUNDS_MAX = 8,
	LAZY_WAIT_MS = 2,		/* a short command ends sooner */
};

static struct {
	struct source source, listener;
	uint8_t rx[RX_BYTES];
	size_t rx_start, rx_end;
	uint8_t *big;			/* one frame, header included */
	size_t big_len, big_have;
	uint8_t tx[TX_BYTES];
	size_t tx_start, tx_end;
	bool urgent, blocked, closing;
	int lazy_rounds;
	int fds[CONN_FDS_MAX];
	int fd_count;
} conn;

static void drop_fds(void)
{
	while (conn.fd_count > 0)
		close(conn.fds[--conn.fd_count]);
}

/* A line stays: whatever comes over it is passed over until the next greeting. */
static void conn_close(void)
{
	if (line.is_used)
		line.is_greeted = false;
	else
		loop_close(&conn.source);
	free(conn.big);
	conn.big = NULL;
	conn.rx_start = conn.rx_end = conn.tx_start = conn.tx_end = 0;
	conn.urgent = conn.blocked = conn.closing = false;
	conn.lazy_rounds = 0;
	drop_fds();
	process_unfollow_all();
	machine_forget_reply();
}

void conn_open(int listen_fd)
{
	conn.source = (struct source){.fd = -1, .kind = SOURCE_CONN};
	conn.listener = (struct source){.fd = listen_fd, .kind = SOURCE_LISTEN};
	loop_add(&conn.listener, EPOLLIN);
}

int conn_open_line(int fd)
{
	line.is_used = line.is_up = true;
	conn.source = (struct source){.fd = fd, .kind = SOURCE_CONN};
	return loop_add(&conn.source, EPOLLIN);
}

/* gVisor forgets, when it comes back from a memory snapshot, what of the host was waited for: its host then wakes us by a signal. */
void conn_wait_again(void)
{
	uint32_t events = conn.source.events;

	if (!conn.source.added || !settings.is_gvisor)
		return;
	loop_remove(&conn.source);
	loop_add(&conn.source, events);
}

bool conn_is_open(void)
{
	return conn.source.fd >= 0 && (!line.is_used || line.is_greeted);
}

/* Only a process outside this pid namespace may speak to us: it has no pid here. */
static bool peer_is_host(int fd)
{
	struct ucred peer;
	socklen_t len = sizeof peer;

	return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &len) == 0 && len == sizeof peer && peer.pid == 0;
}

void conn_accept(void)
{
	int fd;

	while ((fd = accept4(conn.listener.fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0) {
		if (!peer_is_host(fd)) {
			close(fd);
			continue;
		}
		if (conn_is_open())
			conn_close();
		conn.source.fd = fd;
		if (loop_add(&conn.source, EPOLLIN) != 0)
			conn_close();
	}
}

static size_t tx_pending(void)
{
	return conn.tx_end - conn.tx_start;
}

static bool can_take_request(void)
{
	return !conn.closing && TX_BYTES - tx_pending() >= REPLY_ROOM;
}

/* Begin a frame of at most `body_len_max` bytes: where its body goes, or NULL when there is no connection or no room.
 * Nothing is sent unless frame_end follows before the next frame_begin. */
uint8_t *frame_begin(uint8_t type, uint32_t tag, size_t body_len_max)
{
	uint8_t *at;

	if (!conn_is_open() || TX_BYTES - tx_pending() < FRAME_HEADER_BYTES + body_len_max)
		return NULL;
	if (TX_BYTES - conn.tx_end < FRAME_HEADER_BYTES + body_len_max) {
		memmove(conn.tx, conn.tx + conn.tx_start, tx_pending());
		conn.tx_end = tx_pending();
		conn.tx_start = 0;
	}
	at = put_u32(conn.tx + conn.tx_end, 0);
	at = put_u32(at, type);
	return put_u32(at, tag);
}

/* `urgent`: send in this round. Others may wait a moment for company: a short command's STARTED, END and EXIT then
 * travel, and wake the host, together. */
void frame_end(const uint8_t *end, bool urgent)
{
	uint8_t *start = conn.tx + conn.tx_end;

	put_u32(start, (uint32_t)(end - start) - FRAME_HEADER_BYTES);
	conn.tx_end = (size_t)(end - conn.tx);
	conn.urgent |= urgent;
}

void reply_error(uint32_t tag, int error)
{
	const char *message = strerror(error);
	uint32_t len = (uint32_t)strlen(message);
	uint8_t *at = frame_begin(FRAME_ERROR, tag, 8 + len);

	if (at == NULL)
		return;
	at = put_u32(at, (uint32_t)error);
	frame_end(put_bytes(at, message, len), true);
}

bool conn_has_output_room(size_t body_len)
{
	return tx_pending() + FRAME_HEADER_BYTES + body_len <= TX_BYTES - OUTPUT_ROOM;
}

void conn_close_after_flush(void)
{
	conn.closing = true;
	conn.urgent = true;
}

static bool keep_fds(struct msghdr *msg)
{
	for (struct cmsghdr *c = CMSG_FIRSTHDR(msg); c != NULL; c = CMSG_NXTHDR(msg, c)) {
		size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);

		if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
			continue;
		for (size_t i = 0; i < count; i++) {
			int fd;

			memcpy(&fd, CMSG_DATA(c) + i * sizeof fd, sizeof fd);
			if (conn.fd_count < CONN_FDS_MAX)
				conn.fds[conn.fd_count++] = fd;
			else {
				close(fd);
				msg->msg_flags |= MSG_CTRUNC;
			}
		}
	}
	return !(msg->msg_flags & MSG_CTRUNC);
}

/* The descriptors that came so far; -1 unless there are exactly `count`. The caller owns them. */
int conn_take_fds(int *fds, int count)
{
	if (conn.fd_count != count)
		return -1;
	memcpy(fds, conn.fds, (size_t)count * sizeof *fds);
	conn.fd_count = 0;
	return 0;
}

static void receive(void)
{
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(32 * sizeof(int))];
	} control;
	struct iovec iov;
	struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
	ssize_t n;

	if (conn.big != NULL)
		iov = (struct iovec){conn.big + conn.big_have, conn.big_len - conn.big_have};
	else
		iov = (struct iovec){conn.rx + conn.rx_end, RX_BYTES - conn.rx_end};
	if (iov.iov_len == 0)
		return;	/* what is there waits for room to answer it */
	n = recvmsg(conn.source.fd, &msg, MSG_CMSG_CLOEXEC);
	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return;
	if (n <= 0 || !keep_fds(&msg))
		conn_close();
	else if (conn.big != NULL)
		conn.big_have += (size_t)n;
	else
		conn.rx_end += (size_t)n;
}

/* Header at `at`: the length of the whole frame, or 0 when it breaks the protocol. */
static size_t frame_len(const uint8_t *at)
{
	uint32_t len = load_u32(at);

	if (len > FRAME_TO_INIT_MAX || at[4] == 0 || at[4] > REQUEST_LAST || at[5] || at[6] || at[7])
		return 0;
	return FRAME_HEADER_BYTES + (size_t)len;
}

static bool handle(uint8_t *frame, size_t len)
{
	return request_handle(frame[4], load_u32(frame + 8), frame + FRAME_HEADER_BYTES, len - FRAME_HEADER_BYTES);
}

static bool begin_big(size_t len)
{
	conn.big = malloc(len);
	if (conn.big == NULL)
		return false;
	conn.big_len = len;
	conn.big_have = conn.rx_end - conn.rx_start;
	memcpy(conn.big, conn.rx + conn.rx_start, conn.big_have);
	conn.rx_start = conn.rx_end = 0;
	return true;
}

/* Handle one complete frame. 1: did; 0: none is complete; -1: the peer broke the protocol. */
static int dispatch_one(void)
{
	uint8_t *frame = conn.rx + conn.rx_start;
	size_t have = conn.rx_end - conn.rx_start, len;

	if (conn.big != NULL) {
		bool ok;

		if (conn.big_have < conn.big_len)
			return 0;
		ok = handle(conn.big, conn.big_len);
		free(conn.big);
		conn.big = NULL;
		return ok ? 1 : -1;
	}
	len = have >= FRAME_HEADER_BYTES ? frame_len(frame) : FRAME_HEADER_BYTES;
	if (len == 0)
		return -1;
	if (len > RX_BYTES)
		return begin_big(len) ? 0 : -1;
	if (have >= FRAME_HEADER_BYTES && have >= len) {
		conn.rx_start += len;
		return handle(frame, len) ? 1 : -1;
	}
	if (conn.rx_start > 0) {
		memmove(conn.rx, frame, have);
		conn.rx_start = 0;
		conn.rx_end = have;
	}
	return 0;
}

void conn_dispatch(void)
{
	int did = 1;

	while (did == 1 && conn_is_open() && can_take_request())
		did = dispatch_one();
	if (did < 0)
		conn_close();
}

/* Whether a request may lie in the buffer that had to wait for room. */
bool conn_has_work(void)
{
	size_t have = conn.rx_end - conn.rx_start;

	if (!conn_is_open() || !can_take_request())
		return false;
	if (conn.big != NULL)
		return conn.big_have == conn.big_len;
	return have >= FRAME_HEADER_BYTES && have >= frame_len(conn.rx + conn.rx_start);
}

static void want_events(void)
{
	/* A line without a host says so all the time: only what changes counts then. That a host has come is seen when it sends, or, where its
	 * call was faster than the news of it, when it can be answered. */
	if (line.is_used && !line.is_up)
		loop_set(&conn.source, EPOLLIN | EPOLLET | (conn.blocked ? EPOLLOUT : 0u));
	else if (conn.source.fd >= 0)
		loop_set(&conn.source, (can_take_request() ? EPOLLIN : 0u) | (conn.blocked ? EPOLLOUT : 0u));
}

static void conn_begin_anew(const uint8_t *data, size_t len);

/* The words of greetings among what came; behind the last one begin frames. */
static void listen_for_greeting(void)
{
	enum line_word word = LINE_CALL;
	size_t end;

	while (word == LINE_CALL) {
		conn.rx_start += line_scan(conn.rx + conn.rx_start, conn.rx_end - conn.rx_start, &word);
		if (word != LINE_CALL)
			continue;
		/* What an earlier answer has left half sent is passed over, as all else before this one. */
		conn.tx_start = 0;
		conn.tx_end = line_answer(conn.tx);
		conn.urgent = true;
	}
	memmove(conn.rx, conn.rx + conn.rx_start, conn.rx_end - conn.rx_start);
	conn.rx_end -= conn.rx_start;
	conn.rx_start = 0;
	line.is_greeted = word == LINE_CONFIRM;
	if (line.is_greeted)
		conn.tx_start = conn.tx_end = 0;
	end = line.is_greeted ? line_secret_end(conn.rx, conn.rx_end) : 0;
	if (end > 0)	/* a host that said all at once and went, and the next one's call */
		conn_begin_anew(conn.rx + end, conn.rx_end - end);
}

/* Somebody breaks into the connection, with these bytes. What of them finds no room is heard when the host calls again. */
static void conn_begin_anew(const uint8_t *data, size_t len)
{
	size_t kept = min_u64(len, RX_BYTES);

	memmove(conn.rx, data, kept);	/* they may lie there, or in what is freed next */
	conn_close();
	conn.rx_end = kept;
	listen_for_greeting();
}

/* An answer to a call may be that of the next host, and waits for it. */
static void line_is_down(void)
{
	line.is_up = false;
	if (line.is_greeted)
		conn_close();
}

static void receive_from_line(void)
{
	uint8_t *to = conn.big != NULL ? conn.big + conn.big_have : conn.rx + conn.rx_end;
	size_t room = conn.big != NULL ? conn.big_len - conn.big_have : RX_BYTES - conn.rx_end, end;
	ssize_t n = room > 0 ? read(conn.source.fd, to, room) : -1;

	if (n < 0)
		return;	/* nothing there, or no room; a line that broke says so by its events */
	if (n == 0) {
		line_is_down();
		return;
	}
	if (conn.big != NULL)
		conn.big_have += (size_t)n;
	else
		conn.rx_end += (size_t)n;
	if (!line.is_greeted) {
		listen_for_greeting();
		return;
	}
	end = line_secret_end(to, (size_t)n);
	if (end > 0)
		conn_begin_anew(to + end, (size_t)n - end);
}

static void line_event(uint32_t events)
{
	line.is_up = true;
	if (events & (EPOLLHUP | EPOLLERR))
		line_is_down();
	if (events & EPOLLIN)
		receive_from_line();
	conn_dispatch();
}

void conn_event(uint32_t events)
{
	if (events & EPOLLOUT)
		conn.blocked = false;
	if (line.is_used) {
		line_event(events);
		return;
	}
	if (events & EPOLLERR) {
		conn_close();
		return;
	}
	if ((events & (EPOLLIN | EPOLLHUP)) && can_take_request()) {
		receive();
		conn_dispatch();
	} else if (events & EPOLLHUP) {
		conn_close();
	}
}

static void send_pending(void)
{
	while (tx_pending() > 0) {
		const uint8_t *from = conn.tx + conn.tx_start;
		ssize_t n = line.is_used ? write(conn.source.fd, from, tx_pending()) : send(conn.source.fd, from, tx_pending(), MSG_NOSIGNAL);
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0 && errno == EAGAIN) {
			conn.blocked = true;
			return;
		}
		if (n < 0) {
			conn_close();
			return;
		}
		conn.tx_start += (size_t)n;
	}
	conn.tx_start = conn.tx_end = 0;
	conn.urgent = false;
	if (conn.closing)
		conn_close();
}

/* `idle`: nothing happened for a while, so whatever waits for company goes now. */
void conn_flush(bool idle)
{
	if (conn.source.fd < 0)
		return;
	if (tx_pending() > 0 && !conn.blocked && (conn.urgent || idle || ++conn.lazy_rounds > LAZY_ROUNDS_MAX)) {
		conn.lazy_rounds = 0;
		send_pending();
	}
	want_events();
}

/* How long the loop may sleep before conn_flush(true) is due. */
int conn_wait_ms(void)
{
	return conn.source.fd >= 0 && tx_pending() > 0 && !conn.blocked ? LAZY_WAIT_MS : -1;
}
