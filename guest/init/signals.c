/* Signal scopes. A pid is used as a target only while it can't have been given to another process. */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>

#include "init.h"

enum {
	ROUNDS_MAX = 8,		/* without cgroup.kill, forks may run ahead of the scan */
	SCAN_MAX = 4096,
};

static uint32_t signal_pid(pid_t pid, int signo)
{
	return kill(pid, signo) == 0 ? 1 : 0;
}

static int open_cgroup(const struct process *process)
{
	int leaf_dir = leaves[process->leaf].dir;
	char name[16];

	if (!process->has_cgroup || leaf_dir < 0)
		return -1;
	process_cgroup_name(name, process->handle);
	return openat(leaf_dir, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
}

/* Signal each member of the cgroup except `except`, or only count them when signo is -1. `group` > 0: only that group. */
static uint32_t signal_members(int cgroup, int signo, pid_t except, pid_t group)
{
	int fd = openat(cgroup, "cgroup.procs", O_RDONLY | O_CLOEXEC);
	FILE *file = fd >= 0 ? fdopen(fd, "r") : NULL;
	uint32_t count = 0;
	int pid;

	if (file == NULL) {
		close_fd(&fd);
		return 0;
	}
	while (fscanf(file, "%d", &pid) == 1) {
		if (pid <= 1 || pid == except || (group > 0 && getpgid(pid) != group))
			continue;
		count += signo < 0 ? 1 : signal_pid(pid, signo);
	}
	fclose(file);
	return count;
}

static bool kill_cgroup(int cgroup)
{
	CLEANUP_FD int fd = openat(cgroup, "cgroup.kill", O_WRONLY | O_CLOEXEC);

	return fd >= 0 && write(fd, "1", 1) == 1;
}

/* Kill everything in the cgroup. The main process may not have joined it yet, so it is killed by its pid as well. */
static uint32_t kill_all(const struct process *process, int cgroup)
{
	uint32_t count = signal_members(cgroup, -1, process->exited ? 0 : process->pid, 0);

	if (!process->exited)
		count += signal_pid(process->pid, SIGKILL);
	if (!kill_cgroup(cgroup))
		for (int i = 0; i < ROUNDS_MAX && signal_members(cgroup, SIGKILL, 0, 0) > 0; i++)
			;
	return count;
}

struct entry {
	pid_t pid, parent, group, session;
	bool member;
};

static bool read_entry(int proc, const char *name, struct entry *entry)
{
	char path[32], text[512], *at;
	ssize_t n;

	snprintf(path, sizeof path, "%.16s/stat", name);
	CLEANUP_FD int fd = openat(proc, path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return false;
	n = read(fd, text, sizeof text - 1);
	if (n <= 0)
		return false;
	text[n] = 0;
	at = strrchr(text, ')');	/* the name before it is the guest's to choose */
	entry->pid = atoi(name);
	entry->member = false;
	return at != NULL && sscanf(at + 1, " %*c %d %d %d", &entry->parent, &entry->group, &entry->session) == 3;
}

static size_t read_processes(struct entry **out)
{
	int fd = settings.proc >= 0 ? openat(settings.proc, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
	DIR *dir = fd >= 0 ? fdopendir(fd) : NULL;
	struct entry *entries = calloc(SCAN_MAX, sizeof *entries);
	struct dirent *d;
	size_t count = 0;

	if (dir == NULL)
		close_fd(&fd);
	while (dir != NULL && entries != NULL && count < SCAN_MAX && (d = readdir(dir)) != NULL)
		if (d->d_name[0] >= '1' && d->d_name[0] <= '9' && read_entry(fd, d->d_name, &entries[count]))
			count++;
	if (dir != NULL)
		closedir(dir);
	*out = entries;
	return count;
}

/* One pass over the session, the group, and descendants of either. */
static uint32_t signal_family_once(const struct process *process, int signo, bool with_main)
{
	struct entry *entries;
	size_t count = read_processes(&entries);
	bool grew = true, reused = false;
	uint32_t signalled = 0;

	for (size_t i = 0; i < count; i++)
		reused |= process->exited && entries[i].pid == process->pid;
	while (grew && !reused) {
		grew = false;
		for (size_t i = 0; i < count; i++) {
			struct entry *e = &entries[i];
			bool member = e->session == process->pid || e->group == process->pid || e->pid == process->pid;

			for (size_t j = 0; !member && j < count; j++)
				member = entries[j].member && entries[j].pid == e->parent;
			if (member && !e->member && e->pid > 1)
				grew = e->member = true;
		}
	}
	for (size_t i = 0; i < count; i++)
		if (entries[i].member && (with_main || entries[i].pid != process->pid))
			signalled += signal_pid(entries[i].pid, signo);
	free(entries);
	return signalled;
}

static uint32_t signal_family(const struct process *process, int signo, bool with_main)
{
	uint32_t count = signal_family_once(process, signo, with_main), again = count;

	for (int i = 0; signo == SIGKILL && i < ROUNDS_MAX && again > 0; i++) {
		again = signal_family_once(process, signo, with_main);
		if (again <= count)
			break;
		count = again;
	}
	return count > 0 || process->exited || !with_main ? count : signal_pid(process->pid, signo);
}

static uint32_t signal_others(const struct process *process, int cgroup, int signo)
{
	pid_t except = process->exited ? 0 : process->pid;
	uint32_t count = signal_members(cgroup, signo, except, 0);

	for (int i = 0; signo == SIGKILL && i < ROUNDS_MAX && signal_members(cgroup, signo, except, 0) > 0; i++)
		;
	return count;
}

static uint32_t signal_all(struct process *process, int signo, bool with_main)
{
	CLEANUP_FD int cgroup = open_cgroup(process);
	bool main_too = with_main && !process->exited;
	uint32_t count;

	if (cgroup >= 0 && signo == SIGKILL && with_main)
		return kill_all(process, cgroup);
	if (cgroup >= 0)
		count = signal_others(process, cgroup, signo);
	else if (leaves[process->leaf].dir >= 0 && is_program(process->kind))
		count = 0;	/* not joined yet, or all gone */
	else
		return signal_family(process, signo, with_main);
	return count + (main_too ? signal_pid(process->pid, signo) : 0);
}

/* After the main process was reaped its group's number is safe only for members found in its cgroup. */
static uint32_t signal_group(struct process *process, int signo)
{
	CLEANUP_FD int cgroup = -1;

	if (!process->exited) {
		/* Before the child's setsid there is no group yet. */
		return signal_pid(-process->pid, signo) || signal_pid(process->pid, signo);
	}
	cgroup = open_cgroup(process);
	return cgroup >= 0 ? signal_members(cgroup, signo, 0, process->pid) : 0;
}

uint32_t signal_scope(struct process *process, int signo, uint8_t scope)
{
	switch (scope) {
	case SCOPE_GROUP:
		return signal_group(process, signo);
	case SCOPE_MAIN:
		return process->exited ? 0 : signal_pid(process->pid, signo);
	default:
		return signal_all(process, signo, scope == SCOPE_ALL);
	}
}
