/* A directory tree as the input: the image is written as the tree is walked, so that memory holds only the names of the directories
 * on the way down and the inodes that have several names. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "pack.h"

#define SPARE_FILES 64u

static uint64_t pack_directory(int fd, const struct stat *stat, uint64_t parent_at, unsigned depth);

static struct inode inode_of(const struct stat *stat)
{
	return (struct inode){
		.mode = stat->st_mode,
		.uid = stat->st_uid,
		.gid = stat->st_gid,
		.mtime = stat->st_mtim,
		.size = (uint64_t)stat->st_size,
		.links = 1,
	};
}

static uint64_t seek(int fd, uint64_t at, int whence, uint64_t end)
{
	off_t found = lseek(fd, (off_t)at, whence);

	if (found < 0 && errno != ENXIO) /* nothing but a hole from here on */
		fail_errno("looking for data");
	return found < 0 || (uint64_t)found > end ? end : (uint64_t)found;
}

static void read_data(int fd, uint64_t from, uint64_t end)
{
	while (from < end) {
		size_t room;
		uint8_t *at = data_room(&room);
		ssize_t length = pread(fd, at, end - from < room ? (size_t)(end - from) : room, (off_t)from);
		if (length < 0 && errno == EINTR)
			continue;
		if (length < 0)
			fail_errno("reading a file");
		if (length == 0)
			fail(BLAME_INPUT, "it became shorter while it was read");
		data_filled((size_t)length);
		from += (uint64_t)length;
	}
}

/* Holes need not be read; their edges may lie anywhere, so what is read begins and ends at blocks. */
static uint64_t pack_file(int fd, const struct stat *stat)
{
	struct inode inode = inode_of(stat);
	struct xattrs xattrs = xattrs_of_file(fd);
	uint64_t hole = 0;

	data_begin(inode.size);
	while (hole < inode.size) {
		uint64_t data = seek(fd, hole, SEEK_DATA, inode.size);
		if (data == inode.size)
			break;
		data &= ~(uint64_t)(BLOCK_BYTES - 1);
		if (data > hole)
			data_skip_to(data);
		else
			data = hole;
		hole = (seek(fd, data, SEEK_HOLE, inode.size) + BLOCK_BYTES - 1) & ~(uint64_t)(BLOCK_BYTES - 1);
		if (hole <= data)
			hole = data + BLOCK_BYTES;
		if (hole > inode.size)
			hole = inode.size;
		read_data(fd, data, hole);
	}
	struct data data = data_end();
	inode.xattrs = xattrs.body;
	inode.xattr_bytes = xattrs.bytes;
	return put_file(&inode, &data);
}

static uint64_t pack_link(int dir_fd, const char *name, const struct stat *stat)
{
	char target[PATH_MAX];
	struct inode inode = inode_of(stat);
	ssize_t length = readlinkat(dir_fd, name, target, sizeof(target) - 1);

	if (length < 0)
		fail_errno("reading a symbolic link");
	target[length] = 0;
	return put_symlink(&inode, target);
}

/* No guest can make a device other than 0:0. */
static uint64_t pack_special(const struct stat *stat)
{
	struct inode inode = inode_of(stat);

	if (S_ISBLK(stat->st_mode) || (S_ISCHR(stat->st_mode) && stat->st_rdev != 0))
		fail(BLAME_INPUT, "a device %u:%u", major(stat->st_rdev), minor(stat->st_rdev));
	inode.size = 0;
	return put_special(&inode);
}

static uint64_t pack_first_name(int dir_fd, const char *name, const struct stat *stat, uint64_t parent_at, unsigned depth)
{
	if (S_ISLNK(stat->st_mode))
		return pack_link(dir_fd, name, stat);
	if (!S_ISREG(stat->st_mode) && !S_ISDIR(stat->st_mode))
		return pack_special(stat);
	int fd = openat(dir_fd, name, O_RDONLY | O_NOFOLLOW | O_CLOEXEC | (S_ISDIR(stat->st_mode) ? O_DIRECTORY : 0));
	if (fd < 0)
		fail_errno("opening a file");
	uint64_t at = S_ISDIR(stat->st_mode) ? pack_directory(fd, stat, parent_at, depth + 1) : pack_file(fd, stat);
	close(fd);
	return at;
}

/* Names that are gone may share one device file in the layer; each gets its own here. */
static void pack_entry(int dir_fd, struct entry *entry, uint64_t parent_at, unsigned depth)
{
	struct stat stat;
	uint64_t at, *known;

	where_enter(entry->name);
	if (fstatat(dir_fd, entry->name, &stat, AT_SYMLINK_NOFOLLOW) < 0)
		fail_errno("looking at a file");
	entry->type = type_of(stat.st_mode);
	if (stat.st_nlink < 2 || S_ISDIR(stat.st_mode) || S_ISCHR(stat.st_mode)) {
		at = pack_first_name(dir_fd, entry->name, &stat, parent_at, depth);
	} else {
		known = links_find(&stat);
		if (*known)
			links_again(&stat);
		else
			*known = pack_first_name(dir_fd, entry->name, &stat, parent_at, depth);
		at = *known;
	}
	entry->number = at / SLOT_BYTES;
	where_leave(entry->name);
}

/* All names, `.` and `..` among them. */
static void read_names(int fd, struct directory *directory)
{
	int copy_fd = openat(fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	DIR *stream = copy_fd < 0 ? NULL : fdopendir(copy_fd);
	struct dirent *found;

	if (!stream)
		fail_errno("opening a directory");
	while (errno = 0, (found = readdir(stream))) {
		char *name = strdup(found->d_name);
		if (!name)
			fail_errno("a directory");
		directory_add(directory, name);
		if (!is_dots(name))
			count_entry();
	}
	if (errno)
		fail_errno("reading a directory");
	closedir(stream);
}

static uint64_t pack_directory(int fd, const struct stat *stat, uint64_t parent_at, unsigned depth)
{
	struct directory directory = {0};
	struct inode inode = inode_of(stat);

	check_depth(depth);
	read_names(fd, &directory);
	struct xattrs xattrs = xattrs_of_file(fd);
	inode.xattrs = xattrs.body;
	inode.xattr_bytes = xattrs.bytes;
	directory_place(&directory, &inode);
	for (size_t i = 0; i < directory.count; i++)
		if (!is_dots(directory.entries[i].name))
			pack_entry(fd, &directory.entries[i], inode.at, depth);
	directory_put(&directory, &inode, parent_at ? parent_at : inode.at);
	for (size_t i = 0; i < directory.count; i++)
		free(directory.entries[i].name);
	free(directory.entries);
	return inode.at;
}

/* Every directory on the way down stays open. */
static void raise_limits(void)
{
	struct rlimit files = {options.depth_max + SPARE_FILES, options.depth_max + SPARE_FILES}, had;

	if (getrlimit(RLIMIT_NOFILE, &had) < 0 || (had.rlim_cur < files.rlim_cur && setrlimit(RLIMIT_NOFILE, &files) < 0))
		fail_errno("raising the limit of open files");
}

uint64_t pack_tree(const char *path)
{
	struct stat stat;
	int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);

	if (fd < 0 || fstat(fd, &stat) < 0)
		fail_errno(path);
	raise_limits();
	return pack_directory(fd, &stat, 0, 1);
}
