/* The node's side of the supervisor: one listening SOCK_SEQPACKET socket, one live connection, packets out of and into it.
 *
 * Replies that don't fit the socket wait in a queue; while one waits no request is read, so the queue is bounded by the requests
 * already taken. What was meant for a connection that is gone is dropped: the next node asks with `list`. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <libgen.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include "supervisor.h"

#define SEND_BUFFER_BYTES (1 << 20)

struct queued {
	struct queued *next;
	int fds[REPLY_FDS_MAX];
	unsigned fd_count;
	size_t length;
	char text[];
};

static void handle_listener(struct watch *watch, uint32_t events);
static void handle_connection(struct watch *watch, uint32_t events);

bool node_said_hello;
static struct watch listener = {handle_listener}, connection = {handle_connection};
static int listener_fd = -1, connection_fd = -1, socket_dir_fd = -1;
static char socket_name[NAME_MAX + 1];
static uint64_t connection_number; /* of the live connection, or of the last one */
static int64_t absent_since_ns;
static struct queued *queue_head, **queue_tail = &queue_head;

/* --- connection --------------------------------------------------------------------------------------------------- */

bool node_is_connected(void)
{
	return connection_fd >= 0;
}

bool node_was_ever_connected(void)
{
	return connection_number > 0;
}

int64_t node_absent_since_ns(void)
{
	return absent_since_ns;
}

struct waiter node_waiter(uint64_t tag)
{
	return (struct waiter){.tag = tag, .connection = connection_number};
}

static void free_queued(struct queued *queued)
{
	for (unsigned i = 0; i < queued->fd_count; i++)
		close(queued->fds[i]);
	free(queued);
}

static void drop_connection(void)
{
	if (connection_fd < 0)
		return;
	watch_close(&connection_fd);
	node_said_hello = false;
	absent_since_ns = monotonic_ns();
	while (queue_head) {
		struct queued *queued = queue_head;
		queue_head = queued->next;
		free_queued(queued);
	}
	queue_tail = &queue_head;
}

static void handle_listener(struct watch *watch, uint32_t events)
{
	struct ucred peer;
	socklen_t size = sizeof(peer);
	int send_buffer = SEND_BUFFER_BYTES, fd = accept4(listener_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);

	(void)watch, (void)events;
	if (fd < 0)
		return;
	if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) < 0 || peer.uid != geteuid() ||
	    setsockopt(fd, SOL_SOCKET, SO_SNDBUFFORCE, &send_buffer, sizeof(send_buffer)) < 0) {
		log_line("refused a connection");
		close(fd);
		return;
	}
	drop_connection();
	if (watch_add(&connection, fd, EPOLLIN) < 0) {
		log_line("watching a connection: %s", strerror(errno));
		close(fd);
		return;
	}
	connection_fd = fd;
	connection_number++;
}

/* The path may be longer than an address holds: bind through its directory. */
static int bind_socket(void)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	char directory[PATH_MAX], base[PATH_MAX];

	snprintf(directory, sizeof(directory), "%s", options.socket);
	snprintf(base, sizeof(base), "%s", options.socket);
	snprintf(socket_name, sizeof(socket_name), "%s", basename(base));
	socket_dir_fd = open(dirname(directory), O_PATH | O_DIRECTORY | O_CLOEXEC);
	if (socket_dir_fd < 0)
		return -1;
	int length = snprintf(address.sun_path, sizeof(address.sun_path), "/proc/self/fd/%d/%s", socket_dir_fd, socket_name);
	if (length < 0 || (size_t)length >= sizeof(address.sun_path))
		return errno = ENAMETOOLONG, -1;
	if (unlinkat(socket_dir_fd, socket_name, 0) < 0 && errno != ENOENT)
		return -1;
	mode_t before = umask(0177);
	int result = bind(listener_fd, (struct sockaddr *)&address, sizeof(address));
	umask(before);
	return result;
}

int node_listen(void)
{
	absent_since_ns = monotonic_ns();
	listener_fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (listener_fd < 0 || bind_socket() < 0 || listen(listener_fd, 16) < 0)
		return -1;
	return watch_add(&listener, listener_fd, EPOLLIN);
}

void node_close(void)
{
	drop_connection();
	if (listener_fd >= 0 && unlinkat(socket_dir_fd, socket_name, 0) < 0 && errno != ENOENT)
		log_line("removing the socket: %s", strerror(errno));
	watch_close(&listener_fd);
}

/* --- out ---------------------------------------------------------------------------------------------------------- */

static ssize_t send_packet(const char *text, size_t length, const int *fds, unsigned fd_count)
{
	struct iovec vector = {(void *)text, length};
	union {
		struct cmsghdr header;
		char space[CMSG_SPACE(sizeof(int) * REPLY_FDS_MAX)];
	} control;
	struct msghdr message = {.msg_iov = &vector, .msg_iovlen = 1};

	if (fd_count > 0) {
		message.msg_control = &control;
		message.msg_controllen = CMSG_SPACE(sizeof(int) * fd_count);
		control.header = (struct cmsghdr){.cmsg_len = CMSG_LEN(sizeof(int) * fd_count), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
		memcpy(CMSG_DATA(&control.header), fds, sizeof(int) * fd_count);
	}
	return sendmsg(connection_fd, &message, MSG_NOSIGNAL);
}

static void flush_queue(void)
{
	while (queue_head) {
		struct queued *queued = queue_head;
		if (send_packet(queued->text, queued->length, queued->fds, queued->fd_count) < 0) {
			if (errno != EAGAIN)
				drop_connection();
			return;
		}
		queue_head = queued->next;
		if (!queue_head)
			queue_tail = &queue_head;
		free_queued(queued);
	}
	if (watch_change(&connection, connection_fd, EPOLLIN) < 0)
		drop_connection();
}

/* Takes over the descriptors. */
static void enqueue(const struct reply *reply)
{
	struct queued *queued = malloc(sizeof(*queued) + reply->length);

	if (!queued || watch_change(&connection, connection_fd, EPOLLOUT) < 0) {
		free(queued);
		for (unsigned i = 0; i < reply->fd_count; i++)
			close(reply->fds[i]);
		drop_connection();
		return;
	}
	queued->next = NULL;
	queued->length = reply->length;
	queued->fd_count = reply->fd_count;
	memcpy(queued->fds, reply->fds, sizeof(queued->fds));
	memcpy(queued->text, reply->text, reply->length);
	*queue_tail = queued;
	queue_tail = &queued->next;
}

/* Sends or queues, and closes the descriptors in any case. */
static void send_reply(struct reply *reply)
{
	if (!queue_head) {
		ssize_t sent = send_packet(reply->text, reply->length, reply->fds, reply->fd_count);
		if (sent >= 0 || errno != EAGAIN) {
			for (unsigned i = 0; i < reply->fd_count; i++)
				close(reply->fds[i]);
			if (sent < 0)
				drop_connection();
			return;
		}
	}
	enqueue(reply);
}

/* There is one reply at a time: it is started, filled and sent before another is. */
struct reply *reply_start(const char *kind)
{
	static struct reply reply;

	reply.length = 0;
	reply.fd_count = 0;
	reply_add(&reply, "%s", kind);
	return &reply;
}

void reply_add(struct reply *reply, const char *format, ...)
{
	va_list arguments;
	size_t space = sizeof(reply->text) - reply->length;

	va_start(arguments, format);
	int written = vsnprintf(reply->text + reply->length, space, format, arguments);
	va_end(arguments);
	/* Every caller bounds what it adds. */
	if (written < 0 || (size_t)written >= space)
		abort();
	reply->length += (size_t)written + 1;
}

void reply_add_fd(struct reply *reply, int fd)
{
	reply->fds[reply->fd_count++] = fd;
}

void reply_send(struct reply *reply, const struct waiter *waiter)
{
	if (node_is_connected() && waiter->connection == connection_number) {
		send_reply(reply);
		return;
	}
	for (unsigned i = 0; i < reply->fd_count; i++)
		close(reply->fds[i]);
}

void reply_error(const struct waiter *waiter, const char *stage, int error, const char *message)
{
	struct reply *reply = reply_start("error");

	reply_add(reply, "tag=%llu", (unsigned long long)waiter->tag);
	reply_add(reply, "stage=%s", stage);
	reply_add(reply, "errno=%d", error);
	reply_add(reply, "message=%.400s", message ? message : strerror(error));
	reply_send(reply, waiter);
}

void event_exit(const struct sandbox *sandbox)
{
	struct reply *reply;

	if (!node_is_connected() || !node_said_hello)
		return;
	reply = reply_start("exit");
	reply_add(reply, "id=%s", sandbox->id);
	reply_add(reply, "wstatus=%d", sandbox->wstatus);
	reply_add(reply, "oom_kills=%llu", (unsigned long long)sandbox->counters.oom_kills);
	send_reply(reply);
}

/* A slot can be claimed, or can't any more. */
void event_slot(const struct sandbox *sandbox, bool ready)
{
	if (!node_is_connected() || !node_said_hello)
		return;
	struct reply *reply = reply_start("slot");
	reply_add(reply, "id=%s", sandbox->id);
	reply_add(reply, "ready=%d", ready);
	send_reply(reply);
}

/* --- in ----------------------------------------------------------------------------------------------------------- */

/* A packet, and the descriptor that came with it or -1; what recv returns. */
static ssize_t receive_packet(char *packet, size_t size, int *passed_fd)
{
	struct iovec vector = {packet, size};
	union {
		struct cmsghdr header;
		char space[CMSG_SPACE(sizeof(int))];
	} control;
	struct msghdr message = {.msg_iov = &vector, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = CMSG_LEN(sizeof(int))};
	ssize_t length = recvmsg(connection_fd, &message, MSG_TRUNC | MSG_CMSG_CLOEXEC);
	struct cmsghdr *header = length < 0 ? NULL : CMSG_FIRSTHDR(&message);

	if (header && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS && header->cmsg_len == CMSG_LEN(sizeof(int)))
		memcpy(passed_fd, CMSG_DATA(header), sizeof(int));
	return length;
}

static void handle_connection(struct watch *watch, uint32_t events)
{
	static char packet[PACKET_MAX + 1];

	(void)watch, (void)events;
	if (queue_head)
		flush_queue();
	while (connection_fd >= 0 && !queue_head) {
		uint64_t number = connection_number;
		CLEANUP_FD int passed_fd = -1;
		ssize_t length = receive_packet(packet, sizeof(packet), &passed_fd);
		if (length < 0 && (errno == EAGAIN || errno == EINTR))
			return;
		if (length <= 0 || (size_t)length > PACKET_MAX) {
			drop_connection();
			return;
		}
		handle_request(packet, (size_t)length, passed_fd);
		if (number != connection_number)
			return;
	}
}
