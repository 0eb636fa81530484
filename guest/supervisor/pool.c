/* The writable layers: one btrfs in a file that nobody else sees. Per sandbox a subvolume with a quota (the guest gets
 * EDQUOT beyond it) and, outside that quota, a directory for the init's output spool. Nothing here outlives the supervisor:
 * the file is unlinked as soon as the loop device has it, and the mount hangs on a descriptor. */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <linux/btrfs.h>
#include <linux/btrfs_tree.h>
#include <linux/loop.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/wait.h>

#include "supervisor.h"

#define QUOTA_ENABLE_SIMPLE 4u
#define LOOP_TRIES 20
#define COPY "copy" /* of a cut, until it is a sandbox's */
#define COPIES ".copies" /* behind a cut's name: where the node has made some, for those that will start from it */
#define COPIES_MAX 64u
#define STALE_MAX 65536u
#define SWEEP_MAX 128u
#define SWEEP_BUSY_MAX 8u

bool pool_has_simple_quota;
static int pool_fd = -1; /* the root directory */
/* Quota groups of removed subvolumes: they can be dropped only after the kernel's cleaner has emptied these, and when no
 * copy has data of theirs any more. */
static uint64_t stale_quotas[STALE_MAX]; /* from stale_first on, the one tried longest ago first */
static unsigned stale_first, stale_count;

/* --- start and end ------------------------------------------------------------------------------------------------ */

static int make_file_system(const char *path)
{
	char *arguments[] = {"mkfs.btrfs", "-q", "-f", "-K", "-m", "single", "-d", "single", (char *)path, NULL};
	char *environment[] = {"PATH=/usr/sbin:/sbin:/usr/bin:/bin:/usr/local/sbin:/usr/local/bin", NULL};
	posix_spawn_file_actions_t actions;
	pid_t pid;
	int status;

	/* The caller's stdout is for one line only; what the tool says belongs to the log. */
	setenv("PATH", environment[0] + 5, 1);
	int error = posix_spawn_file_actions_init(&actions);
	if (error == 0)
		error = posix_spawn_file_actions_adddup2(&actions, STDERR_FILENO, STDOUT_FILENO);
	if (error == 0)
		error = posix_spawnp(&pid, "mkfs.btrfs", &actions, NULL, arguments, environment);
	posix_spawn_file_actions_destroy(&actions);
	if (error)
		return errno = error, -1;
	while (waitpid(pid, &status, 0) < 0)
		if (errno != EINTR)
			return -1;
	if (WIFEXITED(status) && WEXITSTATUS(status) == 127) {
		log_line("mkfs.btrfs (btrfs-progs) is missing");
		return errno = ENOENT, -1;
	}
	if (!WIFEXITED(status)) {
		log_line("mkfs.btrfs got signal %d", WTERMSIG(status));
		return errno = EIO, -1;
	}
	return WEXITSTATUS(status) == 0 ? 0 : (errno = EIO, -1);
}

/* Another process may take the free device between the two calls: then ask again. */
static int make_loop(int file_fd, char device[32])
{
	CLEANUP_FD int control_fd = open("/dev/loop-control", O_RDWR | O_CLOEXEC);
	struct loop_config config = {.fd = (uint32_t)file_fd, .info.lo_flags = LO_FLAGS_AUTOCLEAR | LO_FLAGS_DIRECT_IO};

	if (control_fd < 0)
		return -1;
	for (int tries = 0; tries < LOOP_TRIES; tries++) {
		int number = ioctl(control_fd, LOOP_CTL_GET_FREE);
		if (number < 0)
			return -1;
		snprintf(device, 32, "/dev/loop%d", number);
		int loop_fd = open(device, O_RDWR | O_CLOEXEC);
		if (loop_fd < 0)
			return -1;
		if (ioctl(loop_fd, LOOP_CONFIGURE, &config) == 0)
			return loop_fd;
		int error = errno;
		close(loop_fd);
		if (error == EINVAL && config.info.lo_flags & LO_FLAGS_DIRECT_IO)
			config.info.lo_flags = LO_FLAGS_AUTOCLEAR;
		else if (error != EBUSY)
			return errno = error, -1;
	}
	return errno = EBUSY, -1;
}

static int enable_quotas(void)
{
	struct btrfs_ioctl_quota_ctl_args arguments = {.cmd = QUOTA_ENABLE_SIMPLE};

	pool_has_simple_quota = ioctl(pool_fd, BTRFS_IOC_QUOTA_CTL, &arguments) == 0;
	if (pool_has_simple_quota)
		return 0;
	arguments.cmd = BTRFS_QUOTA_CTL_ENABLE;
	return ioctl(pool_fd, BTRFS_IOC_QUOTA_CTL, &arguments);
}

/* nobarrier: after a crash of the host nothing here is looked at again. nodiscard: the room that it has is kept. */
static int mount_pool(const char *device)
{
	const char *pairs[] = {"source", device, "nobarrier", NULL, "nodiscard", NULL, NULL};
	CLEANUP_FD int mount_fd = mount_new("btrfs", MOUNT_ATTR_NOATIME | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOSUID, pairs);

	if (mount_fd < 0 || mounts_hold(mount_fd, "pool") < 0)
		return -1;
	pool_fd = openat(mount_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (pool_fd < 0 || mkdirat(pool_fd, "upper", 0700) < 0 || mkdirat(pool_fd, "cut", 0700) < 0 ||
	    mkdirat(pool_fd, "copy", 0700) < 0 || mkdirat(pool_fd, "spool", 0711) < 0)
		return -1;
	return pool_open_counts() < 0 ? -1 : enable_quotas();
}

int pool_open(void)
{
	char device[32];

	if (unlink(options.pool) < 0 && errno != ENOENT)
		return -1;
	int loop_fd = -1, file_fd = open(options.pool, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
	if (file_fd < 0)
		return -1;
	if (pool_take_room(file_fd) == 0 && make_file_system(options.pool) == 0)
		loop_fd = make_loop(file_fd, device);
	int error = errno;
	unlink(options.pool);
	errno = error;
	if (loop_fd < 0)
		return -1;
	pool_device(loop_fd);
	return mount_pool(device);
}

void pool_close(void)
{
	pool_let_room_go();
	close_fd(&pool_fd);
}

/* --- per sandbox; pool_make and pool_make_spool run in the launch child ------------------------------------------- */

/* The sandbox's root directory is this one, so it is as the topmost layer has it; only that all may enter is made sure of. */
static int make_upper(const struct sandbox *sandbox, int upper_fd)
{
	struct stat top;

	if (fstat(sandbox->spec.layers[0]->fd, &top) < 0 || mkdirat(upper_fd, "u", 0700) < 0 ||
	    fchmodat(upper_fd, "u", (top.st_mode & 07777) | 0555, 0) < 0)
		return -1;
	return utimensat(upper_fd, "u", (struct timespec[]){top.st_mtim, top.st_mtim}, 0);
}

static int make_empty(int dir_fd, const char *id)
{
	struct btrfs_ioctl_vol_args name = {0};

	snprintf(name.name, sizeof(name.name), "%s", id);
	return ioctl(dir_fd, BTRFS_IOC_SUBVOL_CREATE, &name);
}

static int make_place(int places_fd, const char *id)
{
	if (mkdirat(places_fd, id, 0700) < 0 && errno != EEXIST)
		return -1;
	return openat(places_fd, id, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
}

/* The directory that a copy was begun in, with a copy that nobody has taken. */
static int remove_place(int places_fd, const char *id)
{
	struct btrfs_ioctl_vol_args name = {.name = COPY};
	CLEANUP_FD int place_fd = openat(places_fd, id, O_RDONLY | O_DIRECTORY | O_CLOEXEC);

	if (place_fd < 0)
		return errno == ENOENT ? 0 : -1;
	if (ioctl(place_fd, BTRFS_IOC_SNAP_DESTROY, &name) < 0 && errno != ENOENT)
		return -1;
	return unlinkat(places_fd, id, AT_REMOVEDIR);
}

/* The same whatever the size of the cut: no data is copied. Each is made in a directory of its own, for the kernel holds that
 * until what it has made is written: so many at once are written together, and not one after the other. */
static int make_copy(int dir_fd, const char *id, const char *cut)
{
	struct btrfs_ioctl_vol_args_v2 copy = {.name = COPY};
	CLEANUP_FD int cuts_fd = pool_open_dir("cut");
	CLEANUP_FD int cut_fd = cuts_fd < 0 ? -1 : openat(cuts_fd, cut, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	CLEANUP_FD int places_fd = cut_fd < 0 ? -1 : pool_open_dir("copy");
	CLEANUP_FD int place_fd = places_fd < 0 ? -1 : make_place(places_fd, id);

	if (place_fd < 0)
		return -1;
	copy.fd = cut_fd;
	if (ioctl(place_fd, BTRFS_IOC_SNAP_CREATE_V2, &copy) < 0 || renameat(place_fd, COPY, dir_fd, id) < 0)
		return -1;
	return remove_place(places_fd, id);
}

/* One of the copies that the node has made of the cut: whoever takes one first has it. 1: taken; 0: there is none. */
static int take_copy(int dir_fd, const struct sandbox *sandbox)
{
	char path[ID_MAX + 16];
	CLEANUP_FD int cuts_fd = pool_open_dir("cut");

	snprintf(path, sizeof(path), "%s" COPIES, sandbox->spec.cut);
	CLEANUP_FD int copies_fd = cuts_fd < 0 ? -1 : openat(cuts_fd, path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (copies_fd < 0)
		return cuts_fd >= 0 && errno == ENOENT ? 0 : -1;
	/* Those that come together begin to look at different ones. */
	for (unsigned i = 0; i < COPIES_MAX; i++) {
		snprintf(path, sizeof(path), "%u/" COPY, (sandbox->slot + i) % COPIES_MAX);
		if (renameat(copies_fd, path, dir_fd, sandbox->id) == 0)
			return 1;
		if (errno != ENOENT)
			return -1;
	}
	return 0;
}

static int make_from_cut(int dir_fd, const struct sandbox *sandbox)
{
	int taken = take_copy(dir_fd, sandbox);

	if (taken < 0)
		return -1;
	return taken ? 0 : make_copy(dir_fd, sandbox->id, sandbox->spec.cut);
}

int pool_limit(const struct sandbox *sandbox, int upper_fd)
{
	struct btrfs_ioctl_qgroup_limit_args limit = {
		.lim = {.flags = BTRFS_QGROUP_LIMIT_MAX_RFER, .max_rfer = sandbox->spec.upper_bytes}};

	return options.no_quota ? 0 : ioctl(upper_fd, BTRFS_IOC_QGROUP_LIMIT, &limit);
}

/* What of a writable layer follows from the image it is for. */
int pool_fit(const struct sandbox *sandbox, int upper_fd)
{
	return *sandbox->spec.cut ? 0 : make_upper(sandbox, upper_fd);
}

int pool_open_upper(const struct sandbox *sandbox)
{
	char path[ID_MAX + 16];

	snprintf(path, sizeof(path), "upper/%s", sandbox->id);
	return openat(pool_fd, path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
}

/* `*upper_fd` is the subvolume's root, with `u` and `w` for the overlay. Ids on disk are unshifted: guest root is 0. */
int pool_make(const struct sandbox *sandbox, int *upper_fd)
{
	const char *cut = sandbox->spec.cut;
	CLEANUP_FD int dir_fd = openat(pool_fd, "upper", O_RDONLY | O_DIRECTORY | O_CLOEXEC);

	if (dir_fd < 0 || (*cut ? make_from_cut(dir_fd, sandbox) : make_empty(dir_fd, sandbox->id)) < 0)
		return -1;
	*upper_fd = openat(dir_fd, sandbox->id, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (*upper_fd < 0 || (sandbox->spec.upper_bytes && pool_limit(sandbox, *upper_fd) < 0) ||
	    (!sandbox->as_slot.is_slot && pool_fit(sandbox, *upper_fd) < 0))
		return -1;
	/* A work directory that an overlay has used says so, and another one may not be mounted over what a volatile one left. */
	if (*cut && remove_tree_at(*upper_fd, "w", false) < 0)
		return -1;
	return mkdirat(*upper_fd, "w", 0700);
}

/* A slot's empty layer gives way to a copy of a cut. Its quota group stays until the pool goes, some hundred bytes. */
int pool_replace(struct sandbox *sandbox, int *upper_fd)
{
	struct btrfs_ioctl_vol_args name = {0};
	CLEANUP_FD int dir_fd = openat(pool_fd, "upper", O_RDONLY | O_DIRECTORY | O_CLOEXEC);

	close_fd(upper_fd);
	snprintf(name.name, sizeof(name.name), "%s", sandbox->id);
	if (dir_fd < 0 || ioctl(dir_fd, BTRFS_IOC_SNAP_DESTROY, &name) < 0)
		return -1;
	sandbox->as_slot.is_slot = false; /* it has a sandbox's layer from here on */
	return pool_make(sandbox, upper_fd);
}

int pool_descriptor(void)
{
	return pool_fd;
}

/* The init's spool directory, through a mount of its own: `..` leads nowhere. */
int pool_make_spool(const struct sandbox *sandbox)
{
	char path[ID_MAX + 16];
	uid_t uid = sandbox->uid_base + init_uid();

	snprintf(path, sizeof(path), "spool/%s", sandbox->id);
	if (mkdirat(pool_fd, path, 0700) < 0 || fchownat(pool_fd, path, uid, uid, AT_SYMLINK_NOFOLLOW) < 0)
		return -1;
	CLEANUP_FD int tree_fd = mount_clone(pool_fd, path);
	return tree_fd < 0 ? -1 : openat(tree_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
}

/* To the front: memory is touched only about twice as far as the longest list of them reached. */
static void move_stale_quotas(void)
{
	memmove(stale_quotas, stale_quotas + stale_first, stale_count * sizeof(*stale_quotas));
	stale_first = 0;
}

static void add_stale_quota(uint64_t id)
{
	if (stale_first + stale_count == STALE_MAX)
		move_stale_quotas();
	stale_quotas[stale_first + stale_count++] = id;
}

static void remember_quota(int upper_dir_fd, const char *id)
{
	struct btrfs_ioctl_ino_lookup_args lookup = {.objectid = BTRFS_FIRST_FREE_OBJECTID};
	CLEANUP_FD int fd = openat(upper_dir_fd, id, O_RDONLY | O_DIRECTORY | O_CLOEXEC);

	/* One that isn't remembered costs the kernel a few hundred bytes until the pool goes. */
	if (fd < 0 || stale_count == STALE_MAX || ioctl(fd, BTRFS_IOC_INO_LOOKUP, &lookup) < 0)
		return;
	add_stale_quota(lookup.treeid);
}

static int remove_files(const struct sandbox *sandbox)
{
	struct btrfs_ioctl_vol_args name = {0};
	CLEANUP_FD int upper_fd = openat(pool_fd, "upper", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	CLEANUP_FD int spool_fd = openat(pool_fd, "spool", O_RDONLY | O_DIRECTORY | O_CLOEXEC);

	if (upper_fd < 0 || spool_fd < 0)
		return -1;
	if (faccessat(upper_fd, sandbox->id, F_OK, AT_SYMLINK_NOFOLLOW) == 0) {
		remember_quota(upper_fd, sandbox->id);
		snprintf(name.name, sizeof(name.name), "%s", sandbox->id);
		if (ioctl(upper_fd, BTRFS_IOC_SNAP_DESTROY, &name) < 0 && errno != ENOENT)
			return -1;
	}
	CLEANUP_FD int places_fd = pool_open_dir("copy");
	if (places_fd < 0 || (*sandbox->spec.cut && remove_place(places_fd, sandbox->id) < 0))
		return -1;
	return remove_tree_at(spool_fd, sandbox->id, false);
}

/* Whether the kernel writes nothing to it any more, for good: the disk under its file failed. */
bool pool_is_lost(void)
{
	struct statvfs found;

	return pool_fd >= 0 && fstatvfs(pool_fd, &found) == 0 && (found.f_flag & ST_RDONLY);
}

/* Safe to repeat. The subvolume's content goes with it, later and by itself; what can't be removed from a pool that is lost
 * goes with that. */
int pool_remove(const struct sandbox *sandbox)
{
	int result = remove_files(sandbox);

	return result < 0 && pool_is_lost() ? 0 : result;
}

/* `upper` or `cut`, for the node: it makes snapshots of the one in the other by itself, since that waits for the disk. */
int pool_open_dir(const char *name)
{
	return openat(pool_fd, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
}

static int remove_cut(int cuts_fd, const char *cut)
{
	struct btrfs_ioctl_vol_args name = {0};

	remember_quota(cuts_fd, cut);
	snprintf(name.name, sizeof(name.name), "%s", cut);
	return ioctl(cuts_fd, BTRFS_IOC_SNAP_DESTROY, &name);
}

/* Every entry of a directory. Closes `fd`. */
static int remove_each(int fd, int (*let_go)(int dir_fd, const char *name))
{
	struct dirent *entry;
	int result = 0;
	DIR *dir = fd < 0 ? NULL : fdopendir(fd);

	if (!dir) {
		close_fd(&fd);
		return -1;
	}
	while (result == 0 && (entry = readdir(dir)))
		if (entry->d_name[0] != '.')
			result = let_go(fd, entry->d_name);
	int error = errno;
	closedir(dir);
	return errno = error, result;
}

static int remove_cut_or_copies(int cuts_fd, const char *name)
{
	size_t length = strlen(name), tail = strlen(COPIES);

	if (length < tail || strcmp(name + length - tail, COPIES) != 0)
		return remove_cut(cuts_fd, name);
	if (remove_each(openat(cuts_fd, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC), remove_place) < 0)
		return -1;
	return unlinkat(cuts_fd, name, AT_REMOVEDIR);
}

/* Snapshots of an earlier node, that no longer exists when a new one comes. */
int pool_remove_cuts(void)
{
	return remove_each(pool_open_dir("cut"), remove_cut_or_copies);
}

/* Drop those that nothing needs, a bounded number at a time; true when some are left. One that is still needed waits behind
 * the others, and after a few such the rest waits for the next time: most often none of them is emptied yet. */
bool pool_drop_stale_quotas(void)
{
	for (unsigned i = 0, busy = 0; i < SWEEP_MAX && busy < SWEEP_BUSY_MAX && busy < stale_count; i++) {
		struct btrfs_ioctl_qgroup_create_args arguments = {.create = 0, .qgroupid = stale_quotas[stale_first]};
		bool is_busy = ioctl(pool_fd, BTRFS_IOC_QGROUP_CREATE, &arguments) < 0 && errno == EBUSY;
		stale_first++;
		stale_count--;
		if (is_busy) {
			add_stale_quota(arguments.qgroupid);
			busy++;
		}
	}
	if (stale_first >= stale_count)
		move_stale_quotas();
	return stale_count > 0;
}
