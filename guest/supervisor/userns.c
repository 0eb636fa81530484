/* User namespaces, one per uid slot, each owned by an id of its slot: the kernel counts what the users of a namespace hold
 * (inotify instances, queued signals, message queues) against its owner too, who therefore must not be one for all.
 *
 * Making one takes a process; a namespace that outlives its sandbox is used again by the next one on the slot. Its
 * descriptor is held only while no sandbox runs on the slot: every descriptor of the supervisor is copied at each fork, and
 * a running init keeps its own namespace alive. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/sched.h>
#include <linux/securebits.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "supervisor.h"

#define MAP_MAX 160

static bool slot_taken[SLOTS_MAX];
static int cached_fd[SLOTS_MAX]; /* descriptor + 1; 0: none */
static unsigned first_free;

int userns_take_slot(void)
{
	for (unsigned slot = first_free; slot < SLOTS_MAX; slot++)
		if (!slot_taken[slot]) {
			slot_taken[slot] = true;
			first_free = slot + 1;
			return (int)slot;
		}
	errno = EAGAIN;
	return -1;
}

void userns_release_slot(unsigned slot)
{
	slot_taken[slot] = false;
	if (slot < first_free)
		first_free = slot;
}

static int open_of(pid_t pid)
{
	char path[64];

	snprintf(path, sizeof(path), "/proc/%d/ns/user", pid);
	return open(path, O_RDONLY | O_CLOEXEC);
}

static void map_of(unsigned slot, char map[MAP_MAX])
{
	snprintf(map, MAP_MAX, "0 %u %u\n", UID_FIRST + slot * UIDS_PER_SLOT, UIDS_PER_SLOT);
}

static int write_maps(int proc_fd, pid_t pid, const char *map)
{
	char path[32];

	snprintf(path, sizeof(path), "%d/uid_map", pid);
	if (write_at(proc_fd, path, map) < 0)
		return -1;
	snprintf(path, sizeof(path), "%d/gid_map", pid);
	return write_at(proc_fd, path, map);
}

/* Owned by the slot's first id. The capabilities stay: the effective user is changed without the usual loss. */
static pid_t clone_as_owner(unsigned slot)
{
	struct clone_args arguments = {.flags = CLONE_NEWUSER};
	uid_t id = UID_FIRST + slot * UIDS_PER_SLOT;
	pid_t pid = -1;

	if (prctl(PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP) == 0 && setresgid(-1, id, -1) == 0 && setresuid(-1, id, -1) == 0)
		pid = (pid_t)syscall(SYS_clone3, &arguments, sizeof(arguments));
	int error = errno;
	/* Going on as somebody else would be wrong in every call that follows. */
	if (pid != 0 && (setresuid(-1, 0, -1) < 0 || setresgid(-1, 0, -1) < 0 || prctl(PR_SET_SECUREBITS, 0) < 0)) {
		log_line("returning to root: %s", strerror(errno));
		abort();
	}
	errno = error;
	return pid;
}

/* The process that a namespace is made with: there until it is killed, but not longer than the supervisor. */
static _Noreturn void hold(void)
{
	if (die_with_supervisor() < 0)
		_exit(1);
	for (;;)
		pause();
}

/* No exit signal: only a wait with __WCLONE sees it, so the reaper of sandboxes never does. */
static void end_clone(pid_t pid)
{
	kill(pid, SIGKILL);
	while (waitpid(pid, NULL, __WCLONE) < 0 && errno == EINTR)
		;
}

static int make(unsigned slot, const char *map)
{
	pid_t pid = clone_as_owner(slot);

	if (pid < 0)
		return -1;
	if (pid == 0)
		hold();
	CLEANUP_FD int proc_fd = open("/proc", O_PATH | O_CLOEXEC);
	int fd = proc_fd < 0 || write_maps(proc_fd, pid, map) < 0 ? -1 : open_of(pid);
	int error = errno;
	end_clone(pid);
	errno = error;
	return fd;
}

/* The slot's namespace; stays owned by this file. */
int userns_open(unsigned slot)
{
	if (!cached_fd[slot]) {
		char map[MAP_MAX];
		map_of(slot, map);
		int fd = make(slot, map);
		if (fd < 0)
			return -1;
		cached_fd[slot] = fd + 1;
	}
	return cached_fd[slot] - 1;
}

/* A process lives in the namespace now: the descriptor isn't needed to keep it. */
void userns_started(unsigned slot)
{
	if (cached_fd[slot])
		close(cached_fd[slot] - 1);
	cached_fd[slot] = 0;
}

/* Take the namespace back from an init that is about to be killed; without it the next sandbox makes a new one. */
void userns_keep(unsigned slot, pid_t pid)
{
	if (!cached_fd[slot])
		cached_fd[slot] = open_of(pid) + 1;
}

/* With the ids of every other slot beside its own, as they are outside: user namespaces inside it can have theirs. */
int userns_make_wide(unsigned slot)
{
	uid_t first = UID_FIRST + slot * UIDS_PER_SLOT, next = first + UIDS_PER_SLOT, end = UID_FIRST + SLOTS_MAX * UIDS_PER_SLOT;
	char map[MAP_MAX];

	map_of(slot, map);
	size_t length = strlen(map);
	if (first > UID_FIRST)
		length += (size_t)snprintf(map + length, MAP_MAX - length, "%u %u %u\n", UID_FIRST, UID_FIRST, first - UID_FIRST);
	if (next < end)
		snprintf(map + length, MAP_MAX - length, "%u %u %u\n", next, next, end - next);
	return make(slot, map);
}

/* As root of the outer namespace, which is to own the inner one, and whose files in /proc its own copies then are. */
static _Noreturn void make_from_inside(unsigned slot, int outer_fd, int answer_fd)
{
	struct clone_args arguments = {.flags = CLONE_NEWUSER | CLONE_PARENT};
	char map[MAP_MAX];

	map_of(slot, map);
	/* Opened as root: only it may pass the supervisor's own root directory. */
	int proc_fd = open("/proc", O_PATH | O_CLOEXEC);
	if (proc_fd < 0 || setns(outer_fd, CLONE_NEWUSER) < 0 || setresgid(0, 0, 0) < 0 || setresuid(0, 0, 0) < 0 || prctl(PR_SET_DUMPABLE, 1) < 0)
		_exit(errno);
	pid_t pid = (pid_t)syscall(SYS_clone3, &arguments, sizeof(arguments));
	if (pid == 0)
		hold();
	if (pid < 0 || write(answer_fd, &pid, sizeof(pid)) != sizeof(pid) || write_maps(proc_fd, pid, map) < 0)
		_exit(errno);
	_exit(0);
}

/* Inside another one, whose root owns it. */
int userns_make_inside(unsigned slot, int outer_fd)
{
	struct clone_args arguments = {.flags = 0};
	int answer[2], status = 0, fd = -1;
	pid_t held = 0;

	if (pipe2(answer, O_CLOEXEC) < 0)
		return -1;
	pid_t pid = (pid_t)syscall(SYS_clone3, &arguments, sizeof(arguments));
	if (pid == 0)
		make_from_inside(slot, outer_fd, answer[1]);
	int error = errno;
	close(answer[1]);
	if (pid > 0) {
		bool is_held = read(answer[0], &held, sizeof(held)) == sizeof(held);
		while (waitpid(pid, &status, __WCLONE) < 0 && errno == EINTR)
			;
		error = WIFEXITED(status) ? WEXITSTATUS(status) : ECHILD;
		if (is_held && error == 0) {
			fd = open_of(held);
			error = errno;
		}
		if (is_held)
			end_clone(held);
	}
	close(answer[0]);
	errno = error;
	return fd;
}
