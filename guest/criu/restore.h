/* What the supervisor and the shim in CRIU agree on for a restore: descriptors by number, and the report at the end. */
#ifndef BARCHAN_RESTORE_H
#define BARCHAN_RESTORE_H

#include <stdint.h>

#define RESTORE_VARIABLE "BARCHAN_RESTORE" /* the user id that owns the restored user namespace */
#define RESTORE_PLACE_MAX 256
#define RESTORE_TEXT_MAX (1 << 20) /* of all places, and of all processes: more is refused at the dump (inside.py) */

enum {
	RESTORE_STATUS_FD = 3, /* a packet socket for one report */
	RESTORE_JOB_FD,	       /* the node's directory for this restore: `places` is there */
	RESTORE_TREE_FD,       /* the sandbox's group of the version 2 hierarchy */
	RESTORE_WORK_FD,       /* the group in it that CRIU was started in */
	RESTORE_GUEST_FD,      /* `guest` in it */
	RESTORE_INIT_FD,       /* cgroup.procs of the init's group, then of those in version 1 hierarchies */
	RESTORE_INIT_FDS = 4,
	RESTORE_FILES_FD = RESTORE_INIT_FD + RESTORE_INIT_FDS, /* the init's program, its spool directory, its spool files */
};

/* Beyond the stages that a launch child reports on the same socket, in the same form. */
enum { RESTORE_DONE = 1000, RESTORE_FAILED };

struct restore_report {
	int32_t what, value; /* the init's pid, or an errno */
};

#endif
