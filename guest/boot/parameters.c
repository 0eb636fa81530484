/* `barchan.NAME=VALUE` on the kernel's command line, which only the host writes. */
#define _GNU_SOURCE
#include "boot.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PREFIX "barchan."

enum { LINE_BYTES = 4096, LAYERS_MAX = 64 };

static void copy(char *out, const char *value, const char *name)
{
	if (strlen(value) >= NAME_MAX_BYTES) {
		errno = ENAMETOOLONG;
		die(name);
	}
	strcpy(out, value);
}

static uint64_t number(const char *value, const char *name)
{
	char *end;
	uint64_t found;

	errno = 0;
	found = strtoull(value, &end, 10);
	if (errno != 0 || end == value || *end != 0) {
		errno = EINVAL;
		die(name);
	}
	return found;
}

static void take_net(struct parameters *out, char *value)
{
	char *comma = strchr(value, ',');

	if (comma != NULL) {
		*comma = 0;
		copy(out->gateway, comma + 1, "barchan.net");
	}
	copy(out->address, value, "barchan.net");
}

static void take(struct parameters *out, const char *name, char *value)
{
	struct {
		const char *name;
		uint64_t *to;
	} numbers[] = {{"memory", &out->memory_bytes}, {"pids", &out->pids}, {"shm", &out->shm_bytes}, {"spool", &out->spool_bytes}};

	for (size_t i = 0; i < COUNT_OF(numbers); i++)
		if (strcmp(name, numbers[i].name) == 0)
			*numbers[i].to = number(value, name);
	if (strcmp(name, "layers") == 0)
		out->layers = (unsigned)min_u64(number(value, name), LAYERS_MAX + 1);
	else if (strcmp(name, "hostname") == 0)
		copy(out->hostname, value, name);
	else if (strcmp(name, "root") == 0)
		out->capable_root = strcmp(value, "capable") == 0;
	else if (strcmp(name, "net") == 0)
		take_net(out, value);
}

void parameters_read(struct parameters *out)
{
	char line[LINE_BYTES], *rest = line, *word;
	CLEANUP_FD int fd = must(open("/proc/cmdline", O_RDONLY | O_CLOEXEC), "/proc/cmdline");
	ssize_t length = must((int)read(fd, line, sizeof line - 1), "/proc/cmdline");

	line[length] = 0;
	while ((word = strsep(&rest, " \n")) != NULL) {
		char *value = strchr(word, '=');

		if (value == NULL || strncmp(word, PREFIX, strlen(PREFIX)) != 0)
			continue;
		*value = 0;
		take(out, word + strlen(PREFIX), value + 1);
	}
	errno = EINVAL;
	if (out->layers == 0 || out->layers > LAYERS_MAX)
		die("barchan.layers");
	if (out->spool_bytes == 0 || out->hostname[0] == 0)
		die("barchan.spool or barchan.hostname");
}
