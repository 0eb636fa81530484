/* Small helpers: descriptors, numbers, small kernel files, removing trees, log lines. */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "supervisor.h"

void close_fd(int *fd)
{
	if (*fd >= 0)
		close(*fd);
	*fd = -1;
}

void log_line(const char *format, ...)
{
	char line[512];
	va_list arguments;

	va_start(arguments, format);
	int length = vsnprintf(line, sizeof(line) - 1, format, arguments);
	va_end(arguments);
	if (length < 0)
		return;
	if ((size_t)length > sizeof(line) - 2)
		length = sizeof(line) - 2;
	line[length++] = '\n';
	/* The log is the last resort: when it can't be written there is nobody left to tell. */
	if (write(STDERR_FILENO, line, (size_t)length) < 0)
		return;
}

int64_t monotonic_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * NS_PER_S + now.tv_nsec;
}

int write_at(int dir_fd, const char *path, const char *text)
{
	CLEANUP_FD int fd = openat(dir_fd, path, O_WRONLY | O_CLOEXEC);

	if (fd < 0)
		return -1;
	return write(fd, text, strlen(text)) < 0 ? -1 : 0;
}

int write_number_at(int dir_fd, const char *path, uint64_t number)
{
	char text[24];

	snprintf(text, sizeof(text), "%llu", (unsigned long long)number);
	return write_at(dir_fd, path, text);
}

/* The file's beginning as a string; its length, or -1. */
ssize_t read_at(int dir_fd, const char *path, char *text, size_t size)
{
	CLEANUP_FD int fd = openat(dir_fd, path, O_RDONLY | O_CLOEXEC);

	if (fd < 0)
		return -1;
	ssize_t length = read(fd, text, size - 1);
	if (length >= 0)
		text[length] = '\0';
	return length;
}

/* The init's uid and gid inside its sandbox; no guest program runs as it. */
uid_t init_uid(void)
{
	return options.init_as_guest_root ? 0 : 65535;
}

/* The number after `name` in a file of "name number" lines, or the file's only number when name is NULL; 0 if absent. */
uint64_t counter_at(int dir_fd, const char *path, const char *name)
{
	char text[4096], *line, *rest = text;

	if (read_at(dir_fd, path, text, sizeof(text)) <= 0)
		return 0;
	if (!name)
		return strtoull(text, NULL, 10);
	while ((line = strsep(&rest, "\n"))) {
		size_t length = strlen(name);
		if (strncmp(line, name, length) == 0 && line[length] == ' ')
			return strtoull(line + length, NULL, 10);
	}
	return 0;
}

int parse_number(const char *text, uint64_t *number)
{
	char *end;

	if (!text || *text < '0' || *text > '9')
		return errno = EINVAL, -1;
	errno = 0;
	*number = strtoull(text, &end, 10);
	if (errno || *end)
		return errno = EINVAL, -1;
	return 0;
}

/* Safe as one component of a path: letters, digits, `-` and `_`; `.` only inside. */
bool is_name(const char *text, size_t length_max)
{
	size_t length = strlen(text);

	return length > 0 && length <= length_max && text[0] != '.' &&
	       strspn(text, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.") == length;
}

/* Remove a directory and what is in it. A cgroup's files go with it, so there only directories are touched.
 * A missing directory is fine. Never crosses a symbolic link; the depth is bounded by what the callers let exist. */
int remove_tree_at(int dir_fd, const char *name, bool is_cgroup)
{
	struct dirent *entry;
	int fd, result = 0;

	if (unlinkat(dir_fd, name, AT_REMOVEDIR) == 0 || errno == ENOENT)
		return 0;
	fd = openat(dir_fd, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	if (fd < 0)
		return errno == ENOENT ? 0 : -1;
	DIR *dir = fdopendir(fd);
	if (!dir) {
		close(fd);
		return -1;
	}
	while (result == 0 && (entry = readdir(dir))) {
		if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
			continue;
		if (entry->d_type == DT_DIR)
			result = remove_tree_at(dirfd(dir), entry->d_name, is_cgroup);
		else if (!is_cgroup && unlinkat(dirfd(dir), entry->d_name, 0) < 0 && errno != ENOENT)
			result = -1;
	}
	int error = errno;
	closedir(dir);
	if (result == 0 && unlinkat(dir_fd, name, AT_REMOVEDIR) < 0 && errno != ENOENT)
		return -1;
	errno = error;
	return result;
}

/* Field 22 of a process's line in /proc, in clock ticks; 0 if it is gone. */
uint64_t read_start_time(pid_t pid)
{
	char path[32], text[1024];
	unsigned long long start_time = 0;

	snprintf(path, sizeof(path), "/proc/%d/stat", pid);
	if (read_at(-1, path, text, sizeof(text)) <= 0)
		return 0;
	/* The name, field 2, may hold anything; field 3 follows its last parenthesis. */
	char *rest = strrchr(text, ')');
	if (rest)
		sscanf(rest + 1, " %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu", &start_time);
	return start_time;
}
