/* The guest init's data and the calls between its parts.
 *
 *   main.c     start-up, hardening, the epoll loop      child.c    between fork and exec
 *   conn.c     the host's connection: bytes <-> frames  user.c     /etc/passwd and /etc/group
 *   request.c  one handler per request                  applet.c   file operations, with fsops.c,
 *   start.c    decode START, make pipes or pty, fork               tree.c, tar_*.c and watch.c
 *                                                       python.c   source for the warm interpreter
 *                                                       capable.c  what a capable root has
 *                                                       restrained.c  what one that may not kill has not
 *   line.c     greetings on a line that never ends      machine.c  what only an init of a machine does
 *   process.c  table, reaping, cgroups, backstops       stream.c   output: read, push to the host
 *   signals.c  signal scopes                            spool.c    bounded storage of output
 *                                                       input.c    stdin
 *
 * One thread, nothing blocks: whatever a guest can delay happens in a forked child.
 */
#ifndef BARCHAN_INIT_H
#define BARCHAN_INIT_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/resource.h>
#include <sys/types.h>

#include "../common/codec.h"
#include "../common/protocol.h"
#include "../common/siphash.h"
#include "../common/util.h"

enum {
	PROCESSES_MAX = 100000,		/* remembered */
	RUNNING_MAX = 4096,
	LEAF_PROCS_MAX = 8,		/* cgroup v1 hierarchies per leaf */
	INPUT_CHUNKS_MAX = 4,		/* STDIN frames waiting, per process */
	INPUT_CHUNKS_TOTAL = 256,	/* and in all: at most 64 MiB */
	READ_CHUNK = 64 << 10,
};

struct process;

enum source_kind { SOURCE_LISTEN, SOURCE_CONN, SOURCE_SIGNALS, SOURCE_OUTPUT, SOURCE_INPUT, SOURCE_FREEZER };

/* Something the loop waits for. `fd` is -1 when closed; it outlives any event that still names it. */
struct source {
	int fd;
	enum source_kind kind;
	bool added;
	uint32_t events;
	uint8_t index;
	struct process *owner;
};

/* The newest bytes of a stream, as a ring of `ring` bytes: in memory while small, then in an unlinked file.
 * Before the first byte is dropped (tail == 0) positions equal offsets, so only then can the ring grow. */
struct spool {
	uint64_t tail, head;
	uint32_t limit;		/* what the ring may grow to; 0 once evicted */
	uint32_t ring;
	uint32_t charged;	/* bytes counted against the sandbox's bound */
	int fd;
	uint8_t *memory;
};

struct stream {
	struct source source;
	struct spool spool;
	uint64_t acked;		/* BLOCK: bytes before it may be dropped */
	uint64_t window;	/* the follower holds everything before it */
	uint64_t pushed;
	uint64_t exit_end;
	bool tty;
	bool block;
	bool paused;		/* BLOCK and full: not read until an ACK makes room */
	bool eof;
	bool end_sent;
};

struct input_chunk {
	uint32_t tag;
	bool reply;
	bool eof;
	uint64_t end;		/* offset after the bytes */
	uint32_t at, len;
	uint8_t *data;
};

struct input {
	struct source source;
	int peer;		/* of a pty: kept open until the main process is reaped */
	bool tty;
	bool eof;		/* accepted an end of file */
	uint64_t accepted;
	uint32_t count;
	struct input_chunk chunk[INPUT_CHUNKS_MAX];
};

struct process {
	uint32_t handle;
	pid_t pid;
	char *id;
	struct digest digest;
	uint8_t kind, leaf;
	bool exited, follow, exit_sent, dirty, has_cgroup;
	int wstatus;
	uint64_t utime_us, stime_us, maxrss_kib, started_ns, ended_ns, backstop_ns;
	struct stream out[2];
	struct input *input;
	struct process *next_by_id, *next_by_pid, *next_dirty, *next_ended, *next_lingering;
};

struct leaf {
	bool given;
	int procs[LEAF_PROCS_MAX];
	uint8_t procs_count;
	int dir;
};

struct rlimit_request {
	uint32_t resource;
	uint64_t soft, hard;
};

/* A decoded START; spans and places point into the frame's body. */
struct start {
	struct span id, user, cwd, script, input;
	uint8_t kind;
	uint16_t flags, rows, cols;
	uint32_t spool_bytes, backstop_ms, argc, envc, limit_count;
	uint8_t *argv_at, *env_at, *limits_at;
};

/* Operations of ours stay in our own cgroup. */
static inline bool is_program(uint8_t kind)
{
	return kind == KIND_PROGRAM || kind == KIND_PYTHON;
}

/* What the child needs besides the request. Descriptors are -1 when unused. */
struct launch {
	const struct start *request;
	const struct leaf *leaf;
	uint32_t handle;
	int in, out, err;
};

/* main.c */
extern struct settings {
	uid_t uid, applet_uid; /* 0: applets run as the asking user alone */
	gid_t gid;
	uint64_t root_capabilities; /* a bit each: what programs of guest root have */
	bool is_agent;		/* a service of a whole machine, of whose programs it has only those it starts */
	bool is_gvisor;		/* whose kernel is that, instead of Linux */
	int spool_dir, dev_null, dev_pts, proc;
	int cgroup;		/* of a machine of its own: `guest` and `platform` are below; else -1 */
	int upper;		/* of that machine's overlay; else -1 */
	struct rlimit nofile;	/* as it was given to us: what programs get */
	uint64_t key[2];
} settings;
void guard_memory(void);
int loop_add(struct source *source, uint32_t events);
void loop_set(struct source *source, uint32_t events);
void loop_remove(struct source *source);
void loop_close(struct source *source);
void close_between(unsigned first, unsigned last);

/* line.c */
enum line_word { LINE_NOTHING, LINE_CALL, LINE_CONFIRM };
extern struct line {
	bool is_used, is_up, is_greeted;
} line;
size_t line_secret_end(const uint8_t *data, size_t len);
size_t line_scan(const uint8_t *data, size_t len, enum line_word *word);
size_t line_answer(uint8_t *out);

/* conn.c */
void conn_open(int listen_fd);
int conn_open_line(int fd);
void conn_accept(void);
void conn_event(uint32_t events);
bool conn_has_work(void);
void conn_dispatch(void);
void conn_flush(bool idle);
int conn_wait_ms(void);
void conn_wait_again(void);
bool conn_is_open(void);
bool conn_has_output_room(size_t body_len);
void conn_close_after_flush(void);
int conn_take_fds(int *fds, int count);
uint8_t *frame_begin(uint8_t type, uint32_t tag, size_t body_len_max);
void frame_end(const uint8_t *end, bool urgent);
void reply_error(uint32_t tag, int error);
void reply_empty(uint8_t type, uint32_t tag);

/* request.c */
extern struct leaf leaves[LEAF_COUNT];
extern bool hello_seen;
bool request_handle(uint8_t type, uint32_t tag, uint8_t *body, size_t len);

/* machine.c */
struct machine_counters {
	uint64_t oom_kills, memory_bytes, memory_peak_bytes, cpu_us, pids;
};
uint64_t machine_capabilities(void);
int machine_use(uint64_t capabilities);
int machine_let_go(void);
void machine_take_leaves(void);
bool machine_freeze(uint32_t tag);
void machine_thaw(void);
void machine_freezer_event(void);
void machine_forget_reply(void);
int machine_count(struct machine_counters *out);
int machine_configure(struct span hostname, uint64_t memory_bytes, uint64_t pids);
int machine_reseed(struct span entropy);
_Noreturn void machine_main(uint32_t argc, char **argv);

/* start.c */
bool start_decode(struct start *start, uint8_t *body, size_t len);
int start_process(const struct start *start, const struct digest *digest, struct process **out);

/* child.c */
_Noreturn void child_main(const struct launch *launch);

/* user.c */
struct identity {
	uid_t uid;
	gid_t gid;
	gid_t groups[256];
	size_t group_count;
	char name[256];
	char home[1024];
};
/* NULL, or what is wrong. */
const char *identity_find(const char *user, struct identity *identity);

/* gvisor.c */
int gvisor_become(uid_t uid, char **argv);
int gvisor_open_group(void);
uint64_t gvisor_processes(void);
int gvisor_leave_others(uid_t uid);
int gvisor_let_go_of_host(void);
int gvisor_limit_pids(const char *text);

/* capable.c */
/* Give what a capable root has to the child that runs for it, which is uid 0 by now. NULL, or what is wrong. */
const char *capable_become(int kind);

/* restrained.c */
int restrained_become(void);

/* python.c */
_Noreturn void python_main(int procs_fd, char **argv, char **env, const char *cwd);

/* applet.c */
_Noreturn void applet_main(uint32_t argc, char **argv);

/* process.c */
struct counters {
	uint32_t running, total, orphans_reaped;
};
extern struct counters counters;
struct process *process_new(const struct start *start, const struct digest *digest);
void process_discard(struct process *process);
void process_started(struct process *process, pid_t pid);
struct process *process_by_id(struct span id);
struct process *process_by_handle(uint32_t handle);
struct process *process_next_dirty(void);
void process_mark_dirty(struct process *process);
bool process_evict_oldest(void);
void process_unfollow_all(void);
void process_reap_all(void);
void process_remove_cgroups(void);
void process_check_backstops(void);
int process_backstop_wait_ms(void);
void process_hold(void);
void process_thaw(uint64_t frozen_ns);
void process_cgroup_name(char out[16], uint32_t handle);

/* signals.c */
uint32_t signal_scope(struct process *process, int signo, uint8_t scope);

/* stream.c */
void stream_init(struct stream *stream, struct process *owner, uint8_t index);
void stream_readable(struct stream *stream);
void stream_drain(struct stream *stream);
void stream_ack(struct stream *stream, uint64_t offset);
void process_follow(struct process *process, const uint64_t offsets[2]);
void push_all(void);

/* spool.c */
void spool_configure(uint64_t bytes_max, uint64_t nofile);
uint64_t spool_bytes_used(void);
void spool_make_room(struct spool *spool, size_t len);
uint64_t spool_room(const struct spool *spool, uint64_t acked);
void spool_append(struct spool *spool, const uint8_t *data, size_t len);
bool spool_read(struct spool *spool, uint64_t offset, uint8_t *out, size_t len);
void spool_trim(struct spool *spool);
bool spool_drop(struct spool *spool);

/* input.c */
struct input *input_new(struct process *owner, int fd, bool tty);
void input_event(struct input *input, uint32_t events);
int input_frame(struct input *input, uint32_t tag, uint64_t offset, bool eof, struct span data, bool reply);
void input_close(struct input *input);
void input_forget_replies(struct input *input);

#endif
