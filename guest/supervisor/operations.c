/* Requests: packets of NUL-terminated `key=value` strings, checked whole before anything is done. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>

#include "supervisor.h"

#define KEYS_MAX 16u
#define LIST_ENTRY_MAX 160u /* bytes: an id and three numbers, or a digest */
#define SHM_BYTES_MIN 4096u

struct request {
	const char *keys[KEYS_MAX], *values[KEYS_MAX];
	unsigned count;
	int passed_fd; /* came with the packet, or -1 */
	struct waiter waiter;
};

struct operation {
	const char *name;
	void (*handle)(struct request *request);
	const char *keys; /* all of them needed; words in brackets may be left out */
};

static void refuse(const struct request *request, const char *stage, int error, const char *message)
{
	reply_error(&request->waiter, stage, error, message);
}

static const char *value_of(const struct request *request, const char *key)
{
	for (unsigned i = 0; i < request->count; i++)
		if (strcmp(request->keys[i], key) == 0)
			return request->values[i];
	return NULL;
}

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

	if (sandbox && sandbox->state == SANDBOX_RUNNING)
		return sandbox;
	if (!sandbox)
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
		if (!sandbox || (sandbox->state != SANDBOX_RUNNING && sandbox->state != SANDBOX_ENDED))
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

static int parse_layers(const char *text, struct spec *spec)
{
	char digest[DIGEST_MAX + 1];

	for (spec->layer_count = 0; *text; spec->layer_count++) {
		size_t length = strcspn(text, ":");
		if (length > DIGEST_MAX || spec->layer_count == LAYERS_MAX)
			return errno = E2BIG, -1;
		memcpy(digest, text, length);
		digest[length] = '\0';
		spec->layers[spec->layer_count] = layer_find(digest);
		if (!spec->layers[spec->layer_count])
			return errno = ENOENT, -1;
		text += length + (text[length] == ':');
	}
	return spec->layer_count > 0 ? 0 : (errno = EINVAL, -1);
}

static const char *const network_names[] = {[NETWORK_NONE] = "none", [NETWORK_PROXY] = "proxy", [NETWORK_OPEN] = "open"};

static int parse_network(const char *text, enum network *network)
{
	for (size_t i = 0; i < COUNT(network_names); i++)
		if (strcmp(text, network_names[i]) == 0) {
			*network = (enum network)i;
			return 0;
		}
	return -1;
}

/* The key that is wrong, or NULL. */
static const char *parse_spec(const struct request *request, struct spec *spec)
{
	const struct {
		const char *key;
		uint64_t *number, min;
	} numbers[] = {
		{"upper_bytes", &spec->upper_bytes, 1}, {"memory_bytes", &spec->memory_bytes, 1},	       {"pids", &spec->pids, 1},
		{"cpu_us", &spec->cpu_us, 0},		{"shm_bytes", &spec->shm_bytes, SHM_BYTES_MIN},
	};

	for (size_t i = 0; i < COUNT(numbers); i++)
		if (parse_number(value_of(request, numbers[i].key), numbers[i].number) < 0 || *numbers[i].number < numbers[i].min)
			return numbers[i].key;
	const char *hostname = value_of(request, "hostname");
	if (!is_name(hostname, HOSTNAME_MAX))
		return "hostname";
	snprintf(spec->hostname, sizeof(spec->hostname), "%s", hostname);
	const char *cut = value_of(request, "cut");
	if (cut && !is_name(cut, ID_MAX))
		return "cut";
	snprintf(spec->cut, sizeof(spec->cut), "%s", cut ? cut : "");
	const char *root = value_of(request, "root");
	spec->capable_root = root && strcmp(root, "capable") == 0;
	if (root && !spec->capable_root && strcmp(root, "plain") != 0)
		return "root";
	return parse_network(value_of(request, "network"), &spec->network) < 0 ? "network" : NULL;
}

static void handle_create(struct request *request)
{
	const char *id = value_of(request, "id");
	struct spec spec = {.layer_count = 0};

	/* `init` is the shared leaf's name, and a dot marks a sandbox's platform leaf. */
	if (!is_name(id, ID_MAX) || strchr(id, '.') || strcmp(id, "init") == 0) {
		refuse(request, "request", EINVAL, "id");
		return;
	}
	if (sandbox_by_id(id)) {
		refuse(request, "request", EEXIST, "the sandbox exists");
		return;
	}
	const char *wrong = parse_spec(request, &spec);
	if (wrong) {
		refuse(request, "request", EINVAL, wrong);
		return;
	}
	if (parse_layers(value_of(request, "layers"), &spec) < 0) {
		refuse(request, "layers", errno, NULL);
		return;
	}
	sandbox_create(id, &spec, request->waiter.tag);
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
	CLEANUP_FD int init_fd = init_connect(sandbox);
	CLEANUP_FD int pid_fd = init_fd < 0 ? -1 : (int)syscall(SYS_pidfd_open, sandbox->pid, 0);
	CLEANUP_FD int net_fd = pid_fd >= 0 && has_network ? network_fd(sandbox) : -1;

	*failed = STAGE_CONNECT;
	if (pid_fd < 0 || (has_network && net_fd < 0))
		return;
	struct reply *reply = reply_start("ok");
	reply_add(reply, "tag=%llu", (unsigned long long)waiter->tag);
	reply_add(reply, "pid=%d", sandbox->pid);
	reply_add(reply, "start_time=%llu", (unsigned long long)sandbox->start_time);
	reply_add(reply, "uid_base=%u", sandbox->uid_base);
	reply_add(reply, "network=%s", network_names[sandbox->spec.network]);
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
	{"create", handle_create, "id layers upper_bytes memory_bytes pids cpu_us shm_bytes hostname network [root] [cut]"},
	{"attach", handle_attach, "id"},
	{"leaf", handle_leaf, "id"},
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
	char words[128], *word, *rest = words;
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
