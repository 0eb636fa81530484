/* A tar archive on stdin, member by member. Whatever is wrong with it goes to `tar_fail`, which the program has. */
#ifndef BARCHAN_TAR_READER_H
#define BARCHAN_TAR_READER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <time.h>

enum { TAR_PATH_BYTES = 4096 };

struct tar_entry {
	char name[TAR_PATH_BYTES], link[TAR_PATH_BYTES];
	char type;
	uint64_t size, uid, gid;
	mode_t mode;
	struct timespec mtime;
	bool is_device_0;	/* a device whose numbers are both 0 */
	const uint8_t *xattrs;	/* each: NAME, 0, length in four bytes of this machine, value; valid until the next member */
	size_t xattrs_len;
};

_Noreturn void tar_fail(int error, const char *format, ...) __attribute__((format(printf, 2, 3)));
void tar_limit(uint64_t bytes);	/* of the whole archive */
bool tar_next(struct tar_entry *entry);
size_t tar_take(const uint8_t **out, size_t max);
void tar_skip_padding(uint64_t len);
const char *tar_normalise(char *name);

#endif
