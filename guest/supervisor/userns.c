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

static int write_maps(pid_t pid, unsigned slot)
{
	char path[64], map[64];

	snprintf(map, sizeof(map), "0 %u %u", UID_FIRST + slot * UIDS_PER_SLOT, UIDS_PER_SLOT);
	snprintf(path, sizeof(path), "/proc/%d/uid_map", pid);
	if (write_at(AT_FDCWD, path, map) < 0)
		return -1;
	snprintf(path, sizeof(path), "/proc/%d/gid_map", pid);
	return write_at(AT_FDCWD, path, map);
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

static int make(unsigned slot)
{
	pid_t pid = clone_as_owner(slot);

	if (pid < 0)
		return -1;
	if (pid == 0)
		hold();
	int fd = write_maps(pid, slot) < 0 ? -1 : open_of(pid);
	int error = errno;
	/* No exit signal: only a wait with __WCLONE sees it, so the reaper of sandboxes never does. */
	kill(pid, SIGKILL);
	while (waitpid(pid, NULL, __WCLONE) < 0 && errno == EINTR)
		;
	errno = error;
	return fd;
}

/* The slot's namespace; stays owned by this file. */
int userns_open(unsigned slot)
{
	if (!cached_fd[slot]) {
		int fd = make(slot);
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
