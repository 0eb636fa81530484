/* The pages of a restore may still be on their way into their files when CRIU starts: whoever opens one of these waits until all are
 * complete. The node holds a lock on the file `complete` beside them for as long as it writes, and then there is a byte in it; if
 * the node dies or fails, there is none. Without that file nothing is on its way. The files get their names last, so that a CRIU that
 * does not wait finds none (src/barchan/node/late_memory.py, src/barchan/snapshot/memory_file.py). */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "restore.h"
#include "shim.h"

#define PAGES "pages-"
#define COMPLETE "complete"

/* The process that waits is killed with all others when the restore takes too long. */
static int wait_for_pages(int dir_fd)
{
	char mark;
	int result, fd = (int)syscall(SYS_openat, dir_fd, COMPLETE, O_RDONLY | O_CLOEXEC);

	if (fd < 0)
		return errno == ENOENT ? 0 : -1;
	while ((result = flock(fd, LOCK_SH)) < 0 && errno == EINTR)
		;
	if (result == 0 && read(fd, &mark, 1) != 1)
		result = -1, errno = EIO;
	int error = errno;
	close(fd);
	errno = error;
	return result;
}

EXPORT int openat64(int dir_fd, const char *path, int flags, ...)
{
	mode_t mode = 0;
	va_list list;

	if (flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE) {
		va_start(list, flags);
		mode = va_arg(list, mode_t);
		va_end(list);
	}
	if (strncmp(path, PAGES, strlen(PAGES)) == 0 && getenv(RESTORE_VARIABLE) && wait_for_pages(dir_fd) < 0)
		return -1;
	return (int)syscall(SYS_openat, dir_fd, path, flags, mode);
}
