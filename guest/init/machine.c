/* What only an init does that has a kernel of its own, as in a virtual machine: its cgroup leaves, its guest's counters and limits, the
 * machine's name, randomness and disk. The capabilities for it lie unused but for the moment, and no child that touches a guest's file
 * has them. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/capability.h>
#include <linux/random.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>

#include "applet.h"
#include "init.h"

enum { HOSTNAME_MAX = 63, TEXT_MAX = 16 << 10 };

static struct source freezer = {.fd = -1, .kind = SOURCE_FREEZER};
static uint32_t hold_tag;	/* of a HOLD that waits until the guest stands still */
static bool hold_waits;

uint64_t machine_capabilities(void)
{
	if (settings.is_agent)
		return 0;	/* it is root, and stays so */
	if (settings.is_gvisor)
		return UINT64_C(1) << CAP_SYS_ADMIN;
	return settings.cgroup >= 0 ? UINT64_C(1) << CAP_SYS_ADMIN | UINT64_C(1) << CAP_DAC_READ_SEARCH : 0;
}

static int change_capabilities(uint64_t effective, uint64_t gone)
{
	struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
	struct __user_cap_data_struct data[2];

	if (syscall(SYS_capget, &header, data) != 0)
		return -1;
	for (int i = 0; i < 2; i++) {
		uint32_t own = (uint32_t)(machine_capabilities() >> (32 * i));

		data[i].permitted &= ~(uint32_t)(gone >> (32 * i));
		data[i].effective = ((data[i].effective & ~own) | (uint32_t)(effective >> (32 * i))) & data[i].permitted;
	}
	return (int)syscall(SYS_capset, &header, data);
}

/* Of `machine_capabilities`, these and no others are in effect from now on. */
int machine_use(uint64_t capabilities)
{
	return machine_capabilities() == 0 ? 0 : change_capabilities(capabilities, 0);
}

/* For good, in a child. */
int machine_let_go(void)
{
	return machine_capabilities() == 0 ? 0 : change_capabilities(0, machine_capabilities());
}

/* For a host that gave none: those of the machine, or none where programs are in no groups of ours. */
void machine_take_leaves(void)
{
	static const char *const names[LEAF_COUNT] = {[LEAF_GUEST] = "guest", [LEAF_PLATFORM] = "platform"};

	if (settings.cgroup < 0 && !line.is_used)
		return;
	for (int i = 0; i < LEAF_COUNT; i++) {
		leaves[i].given = true;
		if (settings.cgroup >= 0)
			leaves[i].dir = openat(settings.cgroup, names[i], O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	}
	if (settings.is_gvisor && (leaves[LEAF_GUEST].procs[0] = gvisor_open_group()) >= 0)
		leaves[LEAF_GUEST].procs_count = 1;
}

static int write_guest(const char *file, const char *text)
{
	char path[64];

	snprintf(path, sizeof path, "guest/%s", file);
	CLEANUP_FD int fd = openat(settings.cgroup, path, O_WRONLY | O_CLOEXEC);
	return fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text) ? 0 : errno;
}

/* From the beginning, as one read gives it. */
static bool read_text(int fd, char text[TEXT_MAX])
{
	ssize_t n = pread(fd, text, TEXT_MAX - 1, 0);

	text[n > 0 ? n : 0] = 0;
	return n > 0;
}

/* The number behind `name` in a file of lines "NAME NUMBER", or the file's only number. */
static uint64_t number_of(int dir, const char *path, const char *name)
{
	CLEANUP_FD int fd = openat(dir, path, O_RDONLY | O_CLOEXEC);
	static char text[TEXT_MAX];
	size_t len = strlen(name);

	if (fd < 0 || !read_text(fd, text))
		return 0;
	for (const char *at = text; at != NULL; at = strchr(at, '\n')) {
		at += *at == '\n';
		if (strncmp(at, name, len) == 0 && (len == 0 || at[len] == ' '))
			return strtoull(at + len, NULL, 10);
	}
	return 0;
}

static bool is_frozen(void)
{
	static char text[TEXT_MAX];

	return read_text(freezer.fd, text) && strstr(text, "frozen 1") != NULL;
}

void machine_forget_reply(void)
{
	hold_waits = false;
}

static void stop_waiting(int error)
{
	if (hold_waits && error != 0)
		reply_error(hold_tag, error);
	else if (hold_waits)
		reply_empty(REQUEST_HOLD, hold_tag);
	hold_waits = false;
}

/* Stop the guest's programs, where they are in a group of ours; whether the HOLD of this tag is answered here, once they stand still. */
bool machine_freeze(uint32_t tag)
{
	int error = 0;

	if (settings.cgroup < 0)
		return false;
	stop_waiting(ECANCELED);
	hold_waits = true;
	hold_tag = tag;
	if (freezer.fd < 0) {
		freezer.fd = openat(settings.cgroup, "guest/cgroup.events", O_RDONLY | O_CLOEXEC);
		if (freezer.fd < 0 || loop_add(&freezer, EPOLLPRI) != 0)
			error = errno;
	}
	if (error == 0)
		error = write_guest("cgroup.freeze", "1");
	if (error != 0)
		stop_waiting(error);
	else
		machine_freezer_event();
	return true;
}

void machine_freezer_event(void)
{
	if (is_frozen())
		stop_waiting(0);
}

void machine_thaw(void)
{
	stop_waiting(ECANCELED);
	if (settings.cgroup >= 0)
		write_guest("cgroup.freeze", "0");	/* can't fail: the file took a "1" */
	loop_close(&freezer);
}

int machine_count(struct machine_counters *out)
{
	int dir = settings.cgroup;

	*out = (struct machine_counters){0};
	if (settings.is_agent && dir < 0) {
		out->oom_kills = number_of(settings.proc, "vmstat", "oom_kill");
		out->pids = UINT64_MAX;
		return 0;
	}
	if (settings.is_gvisor)
		out->pids = gvisor_processes();
	if (dir < 0)
		return settings.is_gvisor ? 0 : EOPNOTSUPP;
	out->oom_kills = number_of(dir, "guest/memory.events", "oom_kill");
	out->memory_bytes = number_of(dir, "guest/memory.current", "");
	out->memory_peak_bytes = number_of(dir, "guest/memory.peak", "");
	out->cpu_us = number_of(dir, "guest/cpu.stat", "usage_usec");
	out->pids = number_of(dir, "guest/pids.current", "");
	return 0;
}

/* What is empty or 0 stays as it is. */
int machine_configure(struct span hostname, uint64_t memory_bytes, uint64_t pids)
{
	char text[24];
	int error = 0;

	if (settings.cgroup < 0 && !settings.is_agent && !settings.is_gvisor)
		return EOPNOTSUPP;
	if (settings.cgroup < 0 && (memory_bytes != 0 || (pids != 0 && !settings.is_gvisor)))
		return EOPNOTSUPP;
	if (hostname.len > HOSTNAME_MAX)
		return EINVAL;
	if (hostname.len > 0) {
		if (machine_use(UINT64_C(1) << CAP_SYS_ADMIN) != 0 || sethostname((const char *)hostname.data, hostname.len) != 0)
			error = errno;
		if (machine_use(0) != 0 && error == 0)
			error = errno;
	}
	snprintf(text, sizeof text, "%llu", (unsigned long long)memory_bytes);
	if (error == 0 && memory_bytes != 0)
		error = write_guest("memory.max", text);
	snprintf(text, sizeof text, "%llu", (unsigned long long)pids);
	if (error != 0 || pids == 0)
		return error;
	return settings.is_gvisor ? gvisor_limit_pids(text) : write_guest("pids.max", text);
}

/* The kernel mixes in what is written to /dev/urandom at a time of its own. A machine that is one of several from the same memory must draw
 * other numbers at once. */
int machine_reseed(struct span entropy)
{
	static struct {
		struct rand_pool_info info;
		uint8_t bytes[TEXT_MAX];
	} pool;
	CLEANUP_FD int fd = open("/dev/urandom", O_WRONLY | O_NOCTTY | O_NOFOLLOW | O_CLOEXEC);
	struct stat st;
	int error = 0;

	if (fd < 0 || fstat(fd, &st) != 0)
		return errno;
	if (!S_ISCHR(st.st_mode) || st.st_rdev != makedev(1, 9))
		return ENODEV;
	pool.info.entropy_count = (int)entropy.len * 8;
	pool.info.buf_size = (int)entropy.len;
	memcpy(pool.bytes, entropy.data, entropy.len);
	if (machine_use(UINT64_C(1) << CAP_SYS_ADMIN) != 0 || ioctl(fd, RNDADDENTROPY, &pool) != 0 || ioctl(fd, RNDRESEEDCRNG) != 0)
		error = errno;
	if (machine_use(0) != 0 && error == 0)
		error = errno;
	return error;
}

/* In a child: an operation on the machine's disk, which no user of the guest could do. */
_Noreturn void machine_main(uint32_t argc, char **argv)
{
	if (machine_use(machine_capabilities()) != 0)
		applet_fail(errno, "capabilities");
	if (argc == 1 && strcmp(argv[0], "sync") == 0) {
		if (settings.is_agent)
			sync();	/* its disks are the machine's own affair */
		else if (syncfs(settings.upper) != 0)
			applet_fail(errno, "the disk");
	} else if (argc == 1 && strcmp(argv[0], "layer") == 0 && settings.upper >= 0) {
		layer_out(settings.upper);
	} else {
		applet_fail(EINVAL, "operation %.32s", argv[0]);
	}
	out_flush();
	_exit(0);
}
