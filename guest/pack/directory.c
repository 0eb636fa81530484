/* Directories: sorted names in blocks of their own; the last block follows the inode where it fits. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "pack.h"

#define DIRENT_BYTES 12u

uint8_t type_of(mode_t mode)
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

struct entry *directory_add(struct directory *directory, char *name)
{
	if (directory->count == directory->room) {
		directory->room = directory->room ? 2 * directory->room : 16;
		directory->entries = realloc(directory->entries, directory->room * sizeof(*directory->entries));
		if (!directory->entries)
			fail_errno("a directory");
	}
	struct entry *entry = &directory->entries[directory->count++];
	*entry = (struct entry){.name = name, .name_bytes = (uint8_t)strlen(name)};
	return entry;
}

bool is_dots(const char *name)
{
	return strcmp(name, ".") == 0 || strcmp(name, "..") == 0;
}

static int compare(const void *left, const void *right)
{
	return strcmp(((const struct entry *)left)->name, ((const struct entry *)right)->name);
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

/* The inode, once all names are there, `.` and `..` among them: what is in the directory names it as its parent. One link: as btrfs has it,
 * and as programs know that nothing follows from it. */
void directory_place(struct directory *directory, struct inode *inode)
{
	qsort(directory->entries, directory->count, sizeof(*directory->entries), compare);
	lay_out(directory);
	uint64_t head = INODE_BYTES + inode->xattr_bytes, tail = directory->bytes % BLOCK_BYTES;
	bool fits = tail && head + tail <= BLOCK_BYTES;
	uint64_t inlined = fits ? tail : 0;
	inode->size = directory->bytes;
	inode->links = 1;
	inode->layout = fits ? LAYOUT_INLINE : LAYOUT_PLAIN;
	inode->at = image_take_meta(head + inlined);
	directory->inlined_at = fits ? inode->at + head : 0;
	inode->is_value_in_meta = inode->size > inlined;
	if (inode->is_value_in_meta)
		inode->value = image_take_meta_blocks(inode->size - inlined);
	image_put_inode(inode);
}

/* The names, once it is known where their inodes lie. */
void directory_put(const struct directory *directory, const struct inode *inode, uint64_t parent_at)
{
	static uint8_t block[BLOCK_BYTES];
	uint64_t at = (uint64_t)inode->value << BLOCK_BITS;

	for (size_t i = 0; i < directory->count; i++) {
		struct entry *entry = &directory->entries[i];
		if (!is_dots(entry->name))
			continue;
		entry->type = type_of(S_IFDIR);
		entry->number = (entry->name[1] ? parent_at : inode->at) / SLOT_BYTES;
	}
	for (size_t first = 0, next; first < directory->count; first = next, at += BLOCK_BYTES) {
		size_t used = fill_block(directory, first, block, &next);
		bool is_inline = directory->inlined_at && first == directory->last;
		image_write_meta(block, is_inline ? used : BLOCK_BYTES, is_inline ? directory->inlined_at : at);
	}
}
