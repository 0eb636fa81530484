/* Choosing the operation, and what all of them use. */
#define _GNU_SOURCE
#include "applet.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "init.h"

static uint8_t buffer[COPY_CHUNK];
static size_t buffered;

_Noreturn void applet_fail(int error, const char *format, ...)
{
	char text[600];
	va_list args;

	va_start(args, format);
	vsnprintf(text, sizeof text, format, args);
	va_end(args);
	dprintf(2, "%d %s: %s\n", error, text, strerror(error));
	_exit(1);
}

void out_flush(void)
{
	int error = write_all(1, buffer, buffered);

	if (error != 0)
		applet_fail(-error, "stdout");
	buffered = 0;
}

void out_bytes(const void *data, size_t len)
{
	const uint8_t *at = data;

	while (len > 0) {
		size_t n = (size_t)min_u64(len, sizeof buffer - buffered);

		memcpy(buffer + buffered, at, n);
		buffered += n;
		at += n;
		len -= n;
		if (buffered == sizeof buffer)
			out_flush();
	}
}

uint64_t parse_number(const char *text, int base)
{
	char *end;
	uint64_t value;

	errno = 0;
	value = strtoull(text, &end, base);
	if (errno != 0 || end == text || *end != 0 || text[0] == '-')
		applet_fail(EINVAL, "number %.32s", text);
	return value;
}

/* Call `function` for each entry but . and .. - the directory may change meanwhile. Returns 0 or -errno. */
int each_entry(int dir, entry_function *function, void *context)
{
	enum { BYTES = 8 << 10 };
	char *entries = malloc(BYTES);
	ssize_t n = entries ? 1 : -1;

	while (n > 0 && (n = syscall(SYS_getdents64, dir, entries, BYTES)) > 0) {
		for (ssize_t at = 0; at < n;) {
			const struct dirent64 *entry = (const struct dirent64 *)(entries + at);

			at += entry->d_reclen;
			if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0)
				function(dir, entry->d_name, entry->d_type, context);
		}
	}
	free(entries);
	return n < 0 ? -errno : 0;
}

/* Split into the directory ("." when there is none) and the last name. Returns 0 or the errno. */
int split_path(const char *path, char parent[PATH_BYTES], char base[NAME_BYTES])
{
	size_t len = strlen(path), start;

	if (len == 0)
		return ENOENT;
	while (len > 1 && path[len - 1] == '/')
		len--;
	for (start = len; start > 0 && path[start - 1] != '/'; start--)
		;
	if (len - start >= NAME_BYTES || start >= PATH_BYTES)
		return ENAMETOOLONG;
	if (start == len)
		return EBUSY;	/* the root directory */
	memcpy(base, path + start, len - start);
	base[len - start] = 0;
	strcpy(parent, ".");
	if (start > 0) {
		memcpy(parent, path, start);
		parent[start] = 0;
	}
	return 0;
}

int open_dir(int at, const char *name)
{
	return openat(at, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
}

_Noreturn void applet_main(uint32_t argc, char **argv)
{
	static const struct {
		const char *name;
		uint32_t operands;
		void (*run)(char **);
	} operations[] = {
		{"stat", 1, op_stat},       {"list", 1, op_list},     {"read", 3, op_read},   {"write", 3, op_write},
		{"mkdir", 3, op_mkdir},     {"move", 2, op_move},     {"remove", 2, op_remove}, {"tar-out", 1, op_tar_out},
		{"tar-in", 1, op_tar_in},   {"watch", 2, op_watch},
	};

	for (size_t i = 0; i < COUNT_OF(operations); i++) {
		if (strcmp(argv[0], operations[i].name) != 0)
			continue;
		if (argc != operations[i].operands + 1)
			applet_fail(EINVAL, "%s takes %u operands", argv[0], operations[i].operands);
		operations[i].run(argv + 1);
		out_flush();
		_exit(0);
	}
	applet_fail(ENOSYS, "operation %.32s", argv[0]);
}
