/* What the guest has written, as one layer of an OCI image on stdout: the upper directory of the machine's overlay, with `.wh.` names for
 * what is gone. The overlay's own marks are read, so this runs with the init's rights; the guest may change the tree meanwhile. */
#define _GNU_SOURCE
#include "applet.h"
#include "init.h"
#include "tar_member.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/xattr.h>

enum { PAX_MAX = 256 << 10, LIST_MAX_BYTES = 64 << 10, VALUE_MAX = 64 << 10, TABLE_MIN = 1024 };

#define WHITEOUT ".wh."
#define OPAQUE "/.wh..wh..opq"
#define PROC_FD "/proc/self/fd/%d/%s"

/* Where a walk is: a directory of the upper one, and the same as the guest sees it (-1: it could not be opened there). */
struct place {
	int upper, seen;
	bool is_seen;	/* all of it comes from what the guest sees: it was renamed, and the upper one has a part of it only */
	int depth;
};

static struct pax pax;

/* Files of several names, by device and number: the first name. */
static struct known {
	dev_t device;
	ino_t number;
	char *name;
} *known;
static size_t known_count, known_size;

static struct known *known_slot(struct known *table, size_t size, dev_t device, ino_t number)
{
	size_t at = (size_t)number * 0x9e3779b97f4a7c15u % size;

	while (table[at].name != NULL && (table[at].number != number || table[at].device != device))
		at = (at + 1) % size;
	return &table[at];
}

static void known_grow(void)
{
	size_t size = known_size > 0 ? known_size * 2 : TABLE_MIN;
	struct known *table = calloc(size, sizeof *table);

	if (table == NULL)
		applet_fail(ENOMEM, "%s", member_name());
	for (size_t i = 0; i < known_size; i++)
		if (known[i].name != NULL)
			*known_slot(table, size, known[i].device, known[i].number) = known[i];
	free(known);
	known = table;
	known_size = size;
}

/* The name that the file was written under before, or NULL, and then this is it. */
static const char *earlier_name(const struct stat *st)
{
	struct known *slot;

	if (st->st_nlink < 2)
		return NULL;
	if (known_count * 2 >= known_size)
		known_grow();
	slot = known_slot(known, known_size, st->st_dev, st->st_ino);
	if (slot->name != NULL)
		return slot->name;
	*slot = (struct known){st->st_dev, st->st_ino, strdup(member_name())};
	if (slot->name == NULL)
		applet_fail(ENOMEM, "%s", member_name());
	known_count++;
	return NULL;
}

static bool is_kept(const char *attribute)
{
	return strncmp(attribute, "user.", 5) == 0 || strcmp(attribute, "system.posix_acl_access") == 0 ||
	       strcmp(attribute, "system.posix_acl_default") == 0;
}

/* No link is followed: the last name is looked up in an open directory, through /proc since these calls know no other way. */
static const char *path_of(int dir, const char *name)
{
	static char path[32 + NAME_BYTES];

	snprintf(path, sizeof path, PROC_FD, dir, name);
	return path;
}

static void take_attributes(int dir, const char *name)
{
	static char list[LIST_MAX_BYTES], value[VALUE_MAX], key[NAME_BYTES + 32];
	const char *path = path_of(dir, name);
	ssize_t n = llistxattr(path, list, sizeof list);

	if (n < 0 && errno != ENOTSUP && errno != ENOENT)
		applet_fail(errno, "%s", member_name());
	for (const char *at = list; n > 0 && at < list + n; at += strlen(at) + 1) {
		ssize_t len;

		if (!is_kept(at))
			continue;
		len = lgetxattr(path, at, value, sizeof value);
		if (len < 0 && errno != ENODATA)
			applet_fail(errno, "%s", member_name());
		if (len < 0 || strchr(at, '=') != NULL)
			continue;	/* gone meanwhile, or of a name that the format can't say */
		snprintf(key, sizeof key, "SCHILY.xattr.%.255s", at);
		pax_record(&pax, key, value, (size_t)len);
	}
}

static void take_records(int dir, const char *name, const struct stat *st)
{
	char text[48];

	pax.len = 0;
	if (st->st_mtim.tv_nsec != 0 && st->st_mtim.tv_sec >= 0)
		pax_record(&pax, "mtime", text, (size_t)snprintf(text, sizeof text, "%lld.%09ld", (long long)st->st_mtim.tv_sec, st->st_mtim.tv_nsec));
	take_attributes(dir, name);
}

/* An empty file whose name says something. */
static void out_mark(const char *name)
{
	const struct stat none = {0};
	size_t before = member_push(name);

	member_header(&none, '0', 0, "", NULL);
	member_cut(before);
}

static void out_any(int dir, const char *name, unsigned char type, void *context);

static bool has_mark(int dir, const char *name, const char *attribute)
{
	char value[2];

	return lgetxattr(path_of(dir, name), attribute, value, sizeof value) >= 0 || errno == ERANGE;
}

static void out_directory(int dir, const char *name, const struct stat *st, const struct place *place)
{
	bool is_moved = !place->is_seen && has_mark(dir, name, "trusted.overlay.redirect");
	bool is_opaque = !place->is_seen && (is_moved || has_mark(dir, name, "trusted.overlay.opaque"));
	CLEANUP_FD int upper = open_dir(dir, name);
	CLEANUP_FD int seen = place->seen >= 0 ? open_dir(place->seen, name) : -1;
	struct place below = {upper, seen, place->is_seen || is_moved, place->depth + 1};
	int error;

	if (upper < 0 || (is_moved && seen < 0))
		applet_fail(errno, "%s", member_name());
	member_fail_too_deep(below.depth);
	take_records(dir, name, st);
	member_push("/");
	member_header(st, '5', 0, "", &pax);
	if (is_opaque)
		out_mark(OPAQUE + 1);
	error = each_entry(is_moved ? seen : upper, out_any, &below);
	if (error != 0)
		applet_fail(-error, "%s", member_name());
}

static void out_regular(int dir, const char *name)
{
	CLEANUP_FD int fd = openat(dir, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
	const char *earlier;
	struct stat st;

	if (fd < 0 && errno == ENOENT)
		return;
	if (fd < 0 || fstat(fd, &st) != 0)
		applet_fail(errno, "%s", member_name());
	if (!S_ISREG(st.st_mode))
		return;
	earlier = earlier_name(&st);
	take_records(dir, name, &st);
	if (earlier != NULL)
		member_header(&st, '1', 0, earlier, NULL);
	else
		member_file(fd, &st, &pax);
}

static void out_other(int dir, const char *name, const struct stat *st, bool is_seen)
{
	char mark[NAME_BYTES + sizeof WHITEOUT];

	if (S_ISCHR(st->st_mode) && st->st_rdev == 0) {
		if (is_seen)
			return;
		snprintf(mark, sizeof mark, WHITEOUT "%s", name);
		out_mark(mark);
		return;
	}
	take_records(dir, name, st);
	member_push(name);
	if (S_ISLNK(st->st_mode))
		member_link(dir, name, st, &pax);
	else if (S_ISFIFO(st->st_mode))
		member_header(st, '6', 0, "", &pax);
}

static void out_any(int dir, const char *name, unsigned char type, void *context)
{
	const struct place *place = context;
	size_t before = strlen(member_name());
	struct stat st;

	(void)type;
	if (fstatat(dir, name, &st, AT_SYMLINK_NOFOLLOW) != 0) {
		if (errno != ENOENT)
			applet_fail(errno, "%s%s", member_name(), name);
		return;
	}
	if (strncmp(name, WHITEOUT, strlen(WHITEOUT)) == 0)
		applet_fail(EINVAL, "%s%s: in a layer, that name would say that one is gone", member_name(), name);
	if (S_ISREG(st.st_mode) || S_ISDIR(st.st_mode)) {
		member_push(name);
		if (S_ISDIR(st.st_mode))
			out_directory(dir, name, &st, place);
		else
			out_regular(dir, name);
	} else {
		out_other(dir, name, &st, place->is_seen);
	}
	member_cut(before);
}

void layer_out(int upper)
{
	static char text[PAX_MAX];
	CLEANUP_FD int seen = open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	struct place root = {upper, seen, false, 0};
	struct stat st;
	int error;

	pax = (struct pax){text, 0, sizeof text};
	if (fstat(upper, &st) != 0)
		applet_fail(errno, "the upper directory");
	take_records(upper, ".", &st);
	member_push("./");
	member_header(&st, '5', 0, "", &pax);
	member_cut(0);
	error = each_entry(upper, out_any, &root);
	if (error != 0)
		applet_fail(-error, "the upper directory");
	tar_end();
}
