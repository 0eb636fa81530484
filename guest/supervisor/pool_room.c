/* The room of the pool. Its file has blocks of the host's disk for every byte that the file system in it may use, taken before
 * it may: so what a guest has written can't be lost later, when the kernel writes it and the disk is full. It grows in steps
 * while it is used, and its room is given back only with the pool. A pool that is nearly full and can't grow is given up: a
 * guest that ran out of it would fail by the platform's doing, and nobody could tell. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/btrfs.h>
#include <linux/loop.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "supervisor.h"

#define STEPS 32u /* of its whole size: so much is free, or will be before the next look */
#define STEP_BYTES_MIN (UINT64_C(512) << 20)
#define LEAST_SHARE 4u /* of a step: what must be free of a pool that goes on */
#define METADATA_LEAST (UINT64_C(16) << 20)

static int file_fd = -1, device_fd = -1, counts_fd = -1;
static uint64_t size_bytes;

uint64_t pool_bytes(void)
{
	return options.pool_mib << 20;
}

static uint64_t step_bytes(void)
{
	uint64_t step = pool_bytes() / STEPS;

	return step < STEP_BYTES_MIN ? STEP_BYTES_MIN : step;
}

/* Up to `bytes`; with no part of it when that fails. */
static int take(uint64_t bytes)
{
	if (bytes > pool_bytes())
		bytes = pool_bytes();
	if (fallocate(file_fd, 0, (off_t)size_bytes, (off_t)(bytes - size_bytes)) < 0) {
		int error = errno;
		if (ftruncate(file_fd, (off_t)size_bytes) < 0)
			log_line("giving room of the pool back: %s", strerror(errno));
		return errno = error, -1;
	}
	size_bytes = bytes;
	return 0;
}

/* What the pool begins with, in its empty file, which is this one's from now on. A disk that can't keep room for a file has it
 * sparse, and whole. */
int pool_take_room(int fd)
{
	file_fd = fd;
	if (take(2 * step_bytes()) == 0)
		return 0;
	if (errno != EOPNOTSUPP)
		return -1;
	log_line("the disk keeps no room for files: what guests write is lost if it is full");
	size_bytes = pool_bytes();
	return ftruncate(file_fd, (off_t)size_bytes);
}

/* The device over the file, which is this one's from now on. */
void pool_device(int fd)
{
	device_fd = fd;
}

void pool_let_room_go(void)
{
	close_fd(&file_fd);
	close_fd(&device_fd);
	close_fd(&counts_fd);
}

/* Where the kernel counts the bytes of the mounted pool; while the host's /sys is still in reach. */
int pool_open_counts(void)
{
	struct btrfs_ioctl_fs_info_args info;
	char path[96], *end = path + snprintf(path, sizeof(path), "/sys/fs/btrfs/");

	if (ioctl(pool_descriptor(), BTRFS_IOC_FS_INFO, &info) < 0)
		return -1;
	for (unsigned i = 0; i < BTRFS_FSID_SIZE; i++)
		end += sprintf(end, "%s%02x", i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", info.fsid[i]);
	strcpy(end, "/allocation");
	counts_fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	return counts_fd;
}

static uint64_t count(const char *kind, const char *what)
{
	char path[64], text[32] = "";

	snprintf(path, sizeof(path), "%s/%s", kind, what);
	CLEANUP_FD int fd = openat(counts_fd, path, O_RDONLY | O_CLOEXEC);
	if (fd < 0 || read(fd, text, sizeof(text) - 1) <= 0)
		log_line("reading %s of the pool: %s", path, strerror(errno));
	return strtoull(text, NULL, 10);
}

/* Of what one kind of data may take; what guests have written and the kernel hasn't yet is taken already, and statfs can't
 * see it. */
static uint64_t free_of(const char *kind, uint64_t unallocated)
{
	static const char *const taken[] = {"bytes_used", "bytes_may_use", "bytes_reserved", "bytes_pinned", "bytes_readonly"};
	uint64_t room = count(kind, "total_bytes") + unallocated, sum = 0;

	for (size_t i = 0; i < COUNT(taken); i++)
		sum += count(kind, taken[i]);
	return sum < room ? room - sum : 0;
}

static bool has_free(uint64_t bytes)
{
	uint64_t allocated = count("data", "total_bytes") + count("metadata", "total_bytes") + count("system", "total_bytes");
	uint64_t unallocated = allocated < size_bytes ? size_bytes - allocated : 0;

	return free_of("data", unallocated) >= bytes && free_of("metadata", unallocated) >= METADATA_LEAST;
}

static int grow(void)
{
	struct btrfs_ioctl_vol_args all = {.name = "max"};
	struct statvfs host;
	uint64_t step = step_bytes();

	if (size_bytes >= pool_bytes())
		return errno = ENOSPC, -1;
	/* The node itself needs some of the disk, too. */
	if (fstatvfs(file_fd, &host) < 0 || (uint64_t)host.f_bavail * host.f_frsize < step + step / LEAST_SHARE)
		return errno = ENOSPC, -1;
	if (take(size_bytes + step) < 0 || ioctl(device_fd, LOOP_SET_CAPACITY, 0) < 0)
		return -1;
	return ioctl(pool_descriptor(), BTRFS_IOC_RESIZE, &all);
}

/* To be asked again and again. Why the pool can't be gone on with, or NULL. */
const char *pool_fault(void)
{
	if (pool_is_lost())
		return "its disk failed";
	if (has_free(step_bytes()) || grow() == 0)
		return NULL;
	int error = errno;
	if (has_free(step_bytes() / LEAST_SHARE))
		return NULL;
	errno = error;
	log_line("the pool can't grow beyond %llu MiB: %s", (unsigned long long)(size_bytes >> 20), strerror(errno));
	return "it is full, or its disk";
}
