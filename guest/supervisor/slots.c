/* Slots: sandboxes that lack only what makes one differ from another, made before anybody asks for one.
 *
 * A slot has a process, the init, in all its namespaces and cgroups, with a writable layer and a spool; its root is an empty one. Beside
 * it a keeper waits, a process of the host's root. A create that names a slot is a claim: the keeper sets limits and names, puts
 * the root together and swaps it in, and ends. So neither the supervisor nor another claim waits for a slow layer.
 *
 * Only the node that asked for slots knows their ids. With its connection they go. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/sched.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "supervisor.h"

#define FILL_EVERY_NS (4 * NS_PER_MS)	/* so that filling never takes more than about half a processor */
#define CLAIM_QUIET_NS (3 * NS_PER_MS)	/* what was claimed runs its first program meanwhile */
#define FAILED_WAIT_NS (1 * NS_PER_S)
#define OWN_FDS 9u /* a keeper's; and stderr */

static unsigned wanted, ready, filling;
static char prefix[SLOT_PREFIX_MAX + 1];
static int64_t next_fill_ns;
static bool dropping;
static struct spec expected = {.hostname = "slot", .shm_bytes = SLOT_SHM_BYTES}; /* with the limits of the latest create */
static struct {
	uint64_t filled, claimed, cold, died, fill_us_sum;
} totals;

/* What the keeper is told; the layers' mounts come along as descriptors. */
struct claim {
	struct spec spec;
};

/* --- how many there are ------------------------------------------------------------------------------------------- */

static void drop_to(unsigned count)
{
	dropping = true;
	for (unsigned at = 0; ready + filling > count && at < sandbox_slots_end(); at++) {
		struct sandbox *sandbox = sandbox_by_slot(at);
		if (sandbox && (sandbox->state == SANDBOX_SLOT || sandbox->state == SANDBOX_FILLING))
			sandbox_destroy(sandbox, NULL);
	}
	dropping = false;
}

/* Keep so many ready; those of another prefix, and those beyond, go. */
void slots_set(unsigned count, const char *new_prefix)
{
	if (strcmp(prefix, new_prefix) != 0)
		slots_drop();
	snprintf(prefix, sizeof(prefix), "%s", new_prefix);
	wanted = count;
	drop_to(count);
}

void slots_drop(void)
{
	wanted = 0;
	drop_to(0);
}

void slots_describe(struct reply *reply)
{
	reply_add(reply, "ready=%u", ready);
	reply_add(reply, "filling=%u", filling);
	reply_add(reply, "filled=%llu", (unsigned long long)totals.filled);
	reply_add(reply, "claimed=%llu", (unsigned long long)totals.claimed);
	reply_add(reply, "cold=%llu", (unsigned long long)totals.cold);
	reply_add(reply, "died=%llu", (unsigned long long)totals.died);
	reply_add(reply, "fill_us=%llu", (unsigned long long)(totals.filled ? totals.fill_us_sum / totals.filled : 0));
}

/* One that was announced, and ended before the announcement of that came. */
bool slot_can_be_late(const struct sandbox *sandbox)
{
	return sandbox->as_slot.is_slot && sandbox->state == SANDBOX_REMOVING && !sandbox->create_pending;
}

/* Most creates are like the one before, and setting limits takes longer the more groups there are. */
static void copy_limits(struct spec *to, const struct spec *from)
{
	to->memory_bytes = from->memory_bytes;
	to->pids = from->pids;
	to->cpu_us = from->cpu_us;
	to->upper_bytes = from->upper_bytes;
}

static bool has_group_limits(const struct spec *slot, const struct spec *asked)
{
	return slot->memory_bytes == asked->memory_bytes && slot->pids == asked->pids && slot->cpu_us == asked->cpu_us;
}

/* Answers the request now or later. */
void slots_create(const char *id, const struct spec *spec, const struct waiter *waiter)
{
	struct sandbox *slot = sandbox_by_id(id);
	bool is_cold = spec->capable_root || spec->batch || *spec->zygote || spec->is_zygote;

	if (slot && is_cold) {
		reply_error(waiter, stage_name(STAGE_SLOT), EINVAL, "a slot has no capable root and no warm interpreter, and is not batch");
		return;
	}
	totals.claimed += slot != NULL;
	totals.cold += slot == NULL;
	if (!is_cold)
		copy_limits(&expected, spec);
	if (slot)
		sandbox_claim(slot, spec, waiter->tag);
	else
		sandbox_create(id, spec, waiter->tag);
}

/* Begin one more slot if it is time; when it is, INT64_MAX if other things have to happen first. One at a time, and only while no
 * create is under way: those are waited for. */
int64_t slots_fill(int64_t now_ns)
{
	char id[ID_MAX + 1];
	uint64_t number;

	if (ready + filling >= wanted || filling > 0 || sandbox_starting > 0)
		return INT64_MAX;
	if (next_fill_ns > now_ns)
		return next_fill_ns;
	next_fill_ns = now_ns + FILL_EVERY_NS;
	if (getrandom(&number, sizeof(number), 0) != sizeof(number))
		return next_fill_ns;
	snprintf(id, sizeof(id), "%s%012llx", prefix, (unsigned long long)(number >> 16));
	if (sandbox_by_id(id))
		return next_fill_ns;
	filling++;
	if (sandbox_fill(id, &expected) < 0) {
		filling--;
		next_fill_ns = now_ns + FAILED_WAIT_NS;
		log_line("filling a slot: %s", strerror(errno));
		return next_fill_ns;
	}
	return INT64_MAX;
}

/* One goes that was not claimed. */
void slot_ended(const struct sandbox *sandbox)
{
	bool was_ready = sandbox->state == SANDBOX_SLOT;

	if (was_ready) {
		ready--;
		event_slot(sandbox, false);
	} else {
		filling--;
	}
	if (dropping || sandbox->destroys)
		return;
	totals.died++;
	next_fill_ns = monotonic_ns() + FAILED_WAIT_NS;
	if (was_ready)
		log_line("%s: a slot ended that was ready", sandbox->id);
	else
		log_line("%s: a slot ended: %s: %s", sandbox->id, stage_name(sandbox->failed_stage), strerror(sandbox->failed_errno));
}

/* The sandbox is not gone before its keeper is. */
void slot_close(struct sandbox *sandbox)
{
	struct slot *slot = &sandbox->as_slot;

	if (slot->keeper_pidfd >= 0 && syscall(SYS_pidfd_send_signal, slot->keeper_pidfd, SIGKILL, NULL, 0) < 0 && errno != ESRCH)
		log_line("%s: ending a keeper: %s", sandbox->id, strerror(errno));
	watch_close(&slot->keeper_fd);
	close_fd(&slot->init_fd);
}

/* --- the keeper --------------------------------------------------------------------------------------------------- */

/* Descriptors that a keeper needs; -1 for those it can do without. */
struct kept {
	int report, userns, upper, mount_ns, net_ns, uts_ns;
	int pool;
	int own_ns; /* open until its end: a mount namespace that is left for good has to be taken apart at once */
};

static int compare(const void *left, const void *right)
{
	return *(const int *)left - *(const int *)right;
}

static unsigned add_cgroups(int fds[HIERARCHIES])
{
	for (int i = 0; i < HIERARCHIES; i++)
		fds[i] = cgroup_base(i);
	return HIERARCHIES;
}

/* It waits for long: what it held beside that would stay open as long. */
static int close_others(const struct kept *kept)
{
	int fds[OWN_FDS + HIERARCHIES] = {STDERR_FILENO, kept->report, kept->userns, kept->upper, kept->mount_ns, kept->net_ns, kept->uts_ns, kept->own_ns,
						kept->pool};
	unsigned count = OWN_FDS + add_cgroups(fds + OWN_FDS);
	int next = 0;

	qsort(fds, count, sizeof(*fds), compare);
	for (unsigned i = 0; i < count; i++) {
		if (fds[i] < 0)
			continue;
		if (fds[i] > next && close_range((unsigned)next, (unsigned)fds[i] - 1, 0) < 0)
			return -1;
		next = fds[i] + 1;
	}
	return close_range((unsigned)next, ~0U, 0);
}

static int open_namespace(pid_t pid, const char *name)
{
	char path[48];

	snprintf(path, sizeof(path), "/proc/%d/ns/%s", pid, name);
	return open(path, O_RDONLY | O_CLOEXEC);
}

/* 0: told; -1 with errno, 0 when the supervisor's end was closed. Layers get the descriptors that came along. */
static int wait_for_claim(int fd, struct spec *spec, struct layer layers[LAYERS_MAX])
{
	struct claim claim;
	struct iovec vector = {&claim, sizeof(claim)};
	union {
		struct cmsghdr header;
		char space[CMSG_SPACE(sizeof(int) * LAYERS_MAX)];
	} control;
	struct msghdr message = {.msg_iov = &vector, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control)};
	int fds[LAYERS_MAX];
	ssize_t length = recvmsg(fd, &message, MSG_CMSG_CLOEXEC);

	if (length <= 0)
		return length < 0 ? -1 : (errno = 0, -1);
	struct cmsghdr *header = CMSG_FIRSTHDR(&message);
	if (length != sizeof(claim) || !header || header->cmsg_len != CMSG_LEN(sizeof(int) * claim.spec.layer_count))
		return errno = EPROTO, -1;
	memcpy(fds, CMSG_DATA(header), sizeof(int) * claim.spec.layer_count);
	*spec = claim.spec;
	for (unsigned i = 0; i < spec->layer_count; i++) {
		layers[i].fd = fds[i];
		spec->layers[i] = &layers[i];
	}
	return 0;
}

/* Returns the listener of a network that has one, or -1. */
static int make_names(const struct spec *spec, const struct kept *kept)
{
	enter_stage(STAGE_NETWORK);
	must(setns(kept->uts_ns, CLONE_NEWUTS));
	must(sethostname(spec->hostname, strlen(spec->hostname)));
	if (options.no_netns || spec->network != NETWORK_PROXY)
		return -1;
	must(setns(kept->net_ns, CLONE_NEWNET));
	return listen_for_proxy();
}

static _Noreturn void keep(struct sandbox *sandbox, struct kept *kept)
{
	static struct layer layers[LAYERS_MAX];
	static struct spec made;

	kept->upper = pool_open_upper(sandbox);
	kept->pool = pool_descriptor();
	kept->mount_ns = open_namespace(sandbox->pid, "mnt");
	kept->uts_ns = open_namespace(sandbox->pid, "uts");
	kept->net_ns = options.no_netns ? -1 : open_namespace(sandbox->pid, "net");
	if (die_with_supervisor() < 0 || kept->upper < 0 || kept->mount_ns < 0 || kept->uts_ns < 0 ||
	    (kept->net_ns < 0 && !options.no_netns) || (detached_clones && unshare(CLONE_NEWNS) < 0))
		_exit(1);
	kept->own_ns = open("/proc/self/ns/mnt", O_RDONLY | O_CLOEXEC);
	if (kept->own_ns < 0 || close_others(kept) < 0)
		_exit(1);
	copy_limits(&made, &sandbox->spec);
	if (wait_for_claim(kept->report, &sandbox->spec, layers) < 0)
		_exit(errno ? 1 : 0);
	report_to(kept->report);
	enter_stage(STAGE_CGROUP);
	if (!has_group_limits(&made, &sandbox->spec))
		must(cgroup_limit_guest(sandbox));
	enter_stage(STAGE_POOL);
	if (*sandbox->spec.cut) {
		must(pool_replace(sandbox, &kept->upper));
	} else {
		if (made.upper_bytes != sandbox->spec.upper_bytes)
			must(pool_limit(sandbox, kept->upper));
		must(pool_fit(sandbox, kept->upper));
	}
	int proxy_fd = make_names(&sandbox->spec, kept);
	must(root_replace(sandbox, kept->userns, kept->upper, kept->mount_ns));
	_exit(send_report(STAGE_READY, 0, proxy_fd) < 0);
}

static int start_keeper(struct sandbox *sandbox, int userns_fd)
{
	struct slot *slot = &sandbox->as_slot;
	struct clone_args arguments = {
		.flags = CLONE_PIDFD, .pidfd = (uint64_t)(uintptr_t)&slot->keeper_pidfd, .exit_signal = SIGCHLD};
	int pair[2];

	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0)
		return -1;
	if (fcntl(pair[0], F_SETFL, O_NONBLOCK) < 0)
		return close(pair[0]), close(pair[1]), -1;
	pid_t pid = (pid_t)syscall(SYS_clone3, &arguments, sizeof(arguments));
	if (pid == 0)
		keep(sandbox, &(struct kept){.report = pair[1], .userns = userns_fd});
	close(pair[1]);
	if (pid < 0)
		return close(pair[0]), -1;
	slot->keeper_fd = pair[0];
	return 0;
}

/* --- the life of a slot ------------------------------------------------------------------------------------------- */

static void handle_keeper(struct watch *watch, uint32_t events)
{
	struct sandbox *sandbox = container_of(watch, struct sandbox, as_slot.keeper);
	struct launch_report report = {STAGE_SLOT, ESRCH};
	int listener_fd = -1, result = receive_report(sandbox->as_slot.keeper_fd, &report, &listener_fd);

	(void)events;
	if (result < 0 && errno == EAGAIN)
		return;
	watch_close(&sandbox->as_slot.keeper_fd);
	if (result > 0 && report.stage == STAGE_READY && sandbox->state == SANDBOX_STARTING) {
		sandbox->listener_fd = listener_fd;
		sandbox_started(sandbox);
	} else {
		close_fd(&listener_fd);
		sandbox_fail(sandbox, (enum stage)report.stage, report.error);
	}
}

static void handle_keeper_end(struct watch *watch, uint32_t events)
{
	struct slot *slot = &container_of(watch, struct sandbox, as_slot.keeper_end)->as_slot;
	siginfo_t info;

	(void)events;
	if (waitid(P_PIDFD, (id_t)slot->keeper_pidfd, &info, WEXITED | WNOHANG) < 0 && errno != ECHILD)
		log_line("reaping a keeper: %s", strerror(errno));
	watch_close(&slot->keeper_pidfd);
}

/* Its init runs. */
void slot_filled(struct sandbox *sandbox)
{
	struct slot *slot = &sandbox->as_slot;
	int userns_fd = options.no_userns ? -1 : userns_open(sandbox->slot);

	slot->keeper.handle = handle_keeper;
	slot->keeper_end.handle = handle_keeper_end;
	slot->init_fd = init_reach(sandbox);
	if (slot->init_fd < 0 || (userns_fd < 0 && !options.no_userns) || start_keeper(sandbox, userns_fd) < 0 ||
	    watch_add(&slot->keeper, slot->keeper_fd, EPOLLIN) < 0 || watch_add(&slot->keeper_end, slot->keeper_pidfd, EPOLLIN) < 0) {
		sandbox_fail(sandbox, STAGE_SLOT, errno);
		return;
	}
	userns_started(sandbox->slot);
	sandbox->state = SANDBOX_SLOT;
	filling--;
	ready++;
	totals.filled++;
	totals.fill_us_sum += (uint64_t)(monotonic_ns() - slot->began_ns) / 1000;
	event_slot(sandbox, true);
}

/* Hand it to its keeper, and greet the init meanwhile. */
int slot_claim(struct sandbox *sandbox)
{
	struct slot *slot = &sandbox->as_slot;
	struct claim claim = {.spec = sandbox->spec};
	struct iovec vector = {&claim, sizeof(claim)};
	unsigned count = sandbox->spec.layer_count;
	union {
		struct cmsghdr header;
		char space[CMSG_SPACE(sizeof(int) * LAYERS_MAX)];
	} control;
	struct msghdr message = {
		.msg_iov = &vector, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = CMSG_SPACE(sizeof(int) * count)};
	int fds[LAYERS_MAX];

	ready--;
	next_fill_ns = monotonic_ns() + CLAIM_QUIET_NS;
	for (unsigned i = 0; i < count; i++)
		fds[i] = sandbox->spec.layers[i]->fd;
	control.header = (struct cmsghdr){.cmsg_len = CMSG_LEN(sizeof(int) * count), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
	memcpy(CMSG_DATA(&control.header), fds, sizeof(int) * count);
	if (sendmsg(slot->keeper_fd, &message, MSG_NOSIGNAL) != sizeof(claim))
		return -1;
	return init_greet(sandbox, slot->init_fd);
}
