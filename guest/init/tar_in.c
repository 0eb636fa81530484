/* Unpack a tar from stdin below a directory. The archive is hostile: every field is checked, every path is resolved by the
 * kernel so that it can't leave the directory (openat2, RESOLVE_BENEATH), links must stay below it, and nothing but files,
 * directories and links is made. The first thing that is not right ends the operation. */
#define _GNU_SOURCE
#include "applet.h"

#include <fcntl.h>
#include <linux/openat2.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "../tar/tar_reader.h"

enum {
	LATER_MAX = 65536,		/* directories whose mode waits for the end */
	LATER_BYTES_MAX = 4 << 20,
};

struct later {
	char *name;
	mode_t mode;
	struct timespec mtime;
};

static int root = -1;
static struct later *later;
static size_t later_count, later_bytes;

/* --- Names --- */

_Noreturn void tar_fail(int error, const char *format, ...)
{
	char text[600];
	va_list args;

	va_start(args, format);
	vsnprintf(text, sizeof text, format, args);
	va_end(args);
	applet_fail(error, "%s", text);
}

/* Refuse a name that is absolute or goes up. */
static void normalise(char *name)
{
	const char *wrong = tar_normalise(name);

	if (wrong != NULL)
		applet_fail(EPERM, "%.200s: %s", name, wrong);
}

static int open_beneath(const char *name, uint64_t flags)
{
	struct open_how how = {.flags = flags | O_CLOEXEC, .resolve = RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS};

	return open_beneath_of(root, name[0] ? name : ".", &how);
}

/* The directory `name`, made with every missing one on the way. */
static int open_or_make(const char *name)
{
	int fd = open_beneath(name, O_PATH | O_DIRECTORY);
	char prefix[PATH_BYTES] = "";

	if (fd >= 0 || errno != ENOENT)
		return fd;
	for (size_t at = 0, len; name[at] != 0; at += len + (name[at + len] == '/')) {
		CLEANUP_FD int parent = open_beneath(prefix, O_PATH | O_DIRECTORY);
		char component[NAME_BYTES];

		len = strcspn(name + at, "/");
		if (parent < 0)
			return -1;
		if (len >= NAME_BYTES) {
			errno = ENAMETOOLONG;
			return -1;
		}
		memcpy(component, name + at, len);
		component[len] = 0;
		if (mkdirat(parent, component, 0755) != 0 && errno != EEXIST)
			return -1;
		memcpy(prefix, name, at + len);
		prefix[at + len] = 0;
	}
	return open_beneath(name, O_PATH | O_DIRECTORY);
}

/* The open directory that holds `name`, and its last component. Members come in order, so the last one is kept. */
static int parent_of(const char *name, const char **base)
{
	static char last[PATH_BYTES];
	static int fd = -1;
	const char *slash = strrchr(name, '/');
	size_t len = slash ? (size_t)(slash - name) : 0;

	*base = slash ? slash + 1 : name;
	if (fd >= 0 && strlen(last) == len && memcmp(last, name, len) == 0)
		return fd;
	close_fd(&fd);
	memcpy(last, name, len);
	last[len] = 0;
	fd = open_or_make(last);
	if (fd < 0)
		applet_fail(errno, "%.200s", name);
	return fd;
}

static unsigned components(const char *name)
{
	unsigned count = 0;

	for (; *name != 0; name++)
		count += *name == '/';
	return count;
}

/* A symbolic link may go up only with its first components, no further than the directory, and only from where no link
 * leads: then what it names is below the directory, whatever other links the archive holds. */
static void check_symlink(const struct tar_entry *entry)
{
	const char *at = entry->link;
	unsigned up = 0;

	if (*at == '/')
		applet_fail(EPERM, "%.200s: a link to an absolute path is refused", entry->name);
	for (; strncmp(at, "..", 2) == 0 && (at[2] == '/' || at[2] == 0); up++)
		for (at += 2; *at == '/'; at++)
			;
	for (; *at != 0; at += strcspn(at, "/"), at += strspn(at, "/"))
		if (strncmp(at, "..", 2) == 0 && (at[2] == '/' || at[2] == 0))
			applet_fail(EPERM, "%.200s: a link with an inner .. is refused", entry->name);
	if (up > components(entry->name))
		applet_fail(EPERM, "%.200s: a link that leaves the directory is refused", entry->name);
	if (up > 0) {
		struct open_how how = {.flags = O_PATH | O_DIRECTORY | O_CLOEXEC, .resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS};
		char parent[PATH_BYTES] = ".";
		const char *slash = strrchr(entry->name, '/');

		memcpy(parent, entry->name, (size_t)(slash - entry->name));
		parent[slash - entry->name] = 0;
		CLEANUP_FD int fd = open_beneath_of(root, parent, &how);
		if (fd < 0 && errno != ENOENT)
			applet_fail(errno, "%.200s: a link upwards from behind a link is refused", entry->name);
	}
}

/* --- Members --- */

/* Run `make`; when something of that name is there already, remove it and try once more. */
#define REPLACING(result, dir, base, make)                                                          \
	do {                                                                                        \
		(result) = (make);                                                                  \
		if ((result) < 0 && errno == EEXIST && unlinkat((dir), (base), 0) == 0)             \
			(result) = (make);                                                          \
	} while (0)

static void put_file(const struct tar_entry *entry)
{
	const struct timespec times[2] = {entry->mtime, entry->mtime};
	const char *base;
	int dir = parent_of(entry->name, &base), error = 0;
	CLEANUP_FD int fd = -1;

	REPLACING(fd, dir, base, openat(dir, base, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
	if (fd < 0)
		applet_fail(errno, "%.200s", entry->name);
	for (uint64_t left = entry->size; left > 0 && error == 0;) {
		const uint8_t *part;
		size_t n = tar_take(&part, (size_t)min_u64(left, COPY_CHUNK));

		error = n == 0 ? EBADMSG : -write_all(fd, part, n);
		left -= n;
	}
	if (error == 0 && (fchmod(fd, entry->mode & 0777) != 0 || futimens(fd, times) != 0))
		error = errno;
	if (error != 0) {
		unlinkat(dir, base, 0);
		applet_fail(error, error == EBADMSG ? "%.200s: the archive is truncated" : "%.200s", entry->name);
	}
	tar_skip_padding(entry->size);
}

static void set_directory(const char *name, mode_t mode, struct timespec mtime)
{
	const struct timespec times[2] = {mtime, mtime};
	CLEANUP_FD int fd = open_beneath(name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW);

	if (fd < 0 || fchmod(fd, mode) != 0 || futimens(fd, times) != 0)
		applet_fail(errno, "%.200s", name);
}

/* Members still to come may need to write into the directory, so its own mode is set at the end. */
static void set_later(const struct tar_entry *entry)
{
	const mode_t mode = entry->mode & 01777;
	size_t bytes = strlen(entry->name) + 1;

	if (later == NULL)
		later = calloc(LATER_MAX, sizeof *later);
	if (later == NULL || later_count == LATER_MAX || later_bytes + bytes > LATER_BYTES_MAX) {
		set_directory(entry->name, mode | 0700, entry->mtime);
		return;
	}
	later[later_count] = (struct later){.name = strdup(entry->name), .mode = mode, .mtime = entry->mtime};
	if (later[later_count++].name == NULL)
		applet_fail(ENOMEM, "%.200s", entry->name);
	later_bytes += bytes;
}

static void put_directory(const struct tar_entry *entry)
{
	const char *base;
	int dir;

	if (entry->name[0] == 0)
		return;
	dir = parent_of(entry->name, &base);
	if (mkdirat(dir, base, 0700) == 0) {
		set_later(entry);
		return;
	}
	if (errno != EEXIST)
		applet_fail(errno, "%.200s", entry->name);
	CLEANUP_FD int fd = open_beneath(entry->name, O_PATH | O_DIRECTORY);
	if (fd < 0)
		applet_fail(errno, "%.200s", entry->name);
}

static void put_symlink(const struct tar_entry *entry)
{
	const char *base;
	int dir = parent_of(entry->name, &base), done;

	check_symlink(entry);
	REPLACING(done, dir, base, symlinkat(entry->link, dir, base));
	if (done != 0)
		applet_fail(errno, "%.200s", entry->name);
}

static void put_hard_link(struct tar_entry *entry)
{
	const char *base, *slash;
	char parent[PATH_BYTES];
	int dir = parent_of(entry->name, &base), done;

	normalise(entry->link);
	slash = strrchr(entry->link, '/');
	memcpy(parent, entry->link, slash ? (size_t)(slash - entry->link) : 0);
	parent[slash ? slash - entry->link : 0] = 0;
	CLEANUP_FD int from = open_beneath(parent, O_PATH | O_DIRECTORY);
	if (from < 0)
		applet_fail(errno, "%.200s", entry->link);
	REPLACING(done, dir, base, linkat(from, slash ? slash + 1 : entry->link, dir, base, 0));
	if (done != 0)
		applet_fail(errno, "%.200s", entry->name);
}

static void put(struct tar_entry *entry)
{
	size_t len = strlen(entry->name);

	if (entry->type == 0 || entry->type == '7')
		entry->type = '0';
	if (entry->type == '0' && len > 0 && entry->name[len - 1] == '/')
		entry->type = '5';	/* how archives before POSIX say "directory" */
	normalise(entry->name);
	if (entry->mtime.tv_sec < 0)	/* not every file system has times before 1970 */
		entry->mtime = (struct timespec){0};
	if (entry->type != '0' && entry->size != 0)
		applet_fail(EBADMSG, "%.200s: only files have content", entry->name);
	if (entry->type != '5' && entry->name[0] == 0)
		applet_fail(EBADMSG, "a member without a name");
	switch (entry->type) {
	case '0':
		put_file(entry);
		break;
	case '1':
		put_hard_link(entry);
		break;
	case '2':
		put_symlink(entry);
		break;
	case '5':
		put_directory(entry);
		break;
	default:
		applet_fail(EPERM, "%.200s: members of type '%c' are refused", entry->name,
			    entry->type >= ' ' && entry->type <= '~' ? entry->type : '?');
	}
}

void op_tar_in(char **argv)
{
	static struct tar_entry entry;

	make_directories(argv[0]);
	root = open(argv[0], O_PATH | O_DIRECTORY | O_CLOEXEC);
	if (root < 0)
		applet_fail(errno, "%s", argv[0]);
	while (tar_next(&entry))
		put(&entry);
	while (later_count-- > 0)
		set_directory(later[later_count].name, later[later_count].mode, later[later_count].mtime);
}
