/* The operations on one file or directory. */
#define _GNU_SOURCE
#include "applet.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/random.h>

static char type_letter(mode_t mode)
{
	switch (mode & S_IFMT) {
	case S_IFREG: return 'f';
	case S_IFDIR: return 'd';
	case S_IFLNK: return 'l';
	case S_IFCHR: return 'c';
	case S_IFBLK: return 'b';
	case S_IFIFO: return 'p';
	default: return 's';
	}
}

static void out_entry(int dir, const char *path, const char *name, const struct stat *st)
{
	char target[PATH_BYTES];
	uint8_t fixed[1 + 4 + 4 + 4 + 8 + 8 + 4], *at = fixed;
	ssize_t target_len = S_ISLNK(st->st_mode) ? readlinkat(dir, path, target, sizeof target) : 0;
	uint32_t name_len = (uint32_t)strlen(name);

	if (target_len < 0)
		target_len = 0;	/* replaced since the stat */
	at = put_u8(at, (uint8_t)type_letter(st->st_mode));
	at = put_u32(at, st->st_mode & 07777);
	at = put_u32(at, st->st_uid);
	at = put_u32(at, st->st_gid);
	at = put_u64(at, (uint64_t)st->st_size);
	at = put_u64(at, (uint64_t)(st->st_mtim.tv_sec * 1000000000 + st->st_mtim.tv_nsec));
	put_u32(at, name_len);
	out_bytes(fixed, sizeof fixed);
	out_bytes(name, name_len);
	put_u32(fixed, (uint32_t)target_len);
	out_bytes(fixed, 4);
	out_bytes(target, (size_t)target_len);
}

void op_stat(char **argv)
{
	struct stat st;

	if (fstatat(AT_FDCWD, argv[0], &st, AT_SYMLINK_NOFOLLOW) != 0)
		applet_fail(errno, "%s", argv[0]);
	out_entry(AT_FDCWD, argv[0], argv[0], &st);
}

static void list_one(int dir, const char *name, unsigned char type, void *context)
{
	struct stat st;

	(void)type;
	(void)context;
	if (fstatat(dir, name, &st, AT_SYMLINK_NOFOLLOW) == 0)
		out_entry(dir, name, name, &st);
	else if (errno != ENOENT)
		applet_fail(errno, "%s", name);
}

void op_list(char **argv)
{
	int dir = open(argv[0], O_RDONLY | O_DIRECTORY | O_NONBLOCK | O_CLOEXEC);
	int error = dir < 0 ? -errno : each_entry(dir, list_one, NULL);

	if (error != 0)
		applet_fail(-error, "%s", argv[0]);
}

void op_read(char **argv)
{
	uint64_t offset = parse_number(argv[1], 10);
	uint64_t left = strcmp(argv[2], "-1") == 0 ? UINT64_MAX : parse_number(argv[2], 10);
	static uint8_t chunk[COPY_CHUNK];
	struct stat st;
	int fd = open(argv[0], O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);

	if (fd < 0 || fstat(fd, &st) != 0)
		applet_fail(errno, "%s", argv[0]);
	if (!S_ISREG(st.st_mode))
		applet_fail(S_ISDIR(st.st_mode) ? EISDIR : EINVAL, "%s is not a regular file", argv[0]);
	if (offset > INT64_MAX || lseek(fd, (off_t)offset, SEEK_SET) < 0)
		applet_fail(EINVAL, "offset %s", argv[1]);
	while (left > 0) {
		ssize_t n = read(fd, chunk, (size_t)min_u64(left, sizeof chunk));
		if (n < 0)
			applet_fail(errno, "%s", argv[0]);
		if (n == 0)
			break;
		out_bytes(chunk, (size_t)n);
		left -= (uint64_t)n;
	}
}

/* Make every missing directory on the way, as `mkdir -p` does. */
void make_directories(const char *path)
{
	char prefix[PATH_BYTES];

	if (strlen(path) >= sizeof prefix)
		applet_fail(ENAMETOOLONG, "%.64s...", path);
	for (size_t i = 0; path[i] != 0; i++) {
		prefix[i] = path[i];
		if (path[i] == '/' || (path[i + 1] != '/' && path[i + 1] != 0))
			continue;
		prefix[i + 1] = 0;
		if (mkdir(prefix, 0755) != 0 && errno != EEXIST)
			applet_fail(errno, "%s", prefix);
	}
}

void op_write(char **argv)
{
	char parent[PATH_BYTES], base[NAME_BYTES], temporary[NAME_BYTES];
	static uint8_t chunk[COPY_CHUNK];
	mode_t mode = (mode_t)parse_number(argv[1], 8) & 07777;
	int error = split_path(argv[0], parent, base), dir, fd;
	uint64_t random;
	ssize_t n;

	if (error != 0)
		applet_fail(error, "%s", argv[0]);
	if (strcmp(argv[2], "1") == 0)
		make_directories(parent);
	dir = open(parent, O_PATH | O_DIRECTORY | O_CLOEXEC);
	if (dir < 0)
		applet_fail(errno, "%s", parent);
	if (getrandom(&random, sizeof random, 0) != sizeof random)
		applet_fail(errno, "random");
	snprintf(temporary, sizeof temporary, ".%.200s.barchan-%016llx", base, (unsigned long long)random);
	fd = openat(dir, temporary, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
	if (fd < 0)
		applet_fail(errno, "%s", argv[0]);
	while (error == 0 && (n = read(0, chunk, sizeof chunk)) != 0)
		error = n < 0 ? -errno : write_all(fd, chunk, (size_t)n);
	if (error == 0 && (fchmod(fd, mode) != 0 || renameat(dir, temporary, dir, base) != 0))
		error = -errno;
	if (error != 0) {
		unlinkat(dir, temporary, 0);
		applet_fail(-error, "%s", argv[0]);
	}
}

void op_mkdir(char **argv)
{
	char parent[PATH_BYTES], base[NAME_BYTES];
	mode_t mode = (mode_t)parse_number(argv[1], 8) & 07777;
	bool parents = strcmp(argv[2], "1") == 0;
	int error = split_path(argv[0], parent, base);
	struct stat st;

	if (parents && stat(argv[0], &st) == 0 && S_ISDIR(st.st_mode))
		return;
	if (error != 0)
		applet_fail(error == EBUSY ? EEXIST : error, "%s", argv[0]);
	if (parents)
		make_directories(parent);
	/* The mode is set apart: mkdir's would be cut by the umask. */
	if (mkdir(argv[0], 0700) != 0 || chmod(argv[0], mode) != 0)
		applet_fail(errno, "%s", argv[0]);
}
