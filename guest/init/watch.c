/* Change records of a directory, from inotify, until killed. */
#define _GNU_SOURCE
#include "applet.h"

#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/inotify.h>

enum { WATCHES_MAX = 65536 };

static const uint32_t watch_mask = IN_CREATE | IN_MODIFY | IN_DELETE | IN_MOVED_FROM | IN_MOVED_TO | IN_DELETE_SELF |
				   IN_ONLYDIR | IN_EXCL_UNLINK;

static int inotify = -1;
static const char *top;	/* not our working directory: that would keep a removed directory alive, and untold */
static bool recursive;
static char **paths;	/* of each watch descriptor, relative; "" is the directory itself */
static size_t paths_size;

static void record(char kind, const char *path)
{
	uint8_t head[5], *at = put_u8(head, (uint8_t)kind);
	uint32_t len = (uint32_t)strlen(path);

	put_u32(at, len);
	out_bytes(head, sizeof head);
	out_bytes(path, len);
}

static void join(char out[PATH_BYTES], const char *parent, const char *name)
{
	if ((size_t)snprintf(out, PATH_BYTES, "%s%s%s", parent, *parent && *name ? "/" : "", name) >= PATH_BYTES)
		out[0] = 0;	/* beyond what a path can say: shows as a change of the directory itself */
}

static bool remember(int wd, const char *path)
{
	if (wd >= WATCHES_MAX)
		return false;
	if ((size_t)wd >= paths_size) {
		size_t size = (size_t)wd * 2 + 64;
		char **larger = realloc(paths, size * sizeof *larger);

		if (larger == NULL)
			applet_fail(ENOMEM, "watches");
		memset(larger + paths_size, 0, (size - paths_size) * sizeof *larger);
		paths = larger;
		paths_size = size;
	}
	free(paths[wd]);
	paths[wd] = strdup(path);
	if (paths[wd] == NULL)
		applet_fail(ENOMEM, "watches");
	return true;
}

struct walk {
	const char *path;
	bool announce;
};

static void add_tree(const char *path, bool announce);

static void add_entry(int dir, const char *name, unsigned char type, void *context)
{
	const struct walk *walk = context;
	char path[PATH_BYTES];

	(void)dir;
	join(path, walk->path, name);
	if (walk->announce)
		record('c', path);
	if (recursive && type == DT_DIR && path[0] != 0)
		add_tree(path, walk->announce);
}

/* Watch a directory and, if asked, those below. `announce`: it is new, so what it already holds appeared before the
 * watch did; something may be told twice, but nothing is missed. */
static void add_tree(const char *path, bool announce)
{
	struct walk walk = {path, announce};
	char where[PATH_BYTES];
	int wd;

	join(where, top, path);
	wd = inotify_add_watch(inotify, where, watch_mask | (*path ? IN_DONT_FOLLOW : 0u));
	if (wd < 0 && *path == 0)
		applet_fail(errno, "%s", top);
	if (wd < 0 || !remember(wd, path)) {
		if (wd >= 0)
			inotify_rm_watch(inotify, wd);
		if (wd >= 0 || errno == ENOSPC)
			record('o', "");
		return;	/* or gone again, or not readable for this user */
	}
	if (!recursive && !announce)
		return;
	CLEANUP_FD int fd = open(where, O_RDONLY | O_DIRECTORY | O_NONBLOCK | O_CLOEXEC);
	if (fd >= 0)
		each_entry(fd, add_entry, &walk);
}

/* A directory moved away takes its watches along, whose paths are no longer true. */
static void forget_tree(const char *path)
{
	size_t len = strlen(path);

	for (size_t wd = 0; wd < paths_size; wd++)
		if (paths[wd] != NULL && strncmp(paths[wd], path, len) == 0 && (paths[wd][len] == '/' || paths[wd][len] == 0))
			inotify_rm_watch(inotify, (int)wd);
}

static void handle(const struct inotify_event *event)
{
	char path[PATH_BYTES];
	const char *parent;

	if (event->mask & IN_Q_OVERFLOW) {
		record('o', "");
		return;
	}
	parent = event->wd >= 0 && (size_t)event->wd < paths_size ? paths[event->wd] : NULL;
	if (parent == NULL)
		return;
	if (event->mask & IN_IGNORED) {
		free(paths[event->wd]);
		paths[event->wd] = NULL;
		return;
	}
	join(path, parent, event->len > 0 ? event->name : "");
	if (event->mask & (IN_MOVED_FROM | IN_MOVED_TO))
		record('v', path);
	else if (event->mask & IN_CREATE)
		record('c', path);
	else if (event->mask & IN_MODIFY)
		record('m', path);
	else if ((event->mask & IN_DELETE) || ((event->mask & IN_DELETE_SELF) && *parent == 0))
		record('d', path);
	if (!recursive || !(event->mask & IN_ISDIR) || path[0] == 0)
		return;
	if (event->mask & IN_MOVED_FROM)
		forget_tree(path);
	if (event->mask & (IN_CREATE | IN_MOVED_TO))
		add_tree(path, (event->mask & IN_CREATE) != 0);
}

void op_watch(char **argv)
{
	static char events[COPY_CHUNK] __attribute__((aligned(8)));
	ssize_t n;

	recursive = strcmp(argv[1], "1") == 0;
	inotify = inotify_init1(IN_CLOEXEC);
	if (inotify < 0)
		applet_fail(errno, "inotify");
	top = argv[0];
	add_tree("", false);
	record('r', "");
	out_flush();
	while ((n = read(inotify, events, sizeof events)) > 0) {
		for (ssize_t at = 0; at < n;) {
			const struct inotify_event *event = (const struct inotify_event *)(events + at);

			at += (ssize_t)(sizeof *event + event->len);
			handle(event);
		}
		out_flush();
	}
	applet_fail(n < 0 ? errno : EIO, "inotify");
}
