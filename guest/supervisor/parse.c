/* What a request asks a sandbox to be. */
#define _GNU_SOURCE
#include <stdio.h>
#include <string.h>

#include "request.h"

#define SHM_BYTES_MIN 4096u

static const char *const network_names[] = {[NETWORK_NONE] = "none", [NETWORK_PROXY] = "proxy", [NETWORK_OPEN] = "open"};

void refuse(const struct request *request, const char *stage, int error, const char *message)
{
	reply_error(&request->waiter, stage, error, message);
}

const char *value_of(const struct request *request, const char *key)
{
	for (unsigned i = 0; i < request->count; i++)
		if (strcmp(request->keys[i], key) == 0)
			return request->values[i];
	return NULL;
}

const char *network_name(enum network network)
{
	return network_names[network];
}

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

static int parse_network(const char *text, enum network *network)
{
	for (size_t i = 0; i < COUNT(network_names); i++)
		if (strcmp(text, network_names[i]) == 0) {
			*network = (enum network)i;
			return 0;
		}
	return -1;
}

/* `self`, `calls` (itself as well, of workers), or the id of one that runs. */
static int parse_zygote(const char *text, struct spec *spec)
{
	const struct sandbox *zygote = text ? sandbox_by_id(text) : NULL;

	if (!text)
		return 0;
	spec->keeps_calls = strcmp(text, "calls") == 0;
	spec->is_zygote = spec->keeps_calls || strcmp(text, "self") == 0;
	if (!spec->is_zygote && (!zygote || zygote->state != SANDBOX_RUNNING || !zygote->spec.is_zygote))
		return -1;
	snprintf(spec->zygote, sizeof(spec->zygote), "%s", spec->is_zygote ? "" : text);
	return zygote_is_possible() ? 0 : -1;
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
	const char *cpu = value_of(request, "cpu");
	spec->batch = cpu && strcmp(cpu, "batch") == 0;
	if (cpu && !spec->batch && strcmp(cpu, "latency") != 0)
		return "cpu";
	const char *root = value_of(request, "root");
	spec->capable_root = root && strcmp(root, "capable") == 0;
	if (root && !spec->capable_root && strcmp(root, "plain") != 0)
		return "root";
	if (parse_zygote(value_of(request, "zygote"), spec) < 0)
		return "zygote";
	return parse_network(value_of(request, "network"), &spec->network) < 0 ? "network" : NULL;
}

/* What a create and a restore have in common; false after an error was sent. */
bool parse_sandbox(const struct request *request, struct spec *spec, bool can_be_slot)
{
	const char *id = value_of(request, "id"), *wrong;
	const struct sandbox *taken = sandbox_by_id(id);

	/* `init` is the shared leaf's name, and a dot marks a group that stands beside a sandbox's. */
	if (!is_name(id, ID_MAX) || strchr(id, '.') || strcmp(id, "init") == 0)
		refuse(request, "request", EINVAL, "id");
	else if (taken && !(can_be_slot && taken->state == SANDBOX_SLOT))
		refuse(request, slot_can_be_late(taken) ? "slot" : "request", EEXIST, "the sandbox exists");
	else if ((wrong = parse_spec(request, spec)))
		refuse(request, "request", EINVAL, wrong);
	else if (parse_layers(value_of(request, "layers"), spec) < 0)
		refuse(request, "layers", errno, NULL);
	else
		return true;
	return false;
}
