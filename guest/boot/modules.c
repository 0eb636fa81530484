/* The drivers of a distribution's kernel, which has them as modules: their files lie here in the order in which they can be loaded. */
#define _GNU_SOURCE
#include "boot.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/syscall.h>

enum { MODULES_MAX = 100 };

void modules_load(void)
{
	char path[PATH_BYTES];

	for (unsigned i = 0; i < MODULES_MAX; i++) {
		snprintf(path, sizeof path, "/modules/%02u.ko", i);
		CLEANUP_FD int fd = open(path, O_RDONLY | O_CLOEXEC);
		if (fd < 0 && errno == ENOENT)
			return;
		/* EEXIST: another has brought it. */
		if (fd < 0 || (syscall(SYS_finit_module, fd, "", 0) != 0 && errno != EEXIST))
			die(path);
		unlink(path);
	}
}
