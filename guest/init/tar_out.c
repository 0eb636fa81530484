/* A directory's content, or one file, as a pax tar on stdout. Hard links are written as files of their own; sockets,
 * pipes and devices are left out. */
#define _GNU_SOURCE
#include "applet.h"
#include "tar_member.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>

static int depth;

static void out_any(int dir, const char *name, unsigned char type, void *context);

static void out_directory(int dir, const char *name, const struct stat *st)
{
	CLEANUP_FD int fd = open_dir(dir, name);
	int error;

	if (fd < 0)
		applet_fail(errno, "%s", member_name());
	member_fail_too_deep(++depth);
	member_push("/");
	member_header(st, '5', 0, "", NULL);
	error = each_entry(fd, out_any, NULL);
	if (error != 0)
		applet_fail(-error, "%s", member_name());
	depth--;
}

static void out_regular(int dir, const char *name)
{
	CLEANUP_FD int fd = openat(dir, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
	struct stat st;

	if (fd < 0 || fstat(fd, &st) != 0)
		applet_fail(errno, "%s", member_name());
	if (S_ISREG(st.st_mode))
		member_file(fd, &st, NULL);
}

static void out_any(int dir, const char *name, unsigned char type, void *context)
{
	size_t before = member_push(name);
	struct stat st;

	(void)type;
	(void)context;
	if (fstatat(dir, name, &st, AT_SYMLINK_NOFOLLOW) != 0) {
		if (errno != ENOENT)
			applet_fail(errno, "%s", member_name());
	} else if (S_ISDIR(st.st_mode)) {
		out_directory(dir, name, &st);
	} else if (S_ISLNK(st.st_mode)) {
		member_link(dir, name, &st, NULL);
	} else if (S_ISREG(st.st_mode)) {
		out_regular(dir, name);
	}
	member_cut(before);
}

static void out_single(const char *path)
{
	char parent[PATH_BYTES], base[NAME_BYTES];
	int fd = open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC), error = split_path(path, parent, base);
	struct stat st;

	if (error != 0 || fd < 0 || fstat(fd, &st) != 0)
		applet_fail(error ? error : errno, "%s", path);
	if (!S_ISREG(st.st_mode))
		applet_fail(EINVAL, "%s is neither a directory nor a regular file", path);
	member_push(base);
	member_file(fd, &st, NULL);
}

void op_tar_out(char **argv)
{
	int dir = open(argv[0], O_RDONLY | O_DIRECTORY | O_NONBLOCK | O_CLOEXEC);
	int error = dir < 0 ? -errno : each_entry(dir, out_any, NULL);

	if (error == -ENOTDIR)
		out_single(argv[0]);
	else if (error != 0)
		applet_fail(-error, "%s", argv[0]);
	tar_end();
}
