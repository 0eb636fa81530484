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

#include "../criu/restore.h"
#include "supervisor.h"

#define BUCKETS 4096u
#define TRIES_BEFORE_LOG 100u

static void handle_status(struct watch *watch, uint32_t events);

unsigned sandbox_count, sandbox_starting;
static struct sandbox *by_slot[SLOTS_MAX], *by_id[BUCKETS];
static unsigned slots_end; /* no sandbox at or above */
static struct sandbox *removing; /* with no process left */

static const char *const stage_names[] = {
	[STAGE_REQUEST] = "request",	   [STAGE_USERNS] = "userns",	[STAGE_CGROUP] = "cgroup",	   [STAGE_CLONE] = "clone",
	[STAGE_POOL] = "pool",		   [STAGE_SPOOL] = "spool",	[STAGE_LAYERS] = "layers",	   [STAGE_NAMESPACES] = "namespaces",
	[STAGE_OVERLAY] = "overlay",	   [STAGE_PROC] = "proc",	[STAGE_DEV] = "dev",		   [STAGE_SYS] = "sys",
	[STAGE_MASKS] = "masks",	   [STAGE_NETWORK] = "network", [STAGE_PIVOT] = "pivot",	   [STAGE_SOCKET] = "socket",
	[STAGE_PRIVILEGES] = "privileges", [STAGE_SECCOMP] = "seccomp", [STAGE_EXEC] = "exec",		   [STAGE_CONNECT] = "connect",
	[STAGE_RESTORE] = "restore",
	[STAGE_DESTROYED] = "destroyed",   [STAGE_SLOT] = "slot",	[STAGE_READY] = "ready",
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

/* What a slot fails at may be the slot's doing: whoever asked tries again without one. */
static void reply_failure(const struct sandbox *sandbox)
{
	enum stage stage = sandbox->failed_stage;

	if (sandbox->as_slot.is_slot && stage != STAGE_DESTROYED)
		reply_error(&sandbox->create, stage_name(STAGE_SLOT), sandbox->failed_errno, stage_name(stage));
	else
		reply_error(&sandbox->create, stage_name(stage), sandbox->failed_errno, NULL);
}

static void forget(struct sandbox *sandbox)
{
	table_remove(sandbox);
	memory_forget(sandbox);
	userns_release_slot(sandbox->slot);
	for (unsigned i = 0; i < sandbox->spec.layer_count; i++)
		sandbox->spec.layers[i]->users--;
	if (sandbox->create_pending)
		reply_failure(sandbox);
	answer_destroys(sandbox);
	free(sandbox);
}

/* From here on the main loop tries until it is gone: handlers never free what their caller may still hold. */
static void removable(struct sandbox *sandbox)
{
	child_gone(sandbox);
	watch_close(&sandbox->status_fd), close_fd(&sandbox->listener_fd);
	slot_close(sandbox);
	sandbox->next_removing = removing;
	removing = sandbox;
}

/* Remove all of those whose processes are gone; true when something is left for later. */
bool sandbox_remove_ended(void)
{
	struct sandbox **link = &removing;

	while (*link) {
		struct sandbox *sandbox = *link;
		if (sandbox->spec.zygote[0])
			zygote_end_strays(sandbox);
		if (sandbox->as_slot.keeper_pidfd < 0 && cgroup_remove(sandbox) == 0 && pool_remove(sandbox) == 0) {
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
	if (sandbox->state == SANDBOX_STARTING)
		sandbox_starting--;
	if (sandbox->state == SANDBOX_FILLING || sandbox->state == SANDBOX_SLOT)
		slot_ended(sandbox);
	if (sandbox->pid && (sandbox->state == SANDBOX_RUNNING || sandbox->state == SANDBOX_SLOT) && !zygote_has_userns(sandbox))
		userns_keep(sandbox->slot, sandbox->pid);
	/* The end of PID 1 is the end of every process of its namespace, frozen ones included. */
	if (sandbox->pid && kill(sandbox->pid, SIGKILL) < 0)
		log_line("%s: kill: %s", sandbox->id, strerror(errno));
	if (sandbox->pid)
		child_killed(sandbox);
	/* CRIU, or what is left of what it has made so far; the removal waits until they are gone. */
	if (sandbox->state == SANDBOX_STARTING && cgroup_kill(sandbox->id) < 0)
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
void sandbox_fail(struct sandbox *sandbox, enum stage stage, int error)
{
	if (sandbox->state == SANDBOX_REMOVING)
		return;
	sandbox->failed_stage = stage;
	sandbox->failed_errno = error;
	start_removal(sandbox);
}

void sandbox_started(struct sandbox *sandbox)
{
	enum stage failed = STAGE_CONNECT;

	if (!sandbox->start_time)
		sandbox->start_time = read_start_time(sandbox->pid);
	sandbox->state = SANDBOX_RUNNING;
	sandbox_starting--;
	userns_started(sandbox->slot);
	reply_sandbox(sandbox, &sandbox->create, &failed);
	if (failed == STAGE_READY)
		sandbox->create_pending = false;
	else
		sandbox_fail(sandbox, failed, errno);
}

/* Nothing more is said of a start inside a zygote's: all of it has died, and its init perhaps before its pid was known. */
static void lost_inside(struct sandbox *sandbox)
{
	if (sandbox->pid)
		child_take(sandbox->pid);
	sandbox->pid = 0;
	sandbox_fail(sandbox, STAGE_CLONE, ECHILD);
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
			sandbox_started(sandbox);
			continue;
		}
		if (report.stage == STAGE_EXEC && !report.error && sandbox->state == SANDBOX_STARTING) {
			sandbox->listener_fd = passed_fd;
			continue;
		}
		close_fd(&passed_fd);
		if (report.stage == REPORT_HELPER) {
			child_helps(report.error);
			continue;
		}
		if (report.stage == RESTORE_DONE && sandbox->spec.zygote[0] && !zygote_child_exists(report.error))
			break;
		if (report.stage == RESTORE_DONE && sandbox->state == SANDBOX_STARTING && !sandbox->pid) {
			sandbox->pid = report.error;
			child_add(sandbox);
			continue;
		}
		if (report.stage == STAGE_READY && sandbox->state == SANDBOX_FILLING) {
			sandbox->as_slot.is_launched = true;
			continue;
		}
		if (report.stage == RESTORE_FAILED)
			report.stage = STAGE_RESTORE;
		if (sandbox->state == SANDBOX_STARTING || sandbox->state == SANDBOX_FILLING)
			sandbox_fail(sandbox, (enum stage)report.stage, report.error);
		else
			log_line("%s: %s: %s", sandbox->id, stage_name((enum stage)report.stage), strerror(report.error));
	}
	watch_close(&sandbox->status_fd);
	if (sandbox->spec.zygote[0] && sandbox->state == SANDBOX_STARTING)
		lost_inside(sandbox);
	if (sandbox->state == SANDBOX_FILLING && sandbox->pid && sandbox->as_slot.is_launched)
		slot_filled(sandbox);
}

static void handle_status(struct watch *watch, uint32_t events)
{
	(void)events;
	read_status(container_of(watch, struct sandbox, status));
}

static void begin(struct sandbox *sandbox, const struct restore *restore)
{
	CLEANUP_FD int own_userns_fd = zygote_has_userns(sandbox) ? zygote_userns(sandbox) : -1;
	int userns_fd = zygote_has_userns(sandbox) ? own_userns_fd : options.no_userns ? -1 : userns_open(sandbox->slot);

	if (!options.no_userns && userns_fd < 0) {
		sandbox_fail(sandbox, STAGE_USERNS, errno);
		return;
	}
	CLEANUP_FD int cgroup_fd = cgroup_make_init(sandbox);
	if (cgroup_fd < 0) {
		sandbox_fail(sandbox, STAGE_CGROUP, errno);
		return;
	}
	int (*const start)(struct sandbox *, int, int) = sandbox->spec.zygote[0] ? launch_inside : launch;
	if ((restore ? memory_restore(sandbox, userns_fd, cgroup_fd, restore) : start(sandbox, userns_fd, cgroup_fd)) < 0) {
		sandbox_fail(sandbox, STAGE_CLONE, errno);
		return;
	}
	if (sandbox->pid)
		child_add(sandbox);
	if (watch_add(&sandbox->status, sandbox->status_fd, EPOLLIN) < 0)
		sandbox_fail(sandbox, STAGE_CLONE, errno);
}

/* NULL with errno; else the caller puts it into the table and begins it. */
static struct sandbox *make(const char *id, const struct spec *spec, enum sandbox_state state)
{
	struct sandbox *sandbox = calloc(1, sizeof(*sandbox));
	int slot = sandbox ? userns_take_slot() : -1;

	if (slot < 0) {
		free(sandbox);
		return NULL;
	}
	snprintf(sandbox->id, sizeof(sandbox->id), "%s", id);
	sandbox->state = state;
	sandbox->slot = (unsigned)slot;
	sandbox->uid_base = options.no_userns ? 0 : UID_FIRST + sandbox->slot * UIDS_PER_SLOT;
	sandbox->spec = *spec;
	sandbox->status.handle = handle_status;
	sandbox->status_fd = sandbox->listener_fd = -1;
	sandbox->as_slot = (struct slot){.keeper_fd = -1, .keeper_pidfd = -1, .init_fd = -1};
	return sandbox;
}

/* From here on it is somebody's: the request is answered when it runs or has failed. */
static void answer_later(struct sandbox *sandbox, const struct waiter *waiter)
{
	sandbox->create = *waiter;
	sandbox->create_pending = true;
	sandbox_starting++;
	for (unsigned i = 0; i < sandbox->spec.layer_count; i++)
		sandbox->spec.layers[i]->users++;
}

static void start(const char *id, const struct spec *spec, const struct restore *restore, uint64_t tag)
{
	struct waiter waiter = node_waiter(tag);
	struct sandbox *sandbox = make(id, spec, SANDBOX_STARTING);

	if (!sandbox) {
		reply_error(&waiter, stage_name(STAGE_USERNS), errno, NULL);
		return;
	}
	answer_later(sandbox, &waiter);
	table_add(sandbox);
	begin(sandbox, restore);
}

/* Answers the request now or later. */
void sandbox_create(const char *id, const struct spec *spec, uint64_t tag)
{
	start(id, spec, NULL, tag);
}

void sandbox_restore(const char *id, const struct spec *spec, const struct restore *restore, uint64_t tag)
{
	start(id, spec, restore, tag);
}

/* A slot: all of a sandbox but what it is to be. */
int sandbox_fill(const char *id, const struct spec *spec)
{
	struct sandbox *sandbox = make(id, spec, SANDBOX_FILLING);

	if (!sandbox)
		return -1;
	sandbox->as_slot.is_slot = true;
	sandbox->as_slot.began_ns = monotonic_ns();
	table_add(sandbox);
	begin(sandbox, NULL);
	return 0;
}

/* Answers the request later. */
void sandbox_claim(struct sandbox *slot, const struct spec *spec, uint64_t tag)
{
	struct waiter waiter = node_waiter(tag);

	slot->spec = *spec;
	slot->state = SANDBOX_STARTING;
	answer_later(slot, &waiter);
	if (slot_claim(slot) < 0)
		sandbox_fail(slot, STAGE_SLOT, errno);
}

/* CRIU has ended. */
void sandbox_restored(struct sandbox *sandbox, int error)
{
	if (sandbox->state != SANDBOX_STARTING)
		return;
	/* Its last words, and a report of what was restored. */
	read_status(sandbox);
	if (sandbox->state != SANDBOX_STARTING)
		return;
	if (!error && !sandbox->pid)
		error = ESRCH;
	if (!error && cgroup_limit_guest(sandbox) < 0)
		error = errno;
	if (error)
		sandbox_fail(sandbox, STAGE_RESTORE, error);
	else
		sandbox_started(sandbox);
}

/* --- ends that come by themselves --------------------------------------------------------------------------------- */

/* Its process was reaped. */
void sandbox_ended(struct sandbox *sandbox, int wstatus)
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
	case SANDBOX_FILLING:
	case SANDBOX_SLOT: start_removal(sandbox); break;
	case SANDBOX_STARTING: sandbox_fail(sandbox, STAGE_CLONE, ECHILD); break;
	case SANDBOX_RUNNING:
		sandbox->state = SANDBOX_ENDED;
		close_fd(&sandbox->listener_fd);
		event_exit(sandbox);
		break;
	case SANDBOX_ENDED:
	case SANDBOX_REMOVING: break;
	}
}

/* To a node that has just come: what ended while none was there. */
void sandbox_announce_ended(void)
{
	for (unsigned slot = 0; slot < slots_end; slot++)
		if (by_slot[slot] && by_slot[slot]->state == SANDBOX_ENDED)
			event_exit(by_slot[slot]);
}
