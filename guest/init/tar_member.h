/* Writing a tar on stdout, member by member, as a walk goes down a tree and up again. */
#ifndef BARCHAN_TAR_MEMBER_H
#define BARCHAN_TAR_MEMBER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>

/* What a header can't say, as records of pax. */
struct pax {
	char *text;
	size_t len, max;
};

/* The member's name grows and shrinks with the walk; the returned length brings the earlier one back. */
size_t member_push(const char *name);
void member_cut(size_t len);
const char *member_name(void);
void member_fail_too_deep(int depth);

/* E2BIG ends the operation where a record finds no room. */
void pax_record(struct pax *pax, const char *key, const void *value, size_t value_len);
/* `more`: further records, or NULL. */
void member_header(const struct stat *st, char type, uint64_t size, const char *link, const struct pax *more);
void member_file(int fd, const struct stat *st, const struct pax *more);
void member_link(int dir, const char *name, const struct stat *st, const struct pax *more);
void tar_end(void);

#endif
