/* Layers, each mounted once and read-only for all sandboxes; and the FUSE file system that lazily kept ones are read from.
 *
 * Whoever serves that file system is another process. This one must never wait for it, so it only holds its two descriptors,
 * and mounts that others made of files in it: opening, reading or resolving anything there is left to them. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>

#include "supervisor.h"

#define LAYER_SAFE (MOUNT_ATTR_RDONLY | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOSUID)

static struct layer *layers;
static int fuse_device_fd = -1, fuse_mount_fd = -1;

struct layer *layer_find(const char *digest)
{
	for (struct layer *layer = layers; layer; layer = layer->next)
		if (strcmp(layer->digest, digest) == 0)
			return layer;
	return NULL;
}

/* In the order in which they were mounted last; NULL behind the end. */
const struct layer *layer_at(uint64_t index)
{
	const struct layer *layer = layers;

	while (layer && index-- > 0)
		layer = layer->next;
	return layer;
}

static int open_erofs(const char *path)
{
	char source[32];
	CLEANUP_FD int file_fd = open(path, O_RDONLY | O_CLOEXEC);

	if (file_fd < 0)
		return -1;
	/* By number: an option's value has at most 255 bytes. */
	snprintf(source, sizeof(source), "/proc/self/fd/%d", file_fd);
	return mount_new("erofs", LAYER_SAFE, (const char *[]){"source", source, NULL});
}

static int open_dir(const char *path)
{
	int copy_fd = mount_clone_with(AT_FDCWD, path, 0);

	uint64_t readonly = options.writable_layers ? 0 : MOUNT_ATTR_RDONLY;

	if (copy_fd >= 0 && mount_set_attributes(copy_fd, readonly | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOSUID, -1) < 0)
		close_fd(&copy_fd);
	return copy_fd;
}

/* Make the layer clonable from the supervisor's namespace and from nowhere visible. A clone of a host directory belongs to
 * the namespace it was made in; covering a mount of its own, it belongs to none. */
static int layer_hold(struct layer *layer, enum layer_type type)
{
	char name[DIGEST_MAX + 16];

	if (!detached_clones) {
		snprintf(name, sizeof(name), "layer-%s", layer->digest);
		return mounts_hold(layer->fd, name);
	}
	if (type != LAYER_DIR)
		return 0;
	layer->cover_fd = mount_new("tmpfs", 0, NULL);
	if (layer->cover_fd < 0)
		return -1;
	return move_mount(layer->fd, "", layer->cover_fd, "", MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH);
}

static void layer_free(struct layer *layer)
{
	char name[DIGEST_MAX + 32];

	if (!detached_clones && layer->fd >= 0) {
		snprintf(name, sizeof(name), "/held/layer-%s", layer->digest);
		if (umount2(name, MNT_DETACH) < 0)
			log_line("unmounting layer %s: %s", layer->digest, strerror(errno));
		rmdir(name);
	}
	close_fd(&layer->fd), close_fd(&layer->cover_fd);
	free(layer);
}

/* Takes the descriptor over. */
static int layer_keep(const char *digest, enum layer_type type, int mount_fd)
{
	struct layer *layer = mount_fd < 0 ? NULL : calloc(1, sizeof(*layer));
	int error = errno;

	if (!layer) {
		close_fd(&mount_fd);
		return errno = error, -1;
	}
	snprintf(layer->digest, sizeof(layer->digest), "%s", digest);
	layer->fd = mount_fd;
	layer->cover_fd = -1;
	if (layer_hold(layer, type) < 0) {
		error = errno;
		layer_free(layer);
		return errno = error, -1;
	}
	layer->next = layers;
	layers = layer;
	return 0;
}

int layer_add(const char *digest, enum layer_type type, const char *path)
{
	return layer_keep(digest, type, mounts_on_host(type == LAYER_DIR ? open_dir : open_erofs, path));
}

/* A layer that somebody else mounted. The descriptor stays the caller's. */
int layer_add_mount(const char *digest, int mount_fd)
{
	int copy_fd = fcntl(mount_fd, F_DUPFD_CLOEXEC, 0);

	if (copy_fd >= 0 && mount_set_attributes(copy_fd, LAYER_SAFE, -1) < 0)
		close_fd(&copy_fd);
	return layer_keep(digest, LAYER_EROFS, copy_fd);
}

int layer_remove(struct layer *layer)
{
	struct layer **link = &layers;

	if (layer->users > 0)
		return errno = EBUSY, -1;
	while (*link != layer)
		link = &(*link)->next;
	*link = layer->next;
	layer_free(layer);
	return 0;
}

/* Also those that a sandbox uses which can't be removed: the process is about to end. */
void layers_close(void)
{
	for (struct layer *layer; (layer = layers);) {
		layers = layer->next;
		layer_free(layer);
	}
	close_fd(&fuse_mount_fd);
	fuse_let_go();
}

/* Whoever still waits for a file of it waits for its server alone from now on, and for nobody if there is none. */
void fuse_let_go(void)
{
	close_fd(&fuse_device_fd);
}

static int open_device(const char *path)
{
	return open(path, O_RDWR | O_CLOEXEC);
}

/* The file system's two descriptors, which stay here; mounted on first use, which waits for nobody to serve it. */
int fuse_open(int *device_fd, int *mount_fd)
{
	char number[16];

	if (fuse_mount_fd < 0) {
		CLEANUP_FD int fd = mounts_on_host(open_device, "/dev/fuse");
		if (fd < 0)
			return -1;
		snprintf(number, sizeof(number), "%d", fd);
		fuse_mount_fd = mount_new("fuse", LAYER_SAFE | MOUNT_ATTR_NOEXEC,
					  (const char *[]){"fd", number, "rootmode", "40000", "user_id", "0", "group_id", "0", "allow_other", NULL, NULL});
		if (fuse_mount_fd < 0)
			return -1;
		fuse_device_fd = fd;
		fd = -1;
	}
	*device_fd = fuse_device_fd;
	*mount_fd = fuse_mount_fd;
	return 0;
}
