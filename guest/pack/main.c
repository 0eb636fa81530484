/* barchan-pack: options, the walk through the directories, the end. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

#include "pack.h"

#define DEPTH_MAX 2048u /* as deep as one path can name */
#define SPARE_FILES 64u
#define DIRENT_BYTES 12u

struct entry {
	uint64_t number; /* of the inode: what the directory says about it */
	char *name;
	uint8_t name_bytes, type;
};

struct directory {
	struct entry *entries;
	size_t count;
	uint64_t bytes;	 /* of its blocks, the last one up to its last name */
	size_t last;	 /* first entry of the last block */
};

void fail(enum blame blame, const char *format, ...)
{
	va_list arguments;

	va_start(arguments, format);
	vfprintf(stderr, format, arguments);
	va_end(arguments);
	fputc('\n', stderr);
	_exit((int)blame);
}

void fail_errno(const char *what)
{
	bool is_room = errno == ENOSPC || errno == EDQUOT;

	fail(is_room ? BLAME_ROOM : BLAME_HOST, "%s: %s", what, strerror(errno));
}

static uint8_t type_of(mode_t mode)
{
	static const struct {
		mode_t mode;
		uint8_t type;
	} types[] = {{S_IFREG, 1}, {S_IFDIR, 2}, {S_IFCHR, 3}, {S_IFBLK, 4}, {S_IFIFO, 5}, {S_IFSOCK, 6}, {S_IFLNK, 7}};

	for (size_t i = 0; i < sizeof(types) / sizeof(types[0]); i++)
		if (types[i].mode == (mode & S_IFMT))
			return types[i].type;
	fail(BLAME_HOST, "a file of unknown type");
}

static int compare(const void *left, const void *right)
{
	return strcmp(((const struct entry *)left)->name, ((const struct entry *)right)->name);
}

/* All names, `.` and `..` among them, in the order that lookups need. */
static void read_names(int fd, struct directory *directory)
{
	int copy_fd = openat(fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	DIR *stream = copy_fd < 0 ? NULL : fdopendir(copy_fd);
	size_t size = 0;
	struct dirent *found;

	if (!stream)
		fail_errno("opening a directory");
	while (errno = 0, (found = readdir(stream))) {
		if (directory->count == size) {
			size = size ? 2 * size : 16;
			directory->entries = realloc(directory->entries, size * sizeof(*directory->entries));
			if (!directory->entries)
				fail_errno("a directory");
		}
		struct entry *entry = &directory->entries[directory->count++];
		*entry = (struct entry){.name = strdup(found->d_name), .name_bytes = (uint8_t)strlen(found->d_name)};
		if (!entry->name)
			fail_errno("a directory");
	}
	if (errno)
		fail_errno("reading a directory");
	closedir(stream);
	qsort(directory->entries, directory->count, sizeof(*directory->entries), compare);
}

/* A block holds records and then their names; where the next one starts follows from the names alone. */
static void lay_out(struct directory *directory)
{
	uint64_t used = 0;

	for (size_t i = 0; i < directory->count; i++) {
		uint64_t wanted = DIRENT_BYTES + directory->entries[i].name_bytes;
		if (used + wanted > BLOCK_BYTES) {
			directory->bytes += BLOCK_BYTES;
			directory->last = i;
			used = 0;
		}
		used += wanted;
	}
	directory->bytes += used;
}

static size_t fill_block(const struct directory *directory, size_t first, uint8_t block[BLOCK_BYTES], size_t *next)
{
	size_t used = 0, count = 0;

	memset(block, 0, BLOCK_BYTES);
	while (first + count < directory->count && used + DIRENT_BYTES + directory->entries[first + count].name_bytes <= BLOCK_BYTES)
		used += DIRENT_BYTES + directory->entries[first + count++].name_bytes;
	size_t name_at = count * DIRENT_BYTES;
	for (size_t i = 0; i < count; i++) {
		const struct entry *entry = &directory->entries[first + i];
		put64(block + i * DIRENT_BYTES, entry->number);
		put16(block + i * DIRENT_BYTES + 8, (uint16_t)name_at);
		block[i * DIRENT_BYTES + 10] = entry->type;
		memcpy(block + name_at, entry->name, entry->name_bytes);
		name_at += entry->name_bytes;
	}
	*next = first + count;
	return used;
}

static uint64_t pack_directory(int fd, const struct stat *stat, uint64_t parent_at, unsigned depth);

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
static uint64_t pack_entry(int dir_fd, struct entry *entry, uint64_t parent_at, unsigned depth)
{
	struct stat stat;

	if (fstatat(dir_fd, entry->name, &stat, AT_SYMLINK_NOFOLLOW) < 0)
		fail_errno("looking at a file");
	entry->type = type_of(stat.st_mode);
	if (stat.st_nlink < 2 || S_ISDIR(stat.st_mode) || S_ISCHR(stat.st_mode))
		return pack_first_name(dir_fd, entry->name, &stat, parent_at, depth);
	uint64_t *at = links_find(&stat);
	if (*at)
		links_again(&stat);
	else
		*at = pack_first_name(dir_fd, entry->name, &stat, parent_at, depth);
	return *at;
}

/* The inode's place is taken first, since what is in the directory names it as its parent. One link: as btrfs has it, and as programs
 * know that nothing follows from it. */
static uint64_t pack_directory(int fd, const struct stat *stat, uint64_t parent_at, unsigned depth)
{
	struct directory directory = {0};
	struct inode inode = {.stat = stat, .links = 1};
	static uint8_t block[BLOCK_BYTES]; /* used when all below is done */

	if (depth > DEPTH_MAX)
		fail(BLAME_TREE, "directories more than %u deep", DEPTH_MAX);
	read_names(fd, &directory);
	lay_out(&directory);
	const uint8_t *xattrs = xattrs_read(fd, &inode.xattr_bytes);
	uint64_t head = INODE_BYTES + inode.xattr_bytes, tail = directory.bytes % BLOCK_BYTES;
	inode.size = directory.bytes;
	inode.layout = tail && head + tail <= BLOCK_BYTES ? LAYOUT_INLINE : LAYOUT_PLAIN;
	uint64_t inlined = inode.layout == LAYOUT_INLINE ? tail : 0;
	inode.at = image_take_meta(head + inlined);
	if (inode.size > inlined)
		inode.value = image_take_blocks(inode.size - inlined);
	image_put_inode(&inode);
	image_write(xattrs, inode.xattr_bytes, inode.at + INODE_BYTES);
	for (size_t i = 0; i < directory.count; i++) {
		struct entry *entry = &directory.entries[i];
		uint64_t at = inode.at;
		if (strcmp(entry->name, ".") == 0)
			entry->type = type_of(S_IFDIR);
		else if (strcmp(entry->name, "..") == 0)
			entry->type = type_of(S_IFDIR), at = parent_at ? parent_at : inode.at;
		else
			at = pack_entry(fd, entry, inode.at, depth);
		entry->number = at / SLOT_BYTES;
	}
	uint64_t at = (uint64_t)inode.value << BLOCK_BITS;
	for (size_t first = 0, next; first < directory.count; first = next, at += BLOCK_BYTES) {
		size_t used = fill_block(&directory, first, block, &next);
		bool is_inline = inlined && first == directory.last;
		image_write(block, is_inline ? used : BLOCK_BYTES, is_inline ? inode.at + head : at);
	}
	for (size_t i = 0; i < directory.count; i++)
		free(directory.entries[i].name);
	free(directory.entries);
	return inode.at;
}

/* Every directory on the way down stays open. */
static void raise_limits(void)
{
	struct rlimit files = {DEPTH_MAX + SPARE_FILES, DEPTH_MAX + SPARE_FILES}, had;

	if (getrlimit(RLIMIT_NOFILE, &had) < 0 || (had.rlim_cur < files.rlim_cur && setrlimit(RLIMIT_NOFILE, &files) < 0))
		fail_errno("raising the limit of open files");
}

int main(int argc, char **argv)
{
	struct stat stat;
	char *end = NULL;

	if (argc != 4 || (errno = 0, strtoull(argv[3], &end, 10)) == 0 || errno || *end) {
		fprintf(stderr, "usage: barchan-pack DIRECTORY IMAGE BYTES_MAX\n");
		return 2;
	}
	/* What started this and removes what it leaves may be killed. */
	if (prctl(PR_SET_PDEATHSIG, SIGKILL) < 0)
		fail_errno("prctl");
	raise_limits();
	int fd = open(argv[1], O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (fd < 0 || fstat(fd, &stat) < 0)
		fail_errno(argv[1]);
	int image_fd = open(argv[2], O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
	if (image_fd < 0)
		fail_errno(argv[2]);
	image_open(image_fd, strtoull(argv[3], NULL, 10));
	image_close(pack_directory(fd, &stat, 0, 1));
	if (close(image_fd) < 0)
		fail_errno("writing the image");
	return 0;
}
