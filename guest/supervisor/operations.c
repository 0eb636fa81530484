/* Requests: packets of NUL-terminated `key=value` strings, checked whole before anything is done. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>

#include "request.h"

#define LIST_ENTRY_MAX 160u /* bytes: an id and three numbers, or a digest */
#define SPOOLS_MAX 16384u /* files with output that a restore brings back */

struct operation {
	const char *name;
	void (*handle)(struct request *request);
	const char *keys; /* all of them needed; words in brackets may be left out */
};

static struct reply *start_ok(const struct request *request)
{
	struct reply *reply = reply_start("ok");

	reply_add(reply, "tag=%llu", (unsigned long long)request->waiter.tag);
	return reply;
}

/* The running sandbox that `id` names, or NULL after an error was sent. */
static struct sandbox *running_of(const struct request *request)
{
	struct sandbox *sandbox = sandbox_by_id(value_of(request, "id"));

	if (sandbox && sandbox->state == SANDBOX_RUNNING && !memory_dumps(sandbox))
		return sandbox;
	if (sandbox && sandbox->state == SANDBOX_RUNNING)
		refuse(request, "attach", EBUSY, "its memory is being stored");
	else if (!sandbox)
		refuse(request, "unknown_id", ENOENT, "no such sandbox");
	else if (sandbox->state == SANDBOX_STARTING)
		refuse(request, "attach", EAGAIN, "the sandbox is starting");
	else
		refuse(request, "attach", ESRCH, "the sandbox has ended");
	return NULL;
}

/* --- hello, layers, list, shutdown -------------------------------------------------------------------------------- */

static void add_word(char *list, size_t size, const char *word)
{
	size_t length = strlen(list);

	snprintf(list + length, size - length, "%s%s", length ? "," : "", word);
}

static void handle_hello(struct request *request)
{
	uint64_t version;
	char message[128];

	if (parse_number(value_of(request, "version"), &version) < 0 || version != PROTOCOL_VERSION) {
		snprintf(message, sizeof(message), "this supervisor speaks version %u, the node %.32s", PROTOCOL_VERSION, value_of(request, "version"));
		refuse(request, "hello", EPROTO, message);
		return;
	}
	const struct {
		const char *name;
		bool has;
	} features[] = {
		{"userns", !options.no_userns},
		{"idmap", !options.no_userns},
		{"timens", access("/proc/self/ns/time", F_OK) == 0},
		{"cpu", cgroup_has("cpu")},
		{"simple-quota", pool_has_simple_quota},
	};
	char list[512] = "";
	for (size_t i = 0; i < COUNT(features); i++)
		if (features[i].has)
			add_word(list, sizeof(list), features[i].name);
	/* A node can tell that it talks to a weakened supervisor. */
	for (size_t i = 0; i < WEAKENINGS; i++)
		if (*weakenings[i].flag)
			add_word(list, sizeof(list), weakenings[i].name);
	struct reply *reply = start_ok(request);
	reply_add(reply, "version=%u", PROTOCOL_VERSION);
	reply_add(reply, "pid=%d", getpid());
	reply_add(reply, "pool_bytes=%llu", (unsigned long long)pool_bytes());
	reply_add(reply, "cgroup=%s", cgroup_is_v2() ? "v2" : "v1");
	reply_add(reply, "features=%s", list);
	reply_send(reply, &request->waiter);
	node_said_hello = true;
	slots_drop(); /* it knows none of an earlier node's */
	if (pool_remove_cuts() < 0)
		log_line("removing the cuts of an earlier node: %s", strerror(errno));
	sandbox_announce_ended();
}

static int add_layer(const struct request *request, const char *digest)
{
	const char *type = value_of(request, "type"), *path = value_of(request, "path");

	if (strcmp(type, "mount") == 0 && !path && request->passed_fd >= 0)
		return layer_add_mount(digest, request->passed_fd);
	if (strcmp(type, "dir") == 0 && path && path[0] == '/')
		return layer_add(digest, LAYER_DIR, path);
	if (strcmp(type, "erofs") == 0 && path && path[0] == '/')
		return layer_add(digest, LAYER_EROFS, path);
	return errno = EINVAL, -1;
}

static void handle_layer(struct request *request)
{
	const char *digest = value_of(request, "digest");

	if (!is_name(digest, DIGEST_MAX))
		refuse(request, "request", EINVAL, "digest");
	else if (!layer_find(digest) && add_layer(request, digest) < 0)
		refuse(request, "layer", errno, NULL);
	else
		reply_send(start_ok(request), &request->waiter);
}

/* Both descriptors are copied: the reader that serves them may die, and what it had is kept here. */
static void handle_fuse(struct request *request)
{
	int device_fd, mount_fd;

	if (fuse_open(&device_fd, &mount_fd) < 0) {
		refuse(request, "fuse", errno, NULL);
		return;
	}
	CLEANUP_FD int device_copy_fd = fcntl(device_fd, F_DUPFD_CLOEXEC, 0);
	CLEANUP_FD int mount_copy_fd = fcntl(mount_fd, F_DUPFD_CLOEXEC, 0);
	if (device_copy_fd < 0 || mount_copy_fd < 0) {
		refuse(request, "fuse", errno, NULL);
		return;
	}
	struct reply *reply = start_ok(request);
	reply_add_fd(reply, device_copy_fd);
	reply_add_fd(reply, mount_copy_fd);
	device_copy_fd = mount_copy_fd = -1; /* reply_send closes them */
	reply_send(reply, &request->waiter);
}

static void handle_unlayer(struct request *request)
{
	struct layer *layer = layer_find(value_of(request, "digest"));

	if (layer && layer_remove(layer) < 0)
		refuse(request, "unlayer", errno, NULL);
	else
		reply_send(start_ok(request), &request->waiter);
}

static bool has_room(const struct reply *reply)
{
	return PACKET_MAX - reply->length > 2 * LIST_ENTRY_MAX;
}

/* Where a page of a list starts; -1 after an error was sent. */
static int parse_from(const struct request *request, uint64_t *from)
{
	*from = 0;
	if (!value_of(request, "from") || parse_number(value_of(request, "from"), from) == 0)
		return 0;
	refuse(request, "request", EINVAL, "from");
	return -1;
}

static void handle_layers(struct request *request)
{
	uint64_t at;

	if (parse_from(request, &at) < 0)
		return;
	const struct layer *layer = layer_at(at);
	struct reply *reply = start_ok(request);
	for (; layer && has_room(reply); layer = layer->next, at++)
		reply_add(reply, "layer=%s", layer->digest);
	if (layer)
		reply_add(reply, "next=%llu", (unsigned long long)at);
	reply_send(reply, &request->waiter);
}

static void handle_pool(struct request *request)
{
	CLEANUP_FD int upper_fd = pool_open_dir("upper");
	CLEANUP_FD int cut_fd = pool_open_dir("cut");

	if (upper_fd < 0 || cut_fd < 0) {
		refuse(request, "pool", errno, NULL);
		return;
	}
	struct reply *reply = start_ok(request);
	reply_add_fd(reply, upper_fd);
	reply_add_fd(reply, cut_fd);
	upper_fd = cut_fd = -1; /* reply_send closes them */
	reply_send(reply, &request->waiter);
}

/* Not slots that nobody claimed. What starts or goes counts: its id can be used again only when nothing of it is left. */
static bool is_listed(const struct sandbox *sandbox)
{
	return sandbox && sandbox->state != SANDBOX_FILLING && sandbox->state != SANDBOX_SLOT && sandbox->spec.layer_count > 0;
}

static void handle_list(struct request *request)
{
	struct reply *reply;
	uint64_t from;
	unsigned slot;

	if (parse_from(request, &from) < 0)
		return;
	reply = start_ok(request);
	for (slot = from < SLOTS_MAX ? (unsigned)from : SLOTS_MAX; slot < sandbox_slots_end() && has_room(reply); slot++) {
		const struct sandbox *sandbox = sandbox_by_slot(slot);
		if (!is_listed(sandbox))
			continue;
		reply_add(reply, "sandbox=%s:%d:%llu:%u", sandbox->id, sandbox->pid, (unsigned long long)sandbox->start_time, sandbox->uid_base);
	}
	if (slot < sandbox_slots_end())
		reply_add(reply, "next=%u", slot);
	reply_send(reply, &request->waiter);
}

static void handle_shutdown(struct request *request)
{
	request_shutdown(&request->waiter);
}

/* --- create and what follows -------------------------------------------------------------------------------------- */

static void handle_create(struct request *request)
{
	struct spec spec = {.layer_count = 0};

	if (parse_sandbox(request, &spec, true))
		slots_create(value_of(request, "id"), &spec, &request->waiter);
}

static void handle_restore(struct request *request)
{
	struct spec spec = {.layer_count = 0};
	struct restore restore = {.job_fd = request->passed_fd};
	const char *mounts = value_of(request, "mounts");

	if (restore.job_fd < 0 || strlen(mounts) >= sizeof(restore.mounts) || parse_number(value_of(request, "spools"), &restore.spools) < 0 ||
	    restore.spools > SPOOLS_MAX || parse_number(value_of(request, "monotonic_ns"), &restore.monotonic_ns) < 0 ||
	    parse_number(value_of(request, "boottime_ns"), &restore.boottime_ns) < 0 || parse_number(value_of(request, "seconds"), &restore.seconds) < 0) {
		refuse(request, "request", EINVAL, "mounts, spools, clocks, seconds, or no descriptor");
		return;
	}
	snprintf(restore.mounts, sizeof(restore.mounts), "%s", mounts);
	if (parse_sandbox(request, &spec, false))
		sandbox_restore(value_of(request, "id"), &spec, &restore, request->waiter.tag);
}

static void handle_dump(struct request *request)
{
	struct sandbox *sandbox = running_of(request);
	uint64_t seconds;

	if (!sandbox)
		return;
	if (request->passed_fd < 0 || parse_number(value_of(request, "seconds"), &seconds) < 0)
		refuse(request, "request", EINVAL, "seconds, or no descriptor");
	else if (memory_dump(sandbox, request->passed_fd, seconds, &request->waiter) < 0)
		refuse(request, "dump", errno, NULL);
}

static void handle_slots(struct request *request)
{
	const char *prefix = value_of(request, "prefix");
	uint64_t count;

	if (!is_name(prefix, SLOT_PREFIX_MAX) || strchr(prefix, '.') || parse_number(value_of(request, "count"), &count) < 0 || count > SLOTS_MAX / 2) {
		refuse(request, "request", EINVAL, "count or prefix");
		return;
	}
	slots_set((unsigned)count, prefix);
	struct reply *reply = start_ok(request);
	slots_describe(reply);
	reply_send(reply, &request->waiter);
}

static int network_fd(const struct sandbox *sandbox)
{
	char path[64];

	if (sandbox->spec.network == NETWORK_PROXY)
		return fcntl(sandbox->listener_fd, F_DUPFD_CLOEXEC, 0);
	snprintf(path, sizeof(path), "/proc/%d/ns/net", sandbox->pid);
	return open(path, O_RDONLY | O_CLOEXEC);
}

/* Answer with a fresh connection to the init and what else belongs to the sandbox. `*failed` becomes STAGE_READY when the answer was
 * given; else nothing was sent and errno says why. */
void reply_sandbox(struct sandbox *sandbox, const struct waiter *waiter, enum stage *failed)
{
	bool has_network = sandbox->spec.network != NETWORK_NONE && !options.no_netns;
	CLEANUP_FD int init_fd = sandbox->as_slot.init_fd >= 0 ? sandbox->as_slot.init_fd : init_connect(sandbox);
	CLEANUP_FD int pid_fd = init_fd < 0 ? -1 : (int)syscall(SYS_pidfd_open, sandbox->pid, 0);
	CLEANUP_FD int net_fd = pid_fd >= 0 && has_network ? network_fd(sandbox) : -1;

	sandbox->as_slot.init_fd = -1; /* one is given away once */
	*failed = STAGE_CONNECT;
	if (pid_fd < 0 || (has_network && net_fd < 0))
		return;
	struct reply *reply = reply_start("ok");
	reply_add(reply, "tag=%llu", (unsigned long long)waiter->tag);
	reply_add(reply, "pid=%d", sandbox->pid);
	reply_add(reply, "start_time=%llu", (unsigned long long)sandbox->start_time);
	reply_add(reply, "uid_base=%u", sandbox->uid_base);
	reply_add(reply, "network=%s", network_name(sandbox->spec.network));
	reply_add(reply, "warm=%d", sandbox->as_slot.is_slot);
	reply_add_fd(reply, init_fd);
	reply_add_fd(reply, pid_fd);
	if (has_network)
		reply_add_fd(reply, net_fd);
	init_fd = pid_fd = net_fd = -1; /* reply_send closes them */
	reply_send(reply, waiter);
	*failed = STAGE_READY;
}

static void handle_attach(struct request *request)
{
	struct sandbox *sandbox = running_of(request);
	enum stage failed = STAGE_READY;

	if (sandbox)
		reply_sandbox(sandbox, &request->waiter, &failed);
	if (failed != STAGE_READY)
		refuse(request, stage_name(failed), errno, NULL);
}

static void handle_leaf(struct request *request)
{
	struct sandbox *sandbox = running_of(request);

	if (!sandbox)
		return;
	if (!sandbox->has_platform) {
		/* Set first: what a failure half way leaves is removed with the sandbox. */
		sandbox->has_platform = true;
		if (cgroup_make_platform(sandbox) < 0) {
			int error = errno;
			sandbox->has_platform = cgroup_remove_platform(sandbox) < 0;
			refuse(request, "leaf", error, NULL);
			return;
		}
	}
	handle_attach(request);
}

/* The descriptor that comes along is the fork's line to the node. */
static void handle_enter(struct request *request)
{
	struct sandbox *sandbox = running_of(request);

	if (!sandbox)
		return;
	if (request->passed_fd < 0)
		refuse(request, "request", EINVAL, "a descriptor");
	else if (zygote_enter(sandbox, value_of(request, "text"), request->passed_fd) < 0)
		refuse(request, "enter", errno, NULL);
	else
		reply_send(start_ok(request), &request->waiter);
}

static void handle_destroy(struct request *request)
{
	struct sandbox *sandbox = sandbox_by_id(value_of(request, "id"));

	if (sandbox)
		sandbox_destroy(sandbox, &request->waiter);
	else
		refuse(request, "unknown_id", ENOENT, "no such sandbox");
}

/* --- dispatch ----------------------------------------------------------------------------------------------------- */

static const struct operation operations[] = {
	{"hello", handle_hello, "version"},
	{"layer", handle_layer, "digest type [path]"},
	{"fuse", handle_fuse, ""},
	{"unlayer", handle_unlayer, "digest"},
	{"layers", handle_layers, "[from]"},
	{"pool", handle_pool, ""},
	{"create", handle_create, "id layers upper_bytes memory_bytes pids cpu_us shm_bytes hostname network [root] [cut] [cpu] [zygote]"},
	{"dump", handle_dump, "id seconds"},
	{"restore", handle_restore,
	 "id layers upper_bytes memory_bytes pids cpu_us shm_bytes hostname network [root] [cut] [cpu] mounts spools monotonic_ns boottime_ns seconds"},
	{"slots", handle_slots, "count prefix"},
	{"attach", handle_attach, "id"},
	{"leaf", handle_leaf, "id"},
	{"enter", handle_enter, "id text"},
	{"destroy", handle_destroy, "id"},
	{"list", handle_list, "[from]"},
	{"shutdown", handle_shutdown, ""},
};

/* Splits the packet in place. The tag, when it has one, is known even if the rest is wrong. */
static int parse_packet(char *packet, size_t length, struct request *request)
{
	int result = 0;

	request->count = 0;
	request->waiter = node_waiter(0);
	if (packet[length - 1] != '\0')
		return -1;
	for (char *at = packet + strlen(packet) + 1, *next; at < packet + length; at = next) {
		char *equals = strchr(at, '=');
		next = at + strlen(at) + 1;
		if (!equals || request->count == KEYS_MAX)
			return -1;
		*equals = '\0';
		if (strcmp(at, "tag") == 0)
			result |= parse_number(equals + 1, &request->waiter.tag);
		else if (value_of(request, at))
			result = -1;
		request->keys[request->count] = at;
		request->values[request->count++] = equals + 1;
	}
	return value_of(request, "tag") ? result : -1;
}

/* Every key of the operation is there, and no other. */
static bool has_right_keys(const struct operation *operation, const struct request *request)
{
	char words[256], *word, *rest = words;
	unsigned matched = 1; /* tag */

	snprintf(words, sizeof(words), "%s", operation->keys);
	while ((word = strsep(&rest, " "))) {
		bool optional = word[0] == '[';
		if (optional)
			word[strlen(word) - 1] = '\0', word++;
		if (!*word)
			continue;
		if (value_of(request, word))
			matched++;
		else if (!optional)
			return false;
	}
	return matched == request->count;
}

/* The descriptor that came with the packet, if any, stays the caller's. */
void handle_request(char *packet, size_t length, int passed_fd)
{
	struct request request = {.passed_fd = passed_fd};
	const struct operation *operation = NULL;

	if (parse_packet(packet, length, &request) < 0) {
		refuse(&request, "request", EBADMSG, "not a packet of NUL-terminated key=value strings with one tag");
		return;
	}
	for (size_t i = 0; i < COUNT(operations); i++)
		if (strcmp(operations[i].name, packet) == 0)
			operation = &operations[i];
	if (!operation)
		refuse(&request, "request", EOPNOTSUPP, "unknown operation");
	else if (!has_right_keys(operation, &request))
		refuse(&request, "request", EINVAL, "a key is missing, unknown or given twice");
	else if (!node_said_hello && operation->handle != handle_hello)
		refuse(&request, "hello", EPROTO, "hello comes first");
	else
		operation->handle(&request);
}
