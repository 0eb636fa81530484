/* Stdin of programs: bytes of STDIN frames wait here until the pipe (or pty) takes them. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/epoll.h>

#include "init.h"

enum { TTY_END_OF_FILE = 4 };	/* the default VEOF character, ^D */

static uint32_t chunks_total;

struct input *input_new(struct process *owner, int fd, bool tty)
{
	struct input *input = calloc(1, sizeof *input);

	if (input == NULL)
		return NULL;
	input->source = (struct source){.fd = fd, .kind = SOURCE_INPUT, .owner = owner};
	input->peer = -1;
	input->tty = tty;
	return input;
}

static void answer(const struct input_chunk *chunk, int error)
{
	uint8_t *at;

	if (!chunk->reply)
		return;
	if (error != 0) {
		reply_error(chunk->tag, error);
		return;
	}
	at = frame_begin(FRAME_REPLY | REQUEST_STDIN, chunk->tag, 8);
	if (at != NULL)
		frame_end(put_u64(at, chunk->end), true);
}

static void pop_chunk(struct input *input, int error)
{
	answer(&input->chunk[0], error);
	free(input->chunk[0].data);
	input->count--;
	chunks_total--;
	memmove(&input->chunk[0], &input->chunk[1], input->count * sizeof input->chunk[0]);
}

/* The reader is gone, or all was given. */
void input_close(struct input *input)
{
	while (input->count > 0)
		pop_chunk(input, EPIPE);
	loop_close(&input->source);
}

void input_forget_replies(struct input *input)
{
	for (uint32_t i = 0; i < input->count; i++)
		input->chunk[i].reply = false;
}

/* Write as much as the pipe takes. Returns bytes written, or -errno when nobody can read any more. */
static ssize_t give(struct input *input, const uint8_t *data, size_t len)
{
	size_t done = 0;

	while (done < len) {
		ssize_t n = write(input->source.fd, data + done, len - done);
		if (n < 0 && errno == EAGAIN)
			break;
		if (n < 0 && errno != EINTR)
			return -errno;
		if (n > 0)
			done += (size_t)n;
	}
	return (ssize_t)done;
}

static int finish(struct input *input)
{
	const uint8_t end = TTY_END_OF_FILE;

	if (input->tty)
		return give(input, &end, 1) == 1 ? 0 : EAGAIN;
	return 0;
}

static void pump(struct input *input)
{
	while (input->count > 0 && input->source.fd >= 0) {
		struct input_chunk *chunk = &input->chunk[0];
		ssize_t n = give(input, chunk->data + chunk->at, chunk->len - chunk->at);

		if (n < 0) {
			input_close(input);
			return;
		}
		chunk->at += (uint32_t)n;
		if (chunk->at < chunk->len || (chunk->eof && finish(input) != 0)) {
			loop_set(&input->source, EPOLLOUT);
			return;
		}
		bool last = chunk->eof && !input->tty;
		pop_chunk(input, 0);
		if (last)
			input_close(input);
	}
	if (input->source.fd >= 0)
		loop_set(&input->source, 0);
}

void input_event(struct input *input, uint32_t events)
{
	/* EPOLLERR and EPOLLHUP come whether asked for or not: without a reader they would repeat for ever. */
	if (events & (EPOLLERR | EPOLLHUP))
		input_close(input);
	else
		pump(input);
}

/* Take one frame's bytes. Bytes before `accepted` were taken from an earlier frame and are skipped. A frame without bytes is
 * a question: it is answered with `accepted`, so that whoever goes on with a stream knows where, also when nobody reads
 * any more.
 * Returns 0 when an answer was or will be given, else the errno to answer with. */
int input_frame(struct input *input, uint32_t tag, uint64_t offset, bool eof, struct span data, bool reply)
{
	uint64_t end = offset + data.len, skip;
	struct input_chunk chunk = {.tag = tag, .reply = reply, .eof = eof && !input->eof};

	if (end < offset || offset > input->accepted)
		return EINVAL;
	chunk.end = data.len > 0 ? end : input->accepted;
	skip = min_u64(input->accepted - offset, data.len);
	if (input->eof && (skip < data.len))
		return EPIPE;
	if (input->source.fd < 0 && (data.len > 0 || eof) && !(input->eof && skip == data.len))
		return EPIPE;
	chunk.len = data.len - (uint32_t)skip;
	if (input->count == 0 && chunk.len == 0 && !chunk.eof) {
		answer(&chunk, 0);
		return 0;
	}
	if (input->count == INPUT_CHUNKS_MAX || chunks_total == INPUT_CHUNKS_TOTAL)
		return EAGAIN;
	if (chunk.len > 0) {
		chunk.data = malloc(chunk.len);
		if (chunk.data == NULL)
			return ENOMEM;
		memcpy(chunk.data, data.data + skip, chunk.len);
	}
	input->accepted = max_u64(input->accepted, end);
	input->eof |= chunk.eof;
	input->chunk[input->count++] = chunk;
	chunks_total++;
	pump(input);
	return 0;
}
