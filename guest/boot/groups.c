/* The cgroups of the machine, as in a sandbox of a host with version 2: the init's own, which nothing limits, the guest's, and the
 * platform's beside it, each with limits that only the init may change. */
#define _GNU_SOURCE
#include "boot.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>

#define BASE "/cgroup/barchan"
#define CONTROLLERS "+memory +pids +cpu"

enum { PLATFORM_PIDS = 64 };
static const uint64_t platform_memory_bytes = UINT64_C(128) << 20;

static void give(const char *path)
{
	must(chown(path, INIT_ID, INIT_ID), path);
}

static void limit(const char *group, const char *file, uint64_t value)
{
	char path[PATH_BYTES], text[24];

	snprintf(path, sizeof path, BASE "/%s/%s", group, file);
	snprintf(text, sizeof text, "%llu", (unsigned long long)value);
	if (value != 0)
		write_file(path, text);
	give(path);
}

static void make_group(const char *name, uint64_t memory_bytes, uint64_t pids)
{
	static const char *const files[] = {"cgroup.procs", "cgroup.freeze"};
	char path[PATH_BYTES];

	snprintf(path, sizeof path, BASE "/%s", name);
	make_directory(path, 0755);
	give(path);
	for (size_t i = 0; i < COUNT_OF(files); i++) {
		snprintf(path, sizeof path, BASE "/%s/%s", name, files[i]);
		give(path);
	}
	limit(name, "memory.max", memory_bytes);
	limit(name, "pids.max", pids);
}

/* Returns the directory that has them. */
int groups_make(const struct parameters *parameters)
{
	/* With the second option moves don't wait for a grace period of the kernel; older ones don't know it. With the first no program leaves
	 * the group that its namespace of groups was made in. */
	if (mount("cgroup2", "/cgroup", "cgroup2", 0, "nsdelegate,favordynmods") != 0)
		mount_at("cgroup2", "/cgroup", 0, "nsdelegate");
	write_file("/cgroup/cgroup.subtree_control", CONTROLLERS);
	make_directory(BASE, 0755);
	write_file(BASE "/cgroup.subtree_control", CONTROLLERS);
	/* Moving a program from the init's group asks for this right on what the two groups have in common. */
	must(chown(BASE "/cgroup.procs", (uid_t)-1, INIT_ID), BASE "/cgroup.procs");
	must(chmod(BASE "/cgroup.procs", 0664), BASE "/cgroup.procs");
	make_group("guest", parameters->memory_bytes, parameters->pids);
	make_group("platform", platform_memory_bytes, PLATFORM_PIDS);
	make_directory(BASE "/init", 0755);
	/* Among programs that all want the processor. */
	write_file(BASE "/init/cpu.weight", "1000");
	write_file(BASE "/init/cgroup.procs", "0");
	return must(open(BASE, O_RDONLY | O_DIRECTORY | O_CLOEXEC), BASE);
}
