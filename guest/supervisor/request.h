/* A request of the node, as its operations see it. */
#ifndef BARCHAN_SUPERVISOR_REQUEST_H
#define BARCHAN_SUPERVISOR_REQUEST_H

#include "supervisor.h"

#define KEYS_MAX 32u

struct request {
	const char *keys[KEYS_MAX], *values[KEYS_MAX];
	unsigned count;
	int passed_fd; /* came with the packet, or -1 */
	struct waiter waiter;
};

void refuse(const struct request *request, const char *stage, int error, const char *message);
const char *value_of(const struct request *request, const char *key);
const char *network_name(enum network network);
bool parse_sandbox(const struct request *request, struct spec *spec, bool can_be_slot);

#endif
