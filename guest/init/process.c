/* What was started: remembered for the sandbox's life, found by handle, id and pid; reaping, cgroups, backstops. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>

#include "init.h"

enum {
	PID_BUCKETS = 1024,
	CGROUP_TRIES_PER_ROUND = 16,
	SPOOL_RING_MIN = 16 << 10,
};

struct counters counters;

static struct process **by_handle;	/* handle - 1 */
static uint32_t by_handle_size;
static struct process **by_id;		/* by_id_size is a power of two */
static uint32_t by_id_size;
static struct process *by_pid[PID_BUCKETS];

struct queue {
	struct process *first, **end;
};
static struct queue dirty, ended, lingering;
static bool reaped;			/* since cgroups were last looked at */
static uint64_t next_backstop_ns;	/* no deadline is earlier; 0: none */
static bool backstops_held;

static struct process **id_bucket(struct span id)
{
	return &by_id[siphash128(settings.key, id.data, id.len).low & (by_id_size - 1)];
}

static struct span id_of(const struct process *process)
{
	return (struct span){.data = (const uint8_t *)process->id, .len = (uint32_t)strlen(process->id)};
}

struct process *process_by_id(struct span id)
{
	if (by_id_size == 0)
		return NULL;
	for (struct process *p = *id_bucket(id); p != NULL; p = p->next_by_id)
		if (strlen(p->id) == id.len && memcmp(p->id, id.data, id.len) == 0)
			return p;
	return NULL;
}

struct process *process_by_handle(uint32_t handle)
{
	return handle >= 1 && handle <= counters.total ? by_handle[handle - 1] : NULL;
}

static bool grow_by_handle(void)
{
	uint32_t size = by_handle_size ? by_handle_size * 2 : 64;
	struct process **larger;

	if (counters.total < by_handle_size)
		return true;
	larger = realloc(by_handle, size * sizeof *larger);
	if (larger == NULL)
		return false;
	by_handle = larger;
	by_handle_size = size;
	return true;
}

static bool grow_by_id(void)
{
	uint32_t size = by_id_size ? by_id_size * 2 : 64;
	struct process **larger;

	if (counters.total < by_id_size)
		return true;
	larger = calloc(size, sizeof *larger);
	if (larger == NULL)
		return false;
	free(by_id);
	by_id = larger;
	by_id_size = size;
	for (uint32_t i = 0; i < counters.total; i++) {
		struct process **bucket = id_bucket(id_of(by_handle[i]));

		by_handle[i]->next_by_id = *bucket;
		*bucket = by_handle[i];
	}
	return true;
}

/* A record with the next handle; nothing finds it before process_started. NULL: no memory. */
struct process *process_new(const struct start *start, const struct digest *digest)
{
	struct process *process;

	if (!grow_by_handle() || !grow_by_id())
		return NULL;
	process = calloc(1, sizeof *process);
	if (process == NULL)
		return NULL;
	process->id = strndup((const char *)start->id.data, start->id.len);
	if (process->id == NULL) {
		free(process);
		return NULL;
	}
	process->handle = counters.total + 1;
	process->digest = *digest;
	process->kind = start->kind;
	process->leaf = start->flags & START_PLATFORM ? LEAF_PLATFORM : LEAF_GUEST;
	process->has_cgroup = is_program(start->kind) && leaves[process->leaf].dir >= 0;
	for (uint8_t i = 0; i < 2; i++) {
		struct stream *stream = &process->out[i];

		stream_init(stream, process, i);
		stream->spool.limit = (uint32_t)max_u64(start->spool_bytes, SPOOL_RING_MIN);
		stream->block = start->flags & START_BLOCK;
	}
	return process;
}

void process_discard(struct process *process)
{
	for (int i = 0; i < 2; i++)
		loop_close(&process->out[i].source);
	if (process->input != NULL) {
		input_close(process->input);
		close_fd(&process->input->peer);
	}
	free(process->input);
	free(process->id);
	free(process);
}

void process_started(struct process *process, pid_t pid)
{
	struct process **bucket = id_bucket(id_of(process));

	process->pid = pid;
	process->next_by_id = *bucket;
	*bucket = process;
	process->next_by_pid = by_pid[pid % PID_BUCKETS];
	by_pid[pid % PID_BUCKETS] = process;
	by_handle[counters.total++] = process;
	counters.running++;
	if (process->backstop_ns != 0 && (next_backstop_ns == 0 || process->backstop_ns < next_backstop_ns))
		next_backstop_ns = process->backstop_ns;
}

static void queue_add(struct queue *queue, struct process *process, struct process **link)
{
	if (queue->first == NULL)
		queue->end = &queue->first;
	*link = NULL;
	*queue->end = process;
	queue->end = link;
}

void process_mark_dirty(struct process *process)
{
	if (process->dirty || !process->follow)
		return;
	process->dirty = true;
	queue_add(&dirty, process, &process->next_dirty);
}

struct process *process_next_dirty(void)
{
	struct process *process = dirty.first;

	if (process != NULL) {
		dirty.first = process->next_dirty;
		process->dirty = false;
	}
	return process;
}

/* The connection is gone: nobody follows, nobody waits for an answer. */
void process_unfollow_all(void)
{
	while (process_next_dirty() != NULL)
		;
	for (uint32_t i = 0; i < counters.total; i++) {
		by_handle[i]->follow = false;
		if (by_handle[i]->input != NULL)
			input_forget_replies(by_handle[i]->input);
	}
}

/* Free the output of the longest-ended process that still has some. */
bool process_evict_oldest(void)
{
	struct process *process;

	while ((process = ended.first) != NULL) {
		bool freed = false;

		ended.first = process->next_ended;
		for (int i = 0; i < 2; i++)
			freed |= spool_drop(&process->out[i].spool);
		if (freed)
			return true;
	}
	return false;
}

static struct process *take_by_pid(pid_t pid)
{
	for (struct process **at = &by_pid[pid % PID_BUCKETS]; *at != NULL; at = &(*at)->next_by_pid) {
		struct process *process = *at;

		if (process->pid == pid) {
			*at = process->next_by_pid;
			return process;
		}
	}
	return NULL;
}

static uint64_t micros(const struct timeval *tv)
{
	return (uint64_t)tv->tv_sec * 1000000u + (uint64_t)tv->tv_usec;
}

static void process_ended(struct process *process, int wstatus, const struct rusage *usage)
{
	process->exited = true;
	process->wstatus = wstatus;
	process->utime_us = micros(&usage->ru_utime);
	process->stime_us = micros(&usage->ru_stime);
	process->maxrss_kib = (uint64_t)usage->ru_maxrss;
	process->ended_ns = now_ns();
	counters.running--;
	if (process->input != NULL)
		close_fd(&process->input->peer);
	for (int i = 0; i < 2; i++)
		stream_drain(&process->out[i]);
	queue_add(&ended, process, &process->next_ended);
	if (process->has_cgroup)
		queue_add(&lingering, process, &process->next_lingering);
	process_mark_dirty(process);
}

void process_reap_all(void)
{
	struct rusage usage;
	int wstatus;
	pid_t pid;

	while ((pid = wait4(-1, &wstatus, WNOHANG, &usage)) > 0) {
		struct process *process = take_by_pid(pid);

		reaped = true;
		if (process != NULL)
			process_ended(process, wstatus, &usage);
		else
			counters.orphans_reaped++;
	}
}

void process_cgroup_name(char out[16], uint32_t handle)
{
	snprintf(out, 16, "p%u", handle);
}

/* Remove the cgroups of ended processes. One that background children still populate goes to the end of the queue;
 * it is tried again after later reaps, the first of which is that of its last member. */
void process_remove_cgroups(void)
{
	struct process *last = NULL;
	char name[16];

	if (!reaped)
		return;
	reaped = false;
	for (int i = 0; i < CGROUP_TRIES_PER_ROUND && lingering.first != NULL && lingering.first != last; i++) {
		struct process *process = lingering.first;
		int dir = leaves[process->leaf].dir;

		if (dir < 0)
			return;	/* detached: the next HELLO brings the directory back */
		lingering.first = process->next_lingering;
		process_cgroup_name(name, process->handle);
		if (unlinkat(dir, name, AT_REMOVEDIR) != 0 && errno == EBUSY) {
			queue_add(&lingering, process, &process->next_lingering);
			last = last ? last : process;
		} else {
			process->has_cgroup = false;
		}
	}
}

/* Kill what ran past its backstop, and find the next deadline. */
void process_check_backstops(void)
{
	uint64_t now, next = 0;

	if (backstops_held || next_backstop_ns == 0 || (now = now_ns()) < next_backstop_ns)
		return;
	for (int i = 0; i < PID_BUCKETS; i++) {
		for (struct process *p = by_pid[i]; p != NULL; p = p->next_by_pid) {
			if (p->backstop_ns != 0 && p->backstop_ns <= now) {
				p->backstop_ns = 0;
				signal_scope(p, SIGKILL, SCOPE_ALL);
			}
			if (p->backstop_ns != 0 && (next == 0 || p->backstop_ns < next))
				next = p->backstop_ns;
		}
	}
	next_backstop_ns = next;
}

int process_backstop_wait_ms(void)
{
	uint64_t now;

	if (backstops_held || next_backstop_ns == 0)
		return -1;
	now = now_ns();
	return next_backstop_ns <= now ? 0 : (int)min_u64((next_backstop_ns - now) / 1000000 + 1, 60000);
}

/* The guest is about to stand still: so do its backstops, until the thaw. */
void process_hold(void)
{
	backstops_held = true;
}

/* Time in which the sandbox did not run does not count. */
void process_thaw(uint64_t frozen_ns)
{
	backstops_held = false;
	frozen_ns = min_u64(frozen_ns, now_ns());
	for (int i = 0; i < PID_BUCKETS; i++)
		for (struct process *p = by_pid[i]; p != NULL; p = p->next_by_pid)
			if (p->backstop_ns != 0)
				p->backstop_ns += frozen_ns;
}
