#include "siphash.h"

#include "codec.h"

struct state {
	uint64_t a, b, c, d;
};

static uint64_t rotl(uint64_t v, int bits)
{
	return v << bits | v >> (64 - bits);
}

static void rounds(struct state *s, int count)
{
	while (count-- > 0) {
		s->a += s->b;
		s->b = rotl(s->b, 13) ^ s->a;
		s->a = rotl(s->a, 32);
		s->c += s->d;
		s->d = rotl(s->d, 16) ^ s->c;
		s->a += s->d;
		s->d = rotl(s->d, 21) ^ s->a;
		s->c += s->b;
		s->b = rotl(s->b, 17) ^ s->c;
		s->c = rotl(s->c, 32);
	}
}

static void absorb(struct state *s, uint64_t word)
{
	s->d ^= word;
	rounds(s, 2);
	s->a ^= word;
}

struct digest siphash128(const uint64_t key[2], const void *data, size_t len)
{
	/* The constants are the ones of the SipHash paper; 0xee marks the 128 bit variant. */
	struct state s = {
		.a = key[0] ^ 0x736f6d6570736575,
		.b = key[1] ^ 0x646f72616e646f6d ^ 0xee,
		.c = key[0] ^ 0x6c7967656e657261,
		.d = key[1] ^ 0x7465646279746573,
	};
	const uint8_t *at = data;
	uint64_t last = (uint64_t)len << 56;
	struct digest out;

	for (; (size_t)(at - (const uint8_t *)data) + 8 <= len; at += 8)
		absorb(&s, load_u64(at));
	for (size_t i = 0; i < len % 8; i++)
		last |= (uint64_t)at[i] << (8 * i);
	absorb(&s, last);
	s.c ^= 0xee;
	rounds(&s, 4);
	out.low = s.a ^ s.b ^ s.c ^ s.d;
	s.b ^= 0xdd;
	rounds(&s, 4);
	out.high = s.a ^ s.b ^ s.c ^ s.d;
	return out;
}
