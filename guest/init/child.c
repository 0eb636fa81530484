/* Between fork and exec. Everything that touches the guest's files happens here, after the privileges are gone where
 * the kernel's permission checks are meant to decide. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <grp.h>
#include <linux/capability.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/fsuid.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include "init.h"

enum { EXIT_NOT_FOUND = 127, EXIT_CANNOT = 126, SCRIPT_FD = 3, FIRST_KEPT_FD = 10, EXTRA_ENV = 3 };

static const char default_path[] = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

_Noreturn static void __attribute__((format(printf, 2, 3))) fail(int code, const char *format, ...)
{
	char text[600] = "barchan: ";
	size_t len = strlen(text);
	va_list args;

	va_start(args, format);
	vsnprintf(text + len, sizeof text - len - 1, format, args);
	va_end(args);
	len = strlen(text);
	text[len++] = '\n';
	write_all(2, text, len);
	_exit(code);
}

/* Cut the strings at `at` out of the body, in place: each gets its NUL where the next one's length began. */
static char **cut_strings(uint8_t *at, uint32_t count, uint32_t extra)
{
	char **out = malloc((count + extra + 1) * sizeof *out);
	uint32_t len = count > 0 ? load_u32(at) : 0;

	if (out == NULL)
		fail(EXIT_CANNOT, "%s", strerror(ENOMEM));
	for (uint32_t i = 0; i < count; i++) {
		out[i] = (char *)at + 4;
		at += 4 + len;
		len = i + 1 < count ? load_u32(at) : 0;
		*at = 0;
	}
	out[count] = NULL;
	return out;
}

/* As cut_strings for one field that is followed by another: both were decoded before. */
static char *cut(struct span span)
{
	uint8_t *data = (uint8_t *)(uintptr_t)span.data;

	data[span.len] = 0;
	return (char *)data;
}

static void place(int from, int to)
{
	int done = from == to ? fcntl(to, F_SETFD, 0) : dup2(from, to);

	if (done < 0)
		fail(EXIT_CANNOT, "cannot set up descriptor %d: %s", to, strerror(errno));
}

/* A file of its own holding `data`, at its beginning, charged to whoever runs (the leaf is joined by now). */
static void place_file(struct span data, int to)
{
	int fd = memfd_create("input", MFD_CLOEXEC);
	int error;

	if (fd < 0)
		fail(EXIT_CANNOT, "cannot make a file: %s", strerror(errno));
	error = write_all(fd, data.data, data.len);
	if (error != 0 || lseek(fd, 0, SEEK_SET) != 0)
		fail(EXIT_CANNOT, "cannot fill a file: %s", strerror(-error));
	place(fd, to);
}

static void place_output(const struct launch *launch)
{
	if (launch->request->flags & START_PTY) {
		place(launch->in, 1);
		place(launch->in, 2);
		return;
	}
	place(launch->out, 1);
	place(launch->err >= 0 ? launch->err : launch->out, 2);
}

static void place_input(const struct launch *launch)
{
	if (launch->in >= 0)
		place(launch->in, 0);
	else if (launch->request->input.len > 0 || settings.dev_null < 0)
		place_file(launch->request->input, 0);
	else
		place(settings.dev_null, 0);
	if (launch->request->script.len > 0 || launch->request->kind == KIND_PYTHON)
		place_file(launch->request->script, SCRIPT_FD);
}

/* By it this process lets another join its cgroup. Opened without the group that may move what is not the guest's, the init for one: the
 * kernel asks what the opener may. */
static int open_for_others(const struct leaf *leaf, const char *path)
{
	gid_t own = (gid_t)setfsgid(settings.applet_uid);
	int fd = openat(leaf->dir, path, O_WRONLY | O_CLOEXEC);
	int kept = fd < 0 ? -1 : fcntl(fd, F_DUPFD_CLOEXEC, FIRST_KEPT_FD);

	if (kept < 0)
		fail(EXIT_CANNOT, "cannot open cgroup %s: %s", path, strerror(errno));
	close(fd);
	setfsgid(own);
	return kept;
}

/* Guest code must never run outside its leaf, so every failure ends the start. Returns what lets another process join the cgroup of this
 * start, or -1 where none is to or it has none. */
static int join_leaf(const struct launch *launch)
{
	const struct leaf *leaf = launch->leaf;
	char name[16], path[32];
	int fd;

	for (int i = 0; i < leaf->procs_count; i++)
		if (pwrite(leaf->procs[i], "0", 1, 0) != 1)
			fail(EXIT_CANNOT, "cannot join the cgroup: %s", strerror(errno));
	if (leaf->dir < 0)
		return -1;
	process_cgroup_name(name, launch->handle);
	if (mkdirat(leaf->dir, name, 0755) != 0 && errno != EEXIST)
		fail(EXIT_CANNOT, "cannot make a cgroup: %s", strerror(errno));
	snprintf(path, sizeof path, "%s/cgroup.procs", name);
	fd = openat(leaf->dir, path, O_WRONLY | O_CLOEXEC);
	if (fd < 0 || write(fd, "0", 1) != 1)
		fail(EXIT_CANNOT, "cannot join cgroup %s: %s", name, strerror(errno));
	close(fd);
	return launch->request->kind == KIND_PYTHON ? open_for_others(leaf, path) : -1;
}

/* So that the user can open its terminal or pipes by name, as /dev/stderr; without CAP_CHOWN they work by descriptor only. */
static void own_stream(int fd, uid_t uid)
{
	if (fchown(fd, uid, (gid_t)-1) != 0 && errno != EPERM)
		fail(EXIT_CANNOT, "cannot own descriptor %d: %s", fd, strerror(errno));
}

static void own_session(const struct launch *launch, uid_t uid)
{
	setsid();
	if (launch->in >= 0)
		own_stream(0, uid);
	if (launch->request->flags & START_PTY) {
		if (ioctl(0, TIOCSCTTY, 0) != 0)
			fail(EXIT_CANNOT, "cannot take the terminal: %s", strerror(errno));
		return;
	}
	own_stream(1, uid);
	if (launch->err >= 0)
		own_stream(2, uid);
}

static void set_limit(uint32_t resource, struct rlimit limit)
{
	struct rlimit now;

	if (prlimit(0, (int)resource, &limit, NULL) == 0)
		return;
	/* A hard limit can't be raised without privilege: take what there is. */
	if (errno != EPERM || prlimit(0, (int)resource, NULL, &now) != 0)
		fail(EXIT_CANNOT, "cannot set limit %u: %s", resource, strerror(errno));
	limit.rlim_max = (rlim_t)min_u64(limit.rlim_max, now.rlim_max);
	limit.rlim_cur = (rlim_t)min_u64(limit.rlim_cur, limit.rlim_max);
	if (prlimit(0, (int)resource, &limit, NULL) != 0)
		fail(EXIT_CANNOT, "cannot set limit %u: %s", resource, strerror(errno));
}

static void set_limits(const struct start *start)
{
	struct reader r = reader_of(start->limits_at, start->limit_count * (size_t)20);

	if (is_program(start->kind))
		set_limit(RLIMIT_NOFILE, settings.nofile);
	for (uint32_t i = 0; i < start->limit_count; i++) {
		uint32_t resource = get_u32(&r);
		struct rlimit limit = {.rlim_cur = get_u64(&r)};

		limit.rlim_max = get_u64(&r);
		set_limit(resource, limit);
	}
}

static void become(const struct identity *id, int kind)
{
	struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
	struct __user_cap_data_struct none[2] = {0};

	/* Where setgroups is denied (an unprivileged user namespace), having no groups is as good. */
	if (setgroups(id->group_count, id->groups) != 0 &&
	    !(errno == EPERM && id->group_count == 0 && getgroups(0, NULL) == 0))
		fail(EXIT_CANNOT, "cannot set groups: %s", strerror(errno));
	if (setresgid(id->gid, id->gid, id->gid) != 0)
		fail(EXIT_CANNOT, "cannot become group %u: %s", id->gid, strerror(errno));
	/* What an applet may do with files goes by its file-system id; who may signal, stop or slow it down by the others. What stands for
	 * source is of the user's until it has connected. */
	uid_t uid = kind != KIND_PROGRAM && settings.applet_uid != 0 ? settings.applet_uid : id->uid;
	if (setresuid(uid, kind == KIND_PYTHON ? id->uid : uid, uid) != 0)
		fail(EXIT_CANNOT, "cannot become user %u: %s", uid, strerror(errno));
	if (settings.is_agent)
		return;	/* what its id gives a user is the machine's to say */
	if (uid != id->uid)
		setfsuid(id->uid);
	if (uid != id->uid && (uid_t)setfsuid((uid_t)-1) != id->uid)
		fail(EXIT_CANNOT, "cannot use files as user %u", id->uid);
	if (id->uid == 0 && settings.root_capabilities != 0) {
		const char *wrong = capable_become(kind);

		if (wrong != NULL)
			fail(EXIT_CANNOT, "%s: %s", wrong, strerror(errno));
	} else if (syscall(SYS_capset, &header, none) != 0) {
		fail(EXIT_CANNOT, "cannot drop capabilities: %s", strerror(errno));
	}
}

static const char *env_get(char **env, const char *name)
{
	size_t len = strlen(name);

	for (; *env != NULL; env++)
		if (strncmp(*env, name, len) == 0 && (*env)[len] == '=')
			return *env + len + 1;
	return NULL;
}

static void env_add(char **env, uint32_t *count, const char *name, const char *value)
{
	char *text;

	if (env_get(env, name) != NULL)
		return;
	if (asprintf(&text, "%s=%s", name, value) < 0)
		fail(EXIT_CANNOT, "%s", strerror(ENOMEM));
	env[(*count)++] = text;
	env[*count] = NULL;
}

static void unblock_signals(void)
{
	sigset_t none;

	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
}

/* Try each directory of PATH. Returns the errno of the failure: EACCES when one was found that can't be executed. */
static int exec_along_path(char **argv, char **env, const char *path)
{
	size_t name_len = strlen(argv[0]);
	int error = ENOENT;

	for (const char *end; path != NULL; path = end ? end + 1 : NULL) {
		char file[4096];
		size_t len;

		end = strchr(path, ':');
		len = end ? (size_t)(end - path) : strlen(path);
		if (len + name_len + 2 > sizeof file)
			continue;
		memcpy(file, path, len);
		file[len] = '/';
		memcpy(file + (len > 0 ? len + 1 : 0), argv[0], name_len + 1);
		execve(file, argv, env);
		if (errno == EACCES)
			error = EACCES;
		else if (errno != ENOENT && errno != ENOTDIR && errno != ENAMETOOLONG && errno != ELOOP)
			return errno;
	}
	return error;
}

_Noreturn static void exec_program(char **argv, char **env)
{
	const char *path = env_get(env, "PATH");
	int error;

	unblock_signals();
	if (strchr(argv[0], '/') != NULL) {
		execve(argv[0], argv, env);
		error = errno;
	} else {
		error = argv[0][0] ? exec_along_path(argv, env, path ? path : default_path) : ENOENT;
	}
	fail(error == ENOENT ? EXIT_NOT_FOUND : EXIT_CANNOT, "cannot run %.256s: %s", argv[0],
	     error == ENOENT ? "not found" : strerror(error));
}

/* The helper still holds a copy of the init's memory, other users' output included: nobody may look into it. */
_Noreturn static void run_applet(uint32_t argc, char **argv, const char *cwd)
{
	close_between(3, ~0u);
	if (prctl(PR_SET_DUMPABLE, 0) != 0)
		fail(EXIT_CANNOT, "cannot protect memory: %s", strerror(errno));
	unblock_signals();
	if (chdir(cwd) != 0) {
		dprintf(2, "%d %s: %s\n", errno, cwd, strerror(errno));
		_exit(1);
	}
	applet_main(argc, argv);
}

_Noreturn static void run_on_machine(const struct start *start)
{
	close_between(3, settings.upper < 0 ? ~0u : (unsigned)settings.upper - 1);
	if (settings.upper >= 0)
		close_between((unsigned)settings.upper + 1, ~0u);
	unblock_signals();
	machine_main(start->argc, cut_strings(start->argv_at, start->argc, 0));
}

_Noreturn void child_main(const struct launch *launch)
{
	const struct start *start = launch->request;
	static struct identity identity;
	uint32_t envc = start->envc;
	const char *wrong, *cwd;
	char **argv, **env;
	int procs = -1;

	place_output(launch);
	if (is_program(start->kind))
		procs = join_leaf(launch);
	place_input(launch);
	if (start->kind == KIND_MACHINE)
		run_on_machine(start);
	/* From here on files of the guest's are read. */
	if (machine_let_go() != 0)
		fail(EXIT_CANNOT, "cannot drop capabilities: %s", strerror(errno));
	wrong = identity_find(cut(start->user), &identity);
	if (wrong != NULL)
		fail(EXIT_CANNOT, "user %.128s: %s", cut(start->user), wrong);
	own_session(launch, identity.uid);
	cwd = start->cwd.len > 0 ? cut(start->cwd) : "/";
	argv = cut_strings(start->argv_at, start->argc, 0);
	env = cut_strings(start->env_at, start->envc, EXTRA_ENV);
	env_add(env, &envc, "HOME", identity.home);
	env_add(env, &envc, "USER", identity.name);
	env_add(env, &envc, "LOGNAME", identity.name);
	set_limits(start);
	if (settings.is_gvisor && launch->leaf == &leaves[LEAF_GUEST] && gvisor_leave_others(identity.uid) != 0)
		fail(EXIT_CANNOT, "cannot limit its processes: %s", strerror(errno));
	become(&identity, start->kind);
	if ((start->flags & START_RESTRAINED) && restrained_become() != 0)
		fail(EXIT_CANNOT, "cannot keep it from killing: %s", strerror(errno));
	if (start->kind == KIND_APPLET)
		run_applet(start->argc, argv, cwd);
	if (start->kind == KIND_PYTHON)
		python_main(procs, argv, env, cwd);
	if (chdir(cwd) != 0)
		fail(EXIT_CANNOT, "cannot enter %.256s: %s", cwd, strerror(errno));
	exec_program(argv, env);
}
