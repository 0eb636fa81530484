/* What a sandbox has of its kernel: the same as a container, so that programs find the same, and so that guest root, who has no
 * capability but owns what root owns, can't reach through it what holds it. */
#define _GNU_SOURCE
#include "boot.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#define TERMINALS_MAX "256"

static const unsigned long safe = MS_NOSUID | MS_NODEV | MS_NOEXEC;

static void make_point(const char *path)
{
	struct stat st;

	if (lstat(path, &st) != 0)
		make_directory(path, 0755);
	else if (!S_ISDIR(st.st_mode)) {
		errno = ENOTDIR;
		die(path);
	}
}

static void make_readonly(const char *path, unsigned long flags)
{
	must(mount(NULL, path, NULL, MS_REMOUNT | MS_BIND | MS_RDONLY | flags, NULL), path);
}

static void bind_readonly(const char *from, const char *to)
{
	must(mount(from, to, NULL, MS_BIND, NULL), to);
	make_readonly(to, safe);
}

static void make_dev(const struct parameters *parameters)
{
	static const struct {
		const char *path;
		unsigned major, minor;
	} nodes[] = {{ROOT "/dev/null", 1, 3},	  {ROOT "/dev/zero", 1, 5},    {ROOT "/dev/full", 1, 7},
		     {ROOT "/dev/random", 1, 8}, {ROOT "/dev/urandom", 1, 9}, {ROOT "/dev/tty", 5, 0}};
	static const char *const links[][2] = {{"/proc/self/fd", ROOT "/dev/fd"},
					       {"/proc/self/fd/0", ROOT "/dev/stdin"},
					       {"/proc/self/fd/1", ROOT "/dev/stdout"},
					       {"/proc/self/fd/2", ROOT "/dev/stderr"},
					       {"pts/ptmx", ROOT "/dev/ptmx"}};
	static const char *const directories[] = {ROOT "/dev/pts", ROOT "/dev/shm", ROOT "/dev/mqueue"};
	char options[PATH_BYTES];

	mount_at("tmpfs", ROOT "/dev", MS_NOSUID | MS_NOEXEC, "mode=0755");
	for (size_t i = 0; i < COUNT_OF(nodes); i++)
		if (mknod(nodes[i].path, S_IFCHR | 0666, makedev(nodes[i].major, nodes[i].minor)) != 0 || chmod(nodes[i].path, 0666) != 0)
			die(nodes[i].path);
	for (size_t i = 0; i < COUNT_OF(links); i++)
		must(symlink(links[i][0], links[i][1]), links[i][1]);
	for (size_t i = 0; i < COUNT_OF(directories); i++)
		make_directory(directories[i], 0755);
	make_readonly(ROOT "/dev", MS_NOSUID | MS_NOEXEC);
	mount_at("devpts", ROOT "/dev/pts", MS_NOSUID | MS_NOEXEC, "newinstance,gid=5,mode=0620,ptmxmode=0666,max=" TERMINALS_MAX);
	snprintf(options, sizeof options, "mode=1777,size=%llu", (unsigned long long)parameters->shm_bytes);
	mount_at("tmpfs", ROOT "/dev/shm", MS_NOSUID | MS_NODEV, options);
}

static void make_sys(void)
{
	static const char *const directories[] = {ROOT "/sys/devices", ROOT "/sys/devices/system", ROOT "/sys/devices/system/cpu",
						  ROOT "/sys/devices/system/node"};

	mount_at("tmpfs", ROOT "/sys", safe, "mode=0755");
	for (size_t i = 0; i < COUNT_OF(directories); i++)
		make_directory(directories[i], 0755);
	make_readonly(ROOT "/sys", safe);
	bind_readonly("/sys/devices/system/cpu", ROOT "/sys/devices/system/cpu");
	if (access("/sys/devices/system/node", F_OK) == 0)
		bind_readonly("/sys/devices/system/node", ROOT "/sys/devices/system/node");
}

static void make_proc(void)
{
	static const char *const files[] = {"kcore",	    "keys",	    "key-users",     "kmsg",	    "latency_stats", "timer_list",
					    "timer_stats",  "sched_debug",  "kpagecount",    "kpageflags",  "kpagecgroup",   "sysrq-trigger",
					    "vmallocinfo",  "slabinfo",	    "pagetypeinfo",  "kallsyms",    "modules",	     "iomem",
					    "ioports",	    "interrupts"};
	static const char *const directories[] = {"acpi", "scsi", "asound", "driver", "pressure"};
	static const char *const readonly[] = {"sys", "bus", "fs", "irq"};
	char path[PATH_BYTES];

	mount_at("proc", ROOT "/proc", safe, NULL);
	mount_at("tmpfs", "/masks", safe, "mode=0755");
	make_directory("/masks/directory", 0555);
	close(must(open("/masks/file", O_CREAT | O_WRONLY | O_CLOEXEC, 0444), "/masks/file"));
	for (size_t i = 0; i < COUNT_OF(files); i++) {
		snprintf(path, sizeof path, ROOT "/proc/%s", files[i]);
		if (access(path, F_OK) == 0)
			bind_readonly("/masks/file", path);
	}
	for (size_t i = 0; i < COUNT_OF(directories); i++) {
		snprintf(path, sizeof path, ROOT "/proc/%s", directories[i]);
		if (access(path, F_OK) == 0)
			bind_readonly("/masks/directory", path);
	}
	for (size_t i = 0; i < COUNT_OF(readonly); i++) {
		snprintf(path, sizeof path, ROOT "/proc/%s", readonly[i]);
		if (access(path, F_OK) == 0)
			bind_readonly(path, path);
	}
}

void root_furnish(const struct parameters *parameters)
{
	/* No guest has the capability to bind low ports; what the kernel says may be about others of the sandbox. */
	write_file("/proc/sys/net/ipv4/ip_unprivileged_port_start", "0");
	write_file("/proc/sys/kernel/dmesg_restrict", "1");
	/* Who asks for more than the limit finds it when using it, as beside others on a large host, not when asking. */
	write_file("/proc/sys/vm/overcommit_memory", "1");
	make_point(ROOT "/dev");
	make_point(ROOT "/proc");
	make_point(ROOT "/sys");
	make_dev(parameters);
	make_sys();
	make_proc();
}
