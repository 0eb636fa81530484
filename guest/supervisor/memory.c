/* Memory snapshots: a job for each CRIU that runs (criu_child.c), never waited for. */
#define _GNU_SOURCE
#include <linux/sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "supervisor.h"

#define RETRY_NS (2 * NS_PER_MS)

struct job {
	pid_t pid;
	struct sandbox *sandbox; /* NULL: it has been removed meanwhile */
	bool restores, timed_out, has_ended;
	int wstatus;
	struct waiter waiter; /* of a dump */
	char group[ID_MAX + 16];
	int64_t deadline_ns;
	struct job *next;
};

static struct job *jobs;

static pid_t clone_into(int cgroup_fd)
{
	struct clone_args arguments = {.flags = CLONE_INTO_CGROUP, .exit_signal = SIGCHLD, .cgroup = (uint64_t)cgroup_fd};

	return (pid_t)syscall(SYS_clone3, &arguments, sizeof(arguments));
}

static struct job *job_start(struct sandbox *sandbox, bool restores, uint64_t seconds)
{
	struct job *job = calloc(1, sizeof(*job));

	if (!job)
		return NULL;
	job->sandbox = sandbox, job->restores = restores;
	job->deadline_ns = monotonic_ns() + (int64_t)seconds * NS_PER_S;
	snprintf(job->group, sizeof(job->group), "%s%s", sandbox->id, restores ? "" : ".criu");
	job->next = jobs;
	jobs = job;
	return job;
}

static struct job **job_of(pid_t pid, const struct sandbox *sandbox)
{
	struct job **link = &jobs;

	while (*link && (pid ? (*link)->pid != pid : (*link)->sandbox != sandbox))
		link = &(*link)->next;
	return link;
}

static void job_forget(struct job *job)
{
	struct job **link = &jobs;

	while (*link != job)
		link = &(*link)->next;
	*link = job->next;
	free(job);
}

/* Answer a dump once nothing of it is left; false: later, when what was killed has gone. */
static bool dump_end(struct job *job)
{
	if (cgroup_kill(job->group) < 0 || cgroup_remove_group(job->group) < 0)
		return false;
	if (job->timed_out) {
		reply_error(&job->waiter, "dump", ETIMEDOUT, NULL);
	} else {
		struct reply *reply = reply_start("ok");
		reply_add(reply, "tag=%llu", (unsigned long long)job->waiter.tag);
		reply_add(reply, "wstatus=%d", job->wstatus);
		reply_send(reply, &job->waiter);
	}
	job_forget(job);
	return true;
}

/* Answered when CRIU has ended: `wstatus`. */
int memory_dump(struct sandbox *sandbox, int job_fd, uint64_t seconds, const struct waiter *waiter)
{
	struct job *job = job_start(sandbox, false, seconds);
	CLEANUP_FD int cgroup_fd = job ? cgroup_make_group(job->group, sandbox->spec.memory_bytes + sandbox->spec.shm_bytes + CRIU_MEMORY_BYTES, CRIU_PIDS) : -1;
	if (job && cgroup_fd >= 0)
		job->pid = clone_into(cgroup_fd);
	if (job && cgroup_fd >= 0 && job->pid == 0)
		criu_dump(sandbox, job->group, job_fd);
	int error = errno;
	if (job && job->pid <= 0) {
		cgroup_remove_group(job->group);
		job_forget(job);
		return errno = error, -1;
	}
	if (job) {
		child_helps(job->pid);
		job->waiter = *waiter;
	}
	return job ? 0 : (errno = error, -1);
}

/* --- restore ------------------------------------------------------------------------------------------------------ */

/* Fills status_fd. The init's pid comes as a report of the shim, the sandbox runs when CRIU has ended. */
int memory_restore(struct sandbox *sandbox, int userns_fd, int cgroup_fd, const struct restore *restore)
{
	int pair[2];
	struct job *job = job_start(sandbox, true, restore->seconds);

	if (!job)
		return -1;
	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) < 0) {
		job_forget(job);
		return -1;
	}
	job->pid = clone_into(cgroup_fd);
	if (job->pid == 0) {
		report_to(pair[1]);
		criu_restore(sandbox, userns_fd, restore);
	}
	int error = errno;
	close(pair[1]);
	if (job->pid < 0) {
		close(pair[0]);
		job_forget(job);
		return errno = error, -1;
	}
	child_helps(job->pid);
	sandbox->status_fd = pair[0];
	return 0;
}

/* --- ends --------------------------------------------------------------------------------------------------------- */

bool memory_dumps(const struct sandbox *sandbox)
{
	const struct job *job = *job_of(0, sandbox);

	return job && !job->restores;
}

void memory_forget(const struct sandbox *sandbox)
{
	struct job *job = *job_of(0, sandbox);

	if (job)
		job->sandbox = NULL;
}

/* Whether the child was one of ours. */
bool memory_reaped(pid_t pid, int wstatus)
{
	struct job *job = *job_of(pid, NULL);

	if (!job)
		return false;
	job->pid = 0, job->wstatus = wstatus, job->has_ended = true;
	if (!job->restores) {
		dump_end(job);
		return true;
	}
	struct sandbox *sandbox = job->sandbox;
	int error = job->timed_out ? ETIMEDOUT : WIFEXITED(wstatus) && WEXITSTATUS(wstatus) == 0 ? 0 : EIO;
	job_forget(job);
	if (sandbox)
		sandbox_restored(sandbox, error);
	return true;
}

/* Whatever runs has taken too long. */
void memory_end_all(void)
{
	for (struct job *job = jobs; job; job = job->next)
		job->deadline_ns = 0;
}

bool memory_is_idle(void)
{
	return !jobs;
}

/* Kill what takes too long, whole trees; when to look again. */
int64_t memory_run_timers(int64_t now_ns)
{
	int64_t next_ns = INT64_MAX;

	for (struct job *job = jobs, *next; job; job = next) {
		next = job->next;
		if (job->has_ended) {
			if (!dump_end(job))
				next_ns = now_ns + RETRY_NS;
			continue;
		}
		if (!job->timed_out && job->deadline_ns <= now_ns) {
			job->timed_out = true;
			if (cgroup_kill(job->group) < 0)
				log_line("%s: kill: %s", job->group, strerror(errno));
		}
		if (!job->timed_out && job->deadline_ns < next_ns)
			next_ns = job->deadline_ns;
	}
	return next_ns;
}
