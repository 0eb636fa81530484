/* A directory's content, or one file, as a pax tar on stdout. Hard links are written as files of their own; sockets,
 * pipes and devices are left out. */
#define _GNU_SOURCE
#include "applet.h"
#include "../tar/tar_format.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>

enum { MEMBER_MAX = 64 << 10, PAX_MAX = 2 * MEMBER_MAX + 256 };

static const uint64_t octal_size_max = 077777777777, octal_id_max = 07777777;

/* The member's name grows and shrinks with the walk. */
static char member[MEMBER_MAX];
static size_t member_len;
static int depth;

static const char zeros[TAR_BLOCK];

static void pad(uint64_t len)
{
	out_bytes(zeros, (size_t)((TAR_BLOCK - len % TAR_BLOCK) % TAR_BLOCK));
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
static size_t pax_record(char *out, const char *key, const char *value, size_t value_len)
{
	size_t rest = strlen(key) + value_len + 3, len = rest + 1, head;

	for (size_t limit = 10; len >= limit; limit *= 10)
		len++;
	head = (size_t)sprintf(out, "%zu %s=", len, key);
	memcpy(out + head, value, value_len);
	out[head + value_len] = '\n';
	return head + value_len + 1;
}

static size_t pax_number(char *out, const char *key, uint64_t value)
{
	char text[24];

	return pax_record(out, key, text, (size_t)snprintf(text, sizeof text, "%llu", (unsigned long long)value));
}

static void out_member(const struct stat *st, char type, uint64_t size, const char *link)
{
	static char pax[PAX_MAX];
	struct tar_header header = {.type = type}, extra = {.type = 'x'};
	size_t link_len = strlen(link), len = 0;

	if (member_len > sizeof header.name)
		len += pax_record(pax + len, "path", member, member_len);
	if (link_len > sizeof header.link)
		len += pax_record(pax + len, "linkpath", link, link_len);
	if (size > octal_size_max)
		len += pax_number(pax + len, "size", size);
	if (st->st_uid > octal_id_max)
		len += pax_number(pax + len, "uid", st->st_uid);
	if (st->st_gid > octal_id_max)
		len += pax_number(pax + len, "gid", st->st_gid);
	memcpy(header.name, member, min_u64(member_len, sizeof header.name));
	memcpy(header.link, link, min_u64(link_len, sizeof header.link));
	put_octal(header.mode, sizeof header.mode, st->st_mode & 07777);
	put_octal(header.uid, sizeof header.uid, st->st_uid > octal_id_max ? 0 : st->st_uid);
	put_octal(header.gid, sizeof header.gid, st->st_gid > octal_id_max ? 0 : st->st_gid);
	put_octal(header.size, sizeof header.size, size > octal_size_max ? 0 : size);
	put_octal(header.mtime, sizeof header.mtime, st->st_mtime > 0 ? min_u64((uint64_t)st->st_mtime, octal_size_max) : 0);
	if (len > 0) {
		memcpy(extra.name, "pax", 4);
		memcpy(extra.mode, "0000644", 8);
		put_octal(extra.size, sizeof extra.size, len);
		out_header(&extra);
		out_bytes(pax, len);
		pad(len);
	}
	out_header(&header);
}

/* The header promised `size` bytes: a file that shrinks meanwhile is filled up with zeros, one that grows is cut. */
static void out_file(int fd, const struct stat *st)
{
	static uint8_t chunk[COPY_CHUNK];
	uint64_t left = (uint64_t)st->st_size;

	out_member(st, '0', left, "");
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

static void push_name(const char *name)
{
	size_t len = strlen(name);

	if (member_len + len + 2 > sizeof member)
		applet_fail(ENAMETOOLONG, "%.64s...", member);
	memcpy(member + member_len, name, len + 1);
	member_len += len;
}

static void out_any(int dir, const char *name, unsigned char type, void *context);

static void out_directory(int dir, const char *name, const struct stat *st)
{
	CLEANUP_FD int fd = open_dir(dir, name);
	int error;

	if (fd < 0)
		applet_fail(errno, "%s", member);
	if (++depth > DEPTH_MAX)
		applet_fail(ELOOP, "%.64s...", member);
	push_name("/");
	out_member(st, '5', 0, "");
	error = each_entry(fd, out_any, NULL);
	if (error != 0)
		applet_fail(-error, "%s", member);
	depth--;
}

static void out_link(int dir, const char *name, const struct stat *st)
{
	char target[PATH_BYTES];
	ssize_t n = readlinkat(dir, name, target, sizeof target - 1);

	if (n < 0)
		applet_fail(errno, "%s", member);
	target[n] = 0;
	out_member(st, '2', 0, target);
}

static void out_regular(int dir, const char *name)
{
	CLEANUP_FD int fd = openat(dir, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
	struct stat st;

	if (fd < 0 || fstat(fd, &st) != 0)
		applet_fail(errno, "%s", member);
	if (S_ISREG(st.st_mode))
		out_file(fd, &st);
}

static void out_any(int dir, const char *name, unsigned char type, void *context)
{
	size_t before = member_len;
	struct stat st;

	(void)type;
	(void)context;
	push_name(name);
	if (fstatat(dir, name, &st, AT_SYMLINK_NOFOLLOW) != 0) {
		if (errno != ENOENT)
			applet_fail(errno, "%s", member);
	} else if (S_ISDIR(st.st_mode)) {
		out_directory(dir, name, &st);
	} else if (S_ISLNK(st.st_mode)) {
		out_link(dir, name, &st);
	} else if (S_ISREG(st.st_mode)) {
		out_regular(dir, name);
	}
	member_len = before;
	member[before] = 0;
}

static void out_single(const char *path)
{
	char parent[PATH_BYTES], base[NAME_BYTES];
	int fd = open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC), error = split_path(path, parent, base);
	struct stat st;

	if (error != 0 || fd < 0 || fstat(fd, &st) != 0)
		applet_fail(error ? error : errno, "%s", path);
	if (!S_ISREG(st.st_mode))
		applet_fail(EINVAL, "%s is neither a directory nor a regular file", path);
	push_name(base);
	out_file(fd, &st);
}

void op_tar_out(char **argv)
{
	int dir = open(argv[0], O_RDONLY | O_DIRECTORY | O_NONBLOCK | O_CLOEXEC);
	int error = dir < 0 ? -errno : each_entry(dir, out_any, NULL);

	if (error == -ENOTDIR)
		out_single(argv[0]);
	else if (error != 0)
		applet_fail(-error, "%s", argv[0]);
	out_bytes(zeros, sizeof zeros);
	out_bytes(zeros, sizeof zeros);
}
