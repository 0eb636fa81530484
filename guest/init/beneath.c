/* Opening what lies below a directory, and nothing else: as openat2 does with RESOLVE_BENEATH, or step by step where the kernel, as
 * gVisor's, has no such call. Each step is relative to an open directory and follows no link by itself. */
#define _GNU_SOURCE
#include "applet.h"

#include <fcntl.h>
#include <limits.h>
#include <linux/openat2.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/syscall.h>

enum { DIRECTORIES_MAX = 64, LINKS_MAX = 40, REST_BYTES = 2 * PATH_MAX };

struct walk {
	int at[DIRECTORIES_MAX];	/* the directories on the way; the first is the caller's */
	unsigned depth, links;
	char rest[REST_BYTES];
};

static void leave(struct walk *walk)
{
	close(walk->at[walk->depth--]);
}

/* Put a link's text before what is left of the path. */
static int follow(struct walk *walk, const char *name, const char *rest)
{
	char text[REST_BYTES], joined[2 * REST_BYTES];
	ssize_t len = readlinkat(walk->at[walk->depth], name, text, sizeof text - 1);

	if (len < 0)
		return -1;
	text[len] = 0;
	if (text[0] == '/')
		return errno = EXDEV, -1;
	if (++walk->links > LINKS_MAX || snprintf(joined, sizeof joined, "%s/%s", text, rest) >= REST_BYTES)
		return errno = ELOOP, -1;
	memcpy(walk->rest, joined, strlen(joined) + 1);
	return 0;
}

/* One component that is neither `.` nor `..`. 1: `*out` is what was asked for; 0: go on; -1: errno. */
static int step(struct walk *walk, const char *name, const char *rest, const struct open_how *how, int *out)
{
	int above = walk->at[walk->depth];
	bool is_last = rest[strspn(rest, "/")] == 0;
	int fd = openat(above, name, O_PATH | O_NOFOLLOW | O_CLOEXEC);
	struct stat st;

	if (fd < 0 || fstat(fd, &st) != 0)
		return close_fd(&fd), -1;
	if (S_ISLNK(st.st_mode)) {
		close(fd);
		return how->resolve & RESOLVE_NO_SYMLINKS ? (errno = ELOOP, -1) : follow(walk, name, rest);
	}
	if (is_last) {
		close(fd);
		*out = openat(above, name, (int)how->flags | O_NOFOLLOW);
		return *out < 0 ? -1 : 1;
	}
	if (!S_ISDIR(st.st_mode) || walk->depth + 1 == DIRECTORIES_MAX) {
		close(fd);
		return errno = S_ISDIR(st.st_mode) ? ELOOP : ENOTDIR, -1;
	}
	walk->at[++walk->depth] = fd;
	memmove(walk->rest, rest, strlen(rest) + 1);
	return 0;
}

static int walk_down(struct walk *walk, const struct open_how *how)
{
	char name[NAME_MAX + 1];
	int fd = -1, done = 0;

	while (done == 0) {
		const char *at = walk->rest + strspn(walk->rest, "/");
		size_t len = strcspn(at, "/");

		if (len == 0)
			return openat(walk->at[walk->depth], ".", (int)how->flags);
		if (len > NAME_MAX)
			return errno = ENAMETOOLONG, -1;
		memcpy(name, at, len);
		name[len] = 0;
		if (strcmp(name, "..") == 0 && walk->depth == 0)
			return errno = EXDEV, -1;
		if (strcmp(name, ".") == 0 || strcmp(name, "..") == 0) {
			memmove(walk->rest, at + len, strlen(at + len) + 1);
			if (name[1] == '.')
				leave(walk);
		} else {
			done = step(walk, name, at + len, how, &fd);
		}
	}
	return done > 0 ? fd : -1;
}

/* A descriptor, or -1 with errno. Of `how`, flags and these two are understood: RESOLVE_BENEATH, which is always so, and
 * RESOLVE_NO_SYMLINKS. */
int open_beneath_of(int root, const char *name, const struct open_how *how)
{
	int fd = (int)syscall(SYS_openat2, root, name, how, sizeof *how);
	static struct walk walk;

	if (fd >= 0 || errno != ENOSYS)
		return fd;
	walk.depth = walk.links = 0;
	walk.at[0] = root;
	if (snprintf(walk.rest, sizeof walk.rest, "%s", name) >= (int)sizeof walk.rest)
		return errno = ENAMETOOLONG, -1;
	fd = walk_down(&walk, how);
	int error = errno;
	while (walk.depth > 0)
		leave(&walk);
	errno = error;
	return fd;
}
