/* The header block that both tar directions share (POSIX ustar, with pax records before it). */
#ifndef BARCHAN_TAR_FORMAT_H
#define BARCHAN_TAR_FORMAT_H

enum { TAR_BLOCK = 512 };

struct tar_header {
	char name[100], mode[8], uid[8], gid[8], size[12], mtime[12], checksum[8], type, link[100], magic[6], version[2];
	char user[32], group[32], major[8], minor[8], prefix[155], unused[12];
};
_Static_assert(sizeof(struct tar_header) == TAR_BLOCK, "a tar header is one block");

/* The sum of all bytes, the checksum's own taken as spaces. */
static inline unsigned tar_checksum(const struct tar_header *header)
{
	const unsigned char *bytes = (const unsigned char *)header;
	unsigned sum = 8 * ' ';

	for (unsigned i = 0; i < TAR_BLOCK; i++)
		sum += bytes[i];
	for (unsigned i = 0; i < sizeof header->checksum; i++)
		sum -= (unsigned char)header->checksum[i];
	return sum;
}

#endif
