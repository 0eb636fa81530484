/* Reading a tar archive from stdin: headers, pax records and GNU long names, all of them checked. */
#define _GNU_SOURCE
#include "tar_reader.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "../common/util.h"
#include "tar_format.h"

enum {
	INPUT_BYTES = 64 << 10,
	EXTENSION_MAX = 256 << 10,	/* one pax header or GNU long name */
	XATTR_PREFIX_BYTES = 13,	/* of "SCHILY.xattr." */
};

static const uint64_t mtime_max = 1ull << 36;	/* seconds: some thousand years */

/* What pax records and GNU long names say about the next member. */
static struct {
	bool has_name, has_link, has_size, has_mtime, has_uid, has_gid;
	char name[TAR_PATH_BYTES], link[TAR_PATH_BYTES];
	uint64_t size, uid, gid;
	struct timespec mtime;
	uint8_t xattrs[EXTENSION_MAX];
	size_t xattrs_len;
} over;

static uint8_t input[INPUT_BYTES];
static size_t input_at, input_len;
static uint64_t input_total, input_max = UINT64_MAX;

/* --- Bytes --- */

void tar_limit(uint64_t bytes)
{
	input_max = bytes;
}

/* The next bytes of the archive, at most `max`; 0 at its end. */
size_t tar_take(const uint8_t **out, size_t max)
{
	size_t n;

	if (input_at == input_len) {
		ssize_t got = read(0, input, sizeof input);
		if (got < 0)
			tar_fail(errno, "stdin");
		input_at = 0;
		input_len = (size_t)got;
	}
	n = (size_t)min_u64(max, input_len - input_at);
	*out = input + input_at;
	input_at += n;
	input_total += n;
	if (input_total > input_max)
		tar_fail(EFBIG, "the archive has more than %llu bytes", (unsigned long long)input_max);
	return n;
}

static void need(void *out, size_t len)
{
	const uint8_t *part;

	for (size_t n, done = 0; done < len; done += n) {
		n = tar_take(&part, len - done);
		if (n == 0)
			tar_fail(EBADMSG, "the archive is truncated");
		memcpy((uint8_t *)out + done, part, n);
	}
}

void tar_skip_padding(uint64_t len)
{
	uint8_t block[TAR_BLOCK];

	need(block, (size_t)((TAR_BLOCK - len % TAR_BLOCK) % TAR_BLOCK));
}

/* --- Fields --- */

/* Octal digits, or the base 256 form with the first bit set; below 1 << 63. */
static uint64_t number(const char *field, size_t size, const char *what)
{
	uint64_t value = 0;
	size_t i = 0;

	if ((uint8_t)field[0] == 0x80) {
		for (i = 1; i < size; i++) {
			if (value >> 55)
				tar_fail(EBADMSG, "%s is too large", what);
			value = value << 8 | (uint8_t)field[i];
		}
		return value;
	}
	while (i < size && field[i] == ' ')
		i++;
	for (; i < size && field[i] != 0 && field[i] != ' '; i++) {
		if (field[i] < '0' || field[i] > '7' || value >> 60)
			tar_fail(EBADMSG, "%s is not a number", what);
		value = value << 3 | (uint64_t)(field[i] - '0');
	}
	return value;
}

/* Drop empty and "." components. Returns what is wrong with the name, or NULL; may end up empty: the root itself. */
const char *tar_normalise(char *name)
{
	char *out = name;

	if (name[0] == '/')
		return "absolute names are refused";
	for (char *at = name; *at != 0;) {
		size_t len = strcspn(at, "/");
		bool more = at[len] == '/';

		if (len == 2 && at[0] == '.' && at[1] == '.')
			return "a name with .. is refused";
		if (len > 0 && !(len == 1 && at[0] == '.')) {
			if (out > name)
				*out++ = '/';
			memmove(out, at, len);
			out += len;
		}
		at += len + more;
	}
	*out = 0;
	return NULL;
}

static void copy_text(char out[TAR_PATH_BYTES], const char *text, size_t len)
{
	if (len >= TAR_PATH_BYTES)
		tar_fail(ENAMETOOLONG, "a name in the archive has more than %d bytes", TAR_PATH_BYTES - 1);
	if (memchr(text, 0, len) != NULL)
		tar_fail(EBADMSG, "a name in the archive holds a NUL");
	memcpy(out, text, len);
	out[len] = 0;
}

static bool decimal(const char *text, size_t len, uint64_t *out)
{
	uint64_t value = 0;

	if (len == 0 || len > 18)
		return false;
	for (size_t i = 0; i < len; i++) {
		if (text[i] < '0' || text[i] > '9')
			return false;
		value = value * 10 + (uint64_t)(text[i] - '0');
	}
	*out = value;
	return true;
}

/* The base 256 form has times before 1970, too, with all bits of the first byte set. */
static time_t header_mtime(const struct tar_header *header)
{
	int64_t seconds = -1;

	if ((uint8_t)header->mtime[0] != 0xff)
		return (time_t)min_u64(number(header->mtime, sizeof header->mtime, "a time"), mtime_max);
	for (size_t i = 1; i < sizeof header->mtime; i++) {
		if (seconds < -(int64_t)mtime_max)
			return -(time_t)mtime_max;
		seconds = seconds * 256 + (uint8_t)header->mtime[i];
	}
	return (time_t)seconds;
}

/* Seconds with an optional sign and fraction. */
static void pax_mtime(const char *text, size_t len)
{
	const bool is_negative = len > 0 && text[0] == '-';
	uint64_t seconds = 0;
	long nanos = 0, unit = 100000000;

	text += is_negative;
	len -= is_negative;
	const char *dot = memchr(text, '.', len);
	size_t whole = dot ? (size_t)(dot - text) : len;
	if (!decimal(text, whole, &seconds))
		tar_fail(EBADMSG, "mtime in a pax header");
	seconds = min_u64(seconds, mtime_max);
	for (size_t i = whole + 1; i < len && unit > 0 && text[i] >= '0' && text[i] <= '9'; i++, unit /= 10)
		nanos += (text[i] - '0') * unit;
	over.has_mtime = true;
	over.mtime = (struct timespec){.tv_sec = (time_t)seconds, .tv_nsec = nanos};
	if (is_negative)
		over.mtime = (struct timespec){
			.tv_sec = -(time_t)seconds - (nanos > 0),
			.tv_nsec = nanos > 0 ? 1000000000 - nanos : 0,
		};
}

static bool key_is(const char *text, size_t len, const char *key)
{
	return len == strlen(key) && memcmp(text, key, len) == 0;
}

static void pax_number(const char *key, const char *text, size_t len, uint64_t *value, bool *has)
{
	*has = decimal(text, len, value);
	if (!*has)
		tar_fail(EBADMSG, "%s in a pax header is not a number", key);
}

/* Kept as NAME, 0, length in four bytes, value: the name may hold anything but 0, the value anything. */
static void pax_xattr(const char *name, size_t name_len, const char *value, size_t len)
{
	uint8_t *at = over.xattrs + over.xattrs_len;
	const uint32_t value_len = (uint32_t)len;

	if (name_len == 0 || memchr(name, 0, name_len) != NULL)
		tar_fail(EBADMSG, "the name of an attribute");
	if (over.xattrs_len + name_len + 1 + sizeof value_len + len > sizeof over.xattrs)
		tar_fail(EMSGSIZE, "the attributes of an entry");
	memcpy(at, name, name_len);
	at[name_len] = 0;
	memcpy(at + name_len + 1, &value_len, sizeof value_len);
	memcpy(at + name_len + 1 + sizeof value_len, value, len);
	over.xattrs_len += name_len + 1 + sizeof value_len + len;
}

static void pax_value(const char *key, size_t key_len, const char *value, size_t len)
{
	if (key_is(key, key_len, "path")) {
		over.has_name = true;
		copy_text(over.name, value, len);
	} else if (key_is(key, key_len, "linkpath")) {
		over.has_link = true;
		copy_text(over.link, value, len);
	} else if (key_is(key, key_len, "size")) {
		pax_number("size", value, len, &over.size, &over.has_size);
	} else if (key_is(key, key_len, "uid")) {
		pax_number("uid", value, len, &over.uid, &over.has_uid);
	} else if (key_is(key, key_len, "gid")) {
		pax_number("gid", value, len, &over.gid, &over.has_gid);
	} else if (key_is(key, key_len, "mtime")) {
		pax_mtime(value, len);
	} else if (key_len >= XATTR_PREFIX_BYTES && memcmp(key, "SCHILY.xattr.", XATTR_PREFIX_BYTES) == 0) {
		pax_xattr(key + XATTR_PREFIX_BYTES, key_len - XATTR_PREFIX_BYTES, value, len);
	} else if (key_len >= 10 && memcmp(key, "GNU.sparse", 10) == 0) {
		tar_fail(EPERM, "sparse members are refused");
	}
}

/* Records "LEN KEY=VALUE\n", LEN counting all of it. */
static void pax_records(const char *text, size_t len)
{
	while (len > 0) {
		const char *space = memchr(text, ' ', len), *equals;
		uint64_t size;

		if (space == NULL || !decimal(text, (size_t)(space - text), &size) || size > len ||
		    size < (size_t)(space - text) + 3 || text[size - 1] != '\n')
			tar_fail(EBADMSG, "a pax header does not decode");
		equals = memchr(space, '=', size - (size_t)(space - text));
		if (equals == NULL)
			tar_fail(EBADMSG, "a pax header does not decode");
		pax_value(space + 1, (size_t)(equals - space) - 1, equals + 1, size - (size_t)(equals + 1 - text) - 1);
		text += size;
		len -= size;
	}
}

/* A header that describes the next one: pax ('x', and 'g' whose records are not used) or a GNU long name. */
static void read_extension(char type, uint64_t size)
{
	static char text[EXTENSION_MAX];
	size_t len = (size_t)size;

	if (size > EXTENSION_MAX)
		tar_fail(EMSGSIZE, "an extended header of the archive");
	need(text, len);
	tar_skip_padding(size);
	if (type == 'x')
		pax_records(text, len);
	if (type != 'L' && type != 'K')
		return;
	len = strnlen(text, len);
	copy_text(type == 'L' ? over.name : over.link, text, len);
	*(type == 'L' ? &over.has_name : &over.has_link) = true;
}

/* --- The archive --- */

static void header_names(const struct tar_header *header, struct tar_entry *entry)
{
	size_t prefix = strnlen(header->prefix, sizeof header->prefix);
	size_t name = strnlen(header->name, sizeof header->name);
	char *at = entry->name;

	/* GNU's own format has other things where POSIX has the prefix. */
	if (memcmp(header->magic, "ustar", 6) == 0 && prefix > 0) {
		memcpy(at, header->prefix, prefix);
		at += prefix;
		*at++ = '/';
	}
	memcpy(at, header->name, name);
	at[name] = 0;
	copy_text(entry->link, header->link, strnlen(header->link, sizeof header->link));
}

static void check_header(const struct tar_header *header)
{
	if (number(header->checksum, sizeof header->checksum, "the checksum") != tar_checksum(header))
		tar_fail(EBADMSG, "not a tar header: the checksum is wrong");
}

static void fill_entry(const struct tar_header *header, struct tar_entry *entry)
{
	header_names(header, entry);
	entry->mode = (mode_t)(number(header->mode, sizeof header->mode, "a mode") & 07777);
	entry->uid = over.has_uid ? over.uid : number(header->uid, sizeof header->uid, "an owner");
	entry->gid = over.has_gid ? over.gid : number(header->gid, sizeof header->gid, "a group");
	entry->is_device_0 = (header->type == '3' || header->type == '4') &&
		number(header->major, sizeof header->major, "a device") == 0 &&
		number(header->minor, sizeof header->minor, "a device") == 0;
	entry->xattrs = over.xattrs;
	entry->xattrs_len = over.xattrs_len;
	entry->mtime = (struct timespec){.tv_sec = header_mtime(header)};
	if (over.has_name)
		strcpy(entry->name, over.name);
	if (over.has_link)
		strcpy(entry->link, over.link);
	if (over.has_size)
		entry->size = over.size;
	if (over.has_mtime)
		entry->mtime = over.mtime;
	over.has_name = over.has_link = over.has_size = over.has_mtime = over.has_uid = over.has_gid = false;
	over.xattrs_len = 0;
}

static bool is_zero(const struct tar_header *header)
{
	static const struct tar_header zero;

	return memcmp(header, &zero, sizeof zero) == 0;
}

/* The next member, whose content follows; false at the end. An archive ends with a block of zeros: without one it was cut
 * off, which ends the operation. What comes after the end is read and forgotten. */
bool tar_next(struct tar_entry *entry)
{
	struct tar_header header;
	const uint8_t *rest;

	for (need(&header, sizeof header); !is_zero(&header); need(&header, sizeof header)) {
		check_header(&header);
		entry->type = header.type;
		entry->size = number(header.size, sizeof header.size, "a size");
		if (header.type == 0 || strchr("xgLK", header.type) == NULL) {
			fill_entry(&header, entry);
			return true;
		}
		read_extension(header.type, entry->size);
	}
	while (tar_take(&rest, sizeof input) > 0)
		;
	return false;
}
