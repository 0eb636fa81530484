/* The image: data and metadata are handed out front to back, each in its own file. An inode's number is its place in the metadata, in
 * slots of 32 bytes, so it is known at once; blocks of metadata are named by their place in the image, which is known at the end. */
#define _GNU_SOURCE
#include <endian.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "pack.h"

#define SUPER_AT 1024u
#define SUPER_BYTES 128u
#define MAGIC 0xE0F5E1E2u
#define COMPAT_MTIME 0x2u
#define INCOMPAT_CHUNKED_FILE 0x4u
#define BLOCKS_MAX 0xfffffffeu /* as block numbers reach, and none is the word for a hole */
#define COPY_BYTES (256u << 10)
#define META_START (2 * SLOT_BYTES) /* no inode has number 0, which some programs take for no file */
#define VALUE_AT 16u
#define LINKS_AT 44u

static int data_fd, meta_fd;
static uint64_t blocks_limit, data_blocks, meta_blocks, inode_count;
static uint64_t meta_at, meta_end; /* what is left of the block that metadata was last written to */
static uint64_t *moving;	   /* inodes whose value is a block of the metadata */
static size_t moving_count, moving_room;
static uint64_t mixed[2] = {UINT64_C(0x6A09E667F3BCC909), UINT64_C(0xBB67AE8584CAA73B)};

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

/* --- The identity --- */

static void mix_word(uint64_t word)
{
	mixed[0] = (mixed[0] ^ word) * UINT64_C(0x9E3779B97F4A7C15);
	mixed[0] = mixed[0] << 29 | mixed[0] >> 35;
	mixed[1] = (mixed[1] + word) * UINT64_C(0xC2B2AE3D27D4EB4F);
	mixed[1] = mixed[1] << 31 | mixed[1] >> 33;
}

/* What is written, and where, goes into the identity. It is no digest: whoever tries finds two images with one identity, and gains
 * nothing, since an overlay then only stops promising that inode numbers last. */
static void mix(const void *data, size_t bytes, uint64_t at)
{
	const uint8_t *from = data;
	uint64_t word;

	mix_word(at);
	mix_word(bytes);
	for (; bytes >= sizeof(word); bytes -= sizeof(word), from += sizeof(word)) {
		memcpy(&word, from, sizeof(word));
		mix_word(le64toh(word));
	}
	word = 0;
	if (bytes) /* of nothing there is no address either */
		memcpy(&word, from, bytes);
	mix_word(le64toh(word));
}

static void put_identity(uint8_t uuid[16])
{
	for (int i = 0; i < 4; i++)
		mix_word(mixed[0] ^ mixed[1] >> 32);
	put64(uuid, mixed[0]);
	put64(uuid + 8, mixed[1]);
	uuid[6] = (uint8_t)((uuid[6] & 0x0f) | 0x80); /* a UUID of version 8: made in a way of one's own */
	uuid[8] = (uint8_t)((uuid[8] & 0x3f) | 0x80);
}

/* --- Space --- */

void image_open(int data, int meta)
{
	data_fd = data;
	meta_fd = meta;
	blocks_limit = options.bytes_max >> BLOCK_BITS < BLOCKS_MAX ? options.bytes_max >> BLOCK_BITS : BLOCKS_MAX;
	data_blocks = 1;
	meta_blocks = 1;
	meta_at = META_START;
	meta_end = BLOCK_BYTES;
}

static uint64_t take(uint64_t bytes, uint64_t *blocks)
{
	uint64_t first = *blocks, wanted = (bytes >> BLOCK_BITS) + ((bytes & (BLOCK_BYTES - 1)) != 0);

	if (wanted > blocks_limit || data_blocks + meta_blocks + wanted > blocks_limit)
		fail(BLAME_INPUT, "more than %llu bytes, with the empty parts of sparse files", (unsigned long long)options.bytes_max);
	*blocks += wanted;
	return first;
}

uint32_t image_take_blocks(uint64_t bytes)
{
	return (uint32_t)take(bytes, &data_blocks);
}

uint32_t image_take_meta_blocks(uint64_t bytes)
{
	return (uint32_t)take(bytes, &meta_blocks);
}

/* Room for an inode and what follows it. Within one block where it fits one: the tail of a directory must not cross. */
uint64_t image_take_meta(uint64_t bytes)
{
	uint64_t at = (meta_at + SLOT_BYTES - 1) / SLOT_BYTES * SLOT_BYTES;

	if (at + bytes > meta_end) {
		at = take(bytes, &meta_blocks) << BLOCK_BITS;
		meta_end = meta_blocks << BLOCK_BITS;
	}
	meta_at = at + bytes;
	return at;
}

/* --- Writing --- */

static void write_at(int fd, const void *data, size_t bytes, uint64_t at)
{
	for (size_t done = 0; done < bytes;) {
		ssize_t written = pwrite(fd, (const char *)data + done, bytes - done, (off_t)(at + done));
		if (written < 0 && errno != EINTR)
			fail_errno("writing the image");
		if (written > 0)
			done += (size_t)written;
	}
}

static void read_meta(void *data, size_t bytes, uint64_t at)
{
	for (size_t done = 0; done < bytes;) {
		ssize_t length = pread(meta_fd, (char *)data + done, bytes - done, (off_t)(at + done));
		if (length < 0 && errno != EINTR)
			fail_errno("reading the metadata");
		if (length == 0) { /* the end of the last block was never written */
			memset((char *)data + done, 0, bytes - done);
			return;
		}
		if (length > 0)
			done += (size_t)length;
	}
}

/* Whole blocks of a file's data, and what its last one holds. Each counts for itself, however many are written at once. */
void image_write_blocks(const void *data, size_t bytes, uint64_t at)
{
	for (size_t done = 0; done < bytes; done += BLOCK_BYTES)
		mix((const char *)data + done, bytes - done < BLOCK_BYTES ? bytes - done : BLOCK_BYTES, at + done);
	write_at(data_fd, data, bytes, at);
}

void image_write_meta(const void *data, size_t bytes, uint64_t at)
{
	mix(data, bytes, at);
	write_at(meta_fd, data, bytes, at);
}

static void move_later(uint64_t inode_at)
{
	if (moving_count == moving_room) {
		moving_room = moving_room ? 2 * moving_room : 64;
		moving = realloc(moving, moving_room * sizeof(*moving));
		if (!moving)
			fail_errno("remembering directories");
	}
	moving[moving_count++] = inode_at;
}

void image_put_inode(const struct inode *inode)
{
	uint8_t record[INODE_BYTES] = {0};

	if (inode->uid > ID_MAX || inode->gid > ID_MAX)
		fail(BLAME_INPUT, "it belongs to %u:%u; ids in a layer are at most %u", inode->uid, inode->gid, ID_MAX);
	put16(record, (uint16_t)(1u | (unsigned)inode->layout << 1)); /* of the extended kind */
	put16(record + 2, inode->xattr_bytes ? (uint16_t)((inode->xattr_bytes - 12) / 4 + 1) : 0);
	put16(record + 4, (uint16_t)inode->mode);
	put64(record + 8, inode->size);
	put32(record + VALUE_AT, inode->value);
	put32(record + 20, (uint32_t)++inode_count);
	put32(record + 24, inode->uid);
	put32(record + 28, inode->gid);
	put64(record + 32, (uint64_t)(options.has_mtime ? options.mtime : inode->mtime.tv_sec));
	put32(record + 40, options.has_mtime ? 0 : (uint32_t)inode->mtime.tv_nsec);
	put32(record + LINKS_AT, inode->links);
	image_write_meta(record, sizeof(record), inode->at);
	image_write_meta(inode->xattrs, inode->xattr_bytes, inode->at + INODE_BYTES);
	if (inode->is_value_in_meta)
		move_later(inode->at);
}

void image_put_links(uint64_t inode_at, uint32_t links)
{
	uint8_t record[4];

	put32(record, links);
	image_write_meta(record, sizeof(record), inode_at + LINKS_AT);
}

/* --- The end --- */

/* Metadata gets its place behind the data, and what names blocks of it is told where that is. */
static void join(void)
{
	static uint8_t buffer[COPY_BYTES];
	uint64_t end = meta_blocks << BLOCK_BITS;
	uint32_t value;

	for (size_t i = 0; i < moving_count; i++) {
		read_meta(&value, sizeof(value), moving[i] + VALUE_AT);
		put32(buffer, le32toh(value) + (uint32_t)data_blocks);
		write_at(meta_fd, buffer, sizeof(value), moving[i] + VALUE_AT);
	}
	for (uint64_t at = 0; at < end; at += COPY_BYTES) {
		size_t bytes = end - at < COPY_BYTES ? (size_t)(end - at) : COPY_BYTES;
		read_meta(buffer, bytes, at);
		write_at(data_fd, buffer, bytes, (data_blocks << BLOCK_BITS) + at);
	}
}

void image_close(uint64_t root_at)
{
	uint8_t record[SUPER_BYTES] = {0};

	join();
	mix_word(data_blocks);
	put32(record, MAGIC);
	put32(record + 8, COMPAT_MTIME);
	record[12] = BLOCK_BITS;
	put16(record + 14, (uint16_t)(root_at / SLOT_BYTES)); /* the first inode: its number is small */
	put64(record + 16, inode_count);
	put32(record + 36, (uint32_t)(data_blocks + meta_blocks));
	put32(record + 40, (uint32_t)data_blocks);
	put_identity(record + 48);
	put32(record + 80, INCOMPAT_CHUNKED_FILE);
	write_at(data_fd, record, sizeof(record), SUPER_AT);
}
