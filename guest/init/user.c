/* Users as the guest's own /etc/passwd and /etc/group name them. The files are the guest's to write: whatever they hold
 * may be wrong, but can't name the init's own user nor an id of another sandbox, and can't overflow anything. Runs in the
 * child only. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

#include "init.h"

enum { FILE_BYTES_MAX = 1 << 20, IDS = 1 << 16 };

/* A file being walked line by line. */
struct table {
	char *text;
	size_t len, at;
};

static struct table table_open(const char *path)
{
	CLEANUP_FD int fd = open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
	struct table table = {0};
	struct stat st;
	size_t size;

	if (fd < 0 || fstat(fd, &st) != 0 || !S_ISREG(st.st_mode))
		return table;
	size = (size_t)min_u64((uint64_t)st.st_size, FILE_BYTES_MAX);
	table.text = malloc(size);
	while (table.text != NULL && table.len < size) {
		ssize_t n = read(fd, table.text + table.len, size - table.len);
		if (n <= 0)
			break;
		table.len += (size_t)n;
	}
	return table;
}

struct field {
	const char *text;
	size_t len;
};

/* Split the next line at its colons. Returns how many of `max` fields it has; 0 at the end. Empty lines have one. */
static int next_line(struct table *table, struct field *fields, int max)
{
	const char *at = table->text + table->at;
	const char *end;
	int count = 0;

	if (table->text == NULL || table->at >= table->len)
		return 0;
	end = memchr(at, '\n', table->len - table->at);
	if (end == NULL)
		end = table->text + table->len;
	table->at = (size_t)(end - table->text) + 1;
	while (count < max) {
		const char *colon = count + 1 < max ? memchr(at, ':', (size_t)(end - at)) : NULL;

		fields[count].text = at;
		fields[count++].len = (size_t)((colon ? colon : end) - at);
		if (colon == NULL)
			break;
		at = colon + 1;
	}
	return count;
}

static bool field_is(struct field field, const char *text, size_t len)
{
	return field.len == len && memcmp(field.text, text, len) == 0;
}

/* An id in decimal digits. (uint32_t)-1 means "no change" to the kernel and is no id. */
static bool parse_id(struct field field, uint32_t *out)
{
	uint64_t value = 0;

	if (field.len == 0 || field.len > 10)
		return false;
	for (size_t i = 0; i < field.len; i++) {
		if (field.text[i] < '0' || field.text[i] > '9')
			return false;
		value = value * 10 + (uint64_t)(field.text[i] - '0');
	}
	*out = (uint32_t)value;
	return value < UINT32_MAX;
}

static void copy(char *out, size_t size, struct field field)
{
	if (field.len < size && memchr(field.text, 0, field.len) == NULL) {
		memcpy(out, field.text, field.len);
		out[field.len] = 0;
	}
}

/* Find the user by name, or by number when it is one. */
static bool find_user(struct field user, struct identity *identity)
{
	struct table table = table_open("/etc/passwd");
	uint32_t number = 0, uid, gid;
	bool numeric = parse_id(user, &number), found = false;
	struct field f[7];
	int count;

	while (!found && (count = next_line(&table, f, 7)) > 0) {
		if (count < 6 || !parse_id(f[2], &uid) || !parse_id(f[3], &gid))
			continue;
		if (numeric ? uid != number : !field_is(f[0], user.text, user.len))
			continue;
		found = true;
		identity->uid = uid;
		identity->gid = gid;
		copy(identity->name, sizeof identity->name, f[0]);
		if (f[5].len > 0)
			copy(identity->home, sizeof identity->home, f[5]);
	}
	if (!found && numeric) {
		identity->uid = identity->gid = number;
		copy(identity->name, sizeof identity->name, user);
	}
	free(table.text);
	return found || numeric;
}

static bool find_group(struct field group, gid_t *gid)
{
	struct table table = table_open("/etc/group");
	bool found = parse_id(group, gid);
	struct field f[4];
	int count;

	while (!found && (count = next_line(&table, f, 4)) > 0)
		found = count >= 3 && field_is(f[0], group.text, group.len) && parse_id(f[2], gid);
	free(table.text);
	return found;
}

static bool lists_member(struct field members, const char *name)
{
	size_t len = strlen(name);

	while (members.len > 0) {
		const char *comma = memchr(members.text, ',', members.len);
		size_t item = comma ? (size_t)(comma - members.text) : members.len;

		if (item == len && memcmp(members.text, name, len) == 0)
			return true;
		if (comma == NULL)
			return false;
		members.text += item + 1;
		members.len -= item + 1;
	}
	return false;
}

static void find_supplementary(struct identity *identity)
{
	struct table table = table_open("/etc/group");
	struct field f[4];
	gid_t gid;
	int count;

	identity->groups[identity->group_count++] = identity->gid;
	while ((count = next_line(&table, f, 4)) > 0 && identity->group_count < COUNT_OF(identity->groups))
		if (count == 4 && parse_id(f[2], &gid) && gid != identity->gid && lists_member(f[3], identity->name))
			identity->groups[identity->group_count++] = gid;
	free(table.text);
}

/* The init runs as a user of its own so that no guest user can signal it or change its limits, and so do its applets. As an agent it is
 * root; the same ids are refused, so that what runs there runs elsewhere, too. */
static bool is_reserved(const struct identity *identity)
{
	uid_t own = settings.is_agent ? IDS - 1 : settings.uid, applets = settings.is_agent ? IDS - 3 : settings.applet_uid;
	gid_t group = settings.is_agent ? IDS - 1 : settings.gid;
	bool reserved = (own != 0 && identity->uid == own) || (applets != 0 && identity->uid == applets);

	if (group == 0)
		return reserved;
	reserved |= identity->gid == group;
	for (size_t i = 0; i < identity->group_count; i++)
		reserved |= identity->groups[i] == group;
	return reserved;
}

/* The init of a zygote could take ids of other sandboxes, too: its user namespace has them all. */
static bool is_foreign(const struct identity *identity)
{
	bool foreign = identity->uid >= IDS || identity->gid >= IDS;

	for (size_t i = 0; i < identity->group_count; i++)
		foreign |= identity->groups[i] >= IDS;
	return foreign;
}

const char *identity_find(const char *user, struct identity *identity)
{
	const char *colon = strchr(user, ':');
	struct field name = {user, colon ? (size_t)(colon - user) : strlen(user)};

	*identity = (struct identity){.name = "root", .home = "/root"};
	if (user[0] == 0)
		return NULL;
	strcpy(identity->name, "");
	strcpy(identity->home, "/");
	if (!find_user(name, identity))
		return "not in the sandbox's /etc/passwd";
	if (colon != NULL) {
		if (!find_group((struct field){colon + 1, strlen(colon + 1)}, &identity->gid))
			return "no such group in the sandbox's /etc/group";
	} else {
		find_supplementary(identity);
	}
	if (is_foreign(identity))
		return "has an id above 65535, which no sandbox has";
	return is_reserved(identity) ? "reserved for the platform" : NULL;
}
