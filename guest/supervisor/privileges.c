/* From host root to the init of a sandbox: its user namespace, uid 65535 there, a few capabilities that mean something only in it. */
#define _GNU_SOURCE
#include <grp.h>
#include <linux/capability.h>
#include <linux/securebits.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>

#include "supervisor.h"

/* To become any guest user, to give it its terminal, to drop this power in each child, to signal and to place them. */
static const int kept[] = {CAP_CHOWN, CAP_SETUID, CAP_SETGID, CAP_SETPCAP, CAP_KILL, CAP_SYS_RESOURCE};

/* What a guest's root has where it is asked to be capable: power over the files and ids of its own user namespace. Without CAP_KILL, so
 * that it can't end what the platform does for others in the sandbox. */
static const int of_root[] = {CAP_CHOWN,  CAP_DAC_OVERRIDE, CAP_FOWNER,  CAP_FSETID,
			      CAP_SETGID, CAP_SETUID,	    CAP_SETFCAP, CAP_SYS_CHROOT};

/* The same for every guest, except that the supervisor's own hard limits bound them: it may lack CAP_SYS_RESOURCE. */
static int set_limits(void)
{
	static const struct {
		int resource;
		struct rlimit limit;
	} wanted[] = {
		/* 1 is the value that also keeps a host's core_pattern pipe from being run. */
		{RLIMIT_CORE, {1, 1}},
		{RLIMIT_NOFILE, {65536, 1048576}},
		{RLIMIT_NPROC, {RLIM_INFINITY, RLIM_INFINITY}},
		{RLIMIT_STACK, {8 << 20, RLIM_INFINITY}},
		{RLIMIT_MEMLOCK, {8 << 20, 8 << 20}},
	};
	struct rlimit limit, now;

	for (size_t i = 0; i < COUNT(wanted); i++) {
		if (getrlimit(wanted[i].resource, &now) < 0)
			return -1;
		limit.rlim_max = wanted[i].limit.rlim_max < now.rlim_max ? wanted[i].limit.rlim_max : now.rlim_max;
		limit.rlim_cur = wanted[i].limit.rlim_cur < limit.rlim_max ? wanted[i].limit.rlim_cur : limit.rlim_max;
		if (setrlimit(wanted[i].resource, &limit) < 0)
			return -1;
	}
	return 0;
}

/* --no-caps-drop: everything the user namespace has, for the init and whatever it starts, but for the one that the init
 * would empty the bounding set with. */
static int keep_capabilities(void)
{
	struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
	struct __user_cap_data_struct data[2];

	if (syscall(SYS_capget, &header, data) < 0)
		return -1;
	data[0].inheritable = data[0].permitted & ~(1u << CAP_SETPCAP);
	data[1].inheritable = data[1].permitted;
	if (syscall(SYS_capset, &header, data) < 0)
		return -1;
	for (int capability = 0; capability <= CAP_LAST_CAP; capability++)
		if (prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, capability, 0, 0) < 0 && errno != EPERM)
			return -1;
	return 0;
}

uint64_t root_capabilities(const struct spec *spec)
{
	uint64_t set = 0;

	for (size_t i = 0; spec->capable_root && i < COUNT(of_root); i++)
		set |= UINT64_C(1) << of_root[i];
	return set;
}

static int set_capabilities(uint32_t for_root)
{
	struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
	struct __user_cap_data_struct data[2];
	uint32_t wanted = for_root;

	for (size_t i = 0; i < COUNT(kept); i++)
		wanted |= 1u << kept[i];
	if (syscall(SYS_capget, &header, data) < 0)
		return -1;
	/* A fresh user namespace gives them all; without one (--no-userns) some may be missing. */
	data[0].effective = data[0].inheritable = data[0].permitted &= wanted;
	data[1].effective = data[1].inheritable = data[1].permitted = 0;
	if (syscall(SYS_capset, &header, data) < 0)
		return -1;
	for (int capability = 0; prctl(PR_CAPBSET_READ, capability, 0, 0, 0) >= 0; capability++)
		if ((capability > 31 || !(for_root >> capability & 1)) && prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) < 0)
			return -1;
	for (int capability = 0; capability < 32; capability++)
		if (data[0].permitted >> capability & 1 && prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, capability, 0, 0) < 0)
			return -1;
	/* From here on no uid and no file gives a capability, and none can be passed on that isn't already. Where root is capable, it keeps
	 * what it has across an exec, and loses it, as everywhere, when it becomes another user. */
	unsigned long bits = SECBIT_NOROOT_LOCKED | SECBIT_NO_SETUID_FIXUP_LOCKED | SECBIT_KEEP_CAPS_LOCKED | SECBIT_NO_CAP_AMBIENT_RAISE |
			     SECBIT_NO_CAP_AMBIENT_RAISE_LOCKED;
	return prctl(PR_SET_SECUREBITS, for_root ? bits : bits | SECBIT_NOROOT | SECBIT_NO_SETUID_FIXUP);
}

/* No child may outlive the supervisor, however that ends. A change of credentials clears the setting, so it comes last. */
int die_with_supervisor(void)
{
	struct pollfd supervisor = {.fd = self_pidfd, .events = POLLIN};

	if (prctl(PR_SET_PDEATHSIG, SIGKILL) < 0 || poll(&supervisor, 1, 0) < 0)
		return -1;
	return supervisor.revents ? (errno = ESRCH, -1) : 0;
}

/* What only root of the host may set, and then into the user namespace. */
int leave_host(int userns_fd)
{
	if (set_limits() < 0 || setgroups(0, NULL) < 0)
		return -1;
	return options.no_userns ? 0 : setns(userns_fd, CLONE_NEWUSER);
}

/* The mounts once more, locked as they are, and IPC belong to the sandbox's user namespace: a memory snapshot can take
 * them from no other. It gives nobody power over them: no guest process has CAP_SYS_ADMIN, and mount is no allowed call. */
int own_namespaces(void)
{
	if (unshare(CLONE_NEWNS | CLONE_NEWIPC) < 0)
		return -1;
	if (prctl(PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP) < 0 || setresgid(init_uid(), init_uid(), init_uid()) < 0)
		return -1;
	return setresuid(init_uid(), init_uid(), init_uid());
}

int drop_privileges(const struct spec *spec)
{
	if ((options.no_caps_drop ? keep_capabilities() : set_capabilities((uint32_t)root_capabilities(spec))) < 0 || die_with_supervisor() < 0)
		return -1;
	return options.no_caps_drop ? 0 : prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
}
