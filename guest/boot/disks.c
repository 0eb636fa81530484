/* The sandbox's files: read-only layers, each a disk of its own, and above them what is written, on the last disk. */
#define _GNU_SOURCE
#include "boot.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>

enum { SERIAL_BYTES = 32, WAITS_MAX = 1000, WAIT_US = 5000, OPTIONS_BYTES = 1024 };

static bool has_serial(int blocks, const char *disk, const char *serial)
{
	char path[300], text[SERIAL_BYTES];
	ssize_t length;

	snprintf(path, sizeof path, "%.255s/serial", disk);
	CLEANUP_FD int fd = openat(blocks, path, O_RDONLY | O_CLOEXEC);
	length = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
	if (length <= 0)
		return false;
	text[length] = 0;
	text[strcspn(text, "\n")] = 0;
	return strcmp(text, serial) == 0;
}

static bool find_once(const char *serial, char path[PATH_BYTES])
{
	DIR *blocks = opendir("/sys/block");
	struct dirent *entry;
	bool found = false;

	while (blocks != NULL && !found && (entry = readdir(blocks)) != NULL)
		if (entry->d_name[0] != '.' && has_serial(dirfd(blocks), entry->d_name, serial)) {
			snprintf(path, PATH_BYTES, "/dev/%.64s", entry->d_name);
			found = true;
		}
	if (blocks != NULL)
		closedir(blocks);
	return found;
}

/* By the serial number that the host gave it: the order of disks is the kernel's. A module's device may come a moment later. */
static void find(const char *serial, char path[PATH_BYTES])
{
	for (unsigned i = 0; !find_once(serial, path); i++) {
		if (i == WAITS_MAX) {
			errno = ENODEV;
			die(serial);
		}
		usleep(WAIT_US);
	}
}

static void mount_layers(unsigned count)
{
	char serial[SERIAL_BYTES], device[PATH_BYTES], path[PATH_BYTES];

	for (unsigned i = 0; i < count; i++) {
		snprintf(serial, sizeof serial, "layer-%u", i);
		snprintf(path, sizeof path, "/layers/%u", i);
		find(serial, device);
		make_directory(path, 0700);
		must(mount(device, path, "erofs", MS_RDONLY | MS_NODEV, NULL), serial);
	}
}

static void mount_disk(void)
{
	char device[PATH_BYTES], options[PATH_BYTES];

	find("disk", device);
	/* The reserved blocks are the init's: a guest that fills its disk leaves room for what its programs say. What is flushed or not is
	 * nobody's concern, since the disk ends with the machine or is taken at a moment when nothing is on its way. */
	snprintf(options, sizeof options, "resuid=%d,barrier=0,discard", INIT_ID);
	must(mount(device, "/disk", "ext4", MS_NODEV, options), "disk");
	make_directory("/disk/u", 0755);
	make_directory("/disk/w", 0700);
	make_directory("/disk/spool", 0700);
	must(chown("/disk/spool", INIT_ID, INIT_ID), "/disk/spool");
}

/* The overlay writes as whoever mounts it, and who may have more than the limits allow could take the init's blocks. */
static void limit_resources(bool on)
{
	struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
	struct __user_cap_data_struct data[2];

	must((int)syscall(SYS_capget, &header, data), "capget");
	if (on)
		data[0].effective &= ~(1u << CAP_SYS_RESOURCE);
	else
		data[0].effective |= 1u << CAP_SYS_RESOURCE;
	must((int)syscall(SYS_capset, &header, data), "capset");
}

static void mount_overlay(unsigned layers)
{
	char options[OPTIONS_BYTES] = "lowerdir=";
	size_t length = strlen(options);

	for (unsigned i = 0; i < layers; i++)
		length += (size_t)snprintf(options + length, sizeof options - length, i ? ":%u" : "%u", i);
	snprintf(options + length, sizeof options - length, ",upperdir=/disk/u,workdir=/disk/w,redirect_dir=on,metacopy=off");
	must(chdir("/layers"), "/layers");
	limit_resources(true);
	must(mount("overlay", ROOT, "overlay", MS_NODEV | MS_NOSUID, options), "overlay");
	limit_resources(false);
	must(chdir("/"), "/");
}

void disks_mount(const struct parameters *parameters, struct handover *handover)
{
	const int flags = O_RDONLY | O_DIRECTORY | O_CLOEXEC;

	mount_layers(parameters->layers);
	mount_disk();
	mount_overlay(parameters->layers);
	handover->spool = must(open("/disk/spool", flags), "/disk/spool");
	handover->upper = must(open("/disk/u", flags), "/disk/u");
}
