/* Shared types of the supervisor. docs/formats/supervisor-protocol.md says what it does; each .c file opens with its part.
 *
 * One process, one thread, one epoll loop. A launch child (launch.c) does everything slow about a sandbox and reports
 * through a socket, so that the loop itself never waits. Functions return 0 or a value >= 0, or -1 with errno. */
#ifndef BARCHAN_SUPERVISOR_H
#define BARCHAN_SUPERVISOR_H

#include <errno.h>
#include <limits.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>
#include <unistd.h>

#define PROTOCOL_VERSION 1u
#define ID_MAX 64u
#define DIGEST_MAX 128u
#define HOSTNAME_MAX 64u
#define LAYERS_MAX 64u
#define PACKET_MAX 65536u
#define REPLY_FDS_MAX 3u
/* One uid range per slot: 1048576 + 16384 * 65536 stays below 2^31. */
#define SLOTS_MAX 16384u
#define UID_FIRST 1048576u
#define UIDS_PER_SLOT 65536u
#define INIT_LISTEN_FD 3
#define INIT_SPOOL_FD 4
#define INIT_SPOOL_BYTES "268435456"
#define INIT_SOCKET_DIR "/dev/.barchan"
#define INIT_SOCKET INIT_SOCKET_DIR "/init.sock"
#define PROXY_PORT 3128
#define NS_PER_MS INT64_C(1000000)
#define NS_PER_S INT64_C(1000000000)

#define container_of(pointer, type, member) ((type *)((char *)(pointer)-offsetof(type, member)))
#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

struct options {
	const char *socket, *pool, *cgroup, *init, *log;
	uint64_t pool_mib, orphan_grace_s;
	/* Protections switched off, for the tests that show each matters (docs/threat-model.md). */
	bool no_userns, no_caps_drop, no_seccomp, no_pidns, no_netns, no_masks, writable_layers, no_quota, no_memory_limit,
		no_pids_limit, init_in_guest_leaf, init_as_guest_root, no_exec_cgroup, full_dev;
};
extern struct options options;

struct weakening {
	const char *name;
	bool *flag;
};
#define WEAKENINGS 14
extern const struct weakening weakenings[WEAKENINGS];

/* Where a create can fail; the words of the protocol's `stage`. */
enum stage {
	STAGE_REQUEST,
	STAGE_USERNS,
	STAGE_CGROUP,
	STAGE_CLONE,
	STAGE_POOL,
	STAGE_SPOOL,
	STAGE_LAYERS,
	STAGE_NAMESPACES,
	STAGE_OVERLAY,
	STAGE_PROC,
	STAGE_DEV,
	STAGE_SYS,
	STAGE_MASKS,
	STAGE_NETWORK,
	STAGE_PIVOT,
	STAGE_SOCKET,
	STAGE_PRIVILEGES,
	STAGE_SECCOMP,
	STAGE_EXEC,
	STAGE_CONNECT,
	STAGE_RESTORE,
	STAGE_DESTROYED,
	STAGE_SLOT,
	STAGE_READY,
};

/* What a launch child tells beside its stage: a process that it has started, and that the supervisor is to reap. */
enum { REPORT_HELPER = 2000 };

enum network { NETWORK_NONE, NETWORK_PROXY, NETWORK_OPEN };

struct layer {
	char digest[DIGEST_MAX + 1];
	int fd;	      /* the read-only mount */
	int cover_fd; /* what the mount is attached to, or -1 (layers.c) */
	unsigned users;
	struct layer *next;
};

struct spec {
	struct layer *layers[LAYERS_MAX]; /* topmost first */
	unsigned layer_count;
	uint64_t upper_bytes, memory_bytes, pids, cpu_us, shm_bytes;
	char hostname[HOSTNAME_MAX + 1];
	char cut[ID_MAX + 1]; /* of the pool, whose copy the writable layer starts as; empty: it starts empty */
	enum network network;
	bool capable_root;
	bool batch; /* runs only where nobody else wants the processor */
	bool is_zygote, keeps_calls; /* a zygote, and one whose forks do */
	char zygote[ID_MAX + 1]; /* whose forks are to enter it; empty: none */
};

/* What a restore needs beside the spec. The descriptor is the caller's. */
struct restore {
	int job_fd;
	char mounts[4096]; /* those that CRIU is given, `:` between them */
	uint64_t spools, monotonic_ns, boottime_ns, seconds;
};

/* An epoll registration: embedded in what it belongs to. */
struct watch {
	void (*handle)(struct watch *watch, uint32_t events);
};

enum sandbox_state { SANDBOX_FILLING, SANDBOX_SLOT, SANDBOX_STARTING, SANDBOX_RUNNING, SANDBOX_ENDED, SANDBOX_REMOVING };

/* A request that waits for something; answered only if its connection is still the live one. */
struct waiter {
	uint64_t tag, connection;
	struct waiter *next;
};

/* Prepared before anybody asks for it (slots.c). Descriptors are -1 where there are none. */
struct slot {
	bool is_slot; /* or was one: it is warm */
	bool is_launched;
	int keeper_fd, keeper_pidfd; /* the second until the keeper has ended */
	int init_fd; /* the first connection to its init */
	struct watch keeper, keeper_end;
	int64_t began_ns;
};

struct counters {
	uint64_t oom_kills, cpu_ns, memory_peak_bytes;
};

struct sandbox {
	char id[ID_MAX + 1];
	enum sandbox_state state;
	unsigned slot;
	uid_t uid_base;
	pid_t pid; /* 0 once reaped */
	uint64_t start_time;
	struct spec spec;
	struct watch status;
	int status_fd;	 /* the launch child's reports; -1 after exec */
	int listener_fd; /* the proxy's TCP socket, or -1 */
	struct slot as_slot;
	bool has_platform;
	bool create_pending;
	struct waiter create;
	enum stage failed_stage; /* of a create that failed; meaningful while create_pending and REMOVING */
	int failed_errno;
	struct waiter *destroys;
	int wstatus;
	struct counters counters;
	unsigned remove_tries;
	struct sandbox *next_by_id, *next_by_pid, *next_removing, *next_killed;
};

/* main.c */
extern int epoll_fd, self_pidfd;
int watch_add(struct watch *watch, int fd, uint32_t events);
int watch_change(struct watch *watch, int fd, uint32_t events);
void watch_close(int *fd);
void request_shutdown(const struct waiter *waiter);

/* util.c */
#define CLEANUP_FD __attribute__((cleanup(close_fd)))
void close_fd(int *fd);
void log_line(const char *format, ...) __attribute__((format(printf, 1, 2)));
int64_t monotonic_ns(void);
int write_at(int dir_fd, const char *path, const char *text);
int write_number_at(int dir_fd, const char *path, uint64_t number);
ssize_t read_at(int dir_fd, const char *path, char *text, size_t size);
uid_t init_uid(void);
uint64_t counter_at(int dir_fd, const char *path, const char *name);
int parse_number(const char *text, uint64_t *number);
bool is_name(const char *text, size_t length_max);
int remove_tree_at(int dir_fd, const char *name, bool is_cgroup);
uint64_t read_start_time(pid_t pid);

/* node.c */
struct reply {
	char text[PACKET_MAX];
	size_t length;
	int fds[REPLY_FDS_MAX];
	unsigned fd_count;
};
extern bool node_said_hello;
int node_listen(void);
void node_close(void);
bool node_is_connected(void);
int64_t node_absent_since_ns(void);
bool node_was_ever_connected(void);
struct waiter node_waiter(uint64_t tag);
struct reply *reply_start(const char *kind);
void reply_add(struct reply *reply, const char *format, ...) __attribute__((format(printf, 2, 3)));
void reply_add_fd(struct reply *reply, int fd);
void reply_send(struct reply *reply, const struct waiter *waiter);
void reply_error(const struct waiter *waiter, const char *stage, int error, const char *message);
void event_exit(const struct sandbox *sandbox);
void event_slot(const struct sandbox *sandbox, bool ready);

/* operations.c */
void handle_request(char *packet, size_t length, int passed_fd);
void reply_sandbox(struct sandbox *sandbox, const struct waiter *waiter, enum stage *failed);

/* sandbox.c */
extern unsigned sandbox_count, sandbox_starting;
struct sandbox *sandbox_by_id(const char *id);
struct sandbox *sandbox_by_slot(unsigned slot);
unsigned sandbox_slots_end(void);
void sandbox_create(const char *id, const struct spec *spec, uint64_t tag);
void sandbox_restore(const char *id, const struct spec *spec, const struct restore *restore, uint64_t tag);
void sandbox_restored(struct sandbox *sandbox, int error);
int sandbox_fill(const char *id, const struct spec *spec);
void sandbox_claim(struct sandbox *slot, const struct spec *spec, uint64_t tag);
void sandbox_started(struct sandbox *sandbox);
void sandbox_fail(struct sandbox *sandbox, enum stage stage, int error);
void sandbox_destroy(struct sandbox *sandbox, const struct waiter *waiter);
void sandbox_ended(struct sandbox *sandbox, int wstatus);
void sandbox_destroy_all(void);
bool sandbox_remove_ended(void);
void sandbox_announce_ended(void);
const char *stage_name(enum stage stage);

/* children.c */
void child_add(struct sandbox *sandbox);
struct sandbox *child_take(pid_t pid);
void child_killed(struct sandbox *sandbox);
void child_gone(const struct sandbox *sandbox);
void child_helps(pid_t pid);
void children_reap(pid_t told);
void children_reap_all(void);

/* slots.c */
#define SLOT_PREFIX_MAX 40u
#define SLOT_SHM_BYTES (UINT64_C(64) << 20) /* what a slot has before it is known what it shall have */
void slots_set(unsigned count, const char *prefix);
void slots_drop(void);
int64_t slots_fill(int64_t now_ns);
void slots_describe(struct reply *reply);
void slots_create(const char *id, const struct spec *spec, const struct waiter *waiter);
bool slot_can_be_late(const struct sandbox *sandbox);
void slot_filled(struct sandbox *sandbox);
void slot_ended(const struct sandbox *sandbox);
int slot_claim(struct sandbox *sandbox);
void slot_close(struct sandbox *sandbox);

/* slot_root.c */
int root_make_waiting(void);
int root_loosen(void);
int root_replace(const struct sandbox *sandbox, int userns_fd, int upper_fd, int mount_ns_fd);

/* initlink.c */
int init_reach(const struct sandbox *sandbox);
int init_greet(const struct sandbox *sandbox, int fd);
int init_connect(const struct sandbox *sandbox);

/* pool.c */
int pool_open(void);
void pool_close(void);
extern bool pool_has_simple_quota;
int pool_make(const struct sandbox *sandbox, int *upper_fd);
int pool_limit(const struct sandbox *sandbox, int upper_fd);
int pool_fit(const struct sandbox *sandbox, int upper_fd);
int pool_open_upper(const struct sandbox *sandbox);
int pool_replace(struct sandbox *sandbox, int *upper_fd);
int pool_descriptor(void);
int pool_make_spool(const struct sandbox *sandbox);
int pool_remove(const struct sandbox *sandbox);
bool pool_is_lost(void);
int pool_open_dir(const char *name);
int pool_remove_cuts(void);
bool pool_drop_stale_quotas(void);

/* pool_room.c */
uint64_t pool_bytes(void);
int pool_take_room(int fd);
void pool_device(int fd);
int pool_open_counts(void);
void pool_let_room_go(void);
const char *pool_fault(void);

/* userns.c */
int userns_take_slot(void);
int userns_open(unsigned slot);
int userns_make_wide(unsigned slot);
int userns_make_inside(unsigned slot, int outer_fd);
void userns_started(unsigned slot);
void userns_keep(unsigned slot, pid_t pid);
void userns_release_slot(unsigned slot);

/* cgroup.c */
enum { MEMORY, PIDS, CPU, BATCH, UNIFIED, HIERARCHIES };
int cgroup_base(int hierarchy); /* the node's group in it, or -1 */
int cgroup_mount(int hierarchy); /* its root, or -1: not there, or not ours */
const char *cgroup_top(int hierarchy); /* what all nodes' groups are in */
int cgroup_limit_guest(const struct sandbox *sandbox);
int cgroup_make_group(const char *name, uint64_t memory_bytes, uint64_t pids);
enum leaf { LEAF_GUEST, LEAF_PLATFORM };
#define LEAF_FDS_MAX 4u
struct leaf_fds {
	int fds[LEAF_FDS_MAX];
	unsigned count, procs_count;
};
int cgroup_open(void);
void cgroup_close(void);
bool cgroup_is_v2(void);
bool cgroup_has(const char *controller);
int cgroup_make_init(const struct sandbox *sandbox);
int cgroup_make_guest(const struct sandbox *sandbox);
int cgroup_enter_guest(const struct sandbox *sandbox);
int cgroup_make_platform(const struct sandbox *sandbox);
int cgroup_open_leaf(const struct sandbox *sandbox, enum leaf leaf, struct leaf_fds *leaf_fds);
void cgroup_read_counters(struct sandbox *sandbox);
int cgroup_remove_platform(const struct sandbox *sandbox);
int cgroup_remove(const struct sandbox *sandbox);

/* cgroup_stale.c */
int cgroup_remove_stale(int hierarchy);
void cgroup_remove_dead(void);

/* cgroup_memory.c */
int cgroup_enter(const char *name);
int cgroup_remove_group(const char *name);
int cgroup_kill(const char *name);
int cgroup_open_of(const struct sandbox *sandbox, const char *what);
int cgroup_open_init(const struct sandbox *sandbox, int *fds, int count);
int cgroup_make_places(const struct sandbox *sandbox, int job_fd);

/* mounts.c */
struct root_parts {
	int layers[LAYERS_MAX], upper, dev, sys;
};
int mounts_open(void);
int mounts_leave_host(void);
void mounts_close(void);
int mounts_hold(int mount_fd, const char *name);
int mounts_on_host(int (*run)(const char *path), const char *path);
extern bool detached_clones; /* kernel 6.15 or newer: a mount that is in no namespace can be cloned */
int mount_new(const char *type, unsigned attributes, const char *const *pairs);
int mount_clone(int dir_fd, const char *path);
int mount_clone_with(int dir_fd, const char *path, unsigned flags);
int mount_set_attributes(int mount_fd, uint64_t attributes, int userns_fd);
int root_collect(const struct sandbox *sandbox, int userns_fd, int upper_fd, struct root_parts *parts);
int mount_attach(int mount_fd, int dir_fd, const char *path);
int root_collect_layers(const struct sandbox *sandbox, int userns_fd, int upper_fd, struct root_parts *parts);
int root_enter(int root_fd);
int root_assemble(const struct sandbox *sandbox, const struct root_parts *parts);
int root_overlay(const struct sandbox *sandbox, const struct root_parts *parts);
int mounts_copy_host(void);
int mounts_part(const char *path);
int mounts_run(void);

/* layers.c */
enum layer_type { LAYER_EROFS, LAYER_DIR };
struct layer *layer_find(const char *digest);
const struct layer *layer_at(uint64_t index);
int layer_add(const char *digest, enum layer_type type, const char *path);
int layer_add_mount(const char *digest, int mount_fd);
int layer_remove(struct layer *layer);
void layers_close(void);
int fuse_open(int *device_fd, int *mount_fd);
void fuse_let_go(void);

/* launch.c */
struct launch_report {
	int32_t stage, error;
};
extern int init_binary_fd;
int launch(struct sandbox *sandbox, int userns_fd, int cgroup_fd);
void enter_stage(enum stage stage);
void report_to(int fd);
int report_socket(void);
int send_report(enum stage stage, int error, int passed_fd);
int must(int result);
_Noreturn void exec_init(const struct sandbox *sandbox, int spool_fd, int proxy_fd);
void make_namespaces(void);
int listen_for_proxy(void);
int make_network(const struct spec *spec);
void reset_signals(void);
int receive_report(int fd, struct launch_report *report, int *passed_fd);

/* criu_child.c */
/* What CRIU itself needs: beside the guest's limits while it restores, and of its own while it dumps. */
#define CRIU_MEMORY_BYTES (UINT64_C(128) << 20)
#define CRIU_PIDS 64u
_Noreturn void criu_dump(const struct sandbox *sandbox, const char *group, int job_fd);
_Noreturn void criu_restore(const struct sandbox *sandbox, int userns_fd, const struct restore *restore);

/* memory.c */
int memory_dump(struct sandbox *sandbox, int job_fd, uint64_t seconds, const struct waiter *waiter);
int memory_restore(struct sandbox *sandbox, int userns_fd, int cgroup_fd, const struct restore *restore);
bool memory_dumps(const struct sandbox *sandbox);
void memory_forget(const struct sandbox *sandbox);
bool memory_reaped(pid_t pid, int wstatus);
void memory_end_all(void);
bool memory_is_idle(void);
int64_t memory_run_timers(int64_t now_ns);

/* privileges.c */
int leave_host(int userns_fd);
int own_namespaces(void);
int drop_privileges(const struct spec *spec);
uint64_t root_capabilities(const struct spec *spec); /* a bit each; 0 where it is to have none */
int die_with_supervisor(void);

/* seccomp.c */
int seccomp_compile(void);
int seccomp_install(const struct spec *spec);

/* zygote.c */
bool zygote_is_possible(void);
bool zygote_has_userns(const struct sandbox *sandbox);
int zygote_userns(const struct sandbox *sandbox);
int launch_inside(struct sandbox *sandbox, int userns_fd, int cgroup_fd);
bool zygote_child_exists(pid_t pid);
void zygote_end_strays(const struct sandbox *sandbox);
int zygote_enter(const struct sandbox *sandbox, const char *text, int line_fd);

#endif
