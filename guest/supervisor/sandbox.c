/* The sandboxes and their lives: STARTING -> RUNNING -> ENDED (the init died) -> REMOVING -> gone; REMOVING from any of them.
 * Removing is idempotent and repeated by timer while the kernel still holds something, so nothing is left on any path. */
#define _GNU_SOURCE
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/wait.h>

#include "supervisor.h"

#define BUCKETS 4096u
#define TRIES_BEFORE_LOG 100u

static void handle_status(struct watch *watch, uint32_t events);

unsigned sandbox_count;
static struct sandbox *by_slot[SLOTS_MAX], *by_id[BUCKETS], *by_pid[BUCKETS];
static unsigned slots_end; /* no sandbox at or above */
static struct sandbox *removing; /* with no process left */

static const char *const stage_names[] = {
	[STAGE_REQUEST] = "request",	   [STAGE_USERNS] = "userns",	[STAGE_CGROUP] = "cgroup",	   [STAGE_CLONE] = "clone",
	[STAGE_POOL] = "pool",		   [STAGE_SPOOL] = "spool",	[STAGE_LAYERS] = "layers",	   [STAGE_NAMESPACES] = "namespaces",
	[STAGE_OVERLAY] = "overlay",	   [STAGE_PROC] = "proc",	[STAGE_DEV] = "dev",		   [STAGE_SYS] = "sys",
	[STAGE_MASKS] = "masks",	   [STAGE_NETWORK] = "network", [STAGE_PIVOT] = "pivot",	   [STAGE_SOCKET] = "socket",
	[STAGE_PRIVILEGES] = "privileges", [STAGE_SECCOMP] = "seccomp", [STAGE_EXEC] = "exec",		   [STAGE_CONNECT] = "connect",
	[STAGE_DESTROYED] = "destroyed",   [STAGE_READY] = "ready",
};

const char *stage_name(enum stage stage)
{
	return stage < COUNT(stage_names) ? stage_names[stage] : "unknown";
}

/* --- table -------------------------------------------------------------------------------------------------------- */

static unsigned hash(const char *text)
{
	unsigned value = 2166136261u;

	for (; *text; text++)
		value = (value ^ (unsigned char)*text) * 16777619u;
	return value % BUCKETS;
}

struct sandbox *sandbox_by_id(const char *id)
{
	struct sandbox *sandbox = by_id[hash(id)];

	while (sandbox && strcmp(sandbox->id, id) != 0)
		sandbox = sandbox->next_by_id;
	return sandbox;
}

struct sandbox *sandbox_by_slot(unsigned slot)
{
	return slot < slots_end ? by_slot[slot] : NULL;
}

unsigned sandbox_slots_end(void)
{
	return slots_end;
}

static void table_add(struct sandbox *sandbox)
{
	struct sandbox **bucket = &by_id[hash(sandbox->id)];

	sandbox->next_by_id = *bucket;
	*bucket = sandbox;
	by_slot[sandbox->slot] = sandbox;
	if (sandbox->slot >= slots_end)
		slots_end = sandbox->slot + 1;
	sandbox_count++;
}

static void table_remove(struct sandbox *sandbox)
{
	struct sandbox **link = &by_id[hash(sandbox->id)];

	while (*link != sandbox)
		link = &(*link)->next_by_id;
	*link = sandbox->next_by_id;
	by_slot[sandbox->slot] = NULL;
	while (slots_end > 0 && !by_slot[slots_end - 1])
		slots_end--;
	sandbox_count--;
}

static void pid_add(struct sandbox *sandbox)
{
	struct sandbox **bucket = &by_pid[(unsigned)sandbox->pid % BUCKETS];

	sandbox->next_by_pid = *bucket;
	*bucket = sandbox;
}

static struct sandbox *pid_take(pid_t pid)
{
	struct sandbox **link = &by_pid[(unsigned)pid % BUCKETS];

	while (*link && (*link)->pid != pid)
		link = &(*link)->next_by_pid;
	struct sandbox *sandbox = *link;
	if (sandbox)
		*link = sandbox->next_by_pid;
	return sandbox;
}

/* --- the end ------------------------------------------------------------------------------------------------------ */

static void answer_destroys(struct sandbox *sandbox)
{
	const struct counters *counters = &sandbox->counters;

	while (sandbox->destroys) {
		struct waiter *waiter = sandbox->destroys;
		struct reply *reply = reply_start("ok");
		reply_add(reply, "tag=%llu", (unsigned long long)waiter->tag);
		reply_add(reply, "oom_kills=%llu", (unsigned long long)counters->oom_kills);
		reply_add(reply, "cpu_ns=%llu", (unsigned long long)counters->cpu_ns);
		reply_add(reply, "memory_peak_bytes=%llu", (unsigned long long)counters->memory_peak_bytes);
		reply_send(reply, waiter);
		sandbox->destroys = waiter->next;
		free(waiter);
	}
}

static void forget(struct sandbox *sandbox)
{
	table_remove(sandbox);
	userns_release_slot(sandbox->slot);
	for (unsigned i = 0; i < sandbox->spec.layer_count; i++)
		sandbox->spec.layers[i]->users--;
	if (sandbox->create_pending)
		reply_error(&sandbox->create, stage_name(sandbox->failed_stage), sandbox->failed_errno, NULL);
	answer_destroys(sandbox);
	free(sandbox);
}

/* From here on the main loop tries until it is gone: handlers never free what their caller may still hold. */
static void removable(struct sandbox *sandbox)
{
	watch_close(&sandbox->status_fd), close_fd(&sandbox->listener_fd);
	sandbox->next_removing = removing;
	removing = sandbox;
}

/* Remove all of those whose processes are gone; true when something is left for later. */
bool sandbox_remove_ended(void)
{
	struct sandbox **link = &removing;

	while (*link) {
		struct sandbox *sandbox = *link;
		if (cgroup_remove(sandbox) == 0 && pool_remove(sandbox) == 0) {
			*link = sandbox->next_removing;
			forget(sandbox);
			continue;
		}
		if (++sandbox->remove_tries == TRIES_BEFORE_LOG)
			log_line("%s: still can't be removed: %s", sandbox->id, strerror(errno));
		link = &sandbox->next_removing;
	}
	return removing != NULL;
}

static void start_removal(struct sandbox *sandbox)
{
	if (sandbox->state == SANDBOX_REMOVING)
		return;
	if (sandbox->pid && sandbox->state == SANDBOX_RUNNING)
		userns_keep(sandbox->slot, sandbox->pid);
	/* The end of PID 1 is the end of every process of its namespace, frozen ones included. */
	if (sandbox->pid && kill(sandbox->pid, SIGKILL) < 0)
		log_line("%s: kill: %s", sandbox->id, strerror(errno));
	sandbox->state = SANDBOX_REMOVING;
	if (!sandbox->pid)
		removable(sandbox);
}

void sandbox_destroy(struct sandbox *sandbox, const struct waiter *waiter)
{
	if (waiter) {
		struct waiter *copy = malloc(sizeof(*copy));
		if (!copy) {
			reply_error(waiter, "destroy", ENOMEM, NULL);
			return;
		}
		*copy = *waiter;
		copy->next = sandbox->destroys;
		sandbox->destroys = copy;
	}
	if (sandbox->state == SANDBOX_STARTING) {
		sandbox->failed_stage = STAGE_DESTROYED;
		sandbox->failed_errno = ECANCELED;
	}
	start_removal(sandbox);
}

void sandbox_destroy_all(void)
{
	for (unsigned slot = 0; slot < slots_end; slot++)
		if (by_slot[slot])
			sandbox_destroy(by_slot[slot], NULL);
}

/* --- the start ---------------------------------------------------------------------------------------------------- */

/* The create is answered with this failure once nothing of it is left. */
static void fail_create(struct sandbox *sandbox, enum stage stage, int error)
{
	if (sandbox->state == SANDBOX_REMOVING)
		return;
	sandbox->failed_stage = stage;
	sandbox->failed_errno = error;
	start_removal(sandbox);
}

static uint64_t read_start_time(pid_t pid)
{
	char path[32], text[1024];
	unsigned long long start_time = 0;

	snprintf(path, sizeof(path), "/proc/%d/stat", pid);
	if (read_at(-1, path, text, sizeof(text)) <= 0)
		return 0;
	/* The name, field 2, may hold anything; field 3 follows its last parenthesis. */
	char *rest = strrchr(text, ')');
	if (rest)
		sscanf(rest + 1, " %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu", &start_time);
	return start_time;
}

static void become_running(struct sandbox *sandbox)
{
	enum stage failed = STAGE_CONNECT;

	sandbox->start_time = read_start_time(sandbox->pid);
	sandbox->state = SANDBOX_RUNNING;
	userns_started(sandbox->slot);
	reply_sandbox(sandbox, &sandbox->create, &failed);
	if (failed == STAGE_READY)
		sandbox->create_pending = false;
	else
		fail_create(sandbox, failed, errno);
}

/* Read what the launch child has said; at its end it has become the init, or is gone. */
static void read_status(struct sandbox *sandbox)
{
	struct launch_report report;
	int passed_fd, result;

	while (sandbox->status_fd >= 0 && (result = receive_report(sandbox->status_fd, &report, &passed_fd)) != 0) {
		if (result < 0 && errno != EAGAIN)
			break;
		if (result < 0)
			return;
		if (report.stage == STAGE_READY && sandbox->state == SANDBOX_STARTING) {
			sandbox->listener_fd = passed_fd;
			become_running(sandbox);
			continue;
		}
		close_fd(&passed_fd);
		if (sandbox->state == SANDBOX_STARTING)
			fail_create(sandbox, (enum stage)report.stage, report.error);
		else
			log_line("%s: %s: %s", sandbox->id, stage_name((enum stage)report.stage), strerror(report.error));
	}
	watch_close(&sandbox->status_fd);
}

static void handle_status(struct watch *watch, uint32_t events)
{
	(void)events;
	read_status(container_of(watch, struct sandbox, status));
}

static void begin(struct sandbox *sandbox)
{
	int userns_fd = options.no_userns ? -1 : userns_open(sandbox->slot);

	if (!options.no_userns && userns_fd < 0) {
		fail_create(sandbox, STAGE_USERNS, errno);
		return;
	}
	CLEANUP_FD int cgroup_fd = cgroup_make_init(sandbox);
	if (cgroup_fd < 0) {
		fail_create(sandbox, STAGE_CGROUP, errno);
		return;
	}
	if (launch(sandbox, userns_fd, cgroup_fd) < 0) {
		fail_create(sandbox, STAGE_CLONE, errno);
		return;
	}
	pid_add(sandbox);
	if (watch_add(&sandbox->status, sandbox->status_fd, EPOLLIN) < 0)
		fail_create(sandbox, STAGE_CLONE, errno);
}

/* Answers the request now or later. */
void sandbox_create(const char *id, const struct spec *spec, uint64_t tag)
{
	struct waiter waiter = node_waiter(tag);
	struct sandbox *sandbox = calloc(1, sizeof(*sandbox));
	int slot = sandbox ? userns_take_slot() : -1;

	if (slot < 0) {
		free(sandbox);
		reply_error(&waiter, stage_name(STAGE_USERNS), sandbox ? EAGAIN : ENOMEM, NULL);
		return;
	}
	snprintf(sandbox->id, sizeof(sandbox->id), "%s", id);
	sandbox->slot = (unsigned)slot;
	sandbox->uid_base = options.no_userns ? 0 : UID_FIRST + sandbox->slot * UIDS_PER_SLOT;
	sandbox->spec = *spec;
	sandbox->status.handle = handle_status;
	sandbox->status_fd = sandbox->listener_fd = -1;
	sandbox->create = waiter;
	sandbox->create_pending = true;
	for (unsigned i = 0; i < spec->layer_count; i++)
		spec->layers[i]->users++;
	table_add(sandbox);
	begin(sandbox);
}

/* --- ends that come by themselves --------------------------------------------------------------------------------- */

static void ended(struct sandbox *sandbox, int wstatus)
{
	/* The number may name another process from now on. */
	sandbox->pid = 0;
	sandbox->wstatus = wstatus;
	cgroup_read_counters(sandbox);
	if (sandbox->state == SANDBOX_REMOVING) {
		removable(sandbox);
		return;
	}
	/* Its last words: a child that failed reports and exits at once. */
	read_status(sandbox);
	switch (sandbox->state) {
	case SANDBOX_STARTING: fail_create(sandbox, STAGE_CLONE, ECHILD); break;
	case SANDBOX_RUNNING:
		sandbox->state = SANDBOX_ENDED;
		close_fd(&sandbox->listener_fd);
		event_exit(sandbox);
		break;
	case SANDBOX_ENDED:
	case SANDBOX_REMOVING: break;
	}
}

void sandbox_reap(void)
{
	int wstatus;
	pid_t pid;

	/* Orphans of other kinds come here too, to a subreaper; they need no more than this. */
	while ((pid = waitpid(-1, &wstatus, WNOHANG)) > 0) {
		struct sandbox *sandbox = pid_take(pid);
		if (sandbox)
			ended(sandbox, wstatus);
	}
}

/* To a node that has just come: what ended while none was there. */
void sandbox_announce_ended(void)
{
	for (unsigned slot = 0; slot < slots_end; slot++)
		if (by_slot[slot] && by_slot[slot]->state == SANDBOX_ENDED)
			event_exit(by_slot[slot]);
}
