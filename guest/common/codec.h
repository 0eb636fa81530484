/* Fields of frame bodies: little endian, unaligned, lengths checked before anything is touched. */
#ifndef BARCHAN_CODEC_H
#define BARCHAN_CODEC_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

struct span {
	const uint8_t *data;
	uint32_t len;
};

/* A body being decoded. Once something did not fit, `bad` stays set and every further field is zero. */
struct reader {
	const uint8_t *at, *end;
	bool bad;
};

static inline struct reader reader_of(const void *data, size_t len)
{
	return (struct reader){.at = data, .end = (const uint8_t *)data + len, .bad = false};
}

static inline bool reader_take(struct reader *r, void *out, size_t len)
{
	if (r->bad || (size_t)(r->end - r->at) < len) {
		r->bad = true;
		memset(out, 0, len);
		return false;
	}
	memcpy(out, r->at, len);
	r->at += len;
	return true;
}

static inline uint8_t get_u8(struct reader *r)
{
	uint8_t v;

	reader_take(r, &v, 1);
	return v;
}

static inline uint16_t get_u16(struct reader *r)
{
	uint8_t b[2];

	reader_take(r, b, sizeof b);
	return (uint16_t)(b[0] | b[1] << 8);
}

static inline uint32_t load_u32(const uint8_t *b)
{
	return (uint32_t)b[0] | (uint32_t)b[1] << 8 | (uint32_t)b[2] << 16 | (uint32_t)b[3] << 24;
}

static inline uint32_t get_u32(struct reader *r)
{
	uint8_t b[4];

	reader_take(r, b, sizeof b);
	return load_u32(b);
}

static inline uint64_t load_u64(const uint8_t *b)
{
	return load_u32(b) | (uint64_t)load_u32(b + 4) << 32;
}

static inline uint64_t get_u64(struct reader *r)
{
	uint8_t b[8];

	reader_take(r, b, sizeof b);
	return load_u64(b);
}

static inline struct span get_bytes(struct reader *r)
{
	uint32_t len = get_u32(r);
	struct span s = {.data = r->at, .len = 0};

	if (r->bad || (size_t)(r->end - r->at) < len) {
		r->bad = true;
		return s;
	}
	s.len = len;
	r->at += len;
	return s;
}

/* As get_bytes, and a NUL inside is an error. */
static inline struct span get_str(struct reader *r)
{
	struct span s = get_bytes(r);

	if (s.len > 0 && memchr(s.data, 0, s.len) != NULL)
		r->bad = true;
	return s;
}

static inline bool reader_done(const struct reader *r)
{
	return !r->bad && r->at == r->end;
}

/* Writers: the caller made room; each returns the place after the field. */
static inline uint8_t *put_u8(uint8_t *at, uint8_t v)
{
	*at = v;
	return at + 1;
}

static inline uint8_t *put_u16(uint8_t *at, uint16_t v)
{
	at[0] = (uint8_t)v;
	at[1] = (uint8_t)(v >> 8);
	return at + 2;
}

static inline uint8_t *put_u32(uint8_t *at, uint32_t v)
{
	at = put_u16(at, (uint16_t)v);
	return put_u16(at, (uint16_t)(v >> 16));
}

static inline uint8_t *put_u64(uint8_t *at, uint64_t v)
{
	at = put_u32(at, (uint32_t)v);
	return put_u32(at, (uint32_t)(v >> 32));
}

static inline uint8_t *put_bytes(uint8_t *at, const void *data, uint32_t len)
{
	at = put_u32(at, len);
	if (len > 0)
		memcpy(at, data, len);
	return at + len;
}

#endif
