/* barchan-boot: the first program of a microVM, in its initial file system. It makes the machine look like a sandbox and becomes its init.
 *
 *   main.c        what is done in which order          root.c    /dev, /proc and /sys of the guest
 *   parameters.c  what the kernel's command line says  groups.c  cgroups of the init, the guest and the platform
 *   modules.c     where the kernel has its drivers     net.c     loopback, and a network if there is one
 *                 apart                                enter.c   from root of the machine to the init
 *   disks.c       layers, writable disk, overlay
 *
 * Whatever fails ends the machine, with a line on its console. Nothing of a guest's runs before the init does. */
#ifndef BARCHAN_BOOT_H
#define BARCHAN_BOOT_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "../common/util.h"

#define ROOT "/root" /* the guest's, until it is the machine's */

enum { INIT_ID = 65535, NAME_MAX_BYTES = 64, PATH_BYTES = 96 };

struct parameters {
	unsigned layers;
	char hostname[NAME_MAX_BYTES];
	uint64_t memory_bytes, pids, shm_bytes, spool_bytes; /* the first two of the guest's programs; 0: no limit */
	bool capable_root;
	char address[NAME_MAX_BYTES], gateway[NAME_MAX_BYTES]; /* "10.0.3.15/24" of eth0; empty: none */
};

/* What the init gets by descriptor. */
struct handover {
	int line, spool, upper, cgroup, program;
};

/* main.c */
_Noreturn void die(const char *what);
int must(int result, const char *what);
void make_directory(const char *path, mode_t mode);
void write_file(const char *path, const char *text);
void mount_at(const char *type, const char *path, unsigned long flags, const char *options);

void parameters_read(struct parameters *out);
void modules_load(void);
void disks_mount(const struct parameters *parameters, struct handover *handover);
void root_furnish(const struct parameters *parameters);
int groups_make(const struct parameters *parameters);
void net_set_up(const struct parameters *parameters);
_Noreturn void enter(const struct parameters *parameters, const struct handover *handover);

#endif
