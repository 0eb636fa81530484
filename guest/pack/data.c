/* The content of a file, as it comes: what is not all zero is written, in pieces of a size that keeps the table of pieces short. A
 * file with a piece that is all zero has the table; any other is one run of blocks. So neither holes nor their places matter, only content. */
#define _GNU_SOURCE
#include <string.h>

#include "pack.h"

#define CHUNK_BITS_MIN 16u
#define CHUNK_BITS_MAX (BLOCK_BITS + 31u)
#define CHUNKS_WANTED (1u << 16)
#define CHUNKS_MAX (1u << (63 - CHUNK_BITS_MAX)) /* of the largest file there can be */
#define HOLE UINT32_MAX
#define BUFFER_BYTES (256u << 10)

static uint8_t buffer[BUFFER_BYTES], table[CHUNKS_MAX * 4];
static size_t filled;
static uint64_t size, offset; /* of the file; where the buffer begins in it */
static unsigned chunk_bits;
static size_t chunk_count, chunk_holes;
static uint32_t chunk_block; /* where the newest piece lies */
static uint64_t chunk;	     /* its number; UINT64_MAX: none yet */

void data_begin(uint64_t bytes)
{
	size = bytes;
	offset = 0;
	filled = 0;
	for (chunk_bits = CHUNK_BITS_MIN; chunk_bits < CHUNK_BITS_MAX && size >> chunk_bits >= CHUNKS_WANTED; chunk_bits++)
		;
	chunk_count = (size_t)((size >> chunk_bits) + ((size & ((UINT64_C(1) << chunk_bits) - 1)) != 0));
	chunk_holes = chunk_count;
	chunk = UINT64_MAX;
	memset(table, 0xff, chunk_count * 4);
}

/* Where the block at this place of the file goes. */
static uint64_t place_of(uint64_t at)
{
	uint64_t wanted = at >> chunk_bits, start = wanted << chunk_bits;

	if (wanted != chunk) {
		uint64_t room = UINT64_C(1) << chunk_bits;
		chunk_block = image_take_blocks(size - start < room ? size - start : room);
		chunk = wanted;
		chunk_holes--;
		put32(table + 4 * wanted, chunk_block);
	}
	return ((uint64_t)chunk_block << BLOCK_BITS) + (at - start);
}

static bool is_zero(const uint8_t *block, size_t bytes)
{
	return block[0] == 0 && memcmp(block, block + 1, bytes - 1) == 0;
}

static void flush(void)
{
	size_t run = 0, run_bytes = 0; /* of blocks that lie one behind the other in the image, too */
	uint64_t run_at = 0;

	for (size_t done = 0; done < filled; done += BLOCK_BYTES) {
		size_t bytes = filled - done < BLOCK_BYTES ? filled - done : BLOCK_BYTES;
		if (is_zero(buffer + done, bytes))
			continue;
		uint64_t at = place_of(offset + done);
		if (run_bytes && (run + run_bytes != done || run_at + run_bytes != at)) {
			image_write_blocks(buffer + run, run_bytes, run_at);
			run_bytes = 0;
		}
		if (!run_bytes)
			run = done, run_at = at;
		run_bytes += bytes;
	}
	image_write_blocks(buffer + run, run_bytes, run_at);
	offset += filled;
	filled = 0;
}

/* Where the next bytes go, and how many there is room for. */
uint8_t *data_room(size_t *bytes)
{
	uint64_t left = size - offset - filled;

	*bytes = left < BUFFER_BYTES - filled ? (size_t)left : BUFFER_BYTES - filled;
	return buffer + filled;
}

void data_filled(size_t bytes)
{
	filled += bytes;
	if (filled == BUFFER_BYTES)
		flush();
}

/* Nothing but zeros until there. What has come so far ends at a block's end, and `to` is one. */
void data_skip_to(uint64_t to)
{
	flush();
	offset = to;
}

struct data data_end(void)
{
	flush();
	if (chunk_holes == 0)
		return (struct data){.layout = LAYOUT_PLAIN, .value = chunk_count ? chunk_block - (uint32_t)(chunk << (chunk_bits - BLOCK_BITS)) : 0};
	return (struct data){
		.layout = LAYOUT_CHUNKS,
		.value = chunk_bits - BLOCK_BITS,
		.table = table,
		.table_bytes = chunk_count * 4,
	};
}
