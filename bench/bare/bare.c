/* The bare kernel cost of one sandbox: what a correct launcher must ask of the kernel, and nothing else.
 *
 * Each iteration makes the cgroup leaves, a quota-limited btrfs subvolume, all namespaces, idmapped layers under an
 * overlay, /proc with its masks, /dev, /sys, drops every privilege, installs a seccomp filter, executes a small static
 * init and lets that fork and execute a payload in the limited leaves. The payload prints CLOCK_MONOTONIC; then everything is taken down.
 * One JSON object on stdout. Shares no code with the supervisor, so that it stays a yardstick.
 *
 *   bare --layer EROFS|DIR [--layer ...] --init bare-init --payload STATIC_BINARY [-n N] [-j WORKERS] [--fresh-userns] [--pool FILE]
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <grp.h>
#include <linux/audit.h>
#include <linux/btrfs.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/loop.h>
#include <linux/sched.h>
#include <linux/seccomp.h>
#include <linux/securebits.h>
#include <net/if.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/fsuid.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define LAYERS_MAX 16
#define CONTROLLERS_MAX 3
#define UID_BASE 1048576u
#define INIT_UID 65535u
#define MEMORY_LIMIT "268435456"
#define NAMESPACES (CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS)
#define TIME_NAMESPACE 0x80

#define CHECK(expression) check((long)(expression), __LINE__, #expression)

static long check(long value, int line, const char *expression)
{
	if (value >= 0)
		return value;
	fprintf(stderr, "bare: line %d: %s: %s\n", line, expression, strerror(errno));
	_exit(1);
}

struct sample {
	int64_t create_ns, destroy_ns;
};

struct controller {
	const char *name, *limit_file, *limit;
	int root_fd;
};

static struct controller controllers[CONTROLLERS_MAX] = {
	{"memory", "memory.limit_in_bytes", MEMORY_LIMIT, -1},
	{"pids", "pids.max", "512", -1},
	{"cpu", "cpu.cfs_quota_us", "100000", -1},
};
static const char *layer_paths[LAYERS_MAX];
static int layer_count, layer_fds[LAYERS_MAX];
static int unified_fd = -1, pool_fd, dev_fd, sys_fd, init_fd, payload_fd, userns_fd = -1;
static bool pure_v2;
static struct sock_fprog filter;

static const char *const masked_files[] = {"kcore",	 "keys",      "key-users",     "timer_list", "kpagecount", "kpageflags",
					   "kpagecgroup", "kmsg",      "sysrq-trigger", "vmallocinfo", "slabinfo",   "kallsyms",
					   "iomem",	  "ioports",   "interrupts"};
static const char *const masked_dirs[] = {"acpi"};
static const char *const readonly_dirs[] = {"sys", "bus", "fs", "irq"};

static int64_t now_ns(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void write_at(int dir_fd, const char *path, const char *text)
{
	int fd = (int)CHECK(openat(dir_fd, path, O_WRONLY | O_CLOEXEC));
	CHECK(write(fd, text, strlen(text)));
	close(fd);
}

/* A detached mount of a new file system; options are name, value pairs ended by NULL. */
static int new_mount(const char *type, unsigned attributes, const char *const *options)
{
	int context = (int)CHECK(fsopen(type, FSOPEN_CLOEXEC));
	for (; options && *options; options += 2)
		CHECK(fsconfig(context, FSCONFIG_SET_STRING, options[0], options[1], 0));
	CHECK(fsconfig(context, FSCONFIG_CMD_CREATE, NULL, NULL, 0));
	int fd = (int)CHECK(fsmount(context, FSMOUNT_CLOEXEC, attributes));
	close(context);
	return fd;
}

static int clone_mount(int fd, const char *path)
{
	return (int)CHECK(open_tree(fd, path, OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_RECURSIVE | (*path ? 0 : AT_EMPTY_PATH)));
}

static void attach(int mount_fd, int dir_fd, const char *path)
{
	CHECK(move_mount(mount_fd, "", dir_fd, path, MOVE_MOUNT_F_EMPTY_PATH));
}

static void attach_clone(int fd, int dir_fd, const char *path)
{
	int copy = clone_mount(fd, "");
	attach(copy, dir_fd, path);
	close(copy);
}

static int idmapped_clone(int fd, const char *path, int namespace_fd)
{
	int copy = clone_mount(fd, path);
	struct mount_attr idmap = {.attr_set = MOUNT_ATTR_IDMAP, .userns_fd = (uint64_t)namespace_fd};
	CHECK(mount_setattr(copy, "", AT_EMPTY_PATH, &idmap, sizeof(idmap)));
	return copy;
}

static int make_user_namespace(void)
{
	struct clone_args arguments = {.flags = CLONE_NEWUSER, .exit_signal = SIGCHLD};
	char path[64], map[64];
	pid_t pid = (pid_t)CHECK(syscall(SYS_clone3, &arguments, sizeof(arguments)));
	if (pid == 0)
		for (;;)
			pause();
	snprintf(map, sizeof(map), "0 %u 65536", UID_BASE);
	snprintf(path, sizeof(path), "/proc/%d/uid_map", pid);
	write_at(AT_FDCWD, path, map);
	snprintf(path, sizeof(path), "/proc/%d/gid_map", pid);
	write_at(AT_FDCWD, path, map);
	snprintf(path, sizeof(path), "/proc/%d/ns/user", pid);
	int fd = (int)CHECK(open(path, O_RDONLY | O_CLOEXEC));
	kill(pid, SIGKILL);
	waitpid(pid, NULL, 0);
	return fd;
}

/* A sandbox's own btrfs in a sparse file: the kind of upper the supervisor uses. */
static void make_pool(const char *path)
{
	char command[512], device[32];
	int file = (int)CHECK(open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
	CHECK(ftruncate(file, (off_t)8 << 30));
	snprintf(command, sizeof(command), "mkfs.btrfs -q -f -m single -d single '%s'", path);
	if (system(command) != 0) {
		fprintf(stderr, "bare: mkfs.btrfs failed\n");
		_exit(1);
	}
	unlink(path);
	int control = (int)CHECK(open("/dev/loop-control", O_RDWR | O_CLOEXEC));
	int number = (int)CHECK(ioctl(control, LOOP_CTL_GET_FREE));
	snprintf(device, sizeof(device), "/dev/loop%d", number);
	int loop = (int)CHECK(open(device, O_RDWR | O_CLOEXEC));
	struct loop_config config = {.fd = (uint32_t)file, .info.lo_flags = LO_FLAGS_AUTOCLEAR | LO_FLAGS_DIRECT_IO};
	CHECK(ioctl(loop, LOOP_CONFIGURE, &config));
	const char *options[] = {"source", device, NULL};
	pool_fd = new_mount("btrfs", MOUNT_ATTR_NOATIME | MOUNT_ATTR_NODEV, options);
	pool_fd = (int)CHECK(openat(pool_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
	struct btrfs_ioctl_quota_ctl_args quota = {.cmd = 4 /* simple quotas */};
	CHECK(ioctl(pool_fd, BTRFS_IOC_QUOTA_CTL, &quota));
	close(loop), close(control), close(file);
}

static void make_skeletons(void)
{
	static const struct {
		const char *name;
		unsigned major, minor;
	} nodes[] = {{"null", 1, 3}, {"zero", 1, 5}, {"full", 1, 7}, {"random", 1, 8}, {"urandom", 1, 9}, {"tty", 5, 0}};
	struct mount_attr readonly = {.attr_set = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID};

	umask(0);
	dev_fd = new_mount("tmpfs", MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC, (const char *[]){"mode", "0755", NULL});
	for (size_t i = 0; i < sizeof(nodes) / sizeof(nodes[0]); i++)
		CHECK(mknodat(dev_fd, nodes[i].name, S_IFCHR | 0666, makedev(nodes[i].major, nodes[i].minor)));
	CHECK(symlinkat("pts/ptmx", dev_fd, "ptmx"));
	CHECK(symlinkat("/proc/self/fd", dev_fd, "fd"));
	CHECK(mkdirat(dev_fd, "pts", 0755)), CHECK(mkdirat(dev_fd, "shm", 0755)), CHECK(mkdirat(dev_fd, ".init", 0700));
	CHECK(mkdirat(dev_fd, "empty", 0));
	close(CHECK(openat(dev_fd, "nothing", O_CREAT | O_WRONLY | O_CLOEXEC, 0)));
	CHECK(mount_setattr(dev_fd, "", AT_EMPTY_PATH, &readonly, sizeof(readonly)));

	sys_fd = new_mount("tmpfs", MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV, (const char *[]){"mode", "0755", NULL});
	CHECK(mkdirat(sys_fd, "devices", 0755)), CHECK(mkdirat(sys_fd, "devices/system", 0755));
	CHECK(mkdirat(sys_fd, "devices/system/cpu", 0755));
	int cpu = clone_mount(AT_FDCWD, "/sys/devices/system/cpu");
	CHECK(mount_setattr(cpu, "", AT_EMPTY_PATH, &readonly, sizeof(readonly)));
	attach(cpu, sys_fd, "devices/system/cpu");
	close(cpu);
	CHECK(mount_setattr(sys_fd, "", AT_EMPTY_PATH, &readonly, sizeof(readonly)));
}

/* Leave the host's mounts for a root of two: a copy of the mount namespace then costs next to nothing. */
static void make_small_mount_namespace(void)
{
	CHECK(unshare(CLONE_NEWNS));
	CHECK(mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL));
	CHECK(mount("tmpfs", "/sys", "tmpfs", 0, "mode=0700"));
	CHECK(chdir("/sys"));
	CHECK(mkdir("proc", 0755)), CHECK(mkdir("root", 0755)), CHECK(mkdir("layers", 0755)), CHECK(mkdir("upper", 0755));
	for (int i = 0; i < layer_count; i++) {
		char name[32];
		snprintf(name, sizeof(name), "layers/%d", i);
		CHECK(mkdir(name, 0755));
	}
	CHECK(mount("proc", "proc", "proc", 0, NULL));
	CHECK(syscall(SYS_pivot_root, ".", "."));
	CHECK(umount2(".", MNT_DETACH));
	CHECK(chdir("/"));
}

/* A filter as long as a real allow-list: 48 ranges searched as a tree, so that the kernel's own scan of it is short too. */
static struct sock_filter program[512];

static unsigned emit_tree(unsigned at, unsigned low, unsigned high)
{
	if (low == high) {
		program[at] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, low % 2 ? SECCOMP_RET_ERRNO | EPERM : SECCOMP_RET_ALLOW);
		return at + 1;
	}
	unsigned middle = (low + high + 1) / 2, left = emit_tree(at + 1, low, middle - 1);
	/* Boundaries lie above every number the init and the payload use, as the allowed ones do in a real list. */
	program[at] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, 470 + middle, (uint8_t)(left - at - 1), 0);
	return emit_tree(left, middle, high);
}

static void make_filter(void)
{
	program[0] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, arch));
#if defined(__x86_64__)
	program[1] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, AUDIT_ARCH_X86_64, 1, 0);
#else
	program[1] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, AUDIT_ARCH_AARCH64, 1, 0);
#endif
	program[2] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS);
	program[3] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
	filter = (struct sock_fprog){(unsigned short)emit_tree(4, 0, 47), program};
}

static void make_root(int namespace_fd, const char *id)
{
	char path[64], lower[LAYERS_MAX * 4] = "", options[512];
	int layers[LAYERS_MAX];

	snprintf(path, sizeof(path), "%s", id);
	for (int i = 0; i < layer_count; i++)
		layers[i] = idmapped_clone(layer_fds[i], "", namespace_fd);
	int upper = idmapped_clone(pool_fd, path, namespace_fd);
	int dev = clone_mount(dev_fd, ""), sys = clone_mount(sys_fd, "");
	int file = clone_mount(dev_fd, "nothing"), dir = clone_mount(dev_fd, "empty");

	CHECK(unshare(CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP));
	CHECK(chdir("/layers"));
	for (int i = 0; i < layer_count; i++) {
		snprintf(path, sizeof(path), "%d", i);
		attach(layers[i], AT_FDCWD, path);
		snprintf(lower + strlen(lower), sizeof(lower) - strlen(lower), i ? ":%d" : "%d", i);
	}
	attach(upper, AT_FDCWD, "/upper");
	snprintf(options, sizeof(options), "lowerdir=%s,upperdir=/upper/u,workdir=/upper/w,volatile,uuid=null,redirect_dir=on", lower);
	/* The overlay acts on its upper as this user: an id the idmapped upper knows, with every capability kept. */
	CHECK(prctl(PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP));
	setfsuid(UID_BASE), setfsgid(UID_BASE);
	CHECK(mount("overlay", "/root", "overlay", MS_NODEV | MS_NOSUID, options));
	setfsuid(0), setfsgid(0);

	int root = (int)CHECK(open("/root", O_PATH | O_DIRECTORY | O_CLOEXEC));
	int proc = new_mount("proc", MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC, NULL);
	attach(proc, root, "proc"), attach(dev, root, "dev"), attach(sys, root, "sys");
	char gid[16];
	snprintf(gid, sizeof(gid), "%u", UID_BASE + 5);
	int pts = new_mount("devpts", MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC,
			    (const char *[]){"gid", gid, "mode", "0620", "ptmxmode", "0666", NULL});
	attach(pts, dev, "pts");
	int shm = new_mount("tmpfs", MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV, (const char *[]){"size", "67108864", "mode", "1777", NULL});
	attach(shm, dev, "shm");
	int hidden = new_mount("tmpfs", MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV, (const char *[]){"size", "65536", "mode", "0700", NULL});
	attach(hidden, dev, ".init");
	for (size_t i = 0; i < sizeof(masked_files) / sizeof(masked_files[0]); i++)
		if (faccessat(proc, masked_files[i], F_OK, 0) == 0)
			attach_clone(file, proc, masked_files[i]);
	for (size_t i = 0; i < sizeof(masked_dirs) / sizeof(masked_dirs[0]); i++)
		if (faccessat(proc, masked_dirs[i], F_OK, 0) == 0)
			attach_clone(dir, proc, masked_dirs[i]);
	struct mount_attr readonly = {.attr_set = MOUNT_ATTR_RDONLY};
	for (size_t i = 0; i < sizeof(readonly_dirs) / sizeof(readonly_dirs[0]); i++) {
		int copy = clone_mount(proc, readonly_dirs[i]);
		CHECK(mount_setattr(copy, "", AT_EMPTY_PATH, &readonly, sizeof(readonly)));
		attach(copy, proc, readonly_dirs[i]);
		close(copy);
	}
	CHECK(fchdir(root));
	CHECK(syscall(SYS_pivot_root, ".", "."));
	CHECK(umount2(".", MNT_DETACH));
	CHECK(chdir("/"));
}

static void make_network(void)
{
	int fd = (int)CHECK(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
	struct ifreq request = {.ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING};
	CHECK(ioctl(fd, SIOCSIFFLAGS, &request));
	close(fd);
}

static void drop_privileges(int namespace_fd)
{
	const uint64_t kept = 1u << CAP_SETUID | 1u << CAP_SETGID | 1u << CAP_SETPCAP | 1u << CAP_KILL | 1u << CAP_SYS_RESOURCE;
	struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
	struct __user_cap_data_struct data[2] = {{(uint32_t)kept, (uint32_t)kept, (uint32_t)kept}, {0, 0, 0}};

	CHECK(setgroups(0, NULL));
	CHECK(setns(namespace_fd, CLONE_NEWUSER));
	CHECK(setresgid(INIT_UID, INIT_UID, INIT_UID));
	CHECK(setresuid(INIT_UID, INIT_UID, INIT_UID));
	CHECK(syscall(SYS_capset, &header, data));
	for (int capability = 0; prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) == 0; capability++)
		;
	CHECK(prctl(PR_SET_SECUREBITS, SECBIT_NOROOT | SECBIT_NOROOT_LOCKED | SECBIT_NO_SETUID_FIXUP));
	for (int capability = 0; capability < 32; capability++)
		if (kept >> capability & 1)
			CHECK(prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, capability, 0, 0));
	CHECK(prctl(PR_SET_PDEATHSIG, SIGKILL));
	CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
	CHECK(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &filter));
}

/* What the init needs: 0 null, 1 the payload's output, 2 messages, 3 a listening socket, 4.. the leaves of the guest. */
static void launch(int namespace_fd, const char *id, int output_fd, const int *leaf_fds, int leaf_count)
{
	struct sockaddr_un_ {
		sa_family_t family;
		char path[108];
	} address = {AF_UNIX, "/dev/.init/init.sock"};

	make_root(namespace_fd, id);
	make_network();
	CHECK(sethostname("sandbox", 7));
	int listener = (int)CHECK(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
	CHECK(bind(listener, (struct sockaddr *)&address, sizeof(address)));
	CHECK(listen(listener, 16));
	int null = (int)CHECK(open("/dev/null", O_RDWR | O_CLOEXEC));
	CHECK(dup2(null, 0)), CHECK(dup2(output_fd, 1)), CHECK(dup2(listener, 3));
	for (int i = 0; i < leaf_count; i++)
		CHECK(dup2(leaf_fds[i], 4 + i));
	char count[8];
	snprintf(count, sizeof(count), "%d", leaf_count);
	CHECK(dup2(payload_fd, 4 + leaf_count));
	drop_privileges(namespace_fd);
	char *arguments[] = {"bare-init", count, NULL}, *environment[] = {NULL};
	CHECK(syscall(SYS_execveat, init_fd, "", arguments, environment, AT_EMPTY_PATH));
}

static int open_leaf(int root_fd, const char *id, const char *name)
{
	char path[128];
	snprintf(path, sizeof(path), "%s/%s", id, name);
	return (int)CHECK(openat(root_fd, path, O_WRONLY | O_CLOEXEC));
}

/* Version 1: one leaf per controller, and ID, ID/guest in the empty v2 hierarchy; pure version 2: limits on ID/guest. */
static int make_cgroups(const char *id, int *leaf_fds, int *init_cgroup_fd)
{
	char path[128];
	int count = 0;

	if (!pure_v2)
		for (int i = 0; i < CONTROLLERS_MAX; i++) {
			CHECK(mkdirat(controllers[i].root_fd, id, 0755));
			snprintf(path, sizeof(path), "%s/%s", id, controllers[i].limit_file);
			write_at(controllers[i].root_fd, path, controllers[i].limit);
			if (i == 0) {
				snprintf(path, sizeof(path), "%s/memory.memsw.limit_in_bytes", id);
				if (faccessat(controllers[i].root_fd, path, F_OK, 0) == 0)
					write_at(controllers[i].root_fd, path, MEMORY_LIMIT);
			}
			leaf_fds[count++] = open_leaf(controllers[i].root_fd, id, "tasks");
		}
	CHECK(mkdirat(unified_fd, id, 0755));
	if (pure_v2) {
		snprintf(path, sizeof(path), "%s/cgroup.subtree_control", id);
		write_at(unified_fd, path, "+memory +pids +cpu");
		snprintf(path, sizeof(path), "%s/init", id);
		CHECK(mkdirat(unified_fd, path, 0755));
	}
	*init_cgroup_fd = (int)CHECK(openat(unified_fd, pure_v2 ? path : id, O_RDONLY | O_DIRECTORY | O_CLOEXEC));
	snprintf(path, sizeof(path), "%s/guest", id);
	CHECK(mkdirat(unified_fd, path, 0755));
	if (pure_v2) {
		static const char *const limits[][2] = {{"guest/memory.max", MEMORY_LIMIT}, {"guest/pids.max", "512"}, {"guest/cpu.max", "100000 100000"}};
		for (int i = 0; i < 3; i++) {
			snprintf(path, sizeof(path), "%s/%s", id, limits[i][0]);
			write_at(unified_fd, path, limits[i][1]);
		}
	}
	leaf_fds[count++] = open_leaf(unified_fd, id, "guest/cgroup.procs");
	return count;
}

static void make_upper(const char *id)
{
	char path[64];
	struct btrfs_ioctl_vol_args name = {0};
	snprintf(name.name, sizeof(name.name), "%s", id);
	CHECK(ioctl(pool_fd, BTRFS_IOC_SUBVOL_CREATE, &name));
	int fd = (int)CHECK(openat(pool_fd, id, O_RDONLY | O_DIRECTORY | O_CLOEXEC));
	struct btrfs_ioctl_qgroup_limit_args limit = {.lim = {.flags = BTRFS_QGROUP_LIMIT_MAX_RFER, .max_rfer = 1 << 30}};
	CHECK(ioctl(fd, BTRFS_IOC_QGROUP_LIMIT, &limit));
	CHECK(mkdirat(fd, "u", 0755)), CHECK(mkdirat(fd, "w", 0755));
	close(fd);
	/* The init's own spool, outside the guest's quota. */
	snprintf(path, sizeof(path), "spool-%s", id);
	CHECK(mkdirat(pool_fd, path, 0700));
	CHECK(fchownat(pool_fd, path, UID_BASE + INIT_UID, UID_BASE + INIT_UID, 0));
}

static void remove_all(const char *id)
{
	char path[64];
	struct btrfs_ioctl_vol_args name = {0};

	if (!pure_v2)
		for (int i = 0; i < CONTROLLERS_MAX; i++)
			CHECK(unlinkat(controllers[i].root_fd, id, AT_REMOVEDIR));
	snprintf(path, sizeof(path), "%s/guest", id);
	CHECK(unlinkat(unified_fd, path, AT_REMOVEDIR));
	if (pure_v2) {
		snprintf(path, sizeof(path), "%s/init", id);
		CHECK(unlinkat(unified_fd, path, AT_REMOVEDIR));
	}
	CHECK(unlinkat(unified_fd, id, AT_REMOVEDIR));
	snprintf(name.name, sizeof(name.name), "%s", id);
	CHECK(ioctl(pool_fd, BTRFS_IOC_SNAP_DESTROY, &name));
	snprintf(path, sizeof(path), "spool-%s", id);
	CHECK(unlinkat(pool_fd, path, AT_REMOVEDIR));
}

static void iterate(const char *id, bool fresh_userns, struct sample *sample)
{
	int leaf_fds[CONTROLLERS_MAX + 1], init_cgroup_fd, output[2];
	char text[32] = "";

	int64_t start_ns = now_ns();
	int namespace_fd = fresh_userns ? make_user_namespace() : userns_fd;
	int leaf_count = make_cgroups(id, leaf_fds, &init_cgroup_fd);
	make_upper(id);
	CHECK(pipe2(output, O_CLOEXEC));
	struct clone_args arguments = {.flags = CLONE_NEWPID | TIME_NAMESPACE | CLONE_INTO_CGROUP,
				       .exit_signal = SIGCHLD,
				       .cgroup = (uint64_t)init_cgroup_fd};
	pid_t pid = (pid_t)CHECK(syscall(SYS_clone3, &arguments, sizeof(arguments)));
	if (pid == 0)
		launch(namespace_fd, id, output[1], leaf_fds, leaf_count);
	close(output[1]);
	if (read(output[0], text, sizeof(text) - 1) <= 0) {
		fprintf(stderr, "bare: the payload said nothing\n");
		_exit(1);
	}
	sample->create_ns = strtoll(text, NULL, 10) - start_ns;

	start_ns = now_ns();
	kill(pid, SIGKILL);
	CHECK(waitpid(pid, NULL, 0));
	remove_all(id);
	sample->destroy_ns = now_ns() - start_ns;
	close(output[0]), close(init_cgroup_fd);
	for (int i = 0; i < leaf_count; i++)
		close(leaf_fds[i]);
	if (fresh_userns)
		close(namespace_fd);
}

static void open_cgroups(void)
{
	char path[128];

	pure_v2 = access("/sys/fs/cgroup/memory", F_OK) != 0;
	snprintf(path, sizeof(path), "%s/barchan-bare", pure_v2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/unified");
	CHECK(mkdir(path, 0755));
	unified_fd = (int)CHECK(open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC));
	if (pure_v2)
		write_at(unified_fd, "cgroup.subtree_control", "+memory +pids +cpu");
	for (int i = 0; !pure_v2 && i < CONTROLLERS_MAX; i++) {
		snprintf(path, sizeof(path), "/sys/fs/cgroup/%s/barchan-bare", controllers[i].name);
		CHECK(mkdir(path, 0755));
		controllers[i].root_fd = (int)CHECK(open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC));
		/* Inits inherit the worker's version 1 cgroup: a group of the platform's own, without the guest's limits. */
		CHECK(mkdirat(controllers[i].root_fd, "init", 0755));
	}
}

static void open_layers(void)
{
	struct mount_attr readonly = {.attr_set = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NODEV};
	/* A clone made by open_tree may be cloned only in the mount namespace it came from; attached below a mount
	 * made by fsmount it may be cloned in any. */
	int holder = new_mount("tmpfs", 0, NULL);
	struct stat status;
	char name[16];

	for (int i = 0; i < layer_count; i++) {
		CHECK(stat(layer_paths[i], &status));
		snprintf(name, sizeof(name), "%d", i);
		if (!S_ISDIR(status.st_mode)) {
			layer_fds[i] = new_mount("erofs", MOUNT_ATTR_RDONLY | MOUNT_ATTR_NODEV, (const char *[]){"source", layer_paths[i], NULL});
			continue;
		}
		layer_fds[i] = clone_mount(AT_FDCWD, layer_paths[i]);
		CHECK(mount_setattr(layer_fds[i], "", AT_EMPTY_PATH, &readonly, sizeof(readonly)));
		CHECK(mkdirat(holder, name, 0755));
		attach(layer_fds[i], holder, name);
	}
}

static void run_worker(int worker, int iterations, bool fresh_userns, struct sample *samples)
{
	char id[32];

	CHECK(prctl(PR_SET_PDEATHSIG, SIGKILL));
	for (int i = 0; !pure_v2 && i < CONTROLLERS_MAX; i++)
		write_at(controllers[i].root_fd, "init/cgroup.procs", "0");
	make_small_mount_namespace();
	for (int i = 0; i < iterations; i++) {
		snprintf(id, sizeof(id), "b%d-%d", worker, i);
		iterate(id, fresh_userns, &samples[i]);
	}
	_exit(0);
}

static int compare(const void *left, const void *right)
{
	int64_t a = *(const int64_t *)left, b = *(const int64_t *)right;
	return (a > b) - (a < b);
}

static void print_result(const struct sample *samples, int count, int workers, int64_t wall_ns)
{
	int64_t *create = calloc((size_t)count, sizeof(int64_t)), *destroy = calloc((size_t)count, sizeof(int64_t));
	if (!create || !destroy)
		_exit(1);
	for (int i = 0; i < count; i++)
		create[i] = samples[i].create_ns, destroy[i] = samples[i].destroy_ns;
	qsort(create, (size_t)count, sizeof(int64_t), compare);
	qsort(destroy, (size_t)count, sizeof(int64_t), compare);
#define AT(values, percent) ((double)(values)[(count - 1) * (percent) / 100] / 1000)
	printf("{\"iterations\": %d, \"workers\": %d, \"create_us_p50\": %.1f, \"create_us_p95\": %.1f, \"create_us_p99\": %.1f, "
	       "\"destroy_us_p50\": %.1f, \"rate_per_s\": %.1f}\n",
	       count, workers, AT(create, 50), AT(create, 95), AT(create, 99), AT(destroy, 50), count / ((double)wall_ns / 1e9));
	free(create), free(destroy);
}

static int remove_cgroups(void)
{
	int failures = 0;

	for (int i = 0; !pure_v2 && i < CONTROLLERS_MAX; i++) {
		char path[128];
		snprintf(path, sizeof(path), "/sys/fs/cgroup/%s/barchan-bare", controllers[i].name);
		failures += unlinkat(controllers[i].root_fd, "init", AT_REMOVEDIR) != 0;
		failures += rmdir(path) != 0;
	}
	failures += rmdir(pure_v2 ? "/sys/fs/cgroup/barchan-bare" : "/sys/fs/cgroup/unified/barchan-bare") != 0;
	return failures;
}

int main(int argc, char **argv)
{
	static const struct option options[] = {{"layer", 1, 0, 'l'}, {"init", 1, 0, 'i'},	  {"payload", 1, 0, 'p'},
						{"pool", 1, 0, 'P'},  {"fresh-userns", 0, 0, 'f'}, {0, 0, 0, 0}};
	const char *init = NULL, *payload = NULL, *pool = "/var/tmp/barchan-bare.pool";
	int iterations = 200, workers = 1, option, failed = 0;
	bool fresh_userns = false;

	while ((option = getopt_long(argc, argv, "n:j:", options, NULL)) != -1)
		switch (option) {
		case 'n': iterations = atoi(optarg); break;
		case 'j': workers = atoi(optarg); break;
		case 'l':
			if (layer_count == LAYERS_MAX)
				return fprintf(stderr, "bare: at most %d layers\n", LAYERS_MAX), 2;
			layer_paths[layer_count++] = optarg;
			break;
		case 'i': init = optarg; break;
		case 'p': payload = optarg; break;
		case 'P': pool = optarg; break;
		case 'f': fresh_userns = true; break;
		default: return 2;
		}
	if (!init || !payload || !layer_count || iterations < 1 || workers < 1)
		return fprintf(stderr, "usage: bare --layer EROFS|DIR --init FILE --payload FILE [-n N] [-j WORKERS] [--fresh-userns] [--pool FILE]\n"), 2;

	/* The init's descriptors are 0 to 8: keep these numbers free of anything else. */
	while (CHECK(open("/dev/null", O_RDWR | O_CLOEXEC)) < 8)
		;
	init_fd = (int)CHECK(open(init, O_RDONLY | O_CLOEXEC));
	payload_fd = (int)CHECK(open(payload, O_RDONLY | O_CLOEXEC));
	CHECK(unshare(CLONE_NEWNS));
	CHECK(mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL));
	make_pool(pool);
	make_skeletons();
	open_layers();
	make_filter();
	userns_fd = make_user_namespace();
	open_cgroups();
	size_t total = (size_t)iterations * (size_t)workers;
	struct sample *samples = mmap(NULL, total * sizeof(*samples), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (samples == MAP_FAILED)
		return 1;
	int64_t start_ns = now_ns();
	for (int worker = 0; worker < workers; worker++)
		if (CHECK(fork()) == 0)
			run_worker(worker, iterations, fresh_userns, samples + (size_t)worker * (size_t)iterations);
	for (int worker = 0, status; worker < workers; worker++)
		failed += wait(&status) < 0 || status != 0;
	int64_t wall_ns = now_ns() - start_ns;
	failed += remove_cgroups();
	if (failed)
		return fprintf(stderr, "bare: something failed or was left\n"), 1;
	print_result(samples, (int)total, workers, wall_ns);
	return 0;
}
