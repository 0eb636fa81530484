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
#define COUNT_MAX 512u /* of one entry of an archive */
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

static uint8_t body[BODY_BYTES_MAX + VALUE_BYTES_MAX + 1024];
static size_t used, count;
static uint64_t total;

static void begin(void)
{
	memset(body, 0, HEADER_BYTES);
	used = HEADER_BYTES;
	count = 0;
}

static struct xattrs end(void)
{
	return (struct xattrs){.body = body, .bytes = used > HEADER_BYTES ? used : 0};
}

/* An entry whose value lies already where it belongs: behind its head and its name. */
static void add(uint8_t index, const char *stored, size_t value_bytes)
{
	size_t name_bytes = strlen(stored), before = used;

	body[used] = (uint8_t)name_bytes;
	body[used + 1] = index;
	put16(body + used + 2, (uint16_t)value_bytes);
	memcpy(body + used + ENTRY_BYTES, stored, name_bytes);
	used += ENTRY_BYTES + name_bytes + value_bytes;
	while (used % 4)
		body[used++] = 0;
	if (used > BODY_BYTES_MAX)
		fail(BLAME_INPUT, "more than %u bytes of attributes", BODY_BYTES_MAX);
	total += used - before;
	if (total > options.xattr_bytes_max)
		fail(BLAME_INPUT, "more than %llu bytes of attributes in all", (unsigned long long)options.xattr_bytes_max);
}

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

/* Valid until the next call, like all here. A tree that is packed for its content alone has none. */
struct xattrs xattrs_of_file(int fd)
{
	static char list[LIST_BYTES_MAX];
	ssize_t length = options.has_mtime ? 0 : flistxattr(fd, list, sizeof(list));
	uint8_t index;

	if (length < 0 && errno == E2BIG)
		fail(BLAME_INPUT, "more attributes than can be listed");
	if (length < 0 && errno != ENOTSUP)
		fail_errno("listing attributes");
	begin();
	for (const char *name = list; name < list + length; name += strlen(name) + 1) {
		const char *stored = stored_name(name, &index);
		if (!stored)
			continue;
		ssize_t value_bytes = fgetxattr(fd, name, body + used + ENTRY_BYTES + strlen(stored), VALUE_BYTES_MAX - 1);
		if (value_bytes < 0)
			fail_errno("reading an attribute");
		add(index, stored, (size_t)value_bytes);
	}
	return end();
}

static bool is_there(uint8_t index, const char *stored)
{
	size_t name_bytes = strlen(stored);

	for (size_t at = HEADER_BYTES; at < used;) {
		size_t value_bytes = (size_t)body[at + 2] | (size_t)body[at + 3] << 8;
		if (body[at] == name_bytes && body[at + 1] == index && memcmp(body + at + ENTRY_BYTES, stored, name_bytes) == 0)
			return true;
		at = (at + ENTRY_BYTES + body[at] + value_bytes + 3) / 4 * 4;
	}
	return false;
}

/* As the reader of the archive keeps them. What an overlay says is for us to say: an archive has other words for it. */
struct xattrs xattrs_of_tar(const uint8_t *records, size_t bytes)
{
	uint8_t index;
	uint32_t value_bytes;

	begin();
	for (const uint8_t *at = records; at < records + bytes;) {
		const char *name = (const char *)at, *stored = stored_name(name, &index);
		memcpy(&value_bytes, name + strlen(name) + 1, sizeof(value_bytes));
		const uint8_t *value = (const uint8_t *)name + strlen(name) + 1 + sizeof(value_bytes);
		at = value + value_bytes;
		if (!stored || index == INDEX_TRUSTED)
			continue;
		if (strlen(name) > NAME_BYTES_MAX || (index == INDEX_USER && !*stored))
			fail(BLAME_INPUT, "an attribute's name has none or more than %u bytes", NAME_BYTES_MAX);
		if (value_bytes >= VALUE_BYTES_MAX)
			fail(BLAME_INPUT, "an attribute has more than %u bytes", VALUE_BYTES_MAX - 1);
		if (is_there(index, stored) || ++count > COUNT_MAX)
			fail(BLAME_INPUT, "an attribute comes twice, or there are more than %u", COUNT_MAX);
		memcpy(body + used + ENTRY_BYTES + strlen(stored), value, value_bytes);
		add(index, stored, value_bytes);
	}
	return end();
}

/* The same, and the word that hides what layers below have. */
struct xattrs xattrs_with_opaque(const uint8_t *had, size_t bytes)
{
	static const char stored[] = "overlay.opaque";

	begin();
	if (bytes) {
		memcpy(body, had, bytes);
		used = bytes;
	}
	body[used + ENTRY_BYTES + sizeof(stored) - 1] = 'y';
	add(INDEX_TRUSTED, stored, 1);
	return end();
}
