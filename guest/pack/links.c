/* Files that have several names: device and inode number -> where it was packed, and how many names have come by. A tree may be of
 * several file systems. */
#define _GNU_SOURCE
#include <stdlib.h>

#include "pack.h"

struct linked {
	uint64_t device, number, at;
	uint32_t links; /* 0: free */
};

static struct linked *entries;
static size_t size, count;

static struct linked *place_of(uint64_t device, uint64_t number)
{
	size_t at = ((number ^ device << 40) * UINT64_C(0x9E3779B97F4A7C15)) >> 20;

	for (;; at++) {
		struct linked *entry = &entries[at % size];
		if (!entry->links || (entry->number == number && entry->device == device))
			return entry;
	}
}

static void grow(void)
{
	struct linked *before = entries;
	size_t size_before = size;

	size = size ? 2 * size : 1024;
	entries = calloc(size, sizeof(*entries));
	if (!entries)
		fail_errno("remembering links");
	for (size_t i = 0; i < size_before; i++)
		if (before[i].links)
			*place_of(before[i].device, before[i].number) = before[i];
	free(before);
}

/* Where its inode lies, for the caller to fill in when that is 0: then this is its first name. */
uint64_t *links_find(const struct stat *stat)
{
	if (2 * count >= size)
		grow();
	struct linked *entry = place_of(stat->st_dev, stat->st_ino);
	if (!entry->links) {
		count++;
		*entry = (struct linked){.device = stat->st_dev, .number = stat->st_ino, .links = 1};
	}
	return &entry->at;
}

void links_again(const struct stat *stat)
{
	struct linked *entry = place_of(stat->st_dev, stat->st_ino);

	image_put_links(entry->at, ++entry->links);
}
