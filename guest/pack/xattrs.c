/* Extended attributes: those of users, the access lists, and the two words by which an overlay's layer speaks to the layers below it. Nothing
 * else travels: neither what the overlay noted for the time as an upper layer, nor labels and capabilities of files. */
#define _GNU_SOURCE
#include <errno.h>
#include <string.h>
#include <sys/xattr.h>

#include "pack.h"

#define HEADER_BYTES 12u
#define ENTRY_BYTES 4u
#define LIST_BYTES_MAX 65536u /* the kernel's own bounds */
#define VALUE_BYTES_MAX 65536u
#define BODY_BYTES_MAX (HEADER_BYTES + 65534u * 4u) /* what the inode's counter can say */

enum { INDEX_USER = 1, INDEX_ACL_ACCESS = 2, INDEX_ACL_DEFAULT = 3, INDEX_TRUSTED = 4 };

static const struct {
	const char *name;
	bool is_prefix;
	uint8_t index;
	const char *stored;
} kept[] = {
	{"user.", true, INDEX_USER, NULL},
	{"system.posix_acl_access", false, INDEX_ACL_ACCESS, ""},
	{"system.posix_acl_default", false, INDEX_ACL_DEFAULT, ""},
	{"trusted.overlay.opaque", false, INDEX_TRUSTED, "overlay.opaque"},
	{"trusted.overlay.redirect", false, INDEX_TRUSTED, "overlay.redirect"},
};

/* Where the name starts as the image stores it, or NULL for one that stays behind. */
static const char *stored_name(const char *name, uint8_t *index)
{
	for (size_t i = 0; i < sizeof(kept) / sizeof(kept[0]); i++) {
		size_t length = strlen(kept[i].name);
		if (kept[i].is_prefix ? strncmp(name, kept[i].name, length) != 0 : strcmp(name, kept[i].name) != 0)
			continue;
		*index = kept[i].index;
		return kept[i].is_prefix ? name + length : kept[i].stored;
	}
	return NULL;
}

/* What follows the inode, valid until the next call; `*bytes` is 0 without attributes. */
const uint8_t *xattrs_read(int fd, size_t *bytes)
{
	static char list[LIST_BYTES_MAX];
	static uint8_t body[BODY_BYTES_MAX + VALUE_BYTES_MAX + 1024], index;
	ssize_t length = flistxattr(fd, list, sizeof(list));
	size_t used = HEADER_BYTES;

	if (length < 0 && errno == E2BIG)
		fail(BLAME_TREE, "a file with more attributes than can be listed");
	if (length < 0)
		fail_errno("listing attributes");
	for (const char *name = list; name < list + length; name += strlen(name) + 1) {
		const char *stored = stored_name(name, &index);
		if (!stored)
			continue;
		size_t name_bytes = strlen(stored);
		ssize_t value_bytes = fgetxattr(fd, name, body + used + ENTRY_BYTES + name_bytes, VALUE_BYTES_MAX - 1);
		if (value_bytes < 0)
			fail_errno("reading an attribute");
		body[used] = (uint8_t)name_bytes;
		body[used + 1] = index;
		put16(body + used + 2, (uint16_t)value_bytes);
		memcpy(body + used + ENTRY_BYTES, stored, name_bytes);
		used += ENTRY_BYTES + name_bytes + (size_t)value_bytes;
		while (used % 4)
			body[used++] = 0;
		if (used > BODY_BYTES_MAX)
			fail(BLAME_TREE, "a file with more than %u bytes of attributes", BODY_BYTES_MAX);
	}
	*bytes = used > HEADER_BYTES ? used : 0;
	return body;
}
