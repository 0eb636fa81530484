/* barchan-supervisor: options, start, the loop, the end. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <getopt.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>

#include "supervisor.h"

#define IDLE_WAIT_NS (2 * NS_PER_S)
#define REAP_ALL_NS (10 * NS_PER_MS)
#define REAP_ALL_NS_MAX (NS_PER_S)
#define REAP_ALL_REST 100 /* times what it takes */
#define RETRY_MS 2
#define RETRY_MS_MAX 100
#define QUOTA_SWEEP_NS (NS_PER_S / 5)
#define POOL_LOOK_NS (NS_PER_S / 5)
#define SHUTDOWN_WAIT_NS (20 * NS_PER_S)
#define POOL_MIB_MIN 128u
#define OPEN_FILES_MAX 1048576u
#define NAME_TRIES 50
#define NAME_WAIT_NS (100 * NS_PER_MS)

struct options options;
const struct weakening weakenings[WEAKENINGS] = {
	{"no-userns", &options.no_userns},
	{"no-caps-drop", &options.no_caps_drop},
	{"no-seccomp", &options.no_seccomp},
	{"no-pidns", &options.no_pidns},
	{"no-netns", &options.no_netns},
	{"no-masks", &options.no_masks},
	{"writable-layers", &options.writable_layers},
	{"no-quota", &options.no_quota},
	{"no-memory-limit", &options.no_memory_limit},
	{"no-pids-limit", &options.no_pids_limit},
	{"init-in-guest-leaf", &options.init_in_guest_leaf},
	{"init-as-guest-root", &options.init_as_guest_root},
	{"no-exec-cgroup", &options.no_exec_cgroup},
	{"full-dev", &options.full_dev},
};
int epoll_fd = -1, self_pidfd = -1;

static void handle_signals(struct watch *watch, uint32_t events);
static struct watch signals = {handle_signals};
static int signal_fd = -1, name_lock_fd = -1;
static bool shutting_down, shutdown_asked;
static int64_t reap_all_ns; /* when to look for children that no signal has told of; 0: there can be none */
static int64_t reap_all_wait_ns = REAP_ALL_NS;
static struct waiter shutdown_waiter;
static int64_t shutdown_deadline_ns;

/* --- the loop ----------------------------------------------------------------------------------------------------- */

int watch_add(struct watch *watch, int fd, uint32_t events)
{
	struct epoll_event event = {.events = events, .data.ptr = watch};

	return epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event);
}

int watch_change(struct watch *watch, int fd, uint32_t events)
{
	struct epoll_event event = {.events = events, .data.ptr = watch};

	return epoll_ctl(epoll_fd, EPOLL_CTL_MOD, fd, &event);
}

/* A launch child holds copies of every descriptor until its exec, so that closing one doesn't end its watch: without this the
 * kernel would go on naming a watch that is long freed. */
void watch_close(int *fd)
{
	if (*fd >= 0 && epoll_ctl(epoll_fd, EPOLL_CTL_DEL, *fd, NULL) < 0 && errno != ENOENT)
		log_line("ending a watch: %s", strerror(errno));
	close_fd(fd);
}

static void start_shutdown(void)
{
	if (shutting_down)
		return;
	shutting_down = true;
	shutdown_deadline_ns = monotonic_ns() + SHUTDOWN_WAIT_NS;
	sandbox_destroy_all();
	memory_end_all();
	/* Else killed processes would wait for a reader that is dead and has no successor any more. */
	fuse_let_go();
}

void request_shutdown(const struct waiter *waiter)
{
	shutdown_asked = true;
	shutdown_waiter = *waiter;
	start_shutdown();
}

static void handle_signals(struct watch *watch, uint32_t events)
{
	struct signalfd_siginfo info;

	(void)watch, (void)events;
	while (read(signal_fd, &info, sizeof(info)) == sizeof(info)) {
		if (info.ssi_signo == SIGCHLD) {
			children_reap((pid_t)info.ssi_pid);
			if (!reap_all_ns)
				reap_all_ns = monotonic_ns() + reap_all_wait_ns;
		} else {
			start_shutdown();
		}
	}
}

/* When nobody has been there for too long. Before the first connection that is the long wait: a node is on its way. */
static int64_t orphan_deadline_ns(void)
{
	bool soon = sandbox_count == 0 && node_was_ever_connected();
	int64_t wait_ns = (int64_t)options.orphan_grace_s * NS_PER_S;

	if (soon && wait_ns > IDLE_WAIT_NS)
		wait_ns = IDLE_WAIT_NS;
	return node_absent_since_ns() + wait_ns;
}

static int64_t cpu_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
	return now.tv_sec * NS_PER_S + now.tv_nsec;
}

static int64_t earlier(int64_t left, int64_t right)
{
	return left < right ? left : right;
}

/* The more children there are, the longer it takes to look for one that has ended, and the rarer it is done. */
static void reap_all(void)
{
	int64_t began_ns = cpu_ns();

	reap_all_ns = 0;
	children_reap_all();
	reap_all_wait_ns = REAP_ALL_REST * (cpu_ns() - began_ns);
	if (reap_all_wait_ns < REAP_ALL_NS)
		reap_all_wait_ns = REAP_ALL_NS;
	reap_all_wait_ns = earlier(reap_all_wait_ns, REAP_ALL_NS_MAX);
}

/* Do what time asks for; the milliseconds until it asks again, -1 for never. */
static int run_timers(void)
{
	static int64_t quota_sweep_ns, pool_look_ns;
	static int retry_ms = RETRY_MS;
	int64_t now_ns = monotonic_ns(), next_ns = INT64_MAX;

	if (!node_is_connected() && !shutting_down) {
		if (orphan_deadline_ns() <= now_ns)
			start_shutdown();
		else
			next_ns = orphan_deadline_ns();
	}
	if (reap_all_ns && reap_all_ns <= now_ns)
		reap_all();
	if (reap_all_ns)
		next_ns = earlier(next_ns, reap_all_ns);
	/* What guests can't write, or do in vain, not all of them see: none may go on. */
	if (!shutting_down) {
		const char *fault = pool_look_ns <= now_ns ? pool_fault() : NULL;
		if (fault) {
			log_line("the pool is given up, and all sandboxes with it: %s", fault);
			start_shutdown();
		}
		pool_look_ns = pool_look_ns <= now_ns ? now_ns + POOL_LOOK_NS : pool_look_ns;
		next_ns = earlier(next_ns, pool_look_ns);
	}
	if (sandbox_remove_ended()) {
		next_ns = earlier(next_ns, now_ns + retry_ms * NS_PER_MS);
		retry_ms = retry_ms < RETRY_MS_MAX ? retry_ms * 2 : retry_ms;
	} else {
		retry_ms = RETRY_MS;
	}
	if (!node_is_connected() || shutting_down)
		slots_drop();
	else
		next_ns = earlier(next_ns, slots_fill(now_ns));
	if (quota_sweep_ns <= now_ns)
		quota_sweep_ns = pool_drop_stale_quotas() ? now_ns + QUOTA_SWEEP_NS : 0;
	if (quota_sweep_ns)
		next_ns = earlier(next_ns, quota_sweep_ns);
	next_ns = earlier(next_ns, memory_run_timers(now_ns));
	if (shutting_down)
		next_ns = earlier(next_ns, shutdown_deadline_ns);
	if (next_ns == INT64_MAX)
		return -1;
	return next_ns <= now_ns ? 0 : (int)((next_ns - now_ns) / NS_PER_MS) + 1;
}

static bool is_over(void)
{
	if (!shutting_down)
		return false;
	if (sandbox_count == 0 && memory_is_idle())
		return true;
	if (monotonic_ns() < shutdown_deadline_ns)
		return false;
	log_line("giving up on %u sandboxes that can't be removed", sandbox_count);
	return true;
}

static void run(void)
{
	struct epoll_event event;

	while (!is_over()) {
		int timeout_ms = run_timers();
		if (is_over())
			return;
		/* One at a time: a handler may free what another event points to. */
		if (epoll_wait(epoll_fd, &event, 1, timeout_ms) == 1) {
			struct watch *watch = event.data.ptr;
			watch->handle(watch, event.events);
		}
	}
}

/* --- start and end ------------------------------------------------------------------------------------------------ */

/* Released by the kernel however this process ends: two supervisors must not take each other's groups for left-overs. One that is at
 * its end is waited for. */
static int lock_name(void)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	int length = snprintf(address.sun_path + 1, sizeof(address.sun_path) - 1, "barchan-supervisor/%s", options.cgroup);

	name_lock_fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (name_lock_fd < 0)
		return -1;
	socklen_t size = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length);
	for (int tries = 0; tries < NAME_TRIES; tries++) {
		if (bind(name_lock_fd, (struct sockaddr *)&address, size) == 0)
			return 0;
		if (errno != EADDRINUSE)
			return -1;
		nanosleep(&(struct timespec){.tv_nsec = NAME_WAIT_NS}, NULL);
	}
	return errno = EADDRINUSE, -1;
}

/* Every sandbox costs a descriptor or two at times; without CAP_SYS_RESOURCE what there is must do. */
static int raise_file_limit(void)
{
	struct rlimit limit = {OPEN_FILES_MAX, OPEN_FILES_MAX};

	if (setrlimit(RLIMIT_NOFILE, &limit) == 0)
		return 0;
	if (errno != EPERM || getrlimit(RLIMIT_NOFILE, &limit) < 0)
		return -1;
	limit.rlim_cur = limit.rlim_max;
	return setrlimit(RLIMIT_NOFILE, &limit);
}

static int prepare_process(void)
{
	sigset_t blocked;

	/* The numbers that a launch child puts the init's descriptors on. */
	int fd;
	do
		fd = open("/dev/null", O_RDWR | O_CLOEXEC);
	while (fd >= 0 && fd < INIT_SPOOL_FD);
	if (fd < 0)
		return -1;
	if (fd > INIT_SPOOL_FD)
		close(fd);
	umask(0);
	sigemptyset(&blocked);
	sigaddset(&blocked, SIGCHLD), sigaddset(&blocked, SIGTERM), sigaddset(&blocked, SIGINT), sigaddset(&blocked, SIGHUP);
	if (sigprocmask(SIG_SETMASK, &blocked, NULL) < 0 || signal(SIGPIPE, SIG_IGN) == SIG_ERR)
		return -1;
	if (raise_file_limit() < 0 || prctl(PR_SET_CHILD_SUBREAPER, 1) < 0)
		return -1;
	self_pidfd = (int)syscall(SYS_pidfd_open, getpid(), 0);
	epoll_fd = epoll_create1(EPOLL_CLOEXEC);
	signal_fd = signalfd(-1, &blocked, SFD_CLOEXEC | SFD_NONBLOCK);
	return self_pidfd < 0 || epoll_fd < 0 || signal_fd < 0 ? -1 : watch_add(&signals, signal_fd, EPOLLIN);
}

static int find_init(void)
{
	return access(options.init, R_OK);
}

/* The name of the step that failed, or NULL. */
static const char *start(void)
{
	static const struct {
		const char *name;
		int (*run)(void);
	} steps[] = {
		{"process", prepare_process},	 {"cgroup name in use", lock_name}, {"init", find_init}, {"cgroup", cgroup_open},
		{"socket", node_listen},	 {"mounts", mounts_open},	    {"pool", pool_open}, {"mount namespace", mounts_leave_host},
		{"seccomp", seccomp_compile},
	};

	for (size_t i = 0; i < COUNT(steps); i++)
		if (steps[i].run() < 0)
			return steps[i].name;
	return NULL;
}

static void finish(void)
{
	pool_close();
	mounts_close();
	cgroup_close();
	if (shutdown_asked) {
		struct reply *reply = reply_start("ok");
		reply_add(reply, "tag=%llu", (unsigned long long)shutdown_waiter.tag);
		reply_send(reply, &shutdown_waiter);
	}
	node_close();
}

/* In the foreground only until it is known whether the start succeeded. Returns in the child. */
static int daemonize(void)
{
	int pair[2], status;
	char byte;

	if (pipe2(pair, O_CLOEXEC) < 0)
		return -1;
	pid_t pid = fork();
	if (pid < 0)
		return -1;
	if (pid > 0) {
		close(pair[1]);
		if (read(pair[0], &byte, 1) == 1)
			_exit(0);
		_exit(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) ? WEXITSTATUS(status) : 1);
	}
	close(pair[0]);
	return setsid() < 0 ? -1 : pair[1];
}

static int parse_options(int argc, char **argv)
{
	const struct {
		const char *name, **text;
		uint64_t *number;
	} known[] = {
		{"socket", &options.socket, NULL}, {"pool", &options.pool, NULL},
		{"pool-mib", NULL, &options.pool_mib}, {"cgroup", &options.cgroup, NULL},
		{"init", &options.init, NULL}, {"orphan-grace-s", NULL, &options.orphan_grace_s},
		{"log", &options.log, NULL},
	};
	struct option table[COUNT(known) + WEAKENINGS + 1] = {{0}};
	int index;

	for (size_t i = 0; i < COUNT(known); i++)
		table[i] = (struct option){known[i].name, required_argument, NULL, 0};
	for (size_t i = 0; i < WEAKENINGS; i++)
		table[COUNT(known) + i] = (struct option){weakenings[i].name, no_argument, NULL, 0};
	while ((index = -1, getopt_long(argc, argv, "", table, &index)) == 0) {
		if ((size_t)index >= COUNT(known))
			*weakenings[(size_t)index - COUNT(known)].flag = true;
		else if (known[index].text)
			*known[index].text = optarg;
		else if (parse_number(optarg, known[index].number) < 0)
			return -1;
	}
	if (index != -1 || optind != argc || !options.socket || !options.pool || !options.cgroup || !options.init || !options.log)
		return -1;
	return is_name(options.cgroup, ID_MAX) && options.pool_mib >= POOL_MIB_MIN && options.pool_mib < (UINT64_C(1) << 30) ? 0 : -1;
}

int main(int argc, char **argv)
{
	if (parse_options(argc, argv) < 0) {
		fprintf(stderr, "usage: barchan-supervisor --socket PATH --pool FILE --pool-mib N(>=%u) --cgroup NAME --init FILE\n"
				"       --orphan-grace-s N --log FILE [switches of docs/threat-model.md]\n",
			POOL_MIB_MIN);
		return 2;
	}
	int log_fd = open(options.log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
	int done_fd = log_fd < 0 ? -1 : daemonize();
	int null_fd = open("/dev/null", O_RDWR | O_CLOEXEC);
	if (done_fd < 0 || null_fd < 0 || dup2(null_fd, STDIN_FILENO) < 0 || dup2(log_fd, STDERR_FILENO) < 0) {
		printf("error log: %s: %s\n", options.log, strerror(errno));
		return 1;
	}
	const char *failed = start();
	if (failed) {
		printf("error %s: %s\n", failed, strerror(errno));
		fflush(stdout);
		log_line("start failed: %s: %s", failed, strerror(errno));
		finish();
		return 1;
	}
	printf("ready\n");
	if (fflush(stdout) != 0 || write(done_fd, "r", 1) != 1)
		log_line("nobody waited for the start");
	dup2(log_fd, STDOUT_FILENO);
	close(done_fd), close(log_fd);
	run();
	finish();
	return 0;
}
