/* Unpack a tar from stdin below a directory. The archive is hostile: every field is checked, every path is resolved by the
 * kernel so that it can't leave the directory (openat2, RESOLVE_BENEATH), links must stay below it, and nothing but files,
 * directories and links is made. The first thing that is not right ends the operation. */
#define _GNU_SOURCE
#include "applet.h"
#include "tar_format.h"

#include <fcntl.h>
#include <linux/openat2.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>

enum {
	EXTENSION_MAX = 256 << 10,	/* one pax header or GNU long name */
	LATER_MAX = 65536,		/* directories whose mode waits for the end */
	LATER_BYTES_MAX = 4 << 20,
};

struct entry {
	char name[PATH_BYTES], link[PATH_BYTES];
	char type;
	uint64_t size;
	mode_t mode;
	struct timespec mtime;
};

/* What pax records and GNU long names say about the next member. */
static struct {
	bool has_name, has_link, has_size, has_mtime;
	char name[PATH_BYTES], link[PATH_BYTES];
	uint64_t size;
	struct timespec mtime;
} over;

struct later {
	char *name;
	mode_t mode;
	struct timespec mtime;
};

static int root = -1;
static uint8_t input[COPY_CHUNK];
static size_t input_at, input_len;
static struct later *later;
static size_t later_count, later_bytes;

/* --- Bytes --- */

/* The next bytes of the archive, at most `max`; 0 at its end. */
static size_t take(const uint8_t **out, size_t max)
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
		n = take(&part, len - done);
		if (n == 0)
			applet_fail(EBADMSG, "the archive is truncated");
		memcpy((uint8_t *)out + done, part, n);
	}
}

static void skip_padding(uint64_t len)
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
	if (!decimal(text, whole, &seconds) || seconds > UINT32_MAX * 16ull)
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
	skip_padding(size);
	if (type == 'x')
		pax_records(text, len);
	if (type != 'L' && type != 'K')
		return;
	len = strnlen(text, len);
	copy_text(type == 'L' ? over.name : over.link, text, len);
	*(type == 'L' ? &over.has_name : &over.has_link) = true;
}

/* --- Names --- */

/* Drop empty and "." components; refuse what is absolute or goes up. May end up empty: the directory itself. */
static void normalise(char *name)
{
	char *out = name;

	if (name[0] == '/')
		applet_fail(EPERM, "%.200s: absolute names are refused", name);
	for (char *at = name; *at != 0;) {
		size_t len = strcspn(at, "/");
		bool more = at[len] == '/';

		if (len == 2 && at[0] == '.' && at[1] == '.')
			applet_fail(EPERM, "a name with .. is refused");
		if (len > 0 && !(len == 1 && at[0] == '.')) {
			if (out > name)
				*out++ = '/';
			memmove(out, at, len);
			out += len;
		}
		at += len + more;
	}
	*out = 0;
}

static int open_beneath(const char *name, uint64_t flags)
{
	struct open_how how = {.flags = flags | O_CLOEXEC, .resolve = RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS};
	int fd = (int)syscall(SYS_openat2, root, name[0] ? name : ".", &how, sizeof how);

	if (fd < 0 && (errno == ENOSYS || errno == EPERM))
		applet_fail(errno, "the kernel or its filter does not offer openat2");
	return fd;
}

/* The directory `name`, made with every missing one on the way. */
static int open_or_make(const char *name)
{
	int fd = open_beneath(name, O_PATH | O_DIRECTORY);
	char prefix[PATH_BYTES] = "";

	if (fd >= 0 || errno != ENOENT)
		return fd;
	for (size_t at = 0, len; name[at] != 0; at += len + (name[at + len] == '/')) {
		CLEANUP_FD int parent = open_beneath(prefix, O_PATH | O_DIRECTORY);
		char component[NAME_BYTES];

		len = strcspn(name + at, "/");
		if (parent < 0)
			return -1;
		if (len >= NAME_BYTES) {
			errno = ENAMETOOLONG;
			return -1;
		}
		memcpy(component, name + at, len);
		component[len] = 0;
		if (mkdirat(parent, component, 0755) != 0 && errno != EEXIST)
			return -1;
		memcpy(prefix, name, at + len);
		prefix[at + len] = 0;
	}
	return open_beneath(name, O_PATH | O_DIRECTORY);
}

/* The open directory that holds `name`, and its last component. Members come in order, so the last one is kept. */
static int parent_of(const char *name, const char **base)
{
	static char last[PATH_BYTES];
	static int fd = -1;
	const char *slash = strrchr(name, '/');
	size_t len = slash ? (size_t)(slash - name) : 0;

	*base = slash ? slash + 1 : name;
	if (fd >= 0 && strlen(last) == len && memcmp(last, name, len) == 0)
		return fd;
	close_fd(&fd);
	memcpy(last, name, len);
	last[len] = 0;
	fd = open_or_make(last);
	if (fd < 0)
		applet_fail(errno, "%.200s", name);
	return fd;
}

static unsigned components(const char *name)
{
	unsigned count = 0;

	for (; *name != 0; name++)
		count += *name == '/';
	return count;
}

/* A symbolic link may go up only with its first components, no further than the directory, and only from where no link
 * leads: then what it names is below the directory, whatever other links the archive holds. */
static void check_symlink(const struct entry *entry)
{
	const char *at = entry->link;
	unsigned up = 0;

	if (*at == '/')
		applet_fail(EPERM, "%.200s: a link to an absolute path is refused", entry->name);
	for (; strncmp(at, "..", 2) == 0 && (at[2] == '/' || at[2] == 0); up++)
		for (at += 2; *at == '/'; at++)
			;
	for (; *at != 0; at += strcspn(at, "/"), at += strspn(at, "/"))
		if (strncmp(at, "..", 2) == 0 && (at[2] == '/' || at[2] == 0))
			applet_fail(EPERM, "%.200s: a link with an inner .. is refused", entry->name);
	if (up > components(entry->name))
		applet_fail(EPERM, "%.200s: a link that leaves the directory is refused", entry->name);
	if (up > 0) {
		struct open_how how = {.flags = O_PATH | O_DIRECTORY | O_CLOEXEC, .resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS};
		char parent[PATH_BYTES] = ".";
		const char *slash = strrchr(entry->name, '/');

		memcpy(parent, entry->name, (size_t)(slash - entry->name));
		parent[slash - entry->name] = 0;
		CLEANUP_FD int fd = (int)syscall(SYS_openat2, root, parent, &how, sizeof how);
		if (fd < 0 && errno != ENOENT)
			applet_fail(errno, "%.200s: a link upwards from behind a link is refused", entry->name);
	}
}

/* --- Members --- */

/* Run `make`; when something of that name is there already, remove it and try once more. */
#define REPLACING(result, dir, base, make)                                                          \
	do {                                                                                        \
		(result) = (make);                                                                  \
		if ((result) < 0 && errno == EEXIST && unlinkat((dir), (base), 0) == 0)             \
			(result) = (make);                                                          \
	} while (0)

static void put_file(const struct entry *entry)
{
	const struct timespec times[2] = {entry->mtime, entry->mtime};
	const char *base;
	int dir = parent_of(entry->name, &base), error = 0;
	CLEANUP_FD int fd = -1;

	REPLACING(fd, dir, base, openat(dir, base, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
	if (fd < 0)
		applet_fail(errno, "%.200s", entry->name);
	for (uint64_t left = entry->size; left > 0 && error == 0;) {
		const uint8_t *part;
		size_t n = take(&part, (size_t)min_u64(left, sizeof input));

		error = n == 0 ? EBADMSG : -write_all(fd, part, n);
		left -= n;
	}
	if (error == 0 && (fchmod(fd, entry->mode & 0777) != 0 || futimens(fd, times) != 0))
		error = errno;
	if (error != 0) {
		unlinkat(dir, base, 0);
		applet_fail(error, error == EBADMSG ? "%.200s: the archive is truncated" : "%.200s", entry->name);
	}
	skip_padding(entry->size);
}

static void set_directory(const char *name, mode_t mode, struct timespec mtime)
{
	const struct timespec times[2] = {mtime, mtime};
	CLEANUP_FD int fd = open_beneath(name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW);

	if (fd < 0 || fchmod(fd, mode) != 0 || futimens(fd, times) != 0)
		applet_fail(errno, "%.200s", name);
}

/* Members still to come may need to write into the directory, so its own mode is set at the end. */
static void set_later(const struct entry *entry)
{
	const mode_t mode = entry->mode & 01777;
	size_t bytes = strlen(entry->name) + 1;

	if (later == NULL)
		later = calloc(LATER_MAX, sizeof *later);
	if (later == NULL || later_count == LATER_MAX || later_bytes + bytes > LATER_BYTES_MAX) {
		set_directory(entry->name, mode | 0700, entry->mtime);
		return;
	}
	later[later_count] = (struct later){.name = strdup(entry->name), .mode = mode, .mtime = entry->mtime};
	if (later[later_count++].name == NULL)
		applet_fail(ENOMEM, "%.200s", entry->name);
	later_bytes += bytes;
}

static void put_directory(const struct entry *entry)
{
	const char *base;
	int dir;

	if (entry->name[0] == 0)
		return;
	dir = parent_of(entry->name, &base);
	if (mkdirat(dir, base, 0700) == 0) {
		set_later(entry);
		return;
	}
	if (errno != EEXIST)
		applet_fail(errno, "%.200s", entry->name);
	CLEANUP_FD int fd = open_beneath(entry->name, O_PATH | O_DIRECTORY);
	if (fd < 0)
		applet_fail(errno, "%.200s", entry->name);
}

static void put_symlink(const struct entry *entry)
{
	const char *base;
	int dir = parent_of(entry->name, &base), done;

	check_symlink(entry);
	REPLACING(done, dir, base, symlinkat(entry->link, dir, base));
	if (done != 0)
		applet_fail(errno, "%.200s", entry->name);
}

static void put_hard_link(struct entry *entry)
{
	const char *base, *slash;
	char parent[PATH_BYTES];
	int dir = parent_of(entry->name, &base), done;

	normalise(entry->link);
	slash = strrchr(entry->link, '/');
	memcpy(parent, entry->link, slash ? (size_t)(slash - entry->link) : 0);
	parent[slash ? slash - entry->link : 0] = 0;
	CLEANUP_FD int from = open_beneath(parent, O_PATH | O_DIRECTORY);
	if (from < 0)
		applet_fail(errno, "%.200s", entry->link);
	REPLACING(done, dir, base, linkat(from, slash ? slash + 1 : entry->link, dir, base, 0));
	if (done != 0)
		applet_fail(errno, "%.200s", entry->name);
}

static void put(struct entry *entry)
{
	size_t len = strlen(entry->name);

	if (entry->type == 0 || entry->type == '7')
		entry->type = '0';
	if (entry->type == '0' && len > 0 && entry->name[len - 1] == '/')
		entry->type = '5';	/* how archives before POSIX say "directory" */
	normalise(entry->name);
	if (entry->type != '0' && entry->size != 0)
		applet_fail(EBADMSG, "%.200s: only files have content", entry->name);
	if (entry->type != '5' && entry->name[0] == 0)
		applet_fail(EBADMSG, "a member without a name");
	switch (entry->type) {
	case '0':
		put_file(entry);
		break;
	case '1':
		put_hard_link(entry);
		break;
	case '2':
		put_symlink(entry);
		break;
	case '5':
		put_directory(entry);
		break;
	default:
		applet_fail(EPERM, "%.200s: members of type '%c' are refused", entry->name,
			    entry->type >= ' ' && entry->type <= '~' ? entry->type : '?');
	}
}

/* --- The archive --- */

static void header_names(const struct tar_header *header, struct entry *entry)
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

static void read_member(const struct tar_header *header)
{
	static struct entry entry;

	entry.type = header->type;
	entry.size = number(header->size, sizeof header->size, "a size");
	if (strchr("xgLK", header->type) != NULL && header->type != 0) {
		read_extension(header->type, entry.size);
		return;
	}
	header_names(header, &entry);
	entry.mode = (mode_t)(number(header->mode, sizeof header->mode, "a mode") & 07777);
	entry.mtime = (struct timespec){.tv_sec = (time_t)min_u64(number(header->mtime, 12, "a time"), UINT32_MAX * 16ull)};
	if (over.has_name)
		strcpy(entry.name, over.name);
	if (over.has_link)
		strcpy(entry.link, over.link);
	if (over.has_size)
		entry.size = over.size;
	if (over.has_mtime)
		entry.mtime = over.mtime;
	if (entry.size > INT64_MAX)
		applet_fail(EFBIG, "%.200s", entry.name);
	over.has_name = over.has_link = over.has_size = over.has_mtime = false;
	put(&entry);
}

static bool is_zero(const struct tar_header *header)
{
	static const struct tar_header zero;

	return memcmp(header, &zero, sizeof zero) == 0;
}

void op_tar_in(char **argv)
{
	struct tar_header header;
	const uint8_t *rest;

	make_directories(argv[0]);
	root = open(argv[0], O_PATH | O_DIRECTORY | O_CLOEXEC);
	if (root < 0)
		applet_fail(errno, "%s", argv[0]);
	/* An archive ends with a block of zeros; without one it was cut off. */
	for (need(&header, sizeof header); !is_zero(&header); need(&header, sizeof header)) {
		check_header(&header);
		read_member(&header);
	}
	while (take(&rest, sizeof input) > 0)
		;
	while (later_count-- > 0)
		set_directory(later[later_count].name, later[later_count].mode, later[later_count].mtime);
}
