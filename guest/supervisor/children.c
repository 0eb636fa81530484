/* The supervisor's children: which sandbox a process belongs to, and reaping.
 *
 * Asked for any child that has ended, the kernel looks at all of them, 0.1 us each and twice for each end: beside thousands of
 * sandboxes that is more than all the rest of a create. So those are asked for by their numbers that are known to have ended or to be about
 * to, and any other from time to time. */
#define _GNU_SOURCE
#include <string.h>
#include <sys/wait.h>

#include "supervisor.h"

#define BUCKETS 4096u
#define HELPERS_MAX 64u

static struct sandbox *by_pid[BUCKETS];
static struct sandbox *killed; /* whose process has not been reaped */
static pid_t helpers[HELPERS_MAX];
static unsigned helper_count;

void child_add(struct sandbox *sandbox)
{
	struct sandbox **bucket = &by_pid[(unsigned)sandbox->pid % BUCKETS];

	sandbox->next_by_pid = *bucket;
	*bucket = sandbox;
}

struct sandbox *child_take(pid_t pid)
{
	struct sandbox **link = &by_pid[(unsigned)pid % BUCKETS];

	while (*link && (*link)->pid != pid)
		link = &(*link)->next_by_pid;
	struct sandbox *sandbox = *link;
	if (sandbox)
		*link = sandbox->next_by_pid;
	return sandbox;
}

/* Its process was killed, and will end soon. */
void child_killed(struct sandbox *sandbox)
{
	sandbox->next_killed = killed;
	killed = sandbox;
}

/* It has no process any more, killed or not. */
void child_gone(const struct sandbox *sandbox)
{
	struct sandbox **link = &killed;

	while (*link && *link != sandbox)
		link = &(*link)->next_killed;
	if (*link)
		*link = sandbox->next_killed;
}

/* One that is no sandbox's, and ends by itself. Beyond the bound they are found as any other. */
void child_helps(pid_t pid)
{
	if (helper_count < HELPERS_MAX)
		helpers[helper_count++] = pid;
}

static void reaped(pid_t pid, int wstatus)
{
	struct sandbox *sandbox = memory_reaped(pid, wstatus) ? NULL : child_take(pid);

	if (sandbox)
		sandbox_ended(sandbox, wstatus);
}

/* Whether it is no child any more. */
static bool reap(pid_t pid)
{
	int wstatus;
	pid_t found = waitpid(pid, &wstatus, WNOHANG);

	if (found == pid)
		reaped(pid, wstatus);
	return found != 0;
}

/* The one that the kernel has told of, those that were killed and those that help: of one it may not have told, for such signals
 * merge. */
void children_reap(pid_t told)
{
	if (told > 0)
		reap(told);
	for (struct sandbox *sandbox = killed, *next; sandbox; sandbox = next) {
		next = sandbox->next_killed;
		if (sandbox->pid)
			reap(sandbox->pid);
	}
	for (unsigned i = 0; i < helper_count;)
		if (reap(helpers[i]))
			helpers[i] = helpers[--helper_count];
		else
			i++;
}

void children_reap_all(void)
{
	int wstatus;
	pid_t pid;

	/* Orphans of other kinds come here too, to a subreaper; they need no more than this. */
	while ((pid = waitpid(-1, &wstatus, WNOHANG)) > 0)
		reaped(pid, wstatus);
}
