#define _GNU_SOURCE
#include "tar_member.h"

#include <stdio.h>
#include <stdlib.h>

#include "../tar/tar_format.h"
#include "applet.h"

enum { MEMBER_MAX = 64 << 10, PAX_MAX = 2 * MEMBER_MAX + 256 };

static const uint64_t octal_size_max = 077777777777, octal_id_max = 07777777;

static char member[MEMBER_MAX];
static size_t member_len;

static const char zeros[TAR_BLOCK];

size_t member_push(const char *name)
{
	size_t len = strlen(name), before = member_len;

	if (member_len + len + 2 > sizeof member)
		applet_fail(ENAMETOOLONG, "%.64s...", member);
	memcpy(member + member_len, name, len + 1);
	member_len += len;
	return before;
}

void member_cut(size_t len)
{
	member_len = len;
	member[len] = 0;
}

const char *member_name(void)
{
	return member;
}

void member_fail_too_deep(int depth)
{
	if (depth > DEPTH_MAX)
		applet_fail(ELOOP, "%.64s...", member);
}

static void pad(uint64_t len)
{
	out_bytes(zeros, (size_t)((TAR_BLOCK - len % TAR_BLOCK) % TAR_BLOCK));
}

void tar_end(void)
{
	out_bytes(zeros, sizeof zeros);
	out_bytes(zeros, sizeof zeros);
}

static void put_octal(char *field, size_t size, uint64_t value)
{
	char text[24];

	snprintf(text, sizeof text, "%0*llo", (int)size - 1, (unsigned long long)value);
	memcpy(field, text, size);
}

static void out_header(struct tar_header *header)
{
	char sum[8];

	memcpy(header->magic, "ustar", 6);
	memcpy(header->version, "00", 2);
	snprintf(sum, sizeof sum, "%06o", tar_checksum(header));
	memcpy(header->checksum, sum, 7);
	header->checksum[7] = ' ';
	out_bytes(header, sizeof *header);
}

/* "LEN KEY=VALUE\n", where LEN counts its own digits too. */
void pax_record(struct pax *pax, const char *key, const void *value, size_t value_len)
{
	size_t rest = strlen(key) + value_len + 3, len = rest + 1;
	char *at = pax->text + pax->len;

	for (size_t limit = 10; len >= limit; limit *= 10)
		len++;
	if (len + 1 > pax->max - pax->len)	/* and the NUL of sprintf */
		applet_fail(E2BIG, "%.64s... and its attributes", member);
	at += sprintf(at, "%zu %s=", len, key);
	memcpy(at, value, value_len);
	at[value_len] = '\n';
	pax->len += len;
}

static void pax_number(struct pax *pax, const char *key, uint64_t value)
{
	char text[24];

	pax_record(pax, key, text, (size_t)snprintf(text, sizeof text, "%llu", (unsigned long long)value));
}

void member_header(const struct stat *st, char type, uint64_t size, const char *link, const struct pax *more)
{
	static char text[PAX_MAX];
	struct tar_header header = {.type = type}, extra = {.type = 'x'};
	struct pax pax = {text, 0, sizeof text};
	size_t link_len = strlen(link), more_len = more ? more->len : 0;

	if (member_len > sizeof header.name)
		pax_record(&pax, "path", member, member_len);
	if (link_len > sizeof header.link)
		pax_record(&pax, "linkpath", link, link_len);
	if (size > octal_size_max)
		pax_number(&pax, "size", size);
	if (st->st_uid > octal_id_max)
		pax_number(&pax, "uid", st->st_uid);
	if (st->st_gid > octal_id_max)
		pax_number(&pax, "gid", st->st_gid);
	memcpy(header.name, member, min_u64(member_len, sizeof header.name));
	memcpy(header.link, link, min_u64(link_len, sizeof header.link));
	put_octal(header.mode, sizeof header.mode, st->st_mode & 07777);
	put_octal(header.uid, sizeof header.uid, st->st_uid > octal_id_max ? 0 : st->st_uid);
	put_octal(header.gid, sizeof header.gid, st->st_gid > octal_id_max ? 0 : st->st_gid);
	put_octal(header.size, sizeof header.size, size > octal_size_max ? 0 : size);
	put_octal(header.mtime, sizeof header.mtime, st->st_mtime > 0 ? min_u64((uint64_t)st->st_mtime, octal_size_max) : 0);
	if (pax.len + more_len > 0) {
		memcpy(extra.name, "pax", 4);
		memcpy(extra.mode, "0000644", 8);
		put_octal(extra.size, sizeof extra.size, pax.len + more_len);
		out_header(&extra);
		out_bytes(pax.text, pax.len);
		if (more != NULL)
			out_bytes(more->text, more->len);
		pad(pax.len + more_len);
	}
	out_header(&header);
}

/* The header promised `size` bytes: a file that shrinks meanwhile is filled up with zeros, one that grows is cut. */
void member_file(int fd, const struct stat *st, const struct pax *more)
{
	static uint8_t chunk[COPY_CHUNK];
	uint64_t left = (uint64_t)st->st_size;

	member_header(st, '0', left, "", more);
	while (left > 0) {
		ssize_t n = read(fd, chunk, (size_t)min_u64(left, sizeof chunk));
		if (n < 0)
			applet_fail(errno, "%s", member);
		if (n == 0) {
			memset(chunk, 0, sizeof chunk);
			n = (ssize_t)min_u64(left, sizeof chunk);
		}
		out_bytes(chunk, (size_t)n);
		left -= (uint64_t)n;
	}
	pad((uint64_t)st->st_size);
}

void member_link(int dir, const char *name, const struct stat *st, const struct pax *more)
{
	char target[PATH_BYTES];
	ssize_t n = readlinkat(dir, name, target, sizeof target - 1);

	if (n < 0)
		applet_fail(errno, "%s", member);
	target[n] = 0;
	member_header(st, '2', 0, target, more);
}
