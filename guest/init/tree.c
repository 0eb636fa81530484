/* Moving and removing, which may have to walk a tree. Every step is relative to an open directory and follows no link. */
#define _GNU_SOURCE
#include "applet.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/random.h>

struct removal {
	int depth, error;
};

static int remove_tree(int dir, const char *name, int depth);

static void remove_one(int dir, const char *name, unsigned char type, void *context)
{
	struct removal *removal = context;
	int error = EISDIR;

	if (type != DT_DIR)
		error = unlinkat(dir, name, 0) == 0 ? 0 : errno;
	if (error == EISDIR)
		error = remove_tree(dir, name, removal->depth + 1);
	if (error != 0 && error != ENOENT && removal->error == 0)
		removal->error = error;
}

/* Returns 0 or the first errno; goes on with the rest after one. */
static int remove_tree(int dir, const char *name, int depth)
{
	struct removal removal = {.depth = depth};
	int error;

	if (depth > DEPTH_MAX)
		return ELOOP;
	CLEANUP_FD int fd = open_dir(dir, name);
	if (fd < 0)
		return errno;
	error = -each_entry(fd, remove_one, &removal);
	if (error != 0 || removal.error != 0)
		return error ? error : removal.error;
	return unlinkat(dir, name, AT_REMOVEDIR) == 0 ? 0 : errno;
}

static int remove_any(int dir, const char *name)
{
	int error = unlinkat(dir, name, 0) == 0 ? 0 : errno;

	return error == EISDIR ? remove_tree(dir, name, 0) : error;
}

void op_remove(char **argv)
{
	bool recursive = strcmp(argv[1], "1") == 0;
	int error = unlinkat(AT_FDCWD, argv[0], 0) == 0 ? 0 : errno;

	if (error == EISDIR)
		error = recursive ? remove_tree(AT_FDCWD, argv[0], 0) :
			unlinkat(AT_FDCWD, argv[0], AT_REMOVEDIR) == 0 ? 0 : errno;
	if (error != 0)
		applet_fail(error, "%s", argv[0]);
}

struct copy {
	int to, depth, error;
};

static int copy_any(int from_dir, const char *from, int to_dir, const char *to, int depth);

static int copy_bytes(int from, int to)
{
	static uint8_t chunk[COPY_CHUNK];
	ssize_t n;

	while ((n = read(from, chunk, sizeof chunk)) > 0) {
		int error = write_all(to, chunk, (size_t)n);
		if (error != 0)
			return -error;
	}
	return n < 0 ? errno : 0;
}

static int keep_metadata(int fd, const struct stat *st)
{
	const struct timespec times[2] = {st->st_atim, st->st_mtim};

	/* Another user's file becomes the asking user's own, as with any copy. */
	if (fchown(fd, st->st_uid, st->st_gid) != 0 && errno != EPERM && errno != EINVAL)
		return errno;
	return fchmod(fd, st->st_mode & 07777) == 0 && futimens(fd, times) == 0 ? 0 : errno;
}

static int copy_file(int from_dir, const char *from, int to_dir, const char *to, const struct stat *st)
{
	CLEANUP_FD int in = openat(from_dir, from, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
	CLEANUP_FD int out = -1;
	int error;

	if (in < 0)
		return errno;
	out = openat(to_dir, to, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
	if (out < 0)
		return errno;
	error = copy_bytes(in, out);
	return error ? error : keep_metadata(out, st);
}

static int copy_link(int from_dir, const char *from, int to_dir, const char *to)
{
	char target[PATH_BYTES];
	ssize_t n = readlinkat(from_dir, from, target, sizeof target);

	if (n < 0 || n == sizeof target)
		return n < 0 ? errno : ENAMETOOLONG;
	target[n] = 0;
	return symlinkat(target, to_dir, to) == 0 ? 0 : errno;
}

static void copy_one(int dir, const char *name, unsigned char type, void *context)
{
	struct copy *copy = context;

	(void)type;
	if (copy->error == 0)
		copy->error = copy_any(dir, name, copy->to, name, copy->depth + 1);
}

static int copy_directory(int from_dir, const char *from, int to_dir, const char *to, const struct stat *st, int depth)
{
	struct copy copy = {.depth = depth};
	CLEANUP_FD int in = -1, out = -1;
	int error;

	if (depth > DEPTH_MAX / 2)	/* two descriptors a level */
		return ELOOP;
	in = open_dir(from_dir, from);
	if (in < 0 || mkdirat(to_dir, to, 0700) != 0)
		return errno;
	out = open_dir(to_dir, to);
	if (out < 0)
		return errno;
	copy.to = out;
	error = -each_entry(in, copy_one, &copy);
	if (error == 0)
		error = copy.error;
	return error ? error : keep_metadata(out, st);
}

static int copy_any(int from_dir, const char *from, int to_dir, const char *to, int depth)
{
	struct stat st;

	if (fstatat(from_dir, from, &st, AT_SYMLINK_NOFOLLOW) != 0)
		return errno;
	switch (st.st_mode & S_IFMT) {
	case S_IFREG: return copy_file(from_dir, from, to_dir, to, &st);
	case S_IFDIR: return copy_directory(from_dir, from, to_dir, to, &st, depth);
	case S_IFLNK: return copy_link(from_dir, from, to_dir, to);
	case S_IFIFO: return mkfifoat(to_dir, to, st.st_mode & 0777) == 0 ? 0 : errno;
	default: return ENOTSUP;
	}
}

/* Between file systems, and for a lower layer's directory on overlayfs, rename can't: copy beside the goal, rename that
 * over it, then remove the source. */
static int move_by_copy(const char *from, const char *to)
{
	char parent[PATH_BYTES], base[NAME_BYTES], temporary[NAME_BYTES];
	int error = split_path(to, parent, base);
	uint64_t random;

	if (error != 0)
		return error;
	if (getrandom(&random, sizeof random, 0) != sizeof random)
		return errno;
	snprintf(temporary, sizeof temporary, ".%.200s.barchan-%016llx", base, (unsigned long long)random);
	CLEANUP_FD int dir = open(parent, O_PATH | O_DIRECTORY | O_CLOEXEC);
	if (dir < 0)
		return errno;
	error = copy_any(AT_FDCWD, from, dir, temporary, 0);
	if (error == 0 && renameat(dir, temporary, dir, base) != 0)
		error = errno;
	if (error != 0) {
		remove_any(dir, temporary);
		return error;
	}
	return remove_any(AT_FDCWD, from);
}

void op_move(char **argv)
{
	int error = rename(argv[0], argv[1]) == 0 ? 0 : errno;

	if (error == EXDEV)
		error = move_by_copy(argv[0], argv[1]);
	if (error != 0)
		applet_fail(error, "%s to %s", argv[0], argv[1]);
}
