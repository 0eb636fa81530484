/* The root of a slot: first one that belongs to no image, then, when it is claimed, the one that was asked for. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <sys/mount.h>
#include <sys/stat.h>

#include "supervisor.h"

#define NEW_ROOT "/new"

static const char *const carried[] = {"/dev", "/proc", "/sys"};

/* What a slot's init waits in until it is known which root it is to have: /dev, /proc and /sys, and where that root will go. */
int root_make_waiting(void)
{
	CLEANUP_FD int mount_fd = mount_new("tmpfs", MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC,
					    (const char *[]){"size", "16384", "mode", "0755", NULL});

	if (mount_fd < 0 || mount_attach(mount_fd, AT_FDCWD, "/root") < 0 || mkdirat(mount_fd, NEW_ROOT + 1, 0755) < 0)
		return -1;
	for (size_t i = 0; i < COUNT(carried); i++)
		if (mkdirat(mount_fd, carried[i] + 1, 0755) < 0)
			return -1;
	return open("/root", O_PATH | O_DIRECTORY | O_CLOEXEC);
}

/* In a slot that is in its own mount namespace: what was there when that was made can't be moved to another root. Copies can, and
 * what is below them stays locked. */
int root_loosen(void)
{
	for (size_t i = 0; i < COUNT(carried); i++) {
		CLEANUP_FD int copy_fd = mount_clone_with(AT_FDCWD, carried[i], AT_RECURSIVE);
		if (copy_fd < 0 || mount_attach(copy_fd, AT_FDCWD, carried[i]) < 0)
			return -1;
	}
	return 0;
}

static int carry_over(int root_fd)
{
	for (size_t i = 0; i < COUNT(carried); i++) {
		CLEANUP_FD int tree_fd = open_tree(AT_FDCWD, carried[i], OPEN_TREE_CLOEXEC);
		if (tree_fd < 0 || mount_attach(tree_fd, root_fd, carried[i] + 1) < 0)
			return -1;
	}
	return 0;
}

static int resize_shm(uint64_t bytes)
{
	char text[24];
	CLEANUP_FD int context_fd = fspick(AT_FDCWD, "/dev/shm", FSPICK_CLOEXEC);

	snprintf(text, sizeof(text), "%llu", (unsigned long long)bytes);
	if (context_fd < 0 || fsconfig(context_fd, FSCONFIG_SET_STRING, "size", text, 0) < 0)
		return -1;
	return fsconfig(context_fd, FSCONFIG_CMD_RECONFIGURE, NULL, NULL, 0);
}

/* In a slot's keeper, which is in the supervisor's mount namespace or in a copy of it: make the root that was asked for, and make
 * it the only one in the slot's mount namespace. The init's own root goes with it. */
int root_replace(const struct sandbox *sandbox, int userns_fd, int upper_fd, int mount_ns_fd)
{
	struct root_parts parts;

	enter_stage(STAGE_LAYERS);
	if (root_collect_layers(sandbox, userns_fd, upper_fd, &parts) < 0)
		return -1;
	enter_stage(STAGE_NAMESPACES);
	if (!detached_clones && unshare(CLONE_NEWNS) < 0)
		return -1;
	enter_stage(STAGE_OVERLAY);
	CLEANUP_FD int made_fd = root_overlay(sandbox, &parts);
	if (made_fd < 0 || setns(mount_ns_fd, CLONE_NEWNS) < 0 || mount_attach(made_fd, AT_FDCWD, NEW_ROOT) < 0)
		return -1;
	enter_stage(STAGE_DEV);
	CLEANUP_FD int root_fd = open(NEW_ROOT, O_PATH | O_DIRECTORY | O_CLOEXEC);
	if (root_fd < 0 || (sandbox->spec.shm_bytes != SLOT_SHM_BYTES && resize_shm(sandbox->spec.shm_bytes) < 0))
		return -1;
	return carry_over(root_fd) < 0 ? -1 : root_enter(root_fd);
}
