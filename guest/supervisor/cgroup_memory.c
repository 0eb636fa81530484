/* Control groups of memory snapshots: one for each CRIU that dumps, and the places in a sandbox of what a restore brings back. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/fsuid.h>
#include <sys/stat.h>

#include "../criu/restore.h"
#include "supervisor.h"

#define NAME_PATH_MAX 512

/* The calling process; in the version 2 hierarchy it was born there. */
int cgroup_enter(const char *name)
{
	char path[NAME_PATH_MAX];

	snprintf(path, sizeof(path), "%s/cgroup.procs", name);
	for (int i = 0; i < UNIFIED && !cgroup_is_v2(); i++)
		if (cgroup_base(i) >= 0 && write_at(cgroup_base(i), path, "0") < 0 && errno != ENOENT)
			return -1;
	return 0;
}

int cgroup_remove_group(const char *name)
{
	int result = 0;

	for (int i = 0; i < HIERARCHIES; i++)
		if (cgroup_base(i) >= 0 && remove_tree_at(cgroup_base(i), name, true) < 0)
			result = -1;
	return result;
}

/* Everything in it and below; one that is gone needs nothing. */
int cgroup_kill(const char *name)
{
	char path[NAME_PATH_MAX];

	snprintf(path, sizeof(path), "%s/cgroup.kill", name);
	return write_at(cgroup_base(UNIFIED), path, "1") < 0 && errno != ENOENT ? -1 : 0;
}

/* `tree`: all of the sandbox; `guest`: its programs; `work`: where CRIU restores, whose memory is charged to the guest. */
int cgroup_open_of(const struct sandbox *sandbox, const char *what)
{
	char path[NAME_PATH_MAX];
	bool in_guest = strcmp(what, "guest") == 0 || (strcmp(what, "work") == 0 && cgroup_is_v2());

	snprintf(path, sizeof(path), "%s%s", sandbox->id, in_guest ? "/guest" : "");
	return openat(cgroup_base(UNIFIED), path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
}

/* What puts a process where an init is, to be written to in this order; -1 for hierarchies that are not there. */
int cgroup_open_init(const struct sandbox *sandbox, int *fds, int count)
{
	char path[NAME_PATH_MAX];

	for (int i = 0; i < count; i++)
		fds[i] = -1;
	snprintf(path, sizeof(path), "%s%s/cgroup.procs", sandbox->id, cgroup_is_v2() ? "/init" : "");
	fds[0] = openat(cgroup_base(UNIFIED), path, O_WRONLY | O_CLOEXEC);
	if (fds[0] < 0)
		return -1;
	for (int i = 0; i < UNIFIED && i + 1 < count && !cgroup_is_v2(); i++) {
		if (cgroup_base(i) < 0)
			continue;
		fds[i + 1] = openat(cgroup_base(i), "init/cgroup.procs", O_WRONLY | O_CLOEXEC);
		if (fds[i + 1] < 0)
			return -1;
	}
	return 0;
}

/* A group of one start, the init's as if it had made it. */
static int make_place(const struct sandbox *sandbox, const char *name)
{
	char path[NAME_PATH_MAX];

	if (strcmp(name, ".") == 0)
		return 0;
	if (!is_name(name, ID_MAX * 2))
		return errno = EINVAL, -1;
	snprintf(path, sizeof(path), "%s/guest/%s", sandbox->id, name);
	return mkdirat(cgroup_base(UNIFIED), path, 0755) < 0 && errno != EEXIST ? -1 : 0;
}

/* From `places`, lines of "PID PLACE". */
int cgroup_make_places(const struct sandbox *sandbox, int job_fd)
{
	static char text[RESTORE_TEXT_MAX];
	char *rest = text, *line, *name;
	uid_t uid = sandbox->uid_base + init_uid();
	ssize_t length = read_at(job_fd, "places", text, sizeof(text));
	int result = length < 0 ? -1 : length == sizeof(text) - 1 ? (errno = E2BIG, -1) : 0;

	setfsgid(uid), setfsuid(uid);
	while (result == 0 && (line = strsep(&rest, "\n")) && *line) {
		name = strchr(line, ' ');
		result = name ? make_place(sandbox, name + 1) : (errno = EINVAL, -1);
	}
	int error = errno;
	setfsgid(0), setfsuid(0);
	return errno = error, result;
}
