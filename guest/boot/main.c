#define _GNU_SOURCE
#include "boot.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/stat.h>

#include "../common/port.h"

#define PORT "barchan"

/* Ends the machine: its reset is, for whoever runs it, an end. */
_Noreturn void die(const char *what)
{
	dprintf(2, "barchan-boot: %s: %s\n", what, strerror(errno));
	reboot(RB_AUTOBOOT);
	_exit(1);
}

int must(int result, const char *what)
{
	if (result < 0)
		die(what);
	return result;
}

void make_directory(const char *path, mode_t mode)
{
	if (mkdir(path, mode) != 0 && errno != EEXIST)
		die(path);
}

void write_file(const char *path, const char *text)
{
	CLEANUP_FD int fd = must(open(path, O_WRONLY | O_CLOEXEC), path);
	int error = write_all(fd, text, strlen(text));

	if (error != 0) {
		errno = -error;
		die(path);
	}
}

void mount_at(const char *type, const char *path, unsigned long flags, const char *options)
{
	must(mount(type, path, type, flags, options), path);
}

static void mount_machine(void)
{
	const unsigned long safe = MS_NOSUID | MS_NODEV | MS_NOEXEC;
	static const char *const directories[] = {"/proc", "/sys", "/dev", "/cgroup", "/layers", "/disk", "/masks", ROOT};

	for (size_t i = 0; i < COUNT_OF(directories); i++)
		make_directory(directories[i], 0700);
	mount_at("proc", "/proc", safe, NULL);
	mount_at("sysfs", "/sys", safe, NULL);
	mount_at("devtmpfs", "/dev", MS_NOSUID | MS_NOEXEC, NULL);
}

static int open_line(void)
{
	char path[PORT_PATH_MAX];

	must(port_find(PORT, path), "no port named " PORT);
	return must(open(path, O_RDWR | O_NONBLOCK | O_NOCTTY | O_CLOEXEC), path);
}

/* The only copy of the init that is run: nobody but root may read it, so that no guest process can look into the one that runs it. */
static int open_init(void)
{
	must(chmod("/barchan-init", 0111), "/barchan-init");
	return must(open("/barchan-init", O_PATH | O_CLOEXEC), "/barchan-init");
}

int main(void)
{
	struct parameters parameters = {0};
	struct handover handover;

	umask(022);
	mount_machine();
	parameters_read(&parameters);
	modules_load();
	disks_mount(&parameters, &handover);
	root_furnish(&parameters);
	net_set_up(&parameters);
	handover.cgroup = groups_make(&parameters);
	handover.line = open_line();
	handover.program = open_init();
	enter(&parameters, &handover);
}
