/* Small helpers that both guest programs use. */
#ifndef BARCHAN_UTIL_H
#define BARCHAN_UTIL_H

#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

#define CLEANUP_FD __attribute__((cleanup(cleanup_fd)))
#define COUNT_OF(array) (sizeof(array) / sizeof(array)[0])

static inline void close_fd(int *fd)
{
	if (*fd >= 0)
		close(*fd);
	*fd = -1;
}

static inline void cleanup_fd(int *fd)
{
	int keep = errno;

	close_fd(fd);
	errno = keep;
}

static inline uint64_t now_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

static inline uint64_t min_u64(uint64_t a, uint64_t b)
{
	return a < b ? a : b;
}

static inline uint64_t max_u64(uint64_t a, uint64_t b)
{
	return a > b ? a : b;
}

/* Write everything to a blocking descriptor; 0 or -errno. */
static inline int write_all(int fd, const void *data, size_t len)
{
	const uint8_t *at = data;

	while (len > 0) {
		ssize_t n = write(fd, at, len);
		if (n < 0 && errno != EINTR)
			return -errno;
		if (n > 0) {
			at += n;
			len -= (size_t)n;
		}
	}
	return 0;
}

#endif
