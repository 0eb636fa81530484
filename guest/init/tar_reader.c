/* Reading a tar archive from stdin: headers, pax records and GNU long names, all of them checked. */
#define _GNU_SOURCE
#include "tar_reader.h"

#include <stdio.h>
#include <stdlib.h>

#include "applet.h"
#include "tar_format.h"

enum { EXTENSION_MAX = 256 << 10 };	/* one pax header or GNU long name */

static const uint64_t mtime_max = 1ull << 36;	/* seconds: some thousand years */

/* What pax records and GNU long names say about the next member. */
static struct {
	bool has_name, has_link, has_size, has_mtime;
	char name[PATH_BYTES], link[PATH_BYTES];
	uint64_t size;
	struct timespec mtime;
} over;

static uint8_t input[COPY_CHUNK];
static size_t input_at, input_len;

/* --- Bytes --- */

/* The next bytes of the archive, at most `max`; 0 at its end. */
size_t tar_take(const uint8_t **out, size_t max)
{
	size_t n;

	if (input_at == input_len) {
		ssize_t got = read(0, input, sizeof input);
		if (got < 0)
			applet_fail(errno, "stdin");
		input_at = 0;
		input_len = (size_t)got;
	}
	n = (size_t)min_u64(max, input_len - input_at);
	*out = input + input_at;
	input_at += n;
	return n;
}

static void need(void *out, size_t len)
{
	const uint8_t *part;

	for (size_t n, done = 0; done < len; done += n) {
		n = tar_take(&part, len - done);
		if (n == 0)
			applet_fail(EBADMSG, "the archive is truncated");
		memcpy((uint8_t *)out + done, part, n);
	}
}

void tar_skip_padding(uint64_t len)
{
	uint8_t block[TAR_BLOCK];

	need(block, (size_t)((TAR_BLOCK - len % TAR_BLOCK) % TAR_BLOCK));
}

/* --- Fields --- */

/* Octal digits, or the base 256 form with the first bit set. */
static uint64_t number(const char *field, size_t size, const char *what)
{
	uint64_t value = 0;
	size_t i = 0;

	if ((uint8_t)field[0] == 0x80) {
		for (i = 1; i < size; i++) {
			if (value >> 55)
				applet_fail(EBADMSG, "%s is too large", what);
			value = value << 8 | (uint8_t)field[i];
		}
		return value;
	}
	while (i < size && field[i] == ' ')
		i++;
	for (; i < size && field[i] != 0 && field[i] != ' '; i++) {
		if (field[i] < '0' || field[i] > '7' || value >> 60)
			applet_fail(EBADMSG, "%s is not a number", what);
		value = value << 3 | (uint64_t)(field[i] - '0');
	}
	return value;
}

static void copy_text(char out[PATH_BYTES], const char *text, size_t len)
{
	if (len >= PATH_BYTES)
		applet_fail(ENAMETOOLONG, "a name in the archive");
	if (memchr(text, 0, len) != NULL)
		applet_fail(EBADMSG, "a name in the archive holds a NUL");
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

/* Seconds with an optional fraction; times before 1970 become 1970. */
static void pax_mtime(const char *text, size_t len)
{
	const char *dot = memchr(text, '.', len);
	size_t whole = dot ? (size_t)(dot - text) : len;
	uint64_t seconds = 0;
	long nanos = 0, unit = 100000000;

	over.has_mtime = true;
	over.mtime = (struct timespec){0};
	if (text[0] == '-')
		return;
	if (!decimal(text, whole, &seconds) || seconds > mtime_max)
		applet_fail(EBADMSG, "mtime in a pax header");
	for (size_t i = whole + 1; i < len && unit > 0 && text[i] >= '0' && text[i] <= '9'; i++, unit /= 10)
		nanos += (text[i] - '0') * unit;
	over.mtime = (struct timespec){.tv_sec = (time_t)seconds, .tv_nsec = nanos};
}

static bool key_is(const char *text, size_t len, const char *key)
{
	return len == strlen(key) && memcmp(text, key, len) == 0;
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
		over.has_size = decimal(value, len, &over.size);
		if (!over.has_size)
			applet_fail(EBADMSG, "size in a pax header");
	} else if (key_is(key, key_len, "mtime")) {
		pax_mtime(value, len);
	} else if (key_len >= 10 && memcmp(key, "GNU.sparse", 10) == 0) {
		applet_fail(EPERM, "sparse members are refused");
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
			applet_fail(EBADMSG, "a pax header does not decode");
		equals = memchr(space, '=', size - (size_t)(space - text));
		if (equals == NULL)
			applet_fail(EBADMSG, "a pax header does not decode");
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
		applet_fail(EMSGSIZE, "an extended header of the archive");
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
		applet_fail(EBADMSG, "not a tar header: the checksum is wrong");
}

static void fill_entry(const struct tar_header *header, struct tar_entry *entry)
{
	header_names(header, entry);
	entry->mode = (mode_t)(number(header->mode, sizeof header->mode, "a mode") & 07777);
	entry->mtime = (struct timespec){.tv_sec = (time_t)min_u64(number(header->mtime, 12, "a time"), mtime_max)};
	if (over.has_name)
		strcpy(entry->name, over.name);
	if (over.has_link)
		strcpy(entry->link, over.link);
	if (over.has_size)
		entry->size = over.size;
	if (over.has_mtime)
		entry->mtime = over.mtime;
	if (entry->size > INT64_MAX)
		applet_fail(EFBIG, "%.200s", entry->name);
	over.has_name = over.has_link = over.has_size = over.has_mtime = false;
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
