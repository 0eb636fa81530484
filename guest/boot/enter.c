/* From root of the machine to the init of a sandbox: another root directory, user 65535, and a few capabilities. */
#define _GNU_SOURCE
#include "boot.h"

#include <fcntl.h>
#include <grp.h>
#include <linux/capability.h>
#include <linux/securebits.h>
#include <stdio.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>

/* What the init uses all the time, as in a container, and what it has for the moment when it is asked to: the machine's clock, name and
 * randomness, and the overlay's upper directory. */
static const int kept[] = {CAP_CHOWN,	     CAP_SETUID,   CAP_SETGID,	  CAP_SETPCAP,	      CAP_KILL,
			   CAP_SYS_RESOURCE, CAP_SYS_TIME, CAP_SYS_ADMIN, CAP_DAC_READ_SEARCH};

/* Of guest root, where it is to be capable; the same as in a container. */
static const int of_root[] = {CAP_CHOWN,  CAP_DAC_OVERRIDE, CAP_FOWNER,  CAP_FSETID,
			      CAP_SETGID, CAP_SETUID,	    CAP_SETFCAP, CAP_SYS_CHROOT};

enum { LINE_FD = 3, SPOOL_FD, UPPER_FD, CGROUP_FD, PROGRAM_FD, OWN_FDS_END };

static void set_limits(void)
{
	static const struct {
		int resource;
		struct rlimit limit;
	} wanted[] = {
		{RLIMIT_CORE, {1, 1}},
		{RLIMIT_NOFILE, {65536, 1048576}},
		{RLIMIT_NPROC, {RLIM_INFINITY, RLIM_INFINITY}},
		{RLIMIT_STACK, {8 << 20, RLIM_INFINITY}},
		{RLIMIT_MEMLOCK, {8 << 20, 8 << 20}},
	};

	for (size_t i = 0; i < COUNT_OF(wanted); i++)
		must(setrlimit(wanted[i].resource, &wanted[i].limit), "setrlimit");
}

/* The machine's own mounts go, but for what the new root and the descriptors hold of them; so do the files of the initial file system. */
static void change_root(void)
{
	static const char *const mounts[] = {"/masks", "/cgroup", "/disk", "/dev", "/sys", "/proc"};
	static const char *const files[] = {"/barchan-init", "/init"};
	char path[PATH_BYTES];

	for (unsigned i = 0; snprintf(path, sizeof path, "/layers/%u", i) > 0 && umount2(path, MNT_DETACH) == 0; i++)
		;
	for (size_t i = 0; i < COUNT_OF(mounts); i++)
		must(umount2(mounts[i], MNT_DETACH), mounts[i]);
	for (size_t i = 0; i < COUNT_OF(files); i++)
		must(unlink(files[i]), files[i]);
	must(chdir(ROOT), ROOT);
	must(mount(".", "/", NULL, MS_MOVE, NULL), "the new root");
	must(chroot("."), "the new root");
	must(chdir("/"), "the new root");
}

static void place(int *fds[], int first, int count)
{
	/* Out of the way first: one may have the number of another's place. */
	for (int i = 0; i < count; i++)
		*fds[i] = must(fcntl(*fds[i], F_DUPFD_CLOEXEC, OWN_FDS_END), "descriptor");
	for (int i = 0; i < count; i++)
		must(dup2(*fds[i], first + i), "descriptor");
}

/* The machine's console stays as stderr: an init that ends says why. */
static void place_descriptors(const struct handover *handover)
{
	struct handover given = *handover;
	int *fds[] = {&given.line, &given.spool, &given.upper, &given.cgroup, &given.program};
	int null_fd = must(open("/dev/null", O_RDWR | O_CLOEXEC), "/dev/null");

	must(dup2(null_fd, 0), "/dev/null");
	must(dup2(null_fd, 1), "/dev/null");
	place(fds, LINE_FD, (int)COUNT_OF(fds));
	must((int)syscall(SYS_close_range, PROGRAM_FD, ~0u, 1u << 2 /* CLOSE_RANGE_CLOEXEC */), "close_range");
}

static uint64_t bits_of(const int *capabilities, size_t count)
{
	uint64_t bits = 0;

	for (size_t i = 0; i < count; i++)
		bits |= UINT64_C(1) << capabilities[i];
	return bits;
}

/* As the container's launcher does: no id and no file gives a capability from here on. */
static void drop_privileges(uint64_t for_root)
{
	const uint64_t wanted = bits_of(kept, COUNT_OF(kept)) | for_root;
	struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
	struct __user_cap_data_struct data[2];
	unsigned long secure = SECBIT_NOROOT_LOCKED | SECBIT_NO_SETUID_FIXUP_LOCKED | SECBIT_KEEP_CAPS_LOCKED | SECBIT_NO_CAP_AMBIENT_RAISE |
			       SECBIT_NO_CAP_AMBIENT_RAISE_LOCKED;

	must(prctl(PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP), "securebits");
	must(setgroups(0, NULL), "setgroups");
	must(setresgid(INIT_ID, INIT_ID, INIT_ID), "setresgid");
	must(setresuid(INIT_ID, INIT_ID, INIT_ID), "setresuid");
	must((int)syscall(SYS_capget, &header, data), "capget");
	for (int i = 0; i < 2; i++)
		data[i].effective = data[i].inheritable = data[i].permitted &= (uint32_t)(wanted >> (32 * i));
	must((int)syscall(SYS_capset, &header, data), "capset");
	for (int capability = 0; prctl(PR_CAPBSET_READ, capability, 0, 0, 0) >= 0; capability++) {
		if (!(for_root >> capability & 1))
			must(prctl(PR_CAPBSET_DROP, capability, 0, 0, 0), "capability");
		if (wanted >> capability & 1)
			must(prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, capability, 0, 0), "capability");
	}
	must(prctl(PR_SET_SECUREBITS, for_root ? secure : secure | SECBIT_NOROOT | SECBIT_NO_SETUID_FIXUP), "securebits");
	must(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs");
}

_Noreturn void enter(const struct parameters *parameters, const struct handover *handover)
{
	const uint64_t for_root = parameters->capable_root ? bits_of(of_root, COUNT_OF(of_root)) : 0;
	char spool[24], root[24];
	char *const arguments[] = {"barchan-init", "--serial-fd", "3", "--spool-fd", "4", "--upper-fd", "5", "--cgroup-fd", "6",
				   "--spool-max-bytes", spool, "--root-capabilities", root, NULL};
	char *const environment[] = {NULL};

	snprintf(spool, sizeof spool, "%llu", (unsigned long long)parameters->spool_bytes);
	snprintf(root, sizeof root, "%llu", (unsigned long long)for_root);
	change_root();
	place_descriptors(handover);
	set_limits();
	drop_privileges(for_root);
	syscall(SYS_execveat, PROGRAM_FD, "", arguments, environment, AT_EMPTY_PATH);
	die("barchan-init");
}
