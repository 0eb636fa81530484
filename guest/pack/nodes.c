/* The tree that an archive describes. Names and inodes are kept in memory, never the content of files; what gives way to a later entry is
 * left where it is, so that memory follows from the number of entries. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "pack.h"

#define ARENA_BYTES (1u << 20)
#define NAMES_START 1024u

struct name {
	struct name *next; /* in the same directory */
	const struct node *directory;
	struct node *node;
	char text[];
};

static struct name **table;
static size_t table_size, table_count;
static struct node root = {.mode = S_IFDIR | 0755, .links = 1, .mtime.tv_nsec = IMPLIED_MTIME_NS};

static void *keep(size_t bytes)
{
	static uint8_t *at;
	static size_t left;

	bytes = (bytes + 7) / 8 * 8;
	if (bytes > left) {
		left = bytes > ARENA_BYTES ? bytes : ARENA_BYTES;
		at = malloc(left);
		if (!at)
			fail_errno("keeping entries");
	}
	left -= bytes;
	at += bytes;
	return at - bytes;
}

void *nodes_keep(const void *data, size_t bytes)
{
	return bytes ? memcpy(keep(bytes), data, bytes) : NULL;
}

struct node *nodes_root(void)
{
	return &root;
}

struct node *nodes_new(mode_t mode)
{
	struct node *node = keep(sizeof(*node));

	*node = (struct node){.mode = (uint16_t)mode};
	return node;
}

/* --- Names --- */

/* Keyed by chance: an archive must not be able to put all its names in one place. */
static size_t hash(const struct node *directory, const char *text)
{
	uint64_t value = options.hash_key ^ (uint64_t)(uintptr_t)directory;

	for (; *text; text++)
		value = (value ^ (uint8_t)*text) * UINT64_C(0x9E3779B97F4A7C15), value ^= value >> 32;
	return (size_t)(value ^ value >> 29);
}

static struct name **place_of(const struct node *directory, const char *text)
{
	size_t at = hash(directory, text) & (table_size - 1);

	while (table[at] && (table[at]->directory != directory || strcmp(table[at]->text, text) != 0))
		at = (at + 1) & (table_size - 1);
	return &table[at];
}

static void grow(void)
{
	struct name **before = table;
	size_t size_before = table_size;

	table_size = table_size ? 2 * table_size : NAMES_START;
	table = calloc(table_size, sizeof(*table));
	if (!table)
		fail_errno("keeping names");
	for (size_t i = 0; i < size_before; i++)
		if (before[i])
			*place_of(before[i]->directory, before[i]->text) = before[i];
	free(before);
}

struct node *nodes_find(const struct node *directory, const char *name)
{
	struct name *found = table ? *place_of(directory, name) : NULL;

	return found ? found->node : NULL;
}

/* Nothing below it has that name any more. */
static void let_go(struct node *node)
{
	node->links--;
	if (!S_ISDIR(node->mode))
		return;
	for (struct name *name = node->names; name; name = name->next)
		let_go(name->node);
}

void nodes_put(struct node *directory, const char *name, struct node *node)
{
	if (2 * table_count >= table_size)
		grow();
	struct name **place = place_of(directory, name);
	node->links++;
	if (*place) {
		let_go((*place)->node);
		(*place)->node = node;
		return;
	}
	count_text(name);
	table_count++;
	*place = keep(sizeof(**place) + strlen(name) + 1);
	**place = (struct name){.next = directory->names, .directory = directory, .node = node};
	strcpy((*place)->text, name);
	directory->names = *place;
}

/* --- The image --- */

static uint64_t write_directory(struct node *node, struct inode *inode, uint64_t parent_at);

static uint64_t write_node(struct node *node, uint64_t parent_at)
{
	struct inode inode = {
		.mode = node->mode,
		.uid = node->uid,
		.gid = node->gid,
		.mtime = node->mtime,
		.size = node->size,
		.links = node->links,
		.xattrs = node->xattrs,
		.xattr_bytes = node->xattr_bytes,
	};

	if (S_ISDIR(node->mode))
		return write_directory(node, &inode, parent_at);
	if (S_ISLNK(node->mode))
		return put_symlink(&inode, node->target);
	if (!S_ISREG(node->mode))
		return put_special(&inode);
	return put_file(&inode, &(struct data){
		.layout = node->layout,
		.value = node->value,
		.table = node->table,
		.table_bytes = node->table_bytes,
	});
}

static uint64_t write_directory(struct node *node, struct inode *inode, uint64_t parent_at)
{
	static char here[] = ".", up[] = "..";
	struct directory directory = {0};

	if (node->is_opaque) {
		struct xattrs xattrs = xattrs_with_opaque(node->xattrs, node->xattr_bytes);
		inode->xattrs = xattrs.body;
		inode->xattr_bytes = xattrs.bytes;
	}
	directory_add(&directory, here);
	directory_add(&directory, up);
	for (struct name *name = node->names; name; name = name->next) {
		struct entry *entry = directory_add(&directory, name->text);
		entry->type = type_of(name->node->mode);
		entry->node = name->node;
	}
	directory_place(&directory, inode);
	for (size_t i = 0; i < directory.count; i++) {
		struct node *child = directory.entries[i].node;
		if (child && !child->at)
			child->at = write_node(child, inode->at);
		if (child)
			directory.entries[i].number = child->at / SLOT_BYTES;
	}
	directory_put(&directory, inode, parent_at ? parent_at : inode->at);
	free(directory.entries);
	return inode->at;
}

uint64_t nodes_write(void)
{
	return write_node(&root, 0);
}
