/* Mounts: what is made once and shared (the skeletons of /dev and /sys, masks; layers.c has the layers) and the root of one sandbox.
 *
 * Everything shared hangs below one `holder` that is in no mount namespace and is reached through descriptors. The supervisor lives
 * in a mount namespace of two mounts, which a launch child copies for next to nothing however many layers there are. Kernels before 6.15 can't
 * clone a mount that is in no namespace; there the holder is part of that namespace. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/securebits.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/fsuid.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>

#include "supervisor.h"

#define SOCKET_DIR ".barchan"
#define TERMINALS_MAX "256" /* the host has 4096 for all */
#define READONLY_SAFE (MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC)

static int holder_fd = -1, dev_fd = -1, sys_fd = -1, masks_fd = -1, run_fd = -1, host_ns_fd = -1, own_ns_fd = -1;
bool detached_clones;

/* Shown below the guest's /sys: what programs count processors and memory nodes by. */
static struct {
	const char *path;
	int copy_fd;
} shown[] = {{"devices/system/cpu", -1}, {"devices/system/node", -1}};

/* Entries of /proc that tell about or reach into the host, whatever their mode says. */
static struct {
	const char *name;
	enum { MASK_FILE, MASK_DIR, MAKE_READONLY } how;
	bool exists;
} protections[] = {
	{"kcore", MASK_FILE, false},	   {"keys", MASK_FILE, false},	      {"key-users", MASK_FILE, false},
	{"kmsg", MASK_FILE, false},	   {"latency_stats", MASK_FILE, false}, {"timer_list", MASK_FILE, false},
	{"timer_stats", MASK_FILE, false}, {"sched_debug", MASK_FILE, false}, {"kpagecount", MASK_FILE, false},
	{"kpageflags", MASK_FILE, false},  {"kpagecgroup", MASK_FILE, false}, {"sysrq-trigger", MASK_FILE, false},
	{"vmallocinfo", MASK_FILE, false}, {"slabinfo", MASK_FILE, false},    {"pagetypeinfo", MASK_FILE, false},
	{"kallsyms", MASK_FILE, false},	   {"modules", MASK_FILE, false},     {"iomem", MASK_FILE, false},
	{"ioports", MASK_FILE, false},	   {"interrupts", MASK_FILE, false},  {"acpi", MASK_DIR, false},
	{"scsi", MASK_DIR, false},	   {"asound", MASK_DIR, false},	      {"driver", MASK_DIR, false},
	{"sys", MAKE_READONLY, false},	   {"bus", MAKE_READONLY, false},     {"fs", MAKE_READONLY, false},
	{"irq", MAKE_READONLY, false},	   {"pressure", MASK_DIR, false},
};

/* --- building blocks ---------------------------------------------------------------------------------------------- */

/* A new file system, mounted nowhere. `pairs`: option, value (NULL: a flag), ..., NULL. */
int mount_new(const char *type, unsigned attributes, const char *const *pairs)
{
	CLEANUP_FD int context_fd = fsopen(type, FSOPEN_CLOEXEC);

	if (context_fd < 0)
		return -1;
	for (; pairs && *pairs; pairs += 2)
		if (fsconfig(context_fd, pairs[1] ? FSCONFIG_SET_STRING : FSCONFIG_SET_FLAG, pairs[0], pairs[1], 0) < 0)
			return -1;
	if (fsconfig(context_fd, FSCONFIG_CMD_CREATE, NULL, NULL, 0) < 0)
		return -1;
	return fsmount(context_fd, FSMOUNT_CLOEXEC, attributes);
}

int mount_clone_with(int dir_fd, const char *path, unsigned flags)
{
	return open_tree(dir_fd, path, OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | flags | (*path ? 0 : AT_EMPTY_PATH));
}

int mount_clone(int dir_fd, const char *path)
{
	return mount_clone_with(dir_fd, path, 0);
}

int mount_set_attributes(int mount_fd, uint64_t attributes, int userns_fd)
{
	struct mount_attr change = {.attr_set = attributes, .userns_fd = userns_fd < 0 ? 0 : (uint64_t)userns_fd};

	return mount_setattr(mount_fd, "", AT_EMPTY_PATH, &change, sizeof(change));
}

/* The last component is never followed when it is a symbolic link: a guest's image may have one there. */
int mount_attach(int mount_fd, int dir_fd, const char *path)
{
	return move_mount(mount_fd, "", dir_fd, path, MOVE_MOUNT_F_EMPTY_PATH);
}

int mounts_hold(int mount_fd, const char *name)
{
	if (mkdirat(holder_fd, name, 0700) < 0 && errno != EEXIST)
		return -1;
	return mount_attach(mount_fd, holder_fd, name);
}

/* --- shared, made at start ---------------------------------------------------------------------------------------- */

static int make_dev(void)
{
	static const struct {
		const char *name;
		unsigned major, minor;
	} nodes[] = {{"null", 1, 3}, {"zero", 1, 5}, {"full", 1, 7}, {"random", 1, 8}, {"urandom", 1, 9}, {"tty", 5, 0}, {"kmsg", 1, 11}};
	/* Beside them, with --full-dev: the host's kernel log. */
	const size_t node_count = options.full_dev ? COUNT(nodes) : COUNT(nodes) - 1;
	static const char *const links[][2] = {{"fd", "/proc/self/fd"},		{"stdin", "/proc/self/fd/0"},
					       {"stdout", "/proc/self/fd/1"},	{"stderr", "/proc/self/fd/2"},
					       {"ptmx", "pts/ptmx"}};
	static const char *const dirs[] = {"pts", "shm", "mqueue", SOCKET_DIR};

	dev_fd = mount_new("tmpfs", MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC, (const char *[]){"mode", "0755", NULL});
	if (dev_fd < 0)
		return -1;
	for (size_t i = 0; i < node_count; i++)
		if (mknodat(dev_fd, nodes[i].name, S_IFCHR | 0666, makedev(nodes[i].major, nodes[i].minor)) < 0)
			return -1;
	for (size_t i = 0; i < COUNT(links); i++)
		if (symlinkat(links[i][1], dev_fd, links[i][0]) < 0)
			return -1;
	for (size_t i = 0; i < COUNT(dirs); i++)
		if (mkdirat(dev_fd, dirs[i], 0755) < 0)
			return -1;
	return mount_set_attributes(dev_fd, MOUNT_ATTR_RDONLY, -1) < 0 ? -1 : mounts_hold(dev_fd, "dev");
}

/* What is needed of the host's /sys and /proc, before the first may be covered. */
static int look_at_host(void)
{
	char path[64];

	for (size_t i = 0; i < COUNT(shown); i++) {
		snprintf(path, sizeof(path), "/sys/%s", shown[i].path);
		shown[i].copy_fd = mount_clone(AT_FDCWD, path);
		if (shown[i].copy_fd < 0 ? errno != ENOENT : mount_set_attributes(shown[i].copy_fd, READONLY_SAFE, -1) < 0)
			return -1;
	}
	for (size_t i = 0; i < COUNT(protections); i++) {
		snprintf(path, sizeof(path), "/proc/%s", protections[i].name);
		protections[i].exists = access(path, F_OK) == 0;
	}
	return 0;
}

static int make_sys(void)
{
	static const char *const dirs[] = {"devices", "devices/system", "devices/system/cpu", "devices/system/node"};

	sys_fd = mount_new("tmpfs", 0, (const char *[]){"mode", "0755", NULL});
	if (sys_fd < 0)
		return -1;
	for (size_t i = 0; i < COUNT(dirs); i++)
		if (mkdirat(sys_fd, dirs[i], 0755) < 0)
			return -1;
	if (mount_set_attributes(sys_fd, READONLY_SAFE, -1) < 0 || mounts_hold(sys_fd, "sys") < 0)
		return -1;
	for (size_t i = 0; i < COUNT(shown); i++) {
		if (shown[i].copy_fd >= 0 && mount_attach(shown[i].copy_fd, sys_fd, shown[i].path) < 0)
			return -1;
		close_fd(&shown[i].copy_fd);
	}
	return 0;
}

static int make_masks(void)
{
	masks_fd = mount_new("tmpfs", 0, (const char *[]){"mode", "0755", NULL});
	if (masks_fd < 0 || mkdirat(masks_fd, "dir", 0555) < 0)
		return -1;
	int file_fd = openat(masks_fd, "file", O_CREAT | O_WRONLY | O_CLOEXEC, 0444);
	if (file_fd < 0)
		return -1;
	close(file_fd);
	return mount_set_attributes(masks_fd, READONLY_SAFE, -1) < 0 ? -1 : mounts_hold(masks_fd, "masks");
}

/* /run of every CRIU, which passes through it as a guest's root, too. */
static int make_run(void)
{
	run_fd = mount_new("tmpfs", MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC, (const char *[]){"mode", "0711", "size", "1m", NULL});
	return run_fd < 0 || mkdirat(run_fd, "job", 0711) < 0 ? -1 : mounts_hold(run_fd, "run");
}

/* The root of the supervisor's own mount namespace: /proc, and the places where a launch child puts things together. */
static int make_own_root(void)
{
	static const char *const dirs[] = {"proc", "root", "upper", "layers", "held"};
	char path[32];

	if (mount("tmpfs", "/sys", "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, "mode=0700") < 0)
		return -1;
	for (size_t i = 0; i < COUNT(dirs); i++) {
		snprintf(path, sizeof(path), "/sys/%s", dirs[i]);
		if (mkdir(path, 0700) < 0)
			return -1;
	}
	for (unsigned i = 0; i < LAYERS_MAX; i++) {
		snprintf(path, sizeof(path), "/sys/layers/%u", i);
		if (mkdir(path, 0700) < 0)
			return -1;
	}
	return mount("proc", "/sys/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
}

/* The init is run from a copy that nobody but host root may read: the kernel then lets no guest user, whatever its
 * ids, look into the process or own its files in /proc. An upgrade can't change it under running sandboxes either. */
static int copy_init(void)
{
	CLEANUP_FD int from_fd = open(options.init, O_RDONLY | O_CLOEXEC);
	CLEANUP_FD int to_fd = openat(holder_fd, "init", O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0111);
	char block[65536];
	ssize_t length;

	if (from_fd < 0 || to_fd < 0)
		return -1;
	while ((length = read(from_fd, block, sizeof(block))) > 0)
		if (write(to_fd, block, (size_t)length) != length)
			return -1;
	if (length < 0)
		return -1;
	close_fd(&to_fd);
	init_binary_fd = openat(holder_fd, "init", O_PATH | O_CLOEXEC);
	return init_binary_fd;
}

static int make_holder(void)
{
	holder_fd = mount_new("tmpfs", 0, (const char *[]){"mode", "0700", NULL});
	if (holder_fd < 0)
		return -1;
	CLEANUP_FD int copy_fd = mount_clone(holder_fd, "");
	detached_clones = copy_fd >= 0;
	if (detached_clones)
		return 0;
	if (make_own_root() < 0)
		return -1;
	return mount_attach(holder_fd, AT_FDCWD, "/sys/held");
}

/* Until mounts_leave_host the host's files are still there under their names. */
int mounts_open(void)
{
	host_ns_fd = open("/proc/self/ns/mnt", O_RDONLY | O_CLOEXEC);
	if (host_ns_fd < 0 || unshare(CLONE_NEWNS) < 0 || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0)
		return -1;
	own_ns_fd = open("/proc/self/ns/mnt", O_RDONLY | O_CLOEXEC);
	if (own_ns_fd < 0)
		return -1;
	int (*const steps[])(void) = {look_at_host, make_holder, copy_init, make_dev, make_sys, make_masks, make_run};
	for (size_t i = 0; i < COUNT(steps); i++)
		if (steps[i]() < 0)
			return -1;
	return 0;
}

int mounts_leave_host(void)
{
	if (detached_clones && make_own_root() < 0)
		return -1;
	if (chdir("/sys") < 0 || syscall(SYS_pivot_root, ".", ".") < 0 || umount2(".", MNT_DETACH) < 0)
		return -1;
	return chdir("/");
}

/* Run something that opens or mounts by a host path. Without its own namespace the supervisor can't start anything any more. */
int mounts_on_host(int (*run)(const char *path), const char *path)
{
	int result = setns(host_ns_fd, CLONE_NEWNS) < 0 ? -1 : run(path), error = errno;

	if (setns(own_ns_fd, CLONE_NEWNS) < 0) {
		log_line("returning to the own mount namespace: %s", strerror(errno));
		abort();
	}
	errno = error;
	return result;
}

/* The calling child goes over to a copy of the host's mount namespace. */
int mounts_copy_host(void)
{
	if (setns(host_ns_fd, CLONE_NEWNS) < 0 || unshare(CLONE_NEWNS) < 0)
		return -1;
	return mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL);
}

void mounts_close(void)
{
	layers_close();
	close_fd(&init_binary_fd), close_fd(&dev_fd), close_fd(&sys_fd), close_fd(&masks_fd), close_fd(&run_fd), close_fd(&holder_fd);
}

/* --- the root of one sandbox; runs in the launch child ------------------------------------------------------------ */

static int idmapped_clone(int fd, int userns_fd)
{
	int copy_fd = mount_clone(fd, "");

	if (copy_fd >= 0 && !options.no_userns && mount_set_attributes(copy_fd, MOUNT_ATTR_IDMAP, userns_fd) < 0)
		close_fd(&copy_fd);
	return copy_fd;
}

/* The layers and the writable one, with the ids of the sandbox. */
int root_collect_layers(const struct sandbox *sandbox, int userns_fd, int upper_fd, struct root_parts *parts)
{
	for (unsigned i = 0; i < sandbox->spec.layer_count; i++) {
		parts->layers[i] = idmapped_clone(sandbox->spec.layers[i]->fd, userns_fd);
		if (parts->layers[i] < 0)
			return -1;
	}
	parts->upper = idmapped_clone(upper_fd, userns_fd);
	return parts->upper < 0 ? -1 : 0;
}

/* Copies of the shared mounts, taken while the process is still in the supervisor's mount namespace. */
int root_collect(const struct sandbox *sandbox, int userns_fd, int upper_fd, struct root_parts *parts)
{
	if (!sandbox->as_slot.is_slot && root_collect_layers(sandbox, userns_fd, upper_fd, parts) < 0)
		return -1;
	parts->dev = mount_clone(dev_fd, "");
	parts->sys = mount_clone_with(sys_fd, "", AT_RECURSIVE);
	return parts->dev < 0 || parts->sys < 0 ? -1 : 0;
}

static int make_overlay(const struct sandbox *sandbox, const struct root_parts *parts)
{
	if (options.writable_layers)
		return mount_attach(parts->layers[0], AT_FDCWD, "/root");
	char path[32], options_text[LAYERS_MAX * 3 + 192];
	size_t length = (size_t)snprintf(options_text, sizeof(options_text), "lowerdir=");

	for (unsigned i = 0; i < sandbox->spec.layer_count; i++) {
		snprintf(path, sizeof(path), "/layers/%u", i);
		if (mount_attach(parts->layers[i], AT_FDCWD, path) < 0)
			return -1;
		length += (size_t)snprintf(options_text + length, sizeof(options_text) - length, i ? ":%u" : "%u", i);
	}
	/* volatile: without it, unmounting any sandbox would commit the whole pool to disk. Newer kernels complain in their
	 * log about uuid=off at each mount, older ones don't know null. */
	snprintf(options_text + length, sizeof(options_text) - length, ",upperdir=/upper/u,workdir=/upper/w,volatile,redirect_dir=on,metacopy=off,uuid=%s",
		 detached_clones ? "null" : "off");
	if (mount_attach(parts->upper, AT_FDCWD, "/upper") < 0 || chdir("/layers") < 0)
		return -1;
	return mount("overlay", "/root", "overlay", options.no_caps_drop ? MS_NODEV : MS_NODEV | MS_NOSUID, options_text);
}

static int make_mount_points(int root_fd)
{
	static const char *const names[] = {"proc", "dev", "sys"};

	for (size_t i = 0; i < COUNT(names); i++)
		if (faccessat(root_fd, names[i], F_OK, AT_SYMLINK_NOFOLLOW) < 0 && (errno != ENOENT || mkdirat(root_fd, names[i], 0755) < 0))
			return -1;
	return 0;
}

/* The overlay acts on its upper as whoever mounted it. That must be an id the idmapped upper knows: guest root. */
static int make_root(const struct sandbox *sandbox, const struct root_parts *parts)
{
	if (prctl(PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP) < 0)
		return -1;
	setfsuid(sandbox->uid_base), setfsgid(sandbox->uid_base);
	int root_fd = make_overlay(sandbox, parts) < 0 ? -1 : open("/root", O_PATH | O_DIRECTORY | O_CLOEXEC);
	if (root_fd >= 0 && make_mount_points(root_fd) < 0)
		close_fd(&root_fd);
	setfsuid(0), setfsgid(0);
	return root_fd;
}

/* The same for a restore, mounted nowhere; CRIU makes the rest of the root. */
int root_overlay(const struct sandbox *sandbox, const struct root_parts *parts)
{
	CLEANUP_FD int root_fd = make_root(sandbox, parts);

	return root_fd < 0 ? -1 : mount_clone(root_fd, "");
}

/* A copy of the shared mount that a sandbox has at this path. */
int mounts_part(const char *path)
{
	if (strcmp(path, "/dev") == 0)
		return mount_clone(dev_fd, "");
	if (strcmp(path, "/sys") == 0)
		return mount_clone(sys_fd, "");
	for (size_t i = 0; i < COUNT(shown); i++)
		if (strncmp(path, "/sys/", 5) == 0 && strcmp(path + 5, shown[i].path) == 0)
			return mount_clone(sys_fd, shown[i].path);
	for (size_t i = 0; i < COUNT(protections); i++)
		if (strncmp(path, "/proc/", 6) == 0 && strcmp(path + 6, protections[i].name) == 0 && protections[i].how != MAKE_READONLY)
			return mount_clone(masks_fd, protections[i].how == MASK_FILE ? "file" : "dir");
	return errno = EINVAL, -1;
}

int mounts_run(void)
{
	return mount_clone(run_fd, "");
}

static int attach_new(int dir_fd, const char *path, const char *type, unsigned attributes, const char *const *pairs)
{
	CLEANUP_FD int mount_fd = mount_new(type, attributes, pairs);

	return mount_fd < 0 ? -1 : mount_attach(mount_fd, dir_fd, path);
}

static int make_dev_mounts(const struct sandbox *sandbox, int root_fd, const struct root_parts *parts)
{
	char tty_gid[16], init_id[16], shm_bytes[24];

	snprintf(init_id, sizeof(init_id), "%u", sandbox->uid_base + init_uid());
	snprintf(tty_gid, sizeof(tty_gid), "%u", sandbox->uid_base + 5);
	snprintf(shm_bytes, sizeof(shm_bytes), "%llu", (unsigned long long)sandbox->spec.shm_bytes);
	if (mount_attach(parts->dev, root_fd, "dev") < 0 ||
	    attach_new(parts->dev, "pts", "devpts", MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC,
		       (const char *[]){"gid", tty_gid, "mode", "0620", "ptmxmode", "0666", "max", TERMINALS_MAX, NULL}) < 0 ||
	    attach_new(parts->dev, "shm", "tmpfs", MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV,
		       (const char *[]){"size", shm_bytes, "mode", "1777", NULL}) < 0)
		return -1;
	/* Nobody in the guest may enter: the init's socket lies there. */
	return attach_new(parts->dev, SOCKET_DIR, "tmpfs", MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC,
			  (const char *[]){"size", "16384", "nr_inodes", "8", "mode", "0700", "uid", init_id, "gid", init_id, NULL});
}

static int protect_proc(int proc_fd)
{
	for (size_t i = 0; i < COUNT(protections); i++) {
		if (!protections[i].exists)
			continue;
		bool readonly = protections[i].how == MAKE_READONLY;
		CLEANUP_FD int copy_fd = readonly ? mount_clone(proc_fd, protections[i].name)
						  : mount_clone(masks_fd, protections[i].how == MASK_FILE ? "file" : "dir");
		if (copy_fd < 0 || (readonly && mount_set_attributes(copy_fd, MOUNT_ATTR_RDONLY, -1) < 0) ||
		    mount_attach(copy_fd, proc_fd, protections[i].name) < 0)
			return -1;
	}
	return 0;
}

/* Make it the only root of this mount namespace; processes that had the old one go along. */
int root_enter(int root_fd)
{
	enter_stage(STAGE_PIVOT);
	if (fchdir(root_fd) < 0 || syscall(SYS_pivot_root, ".", ".") < 0 || umount2(".", MNT_DETACH) < 0)
		return -1;
	return chdir("/");
}

/* In the sandbox's new mount namespace: put the root together and make it the only thing there is. */
int root_assemble(const struct sandbox *sandbox, const struct root_parts *parts)
{
	enter_stage(STAGE_OVERLAY);
	CLEANUP_FD int root_fd = sandbox->as_slot.is_slot ? root_make_waiting() : make_root(sandbox, parts);
	if (root_fd < 0)
		return -1;
	enter_stage(STAGE_PROC);
	CLEANUP_FD int proc_fd = options.no_pidns ? mount_clone(AT_FDCWD, "/proc")
						  : mount_new("proc", MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC, NULL);
	if (proc_fd < 0 || mount_attach(proc_fd, root_fd, "proc") < 0)
		return -1;
	enter_stage(STAGE_DEV);
	if (make_dev_mounts(sandbox, root_fd, parts) < 0)
		return -1;
	enter_stage(STAGE_SYS);
	if (mount_attach(parts->sys, root_fd, "sys") < 0)
		return -1;
	enter_stage(STAGE_MASKS);
	if (!options.no_masks && protect_proc(proc_fd) < 0)
		return -1;
	return root_enter(root_fd);
}
