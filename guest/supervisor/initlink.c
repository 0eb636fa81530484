/* The connection to a sandbox's init: found through /proc, checked, greeted with HELLO and the guest's cgroup leaves
 * (docs/formats/guest-protocol.md), then given to the node. */
#define _GNU_SOURCE
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "supervisor.h"

#define FRAME_HELLO 0x01
#define HELLO_TAG 0xffffffffu
#define HEADER_SIZE 12u
#define LEAVES_MAX 2u
#define HELLO_SIZE_MAX (HEADER_SIZE + 5 + 3 * LEAVES_MAX)

static size_t put_u32(uint8_t *at, uint32_t value)
{
	for (unsigned i = 0; i < 4; i++)
		at[i] = (uint8_t)(value >> (8 * i));
	return 4;
}

static size_t build_hello(uint8_t frame[HELLO_SIZE_MAX], const struct leaf_fds *leaves, unsigned leaf_count)
{
	size_t at = HEADER_SIZE;

	at += put_u32(frame + at, 1); /* guest protocol version */
	frame[at++] = (uint8_t)leaf_count;
	for (unsigned i = 0; i < leaf_count; i++) {
		frame[at++] = (uint8_t)i;
		frame[at++] = (uint8_t)leaves[i].procs_count;
		frame[at++] = leaves[i].count > leaves[i].procs_count;
	}
	memset(frame, 0, HEADER_SIZE);
	put_u32(frame, (uint32_t)(at - HEADER_SIZE));
	frame[4] = FRAME_HELLO;
	put_u32(frame + 8, HELLO_TAG);
	return at;
}

static int send_hello(int fd, const struct leaf_fds *leaves, unsigned leaf_count)
{
	uint8_t frame[HELLO_SIZE_MAX];
	struct iovec vector = {frame, build_hello(frame, leaves, leaf_count)};
	union {
		struct cmsghdr header;
		char space[CMSG_SPACE(sizeof(int) * LEAVES_MAX * LEAF_FDS_MAX)];
	} control;
	int fds[LEAVES_MAX * LEAF_FDS_MAX];
	unsigned count = 0;

	for (unsigned i = 0; i < leaf_count; i++)
		for (unsigned k = 0; k < leaves[i].count; k++)
			fds[count++] = leaves[i].fds[k];
	control.header = (struct cmsghdr){.cmsg_len = CMSG_LEN(sizeof(int) * count), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
	memcpy(CMSG_DATA(&control.header), fds, sizeof(int) * count);
	struct msghdr message = {
		.msg_iov = &vector, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = CMSG_SPACE(sizeof(int) * count)};
	ssize_t sent = sendmsg(fd, &message, MSG_NOSIGNAL);
	return sent == (ssize_t)vector.iov_len ? 0 : (errno = sent < 0 ? errno : EAGAIN, -1);
}

/* Never blocks: an init that doesn't accept makes connect fail with EAGAIN once its backlog is full. */
int init_reach(const struct sandbox *sandbox)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	struct ucred peer;
	socklen_t size = sizeof(peer);

	snprintf(address.sun_path, sizeof(address.sun_path), "/proc/%d/root" INIT_SOCKET, sandbox->pid);
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd < 0)
		return -1;
	if (connect(fd, (struct sockaddr *)&address, sizeof(address)) == 0 && getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0) {
		if (peer.pid == sandbox->pid)
			return fd;
		errno = EPERM;
	}
	close_fd(&fd);
	return -1;
}

/* Send HELLO on a new connection. */
int init_greet(const struct sandbox *sandbox, int fd)
{
	struct leaf_fds leaves[LEAVES_MAX];
	unsigned leaf_count = 0, wanted = sandbox->has_platform ? 2 : 1;
	int result = 0;

	while (result == 0 && leaf_count < wanted) {
		result = cgroup_open_leaf(sandbox, (enum leaf)leaf_count, &leaves[leaf_count]);
		leaf_count++;
	}
	if (result == 0)
		result = send_hello(fd, leaves, leaf_count);
	int error = errno;
	for (unsigned i = 0; i < leaf_count; i++)
		for (unsigned k = 0; k < leaves[i].count; k++)
			close(leaves[i].fds[k]);
	errno = error;
	return result;
}

int init_connect(const struct sandbox *sandbox)
{
	int fd = init_reach(sandbox);

	if (fd >= 0 && init_greet(sandbox, fd) < 0)
		close_fd(&fd);
	return fd;
}
