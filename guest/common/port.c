#define _GNU_SOURCE
#include "port.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "util.h"

#define PORTS "/sys/class/virtio-ports"

static bool has_name(int dir, const char *port, const char *name)
{
	char path[300], text[128];
	ssize_t n;

	snprintf(path, sizeof path, "%.255s/name", port);
	CLEANUP_FD int fd = openat(dir, path, O_RDONLY | O_CLOEXEC);
	n = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
	if (n <= 0)
		return false;
	text[n] = 0;
	text[strcspn(text, "\n")] = 0;
	return strcmp(text, name) == 0;
}

int port_find(const char *name, char path[PORT_PATH_MAX])
{
	DIR *ports = opendir(PORTS);
	struct dirent *entry;
	int length = 0;

	while (ports != NULL && length == 0 && (entry = readdir(ports)) != NULL)
		if (entry->d_name[0] != '.' && has_name(dirfd(ports), entry->d_name, name))
			length = snprintf(path, PORT_PATH_MAX, "/dev/%s", entry->d_name);
	if (ports != NULL)
		closedir(ports);
	if (length > 0 && length < PORT_PATH_MAX)
		return 0;
	return errno = ENOENT, -1;
}
