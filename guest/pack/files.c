/* Files, symbolic links, and what has no content. */
#define _GNU_SOURCE
#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "pack.h"

#define CHUNKS_WANTED (1u << 16)
#define CHUNK_BITS_MAX (BLOCK_BITS + 31u)
#define HOLE UINT32_MAX

static uint64_t least(uint64_t left, uint64_t right)
{
	return left < right ? left : right;
}

static uint64_t seek(int fd, uint64_t at, int whence, uint64_t end)
{
	off_t found = lseek(fd, (off_t)at, whence);

	if (found < 0 && errno != ENXIO) /* nothing but a hole from here on */
		fail_errno("looking for data");
	return found < 0 ? end : least((uint64_t)found, end);
}

/* Only the parts with data are written: holes of the file become holes of the image. */
static void copy_data(int fd, uint64_t from, uint64_t end, uint64_t at)
{
	for (uint64_t data = seek(fd, from, SEEK_DATA, end); data < end; data = seek(fd, data, SEEK_DATA, end)) {
		uint64_t hole = seek(fd, data, SEEK_HOLE, end);
		image_copy(fd, data, hole - data, at + (data - from));
		data = hole;
	}
}

/* A table of blocks, one for each piece of a size that keeps the table short; a piece without data takes no room. */
static void pack_sparse(int fd, struct inode *inode, const uint8_t *xattrs)
{
	unsigned bits = BLOCK_BITS;

	while (bits < CHUNK_BITS_MAX && inode->size >> bits >= CHUNKS_WANTED)
		bits++;
	uint64_t chunk = UINT64_C(1) << bits, count = (inode->size >> bits) + ((inode->size & (chunk - 1)) != 0);
	uint8_t *table = malloc(count * 4);
	if (!table)
		fail_errno("a sparse file");
	for (uint64_t i = 0; i < count; i++)
		put32(table + 4 * i, HOLE);
	for (uint64_t data = seek(fd, 0, SEEK_DATA, inode->size); data < inode->size;) {
		uint64_t from = data & ~(chunk - 1), end = inode->size - from < chunk ? inode->size : from + chunk;
		uint32_t block = image_take_blocks(end - from);
		copy_data(fd, from, end, (uint64_t)block << BLOCK_BITS);
		put32(table + 4 * (from >> bits), block);
		data = end < inode->size ? seek(fd, end, SEEK_DATA, inode->size) : end;
	}
	inode->layout = LAYOUT_CHUNKS;
	inode->value = bits - BLOCK_BITS;
	inode->at = image_take_meta(INODE_BYTES + inode->xattr_bytes + count * 4);
	image_put_inode(inode);
	image_write(xattrs, inode->xattr_bytes, inode->at + INODE_BYTES);
	image_write(table, count * 4, inode->at + INODE_BYTES + inode->xattr_bytes);
	free(table);
}

uint64_t pack_file(int fd, const struct stat *stat)
{
	struct inode inode = {.stat = stat, .size = (uint64_t)stat->st_size, .links = 1};
	const uint8_t *xattrs = xattrs_read(fd, &inode.xattr_bytes);
	uint64_t head = INODE_BYTES + inode.xattr_bytes, tail = inode.size % BLOCK_BYTES, whole = inode.size - tail;

	if (inode.size > BLOCK_BYTES && seek(fd, 0, SEEK_HOLE, inode.size) < inode.size) {
		pack_sparse(fd, &inode, xattrs);
		return inode.at;
	}
	if (tail && head + tail <= BLOCK_BYTES)
		inode.layout = LAYOUT_INLINE;
	else
		whole = inode.size, tail = 0;
	if (whole) {
		inode.value = image_take_blocks(whole);
		image_copy(fd, 0, whole, (uint64_t)inode.value << BLOCK_BITS);
	}
	inode.at = image_take_meta(head + tail);
	image_put_inode(&inode);
	image_write(xattrs, inode.xattr_bytes, inode.at + INODE_BYTES);
	image_copy(fd, whole, tail, inode.at + head);
	return inode.at;
}

uint64_t pack_link(int dir_fd, const char *name, const struct stat *stat)
{
	char target[PATH_MAX];
	ssize_t length = readlinkat(dir_fd, name, target, sizeof(target));
	struct inode inode = {.stat = stat, .size = (uint64_t)length, .links = 1};

	if (length < 0)
		fail_errno("reading a symbolic link");
	bool fits = INODE_BYTES + inode.size <= BLOCK_BYTES;
	inode.layout = fits ? LAYOUT_INLINE : LAYOUT_PLAIN;
	if (!fits)
		inode.value = image_take_blocks(inode.size);
	inode.at = image_take_meta(INODE_BYTES + (fits ? inode.size : 0));
	image_put_inode(&inode);
	image_write(target, inode.size, fits ? inode.at + INODE_BYTES : (uint64_t)inode.value << BLOCK_BITS);
	return inode.at;
}

/* Pipes, sockets, and the device 0:0 by which an overlay says that a name is gone. No guest can make another device. */
uint64_t pack_special(const struct stat *stat)
{
	struct inode inode = {.stat = stat, .links = 1};

	if (S_ISBLK(stat->st_mode) || (S_ISCHR(stat->st_mode) && stat->st_rdev != 0))
		fail(BLAME_TREE, "a device %u:%u", major(stat->st_rdev), minor(stat->st_rdev));
	inode.at = image_take_meta(INODE_BYTES);
	image_put_inode(&inode);
	return inode.at;
}
