/* A tar archive on stdin, member by member. Whatever is wrong with it ends the operation with an error. */
#ifndef BARCHAN_TAR_READER_H
#define BARCHAN_TAR_READER_H

#include <time.h>

#include "applet.h"

struct tar_entry {
	char name[PATH_BYTES], link[PATH_BYTES];
	char type;
	uint64_t size;
	mode_t mode;
	struct timespec mtime;
};

bool tar_next(struct tar_entry *entry);
size_t tar_take(const uint8_t **out, size_t max);
void tar_skip_padding(uint64_t len);

#endif
