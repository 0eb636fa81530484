/* Preloaded into CRIU: answers that the kernel refuses to it here, and the one step that must come between CRIU's last and the guest's first.
 *
 * - Limits of a guest's process are read from /proc where asking for them needs a real CAP_SYS_RESOURCE (userns.c has why).
 * - Since Linux 6.16 only unix sockets have SO_PASSCRED and SO_PASSSEC; CRIU 4.1 asks every socket.
 * - CRIU packs what is in each tmpfs with tar and gzip (tar.c).
 * - A process in a user namespace may not make a userfaultfd; CRIU's helper outside it makes one for it, from the device.
 * - Nor may it put a TCP connection together again, since its network is the host's: that helper begins, and the end is made here.
 * - A restored user namespace is owned by an id of its slot, as that of a launched sandbox is.
 * - The init's socket lies in a mount that is read-only except while CRIU makes the socket.
 * - The helpers that CRIU makes for sessions whose leaders have ended would keep their parent out of its mount namespace.
 * - When everything is restored and the first process is about to be let go, each process is put into its cgroup, the guest's
 *   being frozen by then, and the supervisor is told which one is the init.
 *
 * Linked with nothing, so that it loads beside the C library of any release. All but the first three are for a restore alone, which the
 * supervisor marks by BARCHAN_RESTORE (supervisor/memory.c). */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/sched.h>
#include <linux/securebits.h>
#include <linux/userfaultfd.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include "restore.h"
#include "shim.h"

#define LIMITS_TEXT_MAX 4096
#define LIMITS_COLUMN 26 /* of the soft limit in a line of /proc/PID/limits */
#define STATUS_TEXT_MAX 4096

#define FD_COMES_OUT 2 /* of CRIU's helper's call: it answers with a descriptor */
#define DEVICE_NEW _IO(0xAA, 0x00)

/* CRIU's own, for what only its helper outside of the user namespace may do. */
extern int __userns_call(const char *name, int (*call)(void *, int, pid_t), int flags, void *argument, size_t size, int fd)
	__attribute__((weak));

static bool placed;
static volatile int *has_repaired; /* shared by CRIU's processes: some connection was put together */
static char writable[sizeof(((struct sockaddr_un *)0)->sun_path)]; /* the directory that the init's socket was bound in */

static long kernel(long number, long a, long b, long c, long d, long e, long f)
{
#if defined(__x86_64__)
	long result;
	register long r10 __asm__("r10") = d;
	register long r8 __asm__("r8") = e;
	register long r9 __asm__("r9") = f;

	__asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9) : "rcx", "r11", "memory");
	return result;
#elif defined(__aarch64__)
	register long x8 __asm__("x8") = number;
	register long x0 __asm__("x0") = a;
	register long x1 __asm__("x1") = b;
	register long x2 __asm__("x2") = c;
	register long x3 __asm__("x3") = d;
	register long x4 __asm__("x4") = e;
	register long x5 __asm__("x5") = f;

	__asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory");
	return x0;
#else
#error "CRIU's shim knows x86-64 and aarch64"
#endif
}

static long answer(long result)
{
	if (result >= 0 || result < -4095)
		return result;
	errno = (int)-result;
	return -1;
}

static ssize_t read_file(int dir_fd, const char *path, char *text, size_t size)
{
	size_t length = 0;
	ssize_t part = 0;
	int fd = openat(dir_fd, path, O_RDONLY | O_CLOEXEC);

	if (fd < 0)
		return -1;
	while (length < size - 1 && (part = read(fd, text + length, size - 1 - length)) > 0)
		length += (size_t)part;
	close(fd);
	text[length] = '\0';
	return part < 0 ? -1 : (ssize_t)length;
}

/* All of it, or it is too large. */
static int read_whole(int dir_fd, const char *path, char *text, size_t size)
{
	ssize_t length = read_file(dir_fd, path, text, size);

	if (length == (ssize_t)size - 1)
		return errno = E2BIG, -1;
	return length < 0 ? -1 : 0;
}

static int write_file(int dir_fd, const char *path, const char *text)
{
	int fd = openat(dir_fd, path, O_WRONLY | O_CLOEXEC);
	ssize_t written = fd < 0 ? -1 : write(fd, text, strlen(text));
	int error = errno;

	if (fd >= 0)
		close(fd);
	errno = error;
	return written < 0 ? -1 : 0;
}

/* --- limits, socket options --------------------------------------------------------------------------------------- */

static rlim64_t parse_limit(const char *text)
{
	rlim64_t value = 0;

	if (*text == 'u')
		return RLIM64_INFINITY;
	for (; *text >= '0' && *text <= '9'; text++)
		value = value * 10 + (rlim64_t)(*text - '0');
	return value;
}

/* The file has a heading, then a line for each limit in the order of their numbers. */
static int read_limit(long pid, long resource, struct rlimit64 *limit)
{
	char path[32], text[LIMITS_TEXT_MAX], *line = text;

	snprintf(path, sizeof(path), "/proc/%ld/limits", pid);
	if (read_file(AT_FDCWD, path, text, sizeof(text)) < 0)
		return -1;
	for (long i = 0; line && i <= resource; i++) {
		line = strchr(line, '\n');
		line = line ? line + 1 : NULL;
	}
	if (!line || strlen(line) < LIMITS_COLUMN)
		return errno = EPERM, -1;
	const char *soft = line + LIMITS_COLUMN, *hard = soft + strcspn(soft, " ");
	limit->rlim_cur = parse_limit(soft);
	limit->rlim_max = parse_limit(hard + strspn(hard, " "));
	return 0;
}

EXPORT int getsockopt(int fd, int level, int name, void *restrict value, socklen_t *restrict length)
{
	long result = kernel(SYS_getsockopt, fd, level, name, (long)value, (long)length, 0);

	if (result == -EOPNOTSUPP && level == SOL_SOCKET && (name == SO_PASSCRED || name == SO_PASSSEC) && *length >= sizeof(int)) {
		*(int *)value = 0;
		*length = sizeof(int);
		return 0;
	}
	return (int)answer(result);
}

/* --- userfaultfd -------------------------------------------------------------------------------------------------- */

static int open_device(void *argument, int fd, pid_t pid)
{
	(void)argument, (void)fd, (void)pid;
	return open("/dev/userfaultfd", O_RDWR | O_CLOEXEC);
}

static long new_userfaultfd(long flags)
{
	int device_fd = __userns_call ? __userns_call("userfaultfd", open_device, FD_COMES_OUT, NULL, 0, -1) : -1;

	if (device_fd < 0)
		return -EPERM;
	long fd = kernel(SYS_ioctl, device_fd, DEVICE_NEW, flags, 0, 0, 0);
	close(device_fd);
	return fd;
}

/* --- the owner of the user namespace ------------------------------------------------------------------------------ */

static long restore_owner(void)
{
	const char *text = getenv(RESTORE_VARIABLE);

	return text ? atol(text) : -1;
}

static bool become(long uid, long gid)
{
	/* Where it can't be dumped, it could not open its own files in /proc from inside the new namespace. */
	return kernel(SYS_setresgid, -1, gid, -1, 0, 0, 0) == 0 && kernel(SYS_setresuid, -1, uid, -1, 0, 0, 0) == 0 &&
	       kernel(SYS_prctl, PR_SET_DUMPABLE, 1, 0, 0, 0, 0) == 0;
}

static long clone_as_owner(long owner, const struct clone_args *arguments, long size)
{
	long pid = -EPERM;

	if (kernel(SYS_prctl, PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP, 0, 0, 0, 0) == 0 && become(owner, owner))
		pid = kernel(SYS_clone3, (long)arguments, size, 0, 0, 0, 0);
	/* Going on as somebody else would be wrong in every call that follows. The child becomes root of its own namespace by itself. */
	if (pid != 0 && (!become(0, 0) || kernel(SYS_prctl, PR_SET_SECUREBITS, 0, 0, 0, 0, 0) != 0 ||
			 kernel(SYS_prctl, PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0, 0) != 0)) /* a change of user clears it */
		abort();
	return pid;
}

EXPORT long syscall(long number, ...)
{
	long a, b, c, d, e, f;
	va_list list;

	va_start(list, number);
	a = va_arg(list, long), b = va_arg(list, long), c = va_arg(list, long);
	d = va_arg(list, long), e = va_arg(list, long), f = va_arg(list, long);
	va_end(list);
	if (number == SYS_clone3 && restore_owner() >= 0 && ((const struct clone_args *)a)->flags & CLONE_NEWUSER)
		return answer(clone_as_owner(restore_owner(), (const struct clone_args *)a, b));
	long result = kernel(number, a, b, c, d, e, f);
	if (number == SYS_prlimit64 && result == -EPERM && !c && d)
		return read_limit(a, b, (struct rlimit64 *)d);
	if (number == SYS_userfaultfd && result == -EPERM)
		result = new_userfaultfd(a);
	return answer(result);
}

/* --- TCP connections ---------------------------------------------------------------------------------------------- */

static int begin_repair(void *argument, int fd, pid_t pid)
{
	(void)pid;
	*has_repaired = 1;
	return (int)kernel(SYS_setsockopt, fd, IPPROTO_TCP, TCP_REPAIR, (long)argument, sizeof(int), 0);
}

EXPORT int setsockopt(int fd, int level, int name, const void *value, socklen_t length)
{
	long result = kernel(SYS_setsockopt, fd, level, name, (long)value, length, 0);

	if (result == -EPERM && level == IPPROTO_TCP && name == TCP_REPAIR && length == sizeof(int) && has_repaired && __userns_call)
		result = __userns_call("repair", begin_repair, 0, (void *)value, length, fd);
	return (int)answer(result);
}

/* CRIU's last try to end the repair is made inside, in vain, and not taken for a failure. */
static int end_repair_of(int pid_fd, int number)
{
	int on = 0, off = 0, fd = (int)kernel(SYS_pidfd_getfd, pid_fd, number, 0, 0, 0, 0);
	socklen_t length = sizeof(on);
	long result = 0;

	if (fd < 0)
		return errno = -fd, -1;
	if (kernel(SYS_getsockopt, fd, IPPROTO_TCP, TCP_REPAIR, (long)&on, (long)&length, 0) == 0 && on)
		result = kernel(SYS_setsockopt, fd, IPPROTO_TCP, TCP_REPAIR, (long)&off, sizeof(off), 0);
	close(fd);
	return (int)answer(result);
}

static int end_repairs(const char *pid)
{
	char path[32], target[16];
	struct dirent *entry;
	int result = 0, pid_fd = (int)kernel(SYS_pidfd_open, atol(pid), 0, 0, 0, 0, 0);

	snprintf(path, sizeof(path), "/proc/%s/fd", pid);
	DIR *dir = pid_fd < 0 ? NULL : opendir(path);
	while (dir && result == 0 && (entry = readdir(dir)))
		if (readlinkat(dirfd(dir), entry->d_name, target, sizeof(target)) > 7 && strncmp(target, "socket:", 7) == 0)
			result = end_repair_of(pid_fd, atoi(entry->d_name));
	int error = errno;
	if (dir)
		closedir(dir);
	if (pid_fd >= 0)
		close(pid_fd);
	errno = error;
	return dir ? result : -1;
}

/* --- the init's socket --------------------------------------------------------------------------------------------- */

static long change_mount(const char *directory, uint64_t set, uint64_t clear)
{
	struct mount_attr change = {.attr_set = set, .attr_clr = clear};

	return kernel(SYS_mount_setattr, AT_FDCWD, (long)directory, 0, (long)&change, sizeof(change), 0);
}

/* Until it listens: in between CRIU gives it its owner and mode. */
EXPORT int bind(int fd, const struct sockaddr *address, socklen_t length)
{
	const struct sockaddr_un *name = (const struct sockaddr_un *)address;
	long result = kernel(SYS_bind, fd, (long)address, length, 0, 0, 0);

	if (result != -EROFS || restore_owner() < 0 || address->sa_family != AF_UNIX)
		return (int)answer(result);
	snprintf(writable, sizeof(writable), "%.*s", (int)(sizeof(writable) - 1), name->sun_path);
	char *end = strrchr(writable, '/');
	if (!end || end == writable)
		return (int)answer(result);
	*end = '\0';
	if (change_mount(writable, 0, MOUNT_ATTR_RDONLY) < 0) {
		*writable = '\0';
		return (int)answer(result);
	}
	return (int)answer(kernel(SYS_bind, fd, (long)address, length, 0, 0, 0));
}

EXPORT int listen(int fd, int backlog)
{
	/* Open to a guest's root it must not stay. */
	if (*writable && change_mount(writable, MOUNT_ATTR_RDONLY, 0) < 0)
		abort();
	*writable = '\0';
	return (int)answer(kernel(SYS_listen, fd, backlog, 0, 0, 0, 0));
}

/* --- mount namespaces ----------------------------------------------------------------------------------------------- */

/* CRIU makes a helper for a leader of a session that has ended. It shares its parent's root directory, and the kernel lets nobody who
 * shares that enter a mount namespace, as the init must to bind its socket. */
EXPORT int setns(int fd, int kind)
{
	long result = kernel(SYS_setns, fd, kind, 0, 0, 0, 0);

	if (result == -EINVAL && kind == CLONE_NEWNS && restore_owner() >= 0 && kernel(SYS_unshare, CLONE_FS, 0, 0, 0, 0, 0) == 0)
		result = kernel(SYS_setns, fd, kind, 0, 0, 0, 0);
	return (int)answer(result);
}

/* --- the places of the processes ---------------------------------------------------------------------------------- */

/* The pid in the innermost namespace, or 0 for a process that is in ours: CRIU itself and its helpers. */
static long pid_inside(const char *pid)
{
	char path[64], text[STATUS_TEXT_MAX], *line, *last;

	snprintf(path, sizeof(path), "/proc/%s/status", pid);
	if (read_file(AT_FDCWD, path, text, sizeof(text)) < 0 || !(line = strstr(text, "\nNSpid:")))
		return -1;
	line += strlen("\nNSpid:");
	line[strcspn(line, "\n")] = '\0';
	last = strrchr(line, '\t');
	return last && last != line ? atol(last + 1) : 0;
}

/* "PID PLACE" lines: what the record of the dump says. */
static const char *place_of(const char *places, long pid, char place[RESTORE_PLACE_MAX])
{
	for (const char *line = places; line && *line; line = strchr(line, '\n'), line = line ? line + 1 : NULL) {
		const char *name = strchr(line, ' ');
		size_t length = name ? strcspn(++name, "\n") : 0;
		if (!name || atol(line) != pid)
			continue;
		if (length == 0 || length >= RESTORE_PLACE_MAX - sizeof("/cgroup.procs"))
			return NULL;
		memcpy(place, name, length);
		memcpy(place + length, "/cgroup.procs", sizeof("/cgroup.procs"));
		return place;
	}
	return NULL;
}

/* Where the init is: it, and its file operations, which are no guest's programs. */
static int place_beside_init(const char *pid)
{
	for (int fd = RESTORE_INIT_FD; fd < RESTORE_INIT_FD + RESTORE_INIT_FDS; fd++)
		if (write(fd, pid, strlen(pid)) < 0 && errno != EBADF)
			return -1;
	return 0;
}

static int place_init(const char *pid)
{
	if (place_beside_init(pid) < 0)
		return -1;
	struct restore_report report = {RESTORE_DONE, (int32_t)atol(pid)};
	return write(RESTORE_STATUS_FD, &report, sizeof(report)) == sizeof(report) ? 0 : -1;
}

static int place_one(const char *pid, const char *places)
{
	char place[RESTORE_PLACE_MAX];
	long inside = pid_inside(pid);

	if (inside < 0)
		return errno = ESRCH, -1;
	if (inside == 0) /* ours: out of what is about to be frozen, where it is in there */
		return write(RESTORE_INIT_FD, pid, strlen(pid)) < 0 ? -1 : 0;
	if (inside == 1)
		return 0;
	if (!place_of(places, inside, place))
		return place_beside_init(pid);
	return write_file(RESTORE_GUEST_FD, place, pid);
}

static int place_all(void)
{
	static char processes[RESTORE_TEXT_MAX], places[RESTORE_TEXT_MAX];
	char *rest = processes, *pid, init[16] = "";

	if (read_whole(RESTORE_WORK_FD, "cgroup.procs", processes, sizeof(processes)) < 0 ||
	    read_whole(RESTORE_JOB_FD, "places", places, sizeof(places)) < 0)
		return -1;
	while ((pid = strsep(&rest, "\n")) && *pid) {
		if (pid_inside(pid) == 1)
			snprintf(init, sizeof(init), "%s", pid);
		if (place_one(pid, places) < 0 || (*has_repaired && pid_inside(pid) > 0 && end_repairs(pid) < 0))
			return -1;
	}
	/* Stopped by CRIU until now, and by this from here on. */
	if (!*init || write_file(RESTORE_GUEST_FD, "cgroup.freeze", "1") < 0)
		return -1;
	return place_init(init);
}

static bool is_restored(pid_t pid)
{
	char text[16];

	snprintf(text, sizeof(text), "%d", pid);
	return pid_inside(text) > 0;
}

static void place_once(pid_t pid)
{
	if (placed || restore_owner() < 0 || !is_restored(pid))
		return;
	placed = true;
	if (place_all() == 0)
		return;
	/* Nothing of it may run outside its cgroup: the supervisor removes the rest. */
	struct restore_report report = {RESTORE_FAILED, errno};
	if (write(RESTORE_STATUS_FD, &report, sizeof(report)) < 0)
		perror("reporting that the processes could not be placed");
	write_file(RESTORE_TREE_FD, "cgroup.kill", "1");
	_exit(1);
}

/* Only the end of a restore detaches from restored processes. */
EXPORT long ptrace(enum __ptrace_request request, ...)
{
	va_list list;
	long pid, address, data, word;

	va_start(list, request);
	pid = va_arg(list, pid_t), address = va_arg(list, long), data = va_arg(list, long);
	va_end(list);
	if (request == PTRACE_DETACH)
		place_once((pid_t)pid);
	bool peeks = request == PTRACE_PEEKTEXT || request == PTRACE_PEEKDATA || request == PTRACE_PEEKUSER;
	long result = answer(kernel(SYS_ptrace, request, pid, address, peeks ? (long)&word : data, 0, 0));
	if (peeks && result == 0) {
		errno = 0;
		return word;
	}
	return result;
}

/* What the supervisor handed over is for this program alone, not for the tar that it runs. */
__attribute__((constructor)) static void begin(void)
{
	if (restore_owner() < 0)
		return;
	for (int fd = RESTORE_STATUS_FD; fd < RESTORE_FILES_FD; fd++)
		fcntl(fd, F_SETFD, FD_CLOEXEC);
	has_repaired = mmap(NULL, sizeof(*has_repaired), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (has_repaired == MAP_FAILED)
		abort();
}
