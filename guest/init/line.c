/* A connection over a line that never ends: a port of a virtual machine, or one end of a pair of sockets.
 *
 * Nothing on such a line says where one connection ends and the next begins: what an earlier one left half sent lies before what the new
 * one says. So each begins with a greeting (docs/formats/guest-protocol.md): the host calls with a number of its own; we answer with it and
 * one of ours; the host confirms ours and gives a secret. Both pass over all that comes before. A connection that is under way is broken
 * into by that secret alone, which no guest knows: what guests are sent can't be taken for a call. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/random.h>

#include "init.h"

enum { MAGIC_BYTES = 15, NUMBER_BYTES = 16, SECRET_BYTES = 32, CALL = 'C', ANSWER = 'A', CONFIRM = 'K' };
enum { CALL_BYTES = MAGIC_BYTES + 1 + NUMBER_BYTES, CONFIRM_BYTES = CALL_BYTES + SECRET_BYTES };

/* As a frame's header it would be one of 4 GiB, which there is not. */
static const uint8_t magic[MAGIC_BYTES] = {0xff, 0xff, 0xff, 0xff, 0xfe, 'b', 'a', 'r', 'c', 'h', 'a', 'n', '-', 'l', 'n'};

struct line line;

static struct {
	uint8_t called[NUMBER_BYTES], own[NUMBER_BYTES], secret[SECRET_BYTES];
	uint8_t tail[SECRET_BYTES - 1];	/* what came last, for a secret that comes in two pieces */
	size_t tail_len;
	bool has_own;			/* a call was answered */
} state;

/* `len`: at most that of the tail. */
static void keep_tail(const uint8_t *data, size_t len)
{
	size_t keep = min_u64(state.tail_len, sizeof state.tail - len);

	memmove(state.tail, state.tail + state.tail_len - keep, keep);
	memcpy(state.tail + keep, data, len);
	state.tail_len = keep + len;
}

/* Of bytes that came over a connection under way: where its secret ends in them; 0: it is not there. */
size_t line_secret_end(const uint8_t *data, size_t len)
{
	uint8_t seam[2 * sizeof state.tail];
	size_t before = state.tail_len, head = min_u64(len, sizeof state.tail);
	const uint8_t *found;

	memcpy(seam, state.tail, before);
	memcpy(seam + before, data, head);
	found = memmem(seam, before + head, state.secret, SECRET_BYTES);
	if (found != NULL)
		return (size_t)(found - seam) + SECRET_BYTES - before;
	found = memmem(data, len, state.secret, SECRET_BYTES);
	if (found != NULL)
		return (size_t)(found - data) + SECRET_BYTES;
	keep_tail(data + len - head, head);
	return 0;
}

/* Look for the next word of a greeting; returns how many bytes are done with. What may be the beginning of one is not. */
size_t line_scan(const uint8_t *data, size_t len, enum line_word *word)
{
	size_t at = 0;

	*word = LINE_NOTHING;
	while (len - at >= MAGIC_BYTES + 1) {
		const uint8_t *found = memmem(data + at, len - at, magic, MAGIC_BYTES);

		if (found == NULL)
			return len - (MAGIC_BYTES - 1);
		at = (size_t)(found - data);
		if (len - at < CALL_BYTES || (found[MAGIC_BYTES] == CONFIRM && len - at < CONFIRM_BYTES))
			return at;
		if (found[MAGIC_BYTES] == CALL) {
			memcpy(state.called, found + MAGIC_BYTES + 1, NUMBER_BYTES);
			*word = LINE_CALL;
			return at + CALL_BYTES;
		}
		if (found[MAGIC_BYTES] == CONFIRM && state.has_own && memcmp(found + MAGIC_BYTES + 1, state.own, NUMBER_BYTES) == 0) {
			memcpy(state.secret, found + CALL_BYTES, SECRET_BYTES);
			state.has_own = false;
			state.tail_len = 0;
			*word = LINE_CONFIRM;
			return at + CONFIRM_BYTES;
		}
		at += MAGIC_BYTES;
	}
	return at;
}

/* What to answer the last call with; `out` has room for LINE_ANSWER_MAX. Returns its length. */
size_t line_answer(uint8_t *out)
{
	state.has_own = getrandom(state.own, NUMBER_BYTES, GRND_NONBLOCK) == NUMBER_BYTES;
	if (!state.has_own)
		return 0;	/* the host calls again */
	memcpy(out, magic, MAGIC_BYTES);
	out[MAGIC_BYTES] = ANSWER;
	memcpy(out + MAGIC_BYTES + 1, state.called, NUMBER_BYTES);
	memcpy(out + CALL_BYTES, state.own, NUMBER_BYTES);
	return CALL_BYTES + NUMBER_BYTES;
}
