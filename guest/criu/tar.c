/* CRIU packs what is in each tmpfs with tar and gzip. A sandbox's two are mostly empty: then neither is run. */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <stdbool.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "shim.h"

/* As `tar --create --gzip` makes it of nothing: 10,240 zeros. */
static const unsigned char empty_archive[] = {
	0x1f, 0x8b, 0x08, 0x00, 0x00, 0x00, 0x00, 0x00, 0x02, 0x03, 0xed, 0xc1, 0x01, 0x0d, 0x00, 0x00, 0x00, 0xc2, 0xa0, 0xf7, 0x4f, 0x6d, 0x0e,
	0x37, 0xa0, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x80, 0x37, 0x03, 0x9a, 0xde, 0x1d, 0x27, 0x00, 0x28, 0x00, 0x00,
};

/* Nothing but sockets, which tar leaves out and CRIU makes, and the mode that it is mounted with. */
static bool is_empty(int dir_fd)
{
	struct stat info;
	struct dirent *entry;
	DIR *dir;

	if (fstat(dir_fd, &info) < 0 || ((info.st_mode & 07777) != 01777 && (info.st_mode & 07777) != 0700))
		return false;
	int fd = openat(dir_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	bool result = fd >= 0 && (dir = fdopendir(fd));
	while (result && (entry = readdir(dir)))
		result = strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0 || entry->d_type == DT_SOCK;
	return result;
}

/* The directory is the standard input of the one, the archive that of the other. */
static bool is_done_without_tar(const char *what)
{
	unsigned char start[sizeof(empty_archive) + 1];

	if (strcmp(what, "--create") == 0)
		return is_empty(STDIN_FILENO) && write(STDOUT_FILENO, empty_archive, sizeof(empty_archive)) == sizeof(empty_archive);
	return strcmp(what, "--extract") == 0 && pread(STDIN_FILENO, start, sizeof(start), 0) == sizeof(empty_archive) &&
	       memcmp(start, empty_archive, sizeof(empty_archive)) == 0;
}

EXPORT int execvp(const char *file, char *const arguments[])
{
	if (strcmp(file, "tar") == 0 && arguments[1] && is_done_without_tar(arguments[1]))
		_exit(0);
	return execvpe(file, arguments, environ);
}
