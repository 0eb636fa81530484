/* The smallest PID 1 that does what a correct one must: start the payload in the guest's leaves with no privilege at
 * all, wait for it, stay. argv[1] is the number of open cgroup.procs or tasks files from descriptor 4 on; the payload's file follows. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/capability.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define GUEST_UID 1000

static int start_payload(int leaf_count)
{
	struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
	struct __user_cap_data_struct none[2] = {{0, 0, 0}, {0, 0, 0}};
	char *arguments[] = {"payload", NULL}, *environment[] = {NULL};

	for (int i = 0; i < leaf_count; i++)
		if (write(4 + i, "0", 1) != 1)
			return 1;
	if (setresgid(GUEST_UID, GUEST_UID, GUEST_UID) || setresuid(GUEST_UID, GUEST_UID, GUEST_UID) ||
	    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0) || syscall(SYS_capset, &header, none))
		return 2;
	for (int fd = 3; fd < 4 + leaf_count; fd++)
		close(fd);
	if (fcntl(4 + leaf_count, F_SETFD, FD_CLOEXEC))
		return 3;
	syscall(SYS_execveat, 4 + leaf_count, "", arguments, environment, 0x1000 /* AT_EMPTY_PATH */);
	return 4;
}

int main(int argc, char **argv)
{
	if (argc != 2)
		return 2;
	pid_t pid = fork();
	if (pid == 0)
		_exit(start_payload(atoi(argv[1])));
	waitpid(pid, NULL, 0);
	for (;;)
		pause();
}
