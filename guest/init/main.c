/* barchan-init: process 1 of a sandbox, or a service of a machine. See docs/formats/guest-protocol.md.
 *
 *     barchan-init --listen-fd N --spool-fd N --spool-max-bytes N
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <limits.h>
#include <linux/capability.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>

#include "../common/port.h"
#include "init.h"

enum { EVENTS_PER_ROUND = 64, FIRST_OWN_FD = 10, OWN_FDS = 4 };

struct settings settings = {.spool_dir = -1, .dev_null = -1, .dev_pts = -1, .proc = -1, .cgroup = -1, .upper = -1};

static int epoll_fd;
static struct source signals = {.fd = -1, .kind = SOURCE_SIGNALS};

_Noreturn static void die(const char *what)
{
	fprintf(stderr, "barchan-init: %s: %s\n", what, strerror(errno));
	exit(2);
}

static int control(int op, struct source *source, uint32_t events)
{
	struct epoll_event event = {.events = events, .data.ptr = source};

	return epoll_ctl(epoll_fd, op, source->fd, &event);
}

int loop_add(struct source *source, uint32_t events)
{
	if (control(EPOLL_CTL_ADD, source, events) != 0)
		return -1;
	source->added = true;
	source->events = events;
	return 0;
}

void loop_set(struct source *source, uint32_t events)
{
	if (source->added && source->events != events && control(EPOLL_CTL_MOD, source, events) == 0)
		source->events = events;
}

void loop_remove(struct source *source)
{
	if (source->added)
		control(EPOLL_CTL_DEL, source, 0);
	source->added = false;
}

/* Closing alone is not enough: a child that is about to exec still holds a copy, which keeps the registration alive. */
void loop_close(struct source *source)
{
	loop_remove(source);
	close_fd(&source->fd);
}

static void handle_event(struct source *source, uint32_t events)
{
	struct signalfd_siginfo info[4];

	if (source->fd < 0 || !source->added)
		return;	/* closed by an earlier event of the same round */
	switch (source->kind) {
	case SOURCE_LISTEN:
		conn_accept();
		break;
	case SOURCE_CONN:
		conn_event(events);
		break;
	case SOURCE_FREEZER:
		machine_freezer_event();
		break;
	case SOURCE_SIGNALS:
		if (read(source->fd, info, sizeof info) > 0)
			process_reap_all();
		conn_wait_again();
		break;
	case SOURCE_OUTPUT:
		stream_readable(&source->owner->out[source->index]);
		break;
	case SOURCE_INPUT:
		input_event(source->owner->input, events);
		break;
	}
}

static int wait_ms(void)
{
	int a = conn_wait_ms(), b = process_backstop_wait_ms();

	if (conn_has_work())
		return 0;
	if (a < 0 || b < 0)
		return a < 0 ? b : a;
	return a < b ? a : b;
}

_Noreturn static void loop(void)
{
	struct epoll_event events[EVENTS_PER_ROUND];

	for (;;) {
		int count = epoll_wait(epoll_fd, events, EVENTS_PER_ROUND, wait_ms());

		if (count < 0 && errno != EINTR)
			die("epoll_wait");
		for (int i = 0; i < count; i++)
			handle_event(events[i].data.ptr, events[i].events);
		if (conn_has_work())
			conn_dispatch();
		push_all();
		conn_flush(count <= 0);
		/* After the host has its answers. A THAW that came with the wake-up was handled above, before this. */
		process_remove_cgroups();
		process_check_backstops();
	}
}

void close_between(unsigned first, unsigned last)
{
	last = (unsigned)min_u64(last, INT_MAX);	/* no descriptor is beyond it, and not every kernel of a sandbox takes more */
	if (first > last || syscall(SYS_close_range, first, last, 0) == 0)
		return;
	for (rlim_t fd = first; fd <= last && fd < settings.nofile.rlim_max; fd++)
		close((int)fd);
}

/* Whatever else the starter left open must not reach a guest. */
static void close_strangers(const int known[OWN_FDS])
{
	unsigned from = 3;

	for (;;) {
		unsigned next = ~0u;

		for (int i = 0; i < OWN_FDS; i++)
			if (known[i] >= (int)from && (unsigned)known[i] < next)
				next = (unsigned)known[i];
		if (next == ~0u)
			break;
		close_between(from, next - 1);
		from = next + 1;
	}
	close_between(from, ~0u);
}

/* Out of the way of the numbers that children get, and closed on exec. */
static int adopt_fd(const char *text)
{
	int given = atoi(text);
	int fd = fcntl(given, F_DUPFD_CLOEXEC, FIRST_OWN_FD);

	if (fd < 0)
		die("descriptor from the command line");
	close(given);
	return fd;
}

static int open_own(const char *path, int flags)
{
	return open(path, flags | O_CLOEXEC);
}

/* Opened before any guest code runs, so that what the guest puts at these paths later does not matter. */
static void open_devices(void)
{
	struct stat st;

	settings.dev_null = open_own("/dev/null", O_RDWR | O_NOCTTY);
	if (settings.dev_null >= 0 && (fstat(settings.dev_null, &st) != 0 || st.st_rdev != makedev(1, 3)))
		close_fd(&settings.dev_null);
	settings.dev_pts = open_own("/dev/pts", O_PATH | O_DIRECTORY);
	settings.proc = open_own("/proc", O_RDONLY | O_DIRECTORY);
	for (int fd = 0; fd < 3; fd++)
		if (fcntl(fd, F_GETFD) < 0 && settings.dev_null >= 0)
			dup2(settings.dev_null, fd);
}

static void set_up_signals(void)
{
	/* The kernel's own form, all zero for the default: a C library keeps some signals to itself and refuses to touch them. */
	static const unsigned long act[4];
	sigset_t all, child;

	for (int i = 1; i <= 64; i++)
		syscall(SYS_rt_sigaction, i, act, NULL, sizeof(uint64_t));	/* fails for those that have no disposition, and they don't matter */
	sigfillset(&all);
	if (settings.is_agent)
		sigdelset(&all, SIGTERM);	/* by which its machine ends it */
	sigprocmask(SIG_BLOCK, &all, NULL);
	sigemptyset(&child);
	sigaddset(&child, SIGCHLD);
	signals.fd = signalfd(-1, &child, SFD_CLOEXEC | SFD_NONBLOCK);
	if (signals.fd < 0 || loop_add(&signals, EPOLLIN) != 0)
		die("signalfd");
}

/* Keep only what is used here, and unused what a capable root is to have; leave nothing else that an exec could give to a child. */
static void drop_capabilities(void)
{
	const uint64_t keep = 1ull << CAP_SETUID | 1ull << CAP_SETGID | 1ull << CAP_KILL | 1ull << CAP_CHOWN |
			      1ull << CAP_SYS_RESOURCE | 1ull << CAP_SYS_TIME;
	struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
	struct __user_cap_data_struct data[2];

	if (syscall(SYS_capget, &header, data) != 0)
		die("capget");
	prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0);
	for (unsigned long cap = 0; cap < 64; cap++)
		if (prctl(PR_CAPBSET_READ, cap) == 1 && !(settings.root_capabilities >> cap & 1))
			prctl(PR_CAPBSET_DROP, cap);	/* without CAP_SETPCAP the starter must have done it */
	for (int i = 0; i < 2; i++) {
		data[i].effective = data[i].permitted & (uint32_t)(keep >> (32 * i));
		data[i].permitted &= (uint32_t)((keep | settings.root_capabilities | machine_capabilities()) >> (32 * i));
		data[i].inheritable = 0;
	}
	if (syscall(SYS_capset, &header, data) != 0)
		die("capset");
}

/* Nobody in the guest may look into us, nor write what belongs to us in /proc. The kernel gives the /proc files of a
 * process that can't be dumped to root of the user namespace that may read its program. Where that is the guest's root it
 * could, as their owner, make us the first victim of an out-of-memory kill: then it is safer to stay dumpable, since our
 * files are our own user's, whom no guest process can become. (A program file that our user may not read avoids this.) */
void guard_memory(void)
{
	struct stat st;

	if (prctl(PR_SET_DUMPABLE, 0) != 0)
		die("PR_SET_DUMPABLE");
	if (settings.uid != 0 && fstatat(settings.proc, "self/stat", &st, 0) == 0 && st.st_uid == 0)
		prctl(PR_SET_DUMPABLE, 1);
}

/* Whether a process can use files as another id than its own; not every kernel of a sandbox has that. */
static bool has_file_ids(void)
{
	return syscall(SYS_setfsuid, -1) >= 0 || errno != ENOSYS;
}

static void harden(void)
{
	struct rlimit nofile;

	settings.uid = getuid();
	settings.applet_uid = settings.uid > 2 && has_file_ids() ? settings.uid - 2 : 0;
	settings.gid = getgid();
	umask(022);
	nofile = settings.nofile;
	nofile.rlim_cur = nofile.rlim_max;
	setrlimit(RLIMIT_NOFILE, &nofile);
	if (!settings.is_agent)
		drop_capabilities();
	guard_memory();
	if (getppid() == 0 && prctl(PR_SET_PDEATHSIG, SIGKILL) != 0)
		die("PR_SET_PDEATHSIG");
	if (getrandom(settings.key, sizeof settings.key, 0) != sizeof settings.key)
		die("getrandom");
}

static void usage(void)
{
	fputs("usage: barchan-init (--listen-fd N | --serial-fd N | --serial PORT) (--spool-fd N | --spool-dir PATH) --spool-max-bytes N\n"
	      "           [--root-capabilities BITS] [--cgroup-fd N --upper-fd N] [--agent] [--gvisor-uid N]\n", stderr);
	exit(2);
}

static int open_given(const char *path, int flags)
{
	int low = open(path, flags | O_CLOEXEC), fd = low < 0 ? -1 : fcntl(low, F_DUPFD_CLOEXEC, FIRST_OWN_FD);

	if (fd < 0)
		die(path);
	close(low);
	return fd;
}

static int open_port(const char *name)
{
	char path[PORT_PATH_MAX];

	if (port_find(name, path) != 0)
		die(name);
	return open_given(path, O_RDWR | O_NONBLOCK | O_NOCTTY);
}

static struct given {
	int listen, serial;
	uint64_t spool_max;
} parse(int argc, char **argv)
{
	struct given given = {-1, -1, 0};

	for (int i = 1; i < argc; i++) {
		const char *option = argv[i], *value = argv[i + 1];

		if (strcmp(option, "--agent") == 0) {
			settings.is_agent = true;
			continue;
		}
		if (value == NULL)
			usage();
		i++;
		if (strcmp(option, "--gvisor-uid") == 0) {
			if (gvisor_become((uid_t)atoi(value), argv) != 0)
				die("becoming the init's user");
		} else if (strcmp(option, "--listen-fd") == 0)
			given.listen = adopt_fd(value);
		else if (strcmp(option, "--serial-fd") == 0)
			given.serial = adopt_fd(value);
		else if (strcmp(option, "--serial") == 0)
			given.serial = open_port(value);
		else if (strcmp(option, "--spool-fd") == 0)
			settings.spool_dir = adopt_fd(value);
		else if (strcmp(option, "--spool-dir") == 0)
			settings.spool_dir = open_given(value, O_RDONLY | O_DIRECTORY);
		else if (strcmp(option, "--cgroup-fd") == 0)
			settings.cgroup = adopt_fd(value);
		else if (strcmp(option, "--upper-fd") == 0)
			settings.upper = adopt_fd(value);
		else if (strcmp(option, "--spool-max-bytes") == 0)
			given.spool_max = strtoull(value, NULL, 10);
		else if (strcmp(option, "--root-capabilities") == 0)
			settings.root_capabilities = strtoull(value, NULL, 10);
	}
	if ((given.listen < 0) == (given.serial < 0) || settings.spool_dir < 0 || given.spool_max == 0)
		usage();
	return given;
}

int main(int argc, char **argv)
{
	struct given given = parse(argc, argv);
	int host_fd = given.listen >= 0 ? given.listen : given.serial;

	if (fcntl(host_fd, F_SETFL, fcntl(host_fd, F_GETFL) | O_NONBLOCK) != 0)
		die("the host's end");
	if (getrlimit(RLIMIT_NOFILE, &settings.nofile) != 0)
		die("getrlimit");
	close_strangers((const int[]){host_fd, settings.spool_dir, settings.cgroup, settings.upper});
	epoll_fd = epoll_create1(EPOLL_CLOEXEC);
	if (epoll_fd < 0)
		die("epoll_create1");
	open_devices();
	harden();
	spool_configure(given.spool_max, settings.nofile.rlim_max);
	set_up_signals();
	if (given.listen >= 0)
		conn_open(given.listen);
	else if (conn_open_line(given.serial) != 0)
		die("the line");
	if (settings.is_gvisor && gvisor_let_go_of_host() != 0)
		die("the host's streams");
	loop();
}
