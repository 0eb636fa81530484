/* Control groups of supervisors that were killed: their inits died with them, their groups didn't. */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <time.h>

#include "supervisor.h"

#define STALE_WAIT_NS (5 * NS_PER_S)

/* What an earlier one of this name left. */
int cgroup_remove_stale(int hierarchy)
{
	char path[PATH_MAX];
	int64_t deadline_ns = monotonic_ns() + STALE_WAIT_NS;
	int mount_fd = cgroup_mount(hierarchy);

	snprintf(path, sizeof(path), "%s/%s/cgroup.kill", cgroup_top(hierarchy), options.cgroup);
	if (hierarchy == UNIFIED && faccessat(mount_fd, path, F_OK, 0) == 0 && write_at(mount_fd, path, "1") < 0)
		return -1;
	snprintf(path, sizeof(path), "%s/%s", cgroup_top(hierarchy), options.cgroup);
	while (remove_tree_at(mount_fd, path, true) < 0) {
		if (errno != EBUSY || monotonic_ns() > deadline_ns)
			return -1;
		nanosleep(&(struct timespec){.tv_nsec = 5 * NS_PER_MS}, NULL);
	}
	return 0;
}

/* Another supervisor's that lives: it holds the lock of its group, and in version 1 sits in it. */
static bool is_alive(const char *name)
{
	char path[PATH_MAX], pids[64];

	snprintf(path, sizeof(path), "barchan/%s/init/cgroup.procs", name);
	if (cgroup_mount(MEMORY) >= 0 && read_at(cgroup_mount(MEMORY), path, pids, sizeof(pids)) > 0)
		return true;
	snprintf(path, sizeof(path), "barchan/%s", name);
	CLEANUP_FD int fd = openat(cgroup_mount(UNIFIED), path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	return fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) < 0;
}

/* What supervisors of other names left when they were killed, and nobody has come after them. What is busy still is left to the next. */
void cgroup_remove_dead(void)
{
	char path[PATH_MAX];
	struct dirent *entry;
	int fd = openat(cgroup_mount(UNIFIED), "barchan", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	DIR *dir = fd < 0 ? NULL : fdopendir(fd);

	while (dir && (entry = readdir(dir))) {
		if (entry->d_type != DT_DIR || entry->d_name[0] == '.' || strcmp(entry->d_name, options.cgroup) == 0 || is_alive(entry->d_name))
			continue;
		for (int i = 0; i < HIERARCHIES; i++) {
			snprintf(path, sizeof(path), "%s/%s", cgroup_top(i), entry->d_name);
			if (cgroup_mount(i) >= 0 && remove_tree_at(cgroup_mount(i), path, true) < 0)
				log_line("leaving the cgroup %s of a dead supervisor: %s", path, strerror(errno));
		}
	}
	if (dir)
		closedir(dir);
}
