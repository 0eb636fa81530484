/* The image: space is handed out front to back, metadata and data as they come. An inode's number is its offset in slots of 32 bytes,
 * so it may lie anywhere. */
#define _GNU_SOURCE
#include <endian.h>
#include <errno.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "pack.h"

#define SUPER_AT 1024u
#define SUPER_BYTES 128u
#define MAGIC 0xE0F5E1E2u
#define COMPAT_MTIME 0x2u
#define INCOMPAT_CHUNKED_FILE 0x4u
#define BYTES_MAX (UINT64_C(0xfffffffe) << BLOCK_BITS) /* as block numbers reach, and none is the word for a hole */
#define COPY_BYTES (256u << 10)

static int image_fd;
static uint64_t bytes_limit, next_block, inode_count;
static uint64_t meta_at, meta_end; /* what is left of the block that metadata was last written to */

void put16(uint8_t *at, uint16_t value)
{
	value = htole16(value);
	memcpy(at, &value, sizeof(value));
}

void put32(uint8_t *at, uint32_t value)
{
	value = htole32(value);
	memcpy(at, &value, sizeof(value));
}

void put64(uint8_t *at, uint64_t value)
{
	value = htole64(value);
	memcpy(at, &value, sizeof(value));
}

void image_open(int fd, uint64_t bytes_max)
{
	image_fd = fd;
	bytes_limit = bytes_max < BYTES_MAX ? bytes_max : BYTES_MAX;
	next_block = 1;
	meta_at = SUPER_AT + SUPER_BYTES;
	meta_end = BLOCK_BYTES;
}

uint32_t image_take_blocks(uint64_t bytes)
{
	uint64_t first = next_block, blocks = (bytes >> BLOCK_BITS) + ((bytes & (BLOCK_BYTES - 1)) != 0);

	if (blocks > (bytes_limit >> BLOCK_BITS) || first + blocks > (bytes_limit >> BLOCK_BITS))
		fail(BLAME_TREE, "more than %llu bytes, with the empty parts of sparse files", (unsigned long long)bytes_limit);
	next_block = first + blocks;
	return (uint32_t)first;
}

/* Room for an inode and what follows it. Within one block where it fits one: the tail of a file must not cross. */
uint64_t image_take_meta(uint64_t bytes)
{
	uint64_t at = (meta_at + SLOT_BYTES - 1) / SLOT_BYTES * SLOT_BYTES;

	if (at + bytes > meta_end) {
		at = (uint64_t)image_take_blocks(bytes) << BLOCK_BITS;
		meta_end = next_block << BLOCK_BITS;
	}
	meta_at = at + bytes;
	return at;
}

void image_write(const void *data, size_t bytes, uint64_t at)
{
	for (size_t done = 0; done < bytes;) {
		ssize_t written = pwrite(image_fd, (const char *)data + done, bytes - done, (off_t)(at + done));
		if (written < 0 && errno != EINTR)
			fail_errno("writing the image");
		if (written > 0)
			done += (size_t)written;
	}
}

void image_copy(int fd, uint64_t from, uint64_t bytes, uint64_t at)
{
	static char buffer[COPY_BYTES];

	for (uint64_t done = 0; done < bytes;) {
		size_t wanted = bytes - done < COPY_BYTES ? (size_t)(bytes - done) : COPY_BYTES;
		ssize_t length = pread(fd, buffer, wanted, (off_t)(from + done));
		if (length < 0 && errno == EINTR)
			continue;
		if (length <= 0)
			fail_errno("reading a file");
		image_write(buffer, (size_t)length, at + done);
		done += (uint64_t)length;
	}
}

void image_put_inode(const struct inode *inode)
{
	uint8_t record[INODE_BYTES] = {0};

	put16(record, (uint16_t)(1u | (unsigned)inode->layout << 1)); /* of the extended kind */
	put16(record + 2, inode->xattr_bytes ? (uint16_t)((inode->xattr_bytes - 12) / 4 + 1) : 0);
	put16(record + 4, (uint16_t)inode->stat->st_mode);
	put64(record + 8, inode->size);
	put32(record + 16, inode->value);
	put32(record + 20, (uint32_t)++inode_count);
	put32(record + 24, inode->stat->st_uid);
	put32(record + 28, inode->stat->st_gid);
	put64(record + 32, (uint64_t)inode->stat->st_mtim.tv_sec);
	put32(record + 40, (uint32_t)inode->stat->st_mtim.tv_nsec);
	put32(record + 44, inode->links);
	image_write(record, sizeof(record), inode->at);
}

void image_put_links(uint64_t inode_at, uint32_t links)
{
	uint8_t record[4];

	put32(record, links);
	image_write(record, sizeof(record), inode_at + 44);
}

/* The superblock. The random identity keeps two images of equal trees apart: an overlay refuses one file system twice, and a
 * guest could make what it writes equal to an older layer of its own. */
void image_close(uint64_t root_at)
{
	uint8_t record[SUPER_BYTES] = {0};

	put32(record, MAGIC);
	put32(record + 8, COMPAT_MTIME);
	record[12] = BLOCK_BITS;
	put16(record + 14, (uint16_t)(root_at / SLOT_BYTES)); /* the first inode: its number is small */
	put64(record + 16, inode_count);
	put32(record + 36, (uint32_t)next_block);
	if (getrandom(record + 48, 16, 0) != 16)
		fail_errno("getrandom");
	put32(record + 80, INCOMPAT_CHUNKED_FILE);
	image_write(record, sizeof(record), SUPER_AT);
	if (ftruncate(image_fd, (off_t)(next_block << BLOCK_BITS)) < 0)
		fail_errno("writing the image");
}
