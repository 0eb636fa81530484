/* barchan-pack: a directory tree or a tar of a layer in, one EROFS image out. docs/decisions/0009 and 0010 say why this is ours.
 *
 * The input is a guest's or a stranger's: nothing about it is believed, and what it costs is bounded. The first thing that goes
 * wrong ends the program: `fail` says what, in one line, and the exit code whose doing it was.
 *
 * The image: the superblock's block, then the data of files in the order in which they come, then all metadata. Metadata goes
 * to a file of its own until the data's end is known. The same input gives the same bytes. */
#ifndef BARCHAN_PACK_H
#define BARCHAN_PACK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>
#include <time.h>

#define BLOCK_BITS 12u
#define BLOCK_BYTES (1u << BLOCK_BITS)
#define INODE_BYTES 64u
#define SLOT_BYTES 32u /* inode numbers count these */
#define NAME_BYTES_MAX 255u
#define ID_MAX 65535u /* a sandbox has this many user ids */

/* main.c: what is asked for, and how it ends. */
enum blame { BLAME_HOST = 1, BLAME_INPUT = 3, BLAME_ROOM = 4 };

struct options {
	uint64_t bytes_max, entries_max, depth_max, xattr_bytes_max, text_bytes_max;
	bool has_mtime; /* every time becomes this one, and a tree's attributes stay behind: only its content counts */
	time_t mtime;
	uint64_t hash_key; /* random */
};

extern struct options options;

void fail(enum blame blame, const char *format, ...) __attribute__((noreturn, format(printf, 2, 3)));
void fail_errno(const char *what) __attribute__((noreturn));
void count_entry(void);
void count_text(const char *text);
void check_depth(uint64_t depth);

/* where.c: the entry at hand, for what `fail` says. */
void where_enter(const char *name);
void where_leave(const char *name);
void where_is(const char *name);
const char *where_text(void);
const char *printable(const char *text); /* valid until the next call */

/* image.c: space in the image, and the records in it. Places of metadata count from where it begins. */
enum layout { LAYOUT_PLAIN = 0, LAYOUT_INLINE = 2, LAYOUT_CHUNKS = 4 };

struct inode {
	mode_t mode;
	uint32_t uid, gid;
	struct timespec mtime;
	uint64_t at;
	uint64_t size;
	enum layout layout;
	bool is_value_in_meta; /* `value` is a block of the metadata */
	uint32_t value; /* first block, or the chunk format: what the layout and mode ask for */
	uint32_t links;
	const uint8_t *xattrs; /* as the image has them, with their header */
	size_t xattr_bytes;
};

void image_open(int data_fd, int meta_fd);
void image_close(uint64_t root_at);
uint32_t image_take_blocks(uint64_t bytes);
uint64_t image_take_meta(uint64_t bytes);
uint32_t image_take_meta_blocks(uint64_t bytes);
void image_write_blocks(const void *data, size_t bytes, uint64_t at);
void image_write_meta(const void *data, size_t bytes, uint64_t at);
void image_put_inode(const struct inode *inode);
void image_put_links(uint64_t inode_at, uint32_t links);
void put16(uint8_t *at, uint16_t value);
void put32(uint8_t *at, uint32_t value);
void put64(uint8_t *at, uint64_t value);

/* data.c: the content of one file at a time, front to back. */
struct data {
	enum layout layout;
	uint32_t value;
	const uint8_t *table; /* of LAYOUT_CHUNKS, valid until the next file begins */
	size_t table_bytes;
};

void data_begin(uint64_t size);
uint8_t *data_room(size_t *bytes);
void data_filled(size_t bytes);
void data_skip_to(uint64_t offset);
struct data data_end(void);

/* inodes.c: one inode of each kind but directories. */
uint64_t put_file(struct inode *inode, const struct data *data);
uint64_t put_symlink(struct inode *inode, const char *target);
uint64_t put_special(struct inode *inode);

/* directory.c */
struct entry {
	uint64_t number; /* of the inode: what the directory says about it */
	char *name;
	struct node *node; /* of an archive's entry */
	uint8_t name_bytes, type;
};

struct directory {
	struct entry *entries;
	size_t count, room;
	uint64_t bytes;	     /* of its blocks, the last one up to its last name */
	size_t last;	     /* first entry of the last block */
	uint64_t inlined_at; /* where the last block lies when it follows the inode, or 0 */
};

struct entry *directory_add(struct directory *directory, char *name);
void directory_place(struct directory *directory, struct inode *inode);
void directory_put(const struct directory *directory, const struct inode *inode, uint64_t parent_at);
uint8_t type_of(mode_t mode);
bool is_dots(const char *name);

/* xattrs.c */
struct xattrs {
	uint8_t *body; /* as the image has them, with their header */
	size_t bytes;  /* 0 without any */
};

struct xattrs xattrs_of_file(int fd);
struct xattrs xattrs_of_tar(const uint8_t *records, size_t bytes);
struct xattrs xattrs_with_opaque(const uint8_t *body, size_t bytes);

/* links.c: files of a tree with several names. */
uint64_t *links_find(const struct stat *stat);
void links_again(const struct stat *stat);

/* tree.c, tar.c: the inputs; each returns where the root's inode lies. */
uint64_t pack_tree(const char *path);
uint64_t pack_tar(void);

/* nodes.c: a tar's entries as a tree in memory, without content. */
struct node {
	uint64_t size, at; /* `at`: of its inode in the image; 0: not there yet */
	struct timespec mtime;
	const uint8_t *xattrs;
	union {
		const uint8_t *table; /* of a file in chunks */
		const char *target;   /* of a symbolic link */
		struct name *names;   /* of a directory */
	};
	uint32_t value, table_bytes, xattr_bytes;
	uint32_t links; /* names it has */
	uint16_t mode, uid, gid;
	uint8_t layout;
	bool is_opaque;	 /* hides what layers below have in this directory */
	bool only_hides; /* a directory that no entry names, with whiteouts and nothing else in it */
};

#define IMPLIED_MTIME_NS 1 /* the time of a directory that no entry names: image/implied.py looks for it */

struct node *nodes_root(void);
struct node *nodes_new(mode_t mode);
struct node *nodes_find(const struct node *directory, const char *name);
void nodes_put(struct node *directory, const char *name, struct node *node);
void *nodes_keep(const void *data, size_t bytes);
uint64_t nodes_write(void);

#endif
