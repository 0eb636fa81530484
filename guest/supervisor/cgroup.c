/* Control groups under /barchan/NAME of each hierarchy.
 *
 * Version 1 (hybrid hosts): memory, pids and cpu have one limited leaf per sandbox, ID, and one shared leaf, `init`, that
 * the supervisor itself sits in: inits inherit it, so that moving them costs nothing. The version 2 hierarchy, without
 * controllers, has ID (the init) and ID/guest (what the guest runs): it gives kill, freeze, pressure and CPU time.
 * Pure version 2: ID/init, ID/guest and ID/platform, limits on the latter two. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <time.h>

#include "supervisor.h"

#define PLATFORM_MEMORY_BYTES (UINT64_C(128) << 20)
#define PLATFORM_PIDS 64
#define LEAF_PATH_MAX 256
#define CPU_PERIOD "100000"
#define TCP_SHARE 4

static struct {
	const char *name;
	int mount_fd, base_fd; /* the hierarchy's root, and /barchan/NAME in it; -1: absent */
} hierarchies[HIERARCHIES] = {{"memory", -1, -1}, {"pids", -1, -1}, {"cpu", -1, -1}, {"cpu of batch", -1, -1}, {"unified", -1, -1}};
static bool pure_v2;
static char super_options[256]; /* of the version 2 hierarchy, as found */
static bool moves_favoured;

struct limits {
	uint64_t memory_bytes, pids, cpu_us;
	bool batch;
};

static int base(int hierarchy)
{
	return hierarchies[hierarchy].base_fd;
}

int cgroup_base(int hierarchy)
{
	return hierarchy == BATCH ? -1 : base(hierarchy);
}

int cgroup_mount(int hierarchy)
{
	return pure_v2 && hierarchy != UNIFIED ? -1 : hierarchies[hierarchy].mount_fd;
}

const char *cgroup_top(int hierarchy)
{
	return hierarchy == BATCH ? "barchan-batch" : "barchan";
}

/* Version 1: whether a leaf is in this hierarchy. What runs as batch is beside all else of the host, not only beside this node's. */
static bool has_leaf(int hierarchy, const struct sandbox *sandbox, enum leaf leaf)
{
	bool is_batch = leaf == LEAF_GUEST && sandbox->spec.batch && base(BATCH) >= 0;

	return base(hierarchy) >= 0 && (hierarchy == BATCH ? is_batch : hierarchy != CPU || !is_batch);
}

bool cgroup_is_v2(void)
{
	return pure_v2;
}

bool cgroup_has(const char *controller)
{
	for (int i = 0; i < UNIFIED; i++)
		if (strcmp(hierarchies[i].name, controller) == 0)
			return pure_v2 || base(i) >= 0;
	return false;
}

static int write_leaf(int fd, const char *name, const char *file, const char *text)
{
	char path[2 * LEAF_PATH_MAX];

	snprintf(path, sizeof(path), "%s/%s", name, file);
	return write_at(fd, path, text);
}

/* --- start and end ------------------------------------------------------------------------------------------------ */

static bool has_word(const char *list, const char *word, const char *separators)
{
	size_t length = strlen(word);

	for (const char *at = list; (at = strstr(at, word)); at += length)
		if ((at == list || strchr(separators, at[-1])) && (at[length] == '\0' || strchr(separators, at[length])))
			return true;
	return false;
}

/* One line of mountinfo: `... MOUNTPOINT OPTIONS ... - TYPE SOURCE SUPEROPTIONS`. */
static void consider_mount(char *line)
{
	char point[PATH_MAX], type[64], super[256];
	char *tail = strstr(line, " - ");

	if (!tail || sscanf(line, "%*d %*d %*s %*s %4095s", point) != 1 || sscanf(tail, " - %63s %*s %255s", type, super) != 2)
		return;
	for (int i = 0; i < HIERARCHIES; i++) {
		bool wanted = i == UNIFIED ? strcmp(type, "cgroup2") == 0 : strcmp(type, "cgroup") == 0 && has_word(super, hierarchies[i].name, ",");
		if (wanted && hierarchies[i].mount_fd < 0)
			hierarchies[i].mount_fd = open(point, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
		if (wanted && i == UNIFIED)
			snprintf(super_options, sizeof(super_options), "%s", super);
	}
}

static int find_mounts(void)
{
	char controllers[256] = "", *line = NULL;
	size_t size = 0;
	FILE *file = fopen("/proc/self/mountinfo", "re");

	if (!file)
		return -1;
	while (getline(&line, &size, file) > 0)
		consider_mount(line);
	free(line);
	fclose(file);
	if (hierarchies[UNIFIED].mount_fd < 0) {
		log_line("no cgroup2 hierarchy is mounted");
		return errno = ENOENT, -1;
	}
	read_at(hierarchies[UNIFIED].mount_fd, "cgroup.controllers", controllers, sizeof(controllers));
	pure_v2 = has_word(controllers, "memory", " \n") && has_word(controllers, "pids", " \n");
	if (!pure_v2 && (hierarchies[MEMORY].mount_fd < 0 || hierarchies[PIDS].mount_fd < 0)) {
		log_line("no hierarchy has the memory and pids controllers");
		return errno = ENOENT, -1;
	}
	if (!pure_v2 && hierarchies[CPU].mount_fd >= 0 && faccessat(hierarchies[CPU].mount_fd, "cpu.idle", F_OK, 0) == 0)
		hierarchies[BATCH].mount_fd = fcntl(hierarchies[CPU].mount_fd, F_DUPFD_CLOEXEC, 0);
	return 0;
}

static int make_base(int hierarchy)
{
	char path[PATH_MAX];
	int mount_fd = hierarchies[hierarchy].mount_fd;

	if (mkdirat(mount_fd, cgroup_top(hierarchy), 0755) < 0 && errno != EEXIST)
		return -1;
	if (hierarchy == BATCH && write_leaf(mount_fd, cgroup_top(BATCH), "cpu.idle", "1") < 0)
		return -1;
	snprintf(path, sizeof(path), "%s/%s", cgroup_top(hierarchy), options.cgroup);
	if (mkdirat(mount_fd, path, 0755) < 0)
		return -1;
	hierarchies[hierarchy].base_fd = openat(mount_fd, path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	return base(hierarchy);
}

static int enable_controllers(void)
{
	const char *control = "+memory +pids +cpu";

	if (write_at(hierarchies[UNIFIED].mount_fd, "cgroup.subtree_control", control) < 0 ||
	    write_at(hierarchies[UNIFIED].mount_fd, "barchan/cgroup.subtree_control", control) < 0)
		return -1;
	return write_at(base(UNIFIED), "cgroup.subtree_control", control);
}

/* Set the version 2 hierarchy's options as they were found, with or without `favordynmods` (which Linux 6.18 can't unset). */
static int reconfigure(bool favour)
{
	char words[sizeof(super_options)], *rest = NULL;
	CLEANUP_FD int context_fd = fspick(hierarchies[UNIFIED].mount_fd, "", FSPICK_CLOEXEC | FSPICK_EMPTY_PATH);

	if (context_fd < 0)
		return -1;
	memcpy(words, super_options, sizeof(words));
	for (char *word = strtok_r(words, ",", &rest); word; word = strtok_r(NULL, ",", &rest))
		if (strcmp(word, "rw") != 0 && fsconfig(context_fd, FSCONFIG_SET_FLAG, word, NULL, 0) < 0)
			return -1;
	if (favour && fsconfig(context_fd, FSCONFIG_SET_FLAG, "favordynmods", NULL, 0) < 0)
		return -1;
	return fsconfig(context_fd, FSCONFIG_CMD_RECONFIGURE, NULL, NULL, 0);
}

/* Moving a process into a cgroup waits for a grace period of the kernel, 8 to 15 ms, unless the last move was a moment ago or the
 * host's hierarchy is set to favour moves. Without the right to set that, execs are slower; that is all. */
static void favour_moves(void)
{
	if (has_word(super_options, "favordynmods", ","))
		return;
	moves_favoured = reconfigure(true) == 0;
	if (!moves_favoured)
		log_line("moves between cgroups stay slow (favordynmods: %s)", strerror(errno));
}

static int make_bases(void)
{
	/* The kill goes through version 2 and empties the others. */
	for (int i = UNIFIED; i >= 0; i--) {
		if (hierarchies[i].mount_fd < 0 || (pure_v2 && i != UNIFIED))
			continue;
		if (cgroup_remove_stale(i) < 0 || make_base(i) < 0)
			return -1;
		if (i != UNIFIED && i != BATCH && (mkdirat(base(i), "init", 0755) < 0 || write_at(base(i), "init/cgroup.procs", "0") < 0))
			return -1;
	}
	return flock(base(UNIFIED), LOCK_EX | LOCK_NB);
}

int cgroup_open(void)
{
	/* One at a time: nobody takes another's for dead that has only just been made. */
	if (find_mounts() < 0 || flock(hierarchies[UNIFIED].mount_fd, LOCK_EX) < 0)
		return -1;
	int result = make_bases();
	if (result == 0)
		cgroup_remove_dead();
	flock(hierarchies[UNIFIED].mount_fd, LOCK_UN);
	if (result < 0)
		return -1;
	favour_moves();
	return pure_v2 ? enable_controllers() : 0;
}

void cgroup_close(void)
{
	char path[PATH_MAX];

	if (moves_favoured && reconfigure(false) < 0)
		log_line("setting the cgroup mount back: %s", strerror(errno));

	for (int i = 0; i < HIERARCHIES; i++) {
		if (base(i) < 0)
			continue;
		snprintf(path, sizeof(path), "%s/%s", cgroup_top(i), options.cgroup);
		if (i != UNIFIED && i != BATCH && write_at(hierarchies[i].mount_fd, "cgroup.procs", "0") < 0)
			log_line("leaving the %s cgroup: %s", hierarchies[i].name, strerror(errno));
		if (remove_tree_at(hierarchies[i].mount_fd, path, true) < 0)
			log_line("removing the %s cgroup: %s", hierarchies[i].name, strerror(errno));
		/* Shared by every node of the host; the last one out removes it. */
		unlinkat(hierarchies[i].mount_fd, cgroup_top(i), AT_REMOVEDIR);
	}
}

/* --- leaves ------------------------------------------------------------------------------------------------------- */

/* Version 1 leaves have the sandbox's name, or ID.platform beside it, since a child would count against ID's limits. */
static void leaf_name(const struct sandbox *sandbox, enum leaf leaf, char name[ID_MAX + 16])
{
	snprintf(name, ID_MAX + 16, "%s%s", sandbox->id, leaf == LEAF_PLATFORM ? ".platform" : "");
}

/* Scheduled like a program of the class SCHED_IDLE: only when no other wants the processor. Kernels before 5.15 know the
 * smallest share only. */
static int be_batch(int fd, const char *name, const char *share, const char *least)
{
	if (write_leaf(fd, name, "cpu.idle", "1") == 0)
		return 0;
	return errno == ENOENT ? write_leaf(fd, name, share, least) : -1;
}

static int limit_v1(int hierarchy, const char *name, const struct limits *limits)
{
	char text[24];

	switch (hierarchy) {
	case MEMORY:
		if (options.no_memory_limit)
			return 0;
		snprintf(text, sizeof(text), "%llu", (unsigned long long)limits->memory_bytes);
		/* Above what memory and swap may be together, it is refused: then that is raised first. */
		if (write_leaf(base(MEMORY), name, "memory.limit_in_bytes", text) < 0 &&
		    (errno != EINVAL || write_leaf(base(MEMORY), name, "memory.memsw.limit_in_bytes", text) < 0 ||
		     write_leaf(base(MEMORY), name, "memory.limit_in_bytes", text) < 0))
			return -1;
		/* Absent without swap accounting. */
		if (write_leaf(base(MEMORY), name, "memory.memsw.limit_in_bytes", text) < 0 && errno != ENOENT)
			return -1;
		/* What TCP buffers is not part of the limit above. */
		snprintf(text, sizeof(text), "%llu", (unsigned long long)limits->memory_bytes / TCP_SHARE);
		return write_leaf(base(MEMORY), name, "memory.kmem.tcp.limit_in_bytes", text) < 0 && errno != ENOENT ? -1 : 0;
	case PIDS:
		if (options.no_pids_limit)
			return 0;
		snprintf(text, sizeof(text), "%llu", (unsigned long long)limits->pids);
		return write_leaf(base(PIDS), name, "pids.max", text);
	default:
		snprintf(text, sizeof(text), "%llu", (unsigned long long)limits->cpu_us);
		if (limits->cpu_us && write_leaf(base(hierarchy), name, "cpu.cfs_quota_us", text) < 0)
			return -1;
		return limits->batch && hierarchy == CPU ? be_batch(base(CPU), name, "cpu.shares", "2") : 0;
	}
}

static int limit_v2(const char *path, const struct limits *limits)
{
	char text[48];

	snprintf(text, sizeof(text), "%llu", (unsigned long long)limits->memory_bytes);
	if ((!options.no_memory_limit && write_leaf(base(UNIFIED), path, "memory.max", text) < 0) ||
	    (write_leaf(base(UNIFIED), path, "memory.swap.max", "0") < 0 && errno != ENOENT) ||
	    write_leaf(base(UNIFIED), path, "memory.oom.group", "0") < 0)
		return -1;
	snprintf(text, sizeof(text), "%llu", (unsigned long long)limits->pids);
	if (!options.no_pids_limit && write_leaf(base(UNIFIED), path, "pids.max", text) < 0)
		return -1;
	snprintf(text, sizeof(text), "%llu " CPU_PERIOD, (unsigned long long)limits->cpu_us);
	if (limits->cpu_us && write_leaf(base(UNIFIED), path, "cpu.max", text) < 0)
		return -1;
	return limits->batch ? be_batch(base(UNIFIED), path, "cpu.weight", "1") : 0;
}

static int give_to_init(const struct sandbox *sandbox, const char *path)
{
	uid_t uid = sandbox->uid_base + init_uid();

	return fchownat(base(UNIFIED), path, uid, uid, AT_SYMLINK_NOFOLLOW);
}

static void leaf_path(const struct sandbox *sandbox, enum leaf leaf, char path[LEAF_PATH_MAX])
{
	snprintf(path, LEAF_PATH_MAX, "%s/%s", sandbox->id, leaf == LEAF_PLATFORM ? "platform" : "guest");
}

static int limit_leaf(const struct sandbox *sandbox, enum leaf leaf, const struct limits *limits)
{
	char name[ID_MAX + 16], path[LEAF_PATH_MAX];

	leaf_name(sandbox, leaf, name);
	for (int i = 0; i < UNIFIED && !pure_v2; i++)
		if (has_leaf(i, sandbox, leaf) && limit_v1(i, name, limits) < 0)
			return -1;
	leaf_path(sandbox, leaf, path);
	return pure_v2 ? limit_v2(path, limits) : 0;
}

static int make_leaf(const struct sandbox *sandbox, enum leaf leaf)
{
	char name[ID_MAX + 16], path[LEAF_PATH_MAX];

	leaf_name(sandbox, leaf, name);
	for (int i = 0; i < UNIFIED && !pure_v2; i++)
		if (has_leaf(i, sandbox, leaf) && mkdirat(base(i), name, 0755) < 0)
			return -1;
	leaf_path(sandbox, leaf, path);
	if (mkdirat(base(UNIFIED), path, 0755) < 0)
		return -1;
	/* The init makes a child cgroup per start and moves programs there. */
	if (give_to_init(sandbox, path) < 0)
		return -1;
	strcat(path, "/cgroup.procs");
	return give_to_init(sandbox, path);
}

/* The group the init is born in; returns an open directory for CLONE_INTO_CGROUP. */
int cgroup_make_init(const struct sandbox *sandbox)
{
	char path[LEAF_PATH_MAX];

	if (mkdirat(base(UNIFIED), sandbox->id, 0755) < 0)
		return -1;
	/* The common ancestor of init and guest: moving between them asks for write permission here, which the init has by its group, and
	 * can so do without where it opens what moves within the guest only. */
	snprintf(path, sizeof(path), "%s/cgroup.procs", sandbox->id);
	if (fchownat(base(UNIFIED), path, (uid_t)-1, sandbox->uid_base + init_uid(), AT_SYMLINK_NOFOLLOW) < 0 ||
	    fchmodat(base(UNIFIED), path, 0664, 0) < 0)
		return -1;
	snprintf(path, sizeof(path), "%s%s", sandbox->id, pure_v2 ? "/init" : "");
	if (pure_v2 && (write_leaf(base(UNIFIED), sandbox->id, "cgroup.subtree_control", "+memory +pids +cpu") < 0 ||
			mkdirat(base(UNIFIED), path, 0755) < 0))
		return -1;
	return openat(base(UNIFIED), path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
}

int cgroup_make_guest(const struct sandbox *sandbox)
{
	if (make_leaf(sandbox, LEAF_GUEST) < 0)
		return -1;
	/* Nothing runs there before a slot is claimed, and its limits may not be known yet. */
	return sandbox->as_slot.is_slot && !sandbox->spec.memory_bytes ? 0 : cgroup_limit_guest(sandbox);
}

/* Also once more, after a restore that needed more. */
int cgroup_limit_guest(const struct sandbox *sandbox)
{
	const struct spec *spec = &sandbox->spec;

	return limit_leaf(sandbox, LEAF_GUEST, &(struct limits){spec->memory_bytes, spec->pids, spec->cpu_us, spec->batch});
}

/* One of its own, in which a process is to be born; returns its open directory of the version 2 hierarchy. */
int cgroup_make_group(const char *name, uint64_t memory_bytes, uint64_t pids)
{
	const struct limits limits = {memory_bytes, pids, 0, false};

	for (int i = 0; i < CPU && !pure_v2; i++)
		if (mkdirat(base(i), name, 0755) < 0 || limit_v1(i, name, &limits) < 0)
			return -1;
	if (mkdirat(base(UNIFIED), name, 0755) < 0 || (pure_v2 && limit_v2(name, &limits) < 0))
		return -1;
	return openat(base(UNIFIED), name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
}

/* The calling process: a restore is in there, and --init-in-guest-leaf starts so. */
int cgroup_enter_guest(const struct sandbox *sandbox)
{
	for (int i = 0; i < UNIFIED && !pure_v2; i++)
		if (has_leaf(i, sandbox, LEAF_GUEST) && write_leaf(base(i), sandbox->id, "cgroup.procs", "0") < 0)
			return -1;
	return pure_v2 ? write_leaf(base(UNIFIED), sandbox->id, "guest/cgroup.procs", "0") : 0;
}

int cgroup_make_platform(const struct sandbox *sandbox)
{
	if (make_leaf(sandbox, LEAF_PLATFORM) < 0)
		return -1;
	return limit_leaf(sandbox, LEAF_PLATFORM, &(struct limits){PLATFORM_MEMORY_BYTES, PLATFORM_PIDS, 0, false});
}

/* What HELLO hands to the init; opened here, so that writing to them is judged by the supervisor's rights. */
int cgroup_open_leaf(const struct sandbox *sandbox, enum leaf leaf, struct leaf_fds *leaf_fds)
{
	char name[ID_MAX + 16], path[LEAF_PATH_MAX];

	leaf_fds->count = leaf_fds->procs_count = 0;
	leaf_name(sandbox, leaf, name);
	/* A program is one thread when it joins, and moving a thread by `tasks` needs no lock on all of its process. */
	snprintf(path, sizeof(path), "%s/tasks", name);
	for (int i = 0; i < UNIFIED && !pure_v2; i++) {
		if (!has_leaf(i, sandbox, leaf))
			continue;
		int fd = openat(base(i), path, O_WRONLY | O_CLOEXEC);
		if (fd < 0)
			return -1;
		leaf_fds->fds[leaf_fds->count++] = fd;
	}
	leaf_fds->procs_count = leaf_fds->count;
	if (options.no_exec_cgroup)
		return 0;
	leaf_path(sandbox, leaf, path);
	int fd = openat(base(UNIFIED), path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (fd < 0)
		return -1;
	leaf_fds->fds[leaf_fds->count++] = fd;
	return 0;
}

void cgroup_read_counters(struct sandbox *sandbox)
{
	struct counters *counters = &sandbox->counters;
	char path[LEAF_PATH_MAX];

	snprintf(path, sizeof(path), pure_v2 ? "%s/guest/memory.events" : "%s/memory.oom_control", sandbox->id);
	counters->oom_kills = counter_at(base(pure_v2 ? UNIFIED : MEMORY), path, "oom_kill");
	snprintf(path, sizeof(path), pure_v2 ? "%s/guest/memory.peak" : "%s/memory.max_usage_in_bytes", sandbox->id);
	counters->memory_peak_bytes = counter_at(base(pure_v2 ? UNIFIED : MEMORY), path, NULL);
	snprintf(path, sizeof(path), "%s/guest/cpu.stat", sandbox->id);
	counters->cpu_ns = counter_at(base(UNIFIED), path, "usage_usec") * 1000;
}

static int remove_leaf(const struct sandbox *sandbox, enum leaf leaf)
{
	char name[ID_MAX + 16];

	leaf_name(sandbox, leaf, name);
	for (int i = 0; i < UNIFIED; i++)
		if (base(i) >= 0 && remove_tree_at(base(i), name, true) < 0)
			return -1;
	return 0;
}

/* What a failed cgroup_make_platform left. */
int cgroup_remove_platform(const struct sandbox *sandbox)
{
	char path[LEAF_PATH_MAX];

	snprintf(path, sizeof(path), "%s/platform", sandbox->id);
	return remove_leaf(sandbox, LEAF_PLATFORM) < 0 ? -1 : remove_tree_at(base(UNIFIED), path, true);
}

/* Safe to repeat; EBUSY while a process is still leaving. First where all of a start's processes are born: one that lives makes leaves. */
int cgroup_remove(const struct sandbox *sandbox)
{
	if (remove_tree_at(base(UNIFIED), sandbox->id, true) < 0 || remove_leaf(sandbox, LEAF_GUEST) < 0)
		return -1;
	return sandbox->has_platform ? remove_leaf(sandbox, LEAF_PLATFORM) : 0;
}
