/* SipHash-2-4 with 128 bits of output: a keyed digest that a peer without the key can't find collisions for. */
#ifndef BARCHAN_SIPHASH_H
#define BARCHAN_SIPHASH_H

#include <stddef.h>
#include <stdint.h>

struct digest {
	uint64_t low, high;
};

struct digest siphash128(const uint64_t key[2], const void *data, size_t len);

#endif
