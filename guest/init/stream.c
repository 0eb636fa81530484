/* Output: from a pipe or pty into the spool, and from the spool to the host that follows. */
#define _GNU_SOURCE
#include <sys/epoll.h>
#include <sys/ioctl.h>

#include "init.h"

enum {
	PUSH_MAX = 128 << 10,
	DRAIN_MAX = 1 << 20,	/* a pipe holds no more (fs.pipe-max-size for users without privilege) */
};

static uint8_t chunk[READ_CHUNK];

void stream_init(struct stream *stream, struct process *owner, uint8_t index)
{
	stream->source = (struct source){.fd = -1, .kind = SOURCE_OUTPUT, .owner = owner, .index = index};
	stream->spool.fd = -1;
}

static uint32_t bytes_waiting(const struct stream *stream)
{
	int waiting = 0;

	if (ioctl(stream->source.fd, FIONREAD, &waiting) != 0 || waiting < 0)
		return 0;
	return (uint32_t)waiting;
}

/* How much may be read now. In BLOCK mode no more than the spool can keep; 0 pauses the stream. */
static size_t readable_now(struct stream *stream)
{
	uint32_t waiting;

	if (!stream->block)
		return sizeof chunk;
	waiting = bytes_waiting(stream);
	spool_make_room(&stream->spool, waiting > 0 ? waiting : 4096);
	return (size_t)min_u64(sizeof chunk, spool_room(&stream->spool, stream->acked));
}

static uint8_t *output_begin(const struct stream *stream, uint64_t offset, uint32_t len)
{
	uint8_t *at;

	if (!conn_has_output_room(17 + len))
		return NULL;
	at = frame_begin(FRAME_OUTPUT, 0, 17 + len);
	if (at == NULL)
		return NULL;
	at = put_u32(at, stream->source.owner->handle);
	at = put_u8(at, (uint8_t)(stream->source.index + 1));
	at = put_u64(at, offset);
	return put_u32(at, len);
}

/* Store new bytes; a follower that has everything before them gets them without a way through the spool. */
static void stream_append(struct stream *stream, const uint8_t *data, uint32_t len)
{
	struct process *process = stream->source.owner;
	uint64_t offset = stream->spool.head;

	spool_make_room(&stream->spool, len);
	spool_append(&stream->spool, data, len);
	if (!process->follow)
		return;
	if (stream->pushed == offset && offset + len <= stream->window + OUTPUT_WINDOW_BYTES) {
		uint8_t *at = output_begin(stream, offset, len);
		if (at != NULL) {
			memcpy(at, data, len);
			frame_end(at + len, true);
			stream->pushed += len;
			return;
		}
	}
	process_mark_dirty(process);
}

static void stream_ended(struct stream *stream)
{
	stream->eof = true;
	stream->paused = false;
	loop_close(&stream->source);
	spool_trim(&stream->spool);
	if (stream->tty && stream->source.owner->input != NULL)
		input_close(stream->source.owner->input);
	process_mark_dirty(stream->source.owner);
}

/* One read. Returns bytes read; 0 when there is nothing more to read now (or ever). */
static size_t read_once(struct stream *stream)
{
	size_t want = readable_now(stream);
	ssize_t n;

	if (want == 0) {
		stream->paused = true;
		loop_remove(&stream->source);	/* EPOLLHUP can't be masked, so the descriptor has to leave the set */
		return 0;
	}
	n = read(stream->source.fd, chunk, want);
	if (n > 0) {
		stream_append(stream, chunk, (uint32_t)n);
		return (size_t)n;
	}
	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return 0;
	stream_ended(stream);	/* end of file, or EIO from a pty whose last holder closed it */
	return 0;
}

void stream_readable(struct stream *stream)
{
	read_once(stream);
}

/* The main process is gone: take what it left in the pipe, so that its output is complete before its EXIT. A background
 * child may go on writing; the pipe's capacity bounds what belongs to the process itself. */
void stream_drain(struct stream *stream)
{
	size_t total = 0, n;

	while (stream->source.fd >= 0 && !stream->paused && total < DRAIN_MAX) {
		n = read_once(stream);
		if (n == 0)
			break;
		total += n;
	}
	stream->exit_end = stream->spool.head;
	if (stream->source.fd >= 0 && stream->paused)
		stream->exit_end += bytes_waiting(stream);
}

void stream_ack(struct stream *stream, uint64_t offset)
{
	offset = min_u64(offset, stream->spool.head);
	stream->acked = max_u64(stream->acked, offset);
	stream->window = max_u64(stream->window, offset);
	if (stream->paused && spool_room(&stream->spool, stream->acked) > 0) {
		stream->paused = false;
		loop_add(&stream->source, EPOLLIN);
	}
	if (stream->pushed < stream->spool.head)
		process_mark_dirty(stream->source.owner);
}

void process_follow(struct process *process, const uint64_t offsets[2])
{
	process->follow = true;
	process->exit_sent = false;
	for (int i = 0; i < 2; i++) {
		struct stream *stream = &process->out[i];

		stream->pushed = stream->window = min_u64(offsets[i], stream->spool.head);
		stream->end_sent = false;
	}
	process_mark_dirty(process);
}

enum push { PUSH_NOTHING, PUSH_SENT, PUSH_NO_ROOM };

static bool is_final(const struct stream *stream)
{
	const struct process *process = stream->source.owner;

	return stream->eof || (process->exited && !process->exit_sent);
}

static enum push push_output(struct stream *stream)
{
	struct spool *spool = &stream->spool;
	uint64_t offset = max_u64(stream->pushed, spool->tail), lost = offset - stream->pushed;
	/* Lost bytes can't be acknowledged: the window moves over them. */
	uint64_t window = stream->window + lost, limit = min_u64(spool->head, window + OUTPUT_WINDOW_BYTES);
	uint32_t len = limit > offset ? (uint32_t)min_u64(limit - offset, PUSH_MAX) : 0;
	uint8_t *at;

	/* When the last bytes are among the lost, an empty frame tells how far they went. */
	if (len == 0 && (lost == 0 || offset < spool->head || !is_final(stream)))
		return PUSH_NOTHING;
	at = output_begin(stream, offset, len);
	if (at == NULL)
		return PUSH_NO_ROOM;
	if (!spool_read(spool, offset, at, len))
		return PUSH_SENT;	/* dropped by this, and told by the next turn; the frame is not finished */
	frame_end(at + len, true);
	stream->window = window;
	stream->pushed = offset + len;
	return PUSH_SENT;
}

static bool push_end(struct stream *stream)
{
	uint8_t *at;

	if (stream->end_sent || !stream->eof || stream->pushed < stream->spool.head)
		return true;
	if (!conn_has_output_room(13))
		return false;
	at = frame_begin(FRAME_END, 0, 13);
	if (at == NULL)
		return false;
	at = put_u32(at, stream->source.owner->handle);
	at = put_u8(at, (uint8_t)(stream->source.index + 1));
	frame_end(put_u64(at, stream->spool.head), false);
	stream->end_sent = true;
	return true;
}

static bool push_exit(struct process *process)
{
	uint8_t *at;

	if (!process->exited || process->exit_sent)
		return true;
	if (!conn_has_output_room(64))
		return false;
	at = frame_begin(FRAME_EXIT, 0, 64);
	if (at == NULL)
		return false;
	at = put_u32(at, process->handle);
	at = put_u32(at, (uint32_t)process->wstatus);
	at = put_u64(at, process->utime_us);
	at = put_u64(at, process->stime_us);
	at = put_u64(at, process->maxrss_kib);
	at = put_u64(at, process->started_ns);
	at = put_u64(at, process->ended_ns);
	at = put_u64(at, process->out[0].exit_end);
	frame_end(put_u64(at, process->out[1].exit_end), true);
	process->exit_sent = true;
	return true;
}

/* One frame of output per stream, so that processes take turns; END and EXIT once nothing is left to push now. */
static bool push_process(struct process *process)
{
	bool again = false;

	for (int i = 0; i < 2; i++) {
		switch (push_output(&process->out[i])) {
		case PUSH_NO_ROOM:
			process_mark_dirty(process);
			return false;
		case PUSH_SENT:
			again = true;
			break;
		case PUSH_NOTHING:
			break;
		}
	}
	if (!again && push_end(&process->out[0]) && push_end(&process->out[1]) && push_exit(process))
		return true;
	process_mark_dirty(process);
	return again;
}

void push_all(void)
{
	struct process *process;

	while (conn_is_open() && (process = process_next_dirty()) != NULL)
		if (process->follow && !push_process(process))
			return;
}
