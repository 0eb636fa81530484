/* A layer's archive as the input, as OCI images have it: no path is ever touched. Where unpacking would write, follow or guess, the archive is
 * refused with the entry named. */
#define _GNU_SOURCE
#include "../tar/tar_reader.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "pack.h"

#define WHITEOUT ".wh."
#define WHITEOUT_BYTES 4u
#define RESERVED ".wh..wh."
#define RESERVED_BYTES 8u
#define OPAQUE ".wh..wh..opq"

static struct tar_entry entry;
static char last_name[TAR_PATH_BYTES]; /* as the archive has it */

_Noreturn void tar_fail(int error, const char *format, ...)
{
	char text[600];
	va_list arguments;
	bool is_ours = error == EIO || error == EBADF || error == EINVAL;

	va_start(arguments, format);
	vsnprintf(text, sizeof(text), format, arguments);
	va_end(arguments);
	if (is_ours)
		fail(BLAME_HOST, "%s: %s", text, strerror(error));
	if (last_name[0] && !where_text()[0]) {
		where_is(last_name);
		fail(BLAME_INPUT, "in what comes next, %s", printable(text));
	}
	fail(BLAME_INPUT, "%s", printable(text)); /* it may have a name in it */
}

static bool is_whiteout(const struct node *node)
{
	return S_ISCHR(node->mode);
}

/* --- Names --- */

/* The next component of a path, cut off; NULL at its end. */
static char *component(char **path)
{
	char *name = *path;

	if (!name || !*name)
		return NULL;
	size_t bytes = strcspn(name, "/");
	if (bytes > NAME_BYTES_MAX)
		fail(BLAME_INPUT, "a name of more than %u bytes", NAME_BYTES_MAX);
	*path = name[bytes] ? name + bytes + 1 : NULL;
	name[bytes] = 0;
	return name;
}

static const char *base_of(const char *path)
{
	const char *slash = strrchr(path, '/');

	return slash ? slash + 1 : path;
}

/* A directory of this name, for an entry that has its directory not before it. One that comes where something was hidden shows nothing
 * of what layers below have there. NULL: for a whiteout there is nothing to do, since all below the name is gone anyway. */
static struct node *enter(struct node *directory, const char *name, bool is_special)
{
	struct node *found = nodes_find(directory, name);

	if (found && S_ISDIR(found->mode)) {
		found->only_hides &= is_special;
		return found;
	}
	if (found && is_special)
		return NULL;
	if (found && !is_whiteout(found))
		fail(BLAME_INPUT, "it lies below %s, which is no directory", printable(name));
	count_entry();
	struct node *made = nodes_new(S_IFDIR | 0755);
	made->mtime.tv_nsec = IMPLIED_MTIME_NS;
	made->is_opaque = found != NULL;
	made->only_hides = is_special;
	nodes_put(directory, name, made);
	return made;
}

/* Find the directory that a path leads to, and its last name. NULL: the entry says nothing that counts. Older layers have names like
 * `.wh..wh.plnk` for themselves; tools also write whiteouts below what they say is a file now. */
static struct node *parent_of(char *path, char **base, bool is_special)
{
	struct node *directory = nodes_root();
	uint64_t depth = 1;

	for (*base = component(&path); *base && path && directory; *base = component(&path)) {
		if (strncmp(*base, RESERVED, RESERVED_BYTES) == 0)
			return NULL;
		if (strncmp(*base, WHITEOUT, WHITEOUT_BYTES) == 0)
			fail(BLAME_INPUT, "it lies below a whiteout");
		directory = enter(directory, *base, is_special);
		check_depth(++depth);
	}
	return directory;
}

/* --- Entries --- */

static void set_attributes(struct node *node)
{
	struct xattrs xattrs = {0};

	if (entry.uid > ID_MAX || entry.gid > ID_MAX)
		fail(BLAME_INPUT, "it belongs to %llu:%llu; ids in a layer are at most %u", (unsigned long long)entry.uid,
		     (unsigned long long)entry.gid, ID_MAX);
	if (S_ISREG(node->mode) || S_ISDIR(node->mode))
		xattrs = xattrs_of_tar(entry.xattrs, entry.xattrs_len);
	node->mode = (uint16_t)((node->mode & S_IFMT) | (entry.mode & 07777));
	node->uid = (uint16_t)entry.uid;
	node->gid = (uint16_t)entry.gid;
	node->mtime = entry.mtime;
	node->xattrs = nodes_keep(xattrs.body, xattrs.bytes);
	node->xattr_bytes = (uint32_t)xattrs.bytes;
}

static struct node *file(void)
{
	struct node *node = nodes_new(S_IFREG);

	if (entry.size > options.bytes_max)
		fail(BLAME_INPUT, "it has %llu bytes, of at most %llu", (unsigned long long)entry.size, (unsigned long long)options.bytes_max);
	data_begin(entry.size);
	for (uint64_t left = entry.size; left > 0;) {
		const uint8_t *part;
		size_t room;
		uint8_t *to = data_room(&room);
		size_t bytes = tar_take(&part, left < room ? (size_t)left : room);
		if (bytes == 0)
			tar_fail(EBADMSG, "the archive is truncated");
		memcpy(to, part, bytes);
		data_filled(bytes);
		left -= bytes;
	}
	struct data data = data_end();
	node->size = entry.size;
	node->layout = (uint8_t)data.layout;
	node->value = data.value;
	node->table = nodes_keep(data.table, data.table_bytes);
	node->table_bytes = (uint32_t)data.table_bytes;
	tar_skip_padding(entry.size);
	return node;
}

static struct node *symlink_node(void)
{
	struct node *node = nodes_new(S_IFLNK);

	if (!entry.link[0])
		fail(BLAME_INPUT, "a symbolic link to nothing");
	count_text(entry.link);
	node->target = nodes_keep(entry.link, strlen(entry.link) + 1);
	return node;
}

static struct node *linked(void)
{
	const char *wrong = tar_normalise(entry.link);
	char *path = entry.link, *name;
	struct node *node = nodes_root();

	if (wrong)
		fail(BLAME_INPUT, "a hard link: %s", wrong);
	while (node && (name = component(&path)))
		node = S_ISDIR(node->mode) ? nodes_find(node, name) : NULL;
	if (!node || is_whiteout(node))
		fail(BLAME_INPUT, "a hard link to what is not there");
	if (S_ISDIR(node->mode))
		fail(BLAME_INPUT, "a hard link to a directory");
	return node;
}

/* What is there under this name when a directory comes, as another entry that came before or as a whiteout, hides what layers below have. */
static void put_directory(struct node *parent, const char *name)
{
	struct node *node = name ? nodes_find(parent, name) : parent;

	if (!node || !S_ISDIR(node->mode)) {
		struct node *made = nodes_new(S_IFDIR);
		made->is_opaque = node != NULL;
		nodes_put(parent, name, made);
		node = made;
	}
	node->only_hides = false;
	set_attributes(node);
}

/* A whiteout is for the layers below, wherever in the archive it stands: what this one has under the name stays. */
static void put_whiteout(struct node *parent, const char *name)
{
	struct node *node = nodes_find(parent, name);

	if (node && S_ISDIR(node->mode))
		node->is_opaque = true;
	if (!node || node->only_hides)
		nodes_put(parent, name, nodes_new(S_IFCHR));
}

static void put_special_name(struct node *parent, const char *name)
{
	if (strcmp(name, OPAQUE) == 0) {
		if (parent == nodes_root()) /* which an overlay could not say */
			fail(BLAME_INPUT, "it hides all of the layers below");
		parent->is_opaque = true;
		return;
	}
	if (strncmp(name, RESERVED, RESERVED_BYTES) == 0)
		return;
	name += WHITEOUT_BYTES;
	if (!*name || is_dots(name))
		fail(BLAME_INPUT, "a whiteout of nothing");
	put_whiteout(parent, name);
}

static struct node *node_of_type(void)
{
	switch (entry.type) {
	case '0':
		return file();
	case '1':
		return linked();
	case '2':
		return symlink_node();
	case '6':
		return nodes_new(S_IFIFO);
	case '3':
	case '4':
		fail(BLAME_INPUT, "a device");
	case 'S':
		fail(BLAME_INPUT, "a sparse file of GNU's own form");
	default:
		fail(BLAME_INPUT, "an entry of type %d", entry.type);
	}
}

static void put_entry(void)
{
	const char *wrong = entry.name[0] ? tar_normalise(entry.name) : "it has no name";
	char *base;

	if (entry.type == 0 || entry.type == '7')
		entry.type = '0';
	if (entry.type == '0' && last_name[0] && last_name[strlen(last_name) - 1] == '/')
		entry.type = '5'; /* how archives before POSIX say "directory" */
	if (wrong)
		fail(BLAME_INPUT, "%s", wrong);
	if (entry.type != '0' && entry.size != 0)
		fail(BLAME_INPUT, "only files have content");
	count_entry();
	bool is_special = strncmp(base_of(entry.name), WHITEOUT, WHITEOUT_BYTES) == 0 || (entry.type == '3' && entry.is_device_0);
	struct node *parent = parent_of(entry.name, &base, is_special);
	if (!base && entry.type != '5')
		fail(BLAME_INPUT, "only a directory can be the root");
	if ((is_special || !parent) && entry.size)
		fail(BLAME_INPUT, "a whiteout with content");
	if (!parent)
		return;
	if (entry.type == '5' && !is_special)
		put_directory(parent, base);
	else if (strncmp(base, WHITEOUT, WHITEOUT_BYTES) == 0)
		put_special_name(parent, base);
	else if (is_special)
		put_whiteout(parent, base);
	else {
		struct node *node = node_of_type(), *had = nodes_find(parent, base);
		if (entry.type != '1')
			set_attributes(node);
		if (node != had)
			nodes_put(parent, base, node);
	}
}

uint64_t pack_tar(void)
{
	tar_limit(options.bytes_max);
	while (where_is(""), tar_next(&entry)) {
		memcpy(last_name, entry.name, sizeof(last_name));
		where_is(entry.name);
		put_entry();
	}
	where_is("");
	return nodes_write();
}
