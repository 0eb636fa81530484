/* Bounded storage of output. Small streams live in memory; a larger one gets an unlinked file of its own, used as a
 * ring. All spools together stay below a bound; past it the longest-ended processes lose theirs first, and a running
 * stream keeps the ring it has (at least MEMORY_RING_MAX bytes). */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "init.h"

enum {
	MEMORY_RING_MIN = 512,
	MEMORY_RING_MAX = 16 << 10,
	MEMORY_TOTAL_MAX = 8 << 20,	/* beyond it even small streams go to files, so that the init stays small */
	FILES_MAX = 4096,
};

static uint64_t used, used_max, memory_used;
static uint64_t files, files_max;

void spool_configure(uint64_t bytes_max, uint64_t nofile)
{
	used_max = bytes_max;
	files_max = min_u64(nofile / 4, FILES_MAX);
}

uint64_t spool_bytes_used(void)
{
	return used;
}

/* Whether `want` bytes of this spool fit the sandbox's bound, after evicting what may go (perhaps this spool itself). */
static bool can_hold(const struct spool *spool, uint64_t want)
{
	while (used - spool->charged + want > used_max)
		if (!process_evict_oldest())
			return false;
	return spool->limit > 0;
}

static int open_file(void)
{
	int fd;

	while (files >= files_max)
		if (!process_evict_oldest())
			return -1;
	fd = openat(settings.spool_dir, ".", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
	if (fd < 0 && (errno == EOPNOTSUPP || errno == EISDIR || errno == EINVAL || errno == ENOENT))
		fd = memfd_create("spool", MFD_CLOEXEC);
	if (fd >= 0)
		files++;
	return fd;
}

static bool transfer(int fd, bool out, uint8_t *data, size_t len, uint64_t at)
{
	while (len > 0) {
		ssize_t n = out ? pwrite(fd, data, len, (off_t)at) : pread(fd, data, len, (off_t)at);
		if (n == 0 || (n < 0 && errno != EINTR))
			return false;
		if (n > 0) {
			data += n;
			len -= (size_t)n;
			at += (uint64_t)n;
		}
	}
	return true;
}

static bool move_to_file(struct spool *spool)
{
	int fd = open_file();

	if (fd < 0)
		return false;
	/* Making room for the file may have evicted this very spool. */
	if (spool->limit == 0 || !transfer(fd, true, spool->memory, spool->head, 0)) {
		close(fd);
		files--;
		return false;
	}
	if (spool->memory != NULL)
		memory_used -= spool->ring;
	free(spool->memory);
	spool->memory = NULL;
	spool->fd = fd;
	spool->ring = spool->limit;
	return true;
}

static void grow_memory(struct spool *spool, uint64_t want)
{
	uint32_t ring = spool->ring ? spool->ring : MEMORY_RING_MIN;
	uint8_t *memory;

	while (ring < want && ring < MEMORY_RING_MAX)
		ring *= 2;
	memory = realloc(spool->memory, ring);
	if (memory == NULL)
		return;	/* the bytes will be lost, and the next offset tells */
	memory_used += ring - spool->ring;
	used += ring - spool->charged;
	spool->memory = memory;
	spool->ring = spool->charged = ring;
}

/* Make the ring large enough to keep `len` more bytes, as far as the bounds allow. */
void spool_make_room(struct spool *spool, size_t len)
{
	uint64_t want = min_u64(spool->head + len, spool->limit);
	bool holds;

	if (spool->tail > 0 || want <= spool->charged)
		return;
	holds = can_hold(spool, want);
	if (spool->fd < 0) {
		bool in_memory = want <= MEMORY_RING_MAX && memory_used < MEMORY_TOTAL_MAX;

		if (!holds || in_memory || !move_to_file(spool)) {
			/* Every running stream may have its small ring, whatever the sandbox's bound says. */
			if (spool->limit > 0 && spool->ring < MEMORY_RING_MAX)
				grow_memory(spool, want);
			return;
		}
	}
	if (spool->limit == 0)
		return;
	if (holds) {
		used += want - spool->charged;
		spool->charged = (uint32_t)want;
	} else {
		spool->ring = spool->charged;
	}
}

/* Bytes that fit without dropping one that is not acknowledged. */
uint64_t spool_room(const struct spool *spool, uint64_t acked)
{
	if (spool->ring == 0)
		return UINT64_MAX;	/* nothing can be kept: dropping is all that is left */
	return spool->ring - (spool->head - max_u64(acked, spool->tail));
}

static bool ring_copy(const struct spool *spool, bool out, uint64_t offset, uint8_t *data, size_t len)
{
	while (len > 0) {
		uint64_t at = offset % spool->ring;
		size_t n = (size_t)min_u64(len, spool->ring - at);

		if (spool->fd >= 0) {
			if (!transfer(spool->fd, out, data, n, at))
				return false;
		} else if (out) {
			memcpy(spool->memory + at, data, n);
		} else {
			memcpy(data, spool->memory + at, n);
		}
		offset += n;
		data += n;
		len -= n;
	}
	return true;
}

void spool_append(struct spool *spool, const uint8_t *data, size_t len)
{
	size_t keep = (size_t)min_u64(len, spool->ring);
	bool stored;

	/* The const is dropped only to share the ring's loop; `out` reads from it. */
	stored = ring_copy(spool, true, spool->head + (len - keep), (uint8_t *)(uintptr_t)data + (len - keep), keep);
	spool->head += len;
	if (!stored)
		spool_drop(spool);	/* the spool's disk is full: a gap, told by the next offset */
	if (spool->head - spool->tail > spool->ring)
		spool->tail = spool->head - spool->ring;
}

bool spool_read(struct spool *spool, uint64_t offset, uint8_t *out, size_t len)
{
	if (ring_copy(spool, false, offset, out, len))
		return true;
	spool_drop(spool);
	return false;
}

/* Give back what an ended stream's memory ring does not use. */
void spool_trim(struct spool *spool)
{
	uint8_t *memory;

	if (spool->memory == NULL || spool->tail > 0 || spool->head >= spool->ring)
		return;
	if (spool->head == 0) {
		spool_drop(spool);
		return;
	}
	memory = realloc(spool->memory, spool->head);
	if (memory == NULL)
		return;
	memory_used -= spool->ring - (uint32_t)spool->head;
	used -= spool->charged - (uint32_t)spool->head;
	spool->memory = memory;
	spool->ring = spool->charged = (uint32_t)spool->head;
	spool->limit = spool->ring;
}

/* Forget every byte and keep none from now on. Returns whether there was something to free. */
bool spool_drop(struct spool *spool)
{
	bool had = spool->charged > 0;

	if (spool->memory != NULL)
		memory_used -= spool->ring;
	free(spool->memory);
	spool->memory = NULL;
	if (spool->fd >= 0) {
		close_fd(&spool->fd);
		files--;
	}
	used -= spool->charged;
	spool->charged = spool->ring = spool->limit = 0;
	spool->tail = spool->head;
	return had;
}
