/* The children that become CRIU: what it sees, what it is given, where it is.
 *
 * The node gives a directory: `args` (NUL-terminated: what is preloaded, the image of the user namespace or nothing, CRIU's command)
 * and, for a restore, `places` and `memory`, a link to the memory directory; it finds CRIU's `log` in it. CRIU sees the host's files,
 * with one tmpfs of ours for all on /run, where it keeps what it found out about the kernel, and one of its own on /run/job.
 * docs/decisions/0012-memory-snapshots.md has why each step is there. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>

#include "../criu/restore.h"
#include "supervisor.h"

#define ARGS_BYTES_MAX (1u << 20)
#define ARGS_MAX 8192u
#define PARTS_MAX 64u
#define PATH_LINE_MAX 64
#define IMAGE_MAGIC_BYTES 8
#define SPARE_FDS 64 /* above those that CRIU is given */

/* --- what CRIU sees ----------------------------------------------------------------------------------------------- */

struct arguments {
	const char *preload, *userns_image;
	char *words[ARGS_MAX + 1];
};

static void read_arguments(int job_fd, struct arguments *arguments)
{
	static char text[ARGS_BYTES_MAX];
	size_t length = 0, count = 0;
	ssize_t part;
	int fd = must(openat(job_fd, "args", O_RDONLY | O_CLOEXEC));

	while ((part = must((int)read(fd, text + length, sizeof(text) - 1 - length))) > 0)
		length += (size_t)part;
	close(fd);
	const char *heads[2] = {"", ""};
	for (char *at = text; at < text + length; at += strlen(at) + 1, count++) {
		must(count < ARGS_MAX + 2 ? 0 : (errno = E2BIG, -1));
		if (count < 2)
			heads[count] = at;
		else
			arguments->words[count - 2] = at;
	}
	must(count > 2 ? 0 : (errno = EINVAL, -1));
	arguments->words[count - 2] = NULL;
	arguments->preload = heads[0], arguments->userns_image = heads[1];
}

/* The host's files, as they are in a copy of its mount namespace, and our /run. */
static void enter_host(int run_fd)
{
	must(mounts_copy_host());
	must(move_mount(run_fd, "", AT_FDCWD, "/run", MOVE_MOUNT_F_EMPTY_PATH));
	must(mount("tmpfs", "/run/job", "tmpfs", MS_NOSUID | MS_NODEV, "mode=0711"));
}

static _Noreturn void become_criu(int job_fd, const struct arguments *arguments, uid_t owner)
{
	char preload[PATH_MAX + 16], restore[64];
	char *const environment[] = {"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", preload, owner ? restore : NULL, NULL};

	snprintf(preload, sizeof(preload), "LD_PRELOAD=%s", arguments->preload);
	snprintf(restore, sizeof(restore), RESTORE_VARIABLE "=%u", owner);
	int log_fd = must(openat(job_fd, "log", O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600));
	int null_fd = must(open("/dev/null", O_RDWR | O_CLOEXEC));
	must(dup2(null_fd, 0)), must(dup2(log_fd, 1)), must(dup2(log_fd, 2));
	if (!owner)
		must(close_range(3, ~0U, CLOSE_RANGE_CLOEXEC));
	reset_signals();
	enter_stage(STAGE_EXEC);
	must(execve(arguments->words[0], arguments->words, environment));
	_exit(1);
}

/* --- dump --------------------------------------------------------------------------------------------------------- */

static const struct {
	const char *name;
	int flag;
} shared_namespaces[] = {{"net", CLONE_NEWNET}, {"uts", CLONE_NEWUTS}, {"time", 0x80 /* CLONE_NEWTIME */}};

/* CRIU takes them for its own and leaves them out: they belong to the host's user namespace, and a restore makes them anew. */
static void enter_shared_namespaces(pid_t pid)
{
	char path[PATH_LINE_MAX];

	for (size_t i = 0; i < COUNT(shared_namespaces); i++) {
		snprintf(path, sizeof(path), "/proc/%d/ns/%s", pid, shared_namespaces[i].name);
		CLEANUP_FD int fd = open(path, O_RDONLY | O_CLOEXEC);
		if (fd < 0 && errno == ENOENT)
			continue;
		must(fd < 0 ? -1 : setns(fd, shared_namespaces[i].flag));
	}
}

_Noreturn void criu_dump(const struct sandbox *sandbox, const char *group, int job_fd)
{
	struct arguments arguments;

	must(setsid());
	enter_stage(STAGE_CGROUP);
	must(cgroup_enter(group));
	enter_stage(STAGE_REQUEST);
	read_arguments(job_fd, &arguments);
	enter_stage(STAGE_NAMESPACES);
	int run_fd = must(mounts_run());
	enter_shared_namespaces(sandbox->pid);
	enter_host(run_fd);
	must(die_with_supervisor());
	become_criu(job_fd, &arguments, 0);
}

/* --- restore ------------------------------------------------------------------------------------------------------ */

struct parts {
	struct root_parts root;
	int external[PARTS_MAX], run, overlay;
	unsigned count;
};

/* Copies of everything shared, taken while this process is in the supervisor's mount namespace. */
static void collect(const struct sandbox *sandbox, int userns_fd, int upper_fd, const struct restore *restore, struct parts *parts)
{
	char names[sizeof(restore->mounts)], *rest = names, *name;

	must(root_collect(sandbox, userns_fd, upper_fd, &parts->root));
	parts->run = must(mounts_run());
	snprintf(names, sizeof(names), "%s", restore->mounts);
	for (parts->count = 0; (name = strsep(&rest, ":")) && *name; parts->count++) {
		must(parts->count < PARTS_MAX ? 0 : (errno = E2BIG, -1));
		parts->external[parts->count] = must(mounts_part(name));
	}
}

/* CRIU's own clocks, and so those of what it restores: they go on from where they were. */
static void enter_time(const struct restore *restore)
{
	static const struct {
		const char *name;
		clockid_t clock;
	} clocks[] = {{"monotonic", CLOCK_MONOTONIC}, {"boottime", CLOCK_BOOTTIME}};
	const int64_t then_ns[] = {(int64_t)restore->monotonic_ns, (int64_t)restore->boottime_ns};
	struct timespec now;
	char lines[128];
	size_t length = 0;

	for (size_t i = 0; i < COUNT(clocks); i++) {
		must(clock_gettime(clocks[i].clock, &now));
		int64_t offset_ns = then_ns[i] - (now.tv_sec * NS_PER_S + now.tv_nsec), seconds = offset_ns / NS_PER_S;
		if (seconds * NS_PER_S > offset_ns)
			seconds--;
		length += (size_t)snprintf(lines + length, sizeof(lines) - length, "%s %lld %lld\n", clocks[i].name, (long long)seconds,
					   (long long)(offset_ns - seconds * NS_PER_S));
	}
	must(unshare(0x80 /* CLONE_NEWTIME */));
	must(write_at(AT_FDCWD, "/proc/self/timens_offsets", lines));
	CLEANUP_FD int fd = must(open("/proc/self/ns/time_for_children", O_RDONLY | O_CLOEXEC));
	must(setns(fd, 0x80));
}

static void attach_part(int mount_fd, const char *path)
{
	struct stat info;

	must(fstat(mount_fd, &info));
	int fd = S_ISDIR(info.st_mode) ? mkdir(path, 0711) : open(path, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
	if (must(fd) > 0)
		close(fd);
	must(move_mount(mount_fd, "", AT_FDCWD, path, MOVE_MOUNT_F_EMPTY_PATH));
}

static size_t put_varint(uint8_t *at, uint64_t value)
{
	size_t length = 0;

	for (; value > 127; value >>= 7)
		at[length++] = (uint8_t)(value & 127) | 128;
	at[length++] = (uint8_t)value;
	return length;
}

/* The one image that holds ids of the host: for users and groups one extent, `0 UID_BASE UIDS_PER_SLOT`. Laid over the dump's. */
static void shift_user_namespace(const char *image, uid_t uid_base)
{
	uint8_t extent[32], file[128];
	CLEANUP_FD int old_fd = must(open(image, O_RDONLY | O_CLOEXEC));
	CLEANUP_FD int new_fd = must(open("/run/job/userns.img", O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));

	must(read(old_fd, file, IMAGE_MAGIC_BYTES) == IMAGE_MAGIC_BYTES ? 0 : (errno = EBADMSG, -1));
	size_t size = 0, at = IMAGE_MAGIC_BYTES + sizeof(uint32_t);
	extent[size++] = 1 << 3, extent[size++] = 0; /* first id inside */
	extent[size++] = 2 << 3, size += put_varint(extent + size, uid_base);
	extent[size++] = 3 << 3, size += put_varint(extent + size, UIDS_PER_SLOT);
	for (unsigned field = 1; field <= 2; field++) {
		file[at++] = (uint8_t)(field << 3 | 2);
		file[at++] = (uint8_t)size;
		memcpy(file + at, extent, size);
		at += size;
	}
	uint32_t body = (uint32_t)(at - IMAGE_MAGIC_BYTES - sizeof(body));
	memcpy(file + IMAGE_MAGIC_BYTES, &body, sizeof(body));
	must(write(new_fd, file, at) == (ssize_t)at ? 0 : -1);
	must(mount("/run/job/userns.img", image, NULL, MS_BIND, NULL));
}

/* An unlinked copy in the spool directory of what the init had written there. */
static int copy_spool(const struct sandbox *sandbox, int job_fd, int spool_fd, unsigned index)
{
	char path[PATH_LINE_MAX];
	uid_t uid = sandbox->uid_base + init_uid();
	ssize_t part;

	snprintf(path, sizeof(path), "memory/spool/%u", index);
	CLEANUP_FD int from_fd = must(openat(job_fd, path, O_RDONLY | O_CLOEXEC));
	int to_fd = must(openat(spool_fd, ".", O_RDWR | O_TMPFILE | O_CLOEXEC, 0600));
	must(fchown(to_fd, uid, uid));
	while ((part = must((int)sendfile(to_fd, from_fd, NULL, 1 << 20))) > 0)
		;
	return to_fd;
}

static int raised(int fd, int least)
{
	return must(fcntl(fd, F_DUPFD_CLOEXEC, least));
}

/* By number, as restore.h has it; everything else is closed by the exec. Descriptors in the way are the supervisor's. */
static void place_descriptors(const struct sandbox *sandbox, const struct restore *restore, int job_fd, int spool_fd)
{
	int files = RESTORE_FILES_FD + 2 + (int)restore->spools, least = files + SPARE_FDS, wanted[RESTORE_FILES_FD], init_fds[RESTORE_INIT_FDS];
	const char *const groups[] = {"tree", "work", "guest"};

	for (int i = 0; i < RESTORE_FILES_FD; i++)
		wanted[i] = -1;
	wanted[RESTORE_STATUS_FD] = raised(report_socket(), least);
	wanted[RESTORE_JOB_FD] = raised(job_fd, least);
	for (size_t i = 0; i < COUNT(groups); i++)
		wanted[RESTORE_TREE_FD + (int)i] = raised(must(cgroup_open_of(sandbox, groups[i])), least);
	must(cgroup_open_init(sandbox, init_fds, RESTORE_INIT_FDS));
	for (int i = 0; i < RESTORE_INIT_FDS; i++)
		if (init_fds[i] >= 0)
			wanted[RESTORE_INIT_FD + i] = raised(init_fds[i], least);
	int spool_high_fd = raised(spool_fd, least), program_fd = raised(must(openat(job_fd, "memory/init", O_RDONLY | O_CLOEXEC)), least);
	int job_high_fd = wanted[RESTORE_JOB_FD];
	for (unsigned i = 0; i < restore->spools; i++) {
		int high_fd = raised(copy_spool(sandbox, job_high_fd, spool_high_fd, i), least);
		must(dup2(high_fd, RESTORE_FILES_FD + 2 + (int)i));
		close(high_fd);
	}
	must(dup2(program_fd, RESTORE_FILES_FD)), must(dup2(spool_high_fd, RESTORE_FILES_FD + 1));
	must(close_range((unsigned)files, ~0U, CLOSE_RANGE_CLOEXEC));
	for (int i = RESTORE_STATUS_FD; i < RESTORE_FILES_FD; i++) {
		if (wanted[i] >= 0)
			must(dup2(wanted[i], i));
		else
			close(i);
	}
}

_Noreturn void criu_restore(const struct sandbox *sandbox, int userns_fd, const struct restore *restore)
{
	static struct sandbox wide;
	static struct parts parts;
	static struct arguments arguments;
	int upper_fd = -1, job_fd = restore->job_fd;
	char path[PATH_LINE_MAX];

	must(setsid());
	wide = *sandbox;
	wide.spec.memory_bytes += CRIU_MEMORY_BYTES, wide.spec.pids += CRIU_PIDS, wide.spec.cpu_us = 0;
	enter_stage(STAGE_CGROUP);
	must(cgroup_make_guest(&wide));
	must(cgroup_make_places(sandbox, job_fd));
	enter_stage(STAGE_POOL);
	must(pool_make(sandbox, &upper_fd));
	enter_stage(STAGE_SPOOL);
	int spool_fd = must(pool_make_spool(sandbox));
	enter_stage(STAGE_LAYERS);
	collect(sandbox, userns_fd, upper_fd, restore, &parts);
	enter_stage(STAGE_NAMESPACES);
	make_namespaces();
	enter_time(restore);
	enter_stage(STAGE_NETWORK);
	int proxy_fd = make_network(&sandbox->spec);
	enter_stage(STAGE_OVERLAY);
	parts.overlay = must(root_overlay(sandbox, &parts.root));
	/* From here on what is allocated is charged to the guest. */
	enter_stage(STAGE_CGROUP);
	must(cgroup_enter_guest(sandbox));
	enter_stage(STAGE_RESTORE);
	enter_host(parts.run);
	attach_part(parts.overlay, "/run/job/root");
	for (unsigned i = 0; i < parts.count; i++) {
		snprintf(path, sizeof(path), "/run/job/%u", i);
		attach_part(parts.external[i], path);
	}
	read_arguments(job_fd, &arguments);
	shift_user_namespace(arguments.userns_image, sandbox->uid_base);
	must(die_with_supervisor());
	must(send_report(STAGE_EXEC, 0, proxy_fd));
	place_descriptors(sandbox, restore, job_fd, spool_fd);
	become_criu(RESTORE_JOB_FD, &arguments, sandbox->uid_base);
}
