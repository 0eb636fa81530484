/* barchan-pack: one directory tree in, one EROFS image out. docs/decisions/0009 says why this is ours.
 *
 * The tree is a guest's: nothing about it is believed, and what it costs is bounded. The image is written as the tree is walked,
 * so that memory holds only the names of the directories on the way down and the inodes that have several names. The first
 * thing that goes wrong ends the program: `fail` says what, in one line, and the exit code whose doing it was. */
#ifndef BARCHAN_PACK_H
#define BARCHAN_PACK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>

#define BLOCK_BITS 12u
#define BLOCK_BYTES (1u << BLOCK_BITS)
#define INODE_BYTES 64u
#define SLOT_BYTES 32u /* inode numbers count these */

enum blame { BLAME_HOST = 1, BLAME_TREE = 3, BLAME_ROOM = 4 };
void fail(enum blame blame, const char *format, ...) __attribute__((noreturn, format(printf, 2, 3)));
void fail_errno(const char *what) __attribute__((noreturn));

/* image.c: space in the image, and the records in it. */
enum layout { LAYOUT_PLAIN = 0, LAYOUT_INLINE = 2, LAYOUT_CHUNKS = 4 };

struct inode {
	const struct stat *stat;
	uint64_t at; /* its place in the image, in bytes */
	uint64_t size;
	enum layout layout;
	uint32_t value; /* first block, device number or chunk format: what the layout and mode ask for */
	uint32_t links;
	size_t xattr_bytes;
};

void image_open(int fd, uint64_t bytes_max);
void image_close(uint64_t root_at);
uint64_t image_take_meta(uint64_t bytes);
uint32_t image_take_blocks(uint64_t bytes);
void image_write(const void *data, size_t bytes, uint64_t at);
void image_copy(int fd, uint64_t from, uint64_t bytes, uint64_t at);
void image_put_inode(const struct inode *inode);
void image_put_links(uint64_t inode_at, uint32_t links);
void put16(uint8_t *at, uint16_t value);
void put32(uint8_t *at, uint32_t value);
void put64(uint8_t *at, uint64_t value);

/* xattrs.c */
const uint8_t *xattrs_read(int fd, size_t *bytes);

/* files.c: everything that is no directory; each returns where its inode lies. */
uint64_t pack_file(int fd, const struct stat *stat);
uint64_t pack_link(int dir_fd, const char *name, const struct stat *stat);
uint64_t pack_special(const struct stat *stat);

/* links.c: files with several names. */
uint64_t *links_find(const struct stat *stat);
void links_again(const struct stat *stat);

#endif
