/* What guest root has where the sandbox makes it capable: power over the guest's files and ids. It could become any id then, the init's
 * own and that of file operations included, and signal and starve those: a filter on top of the sandbox's keeps it from these. Nobody
 * else in the guest can take an id, so that nobody in it ever has one of them. Runs in the child only. */
#define _GNU_SOURCE
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#include "init.h"

/* What a file operation needs of it to work on all of the guest's files as root does. */
static const uint64_t of_applets = 1u << CAP_DAC_OVERRIDE | 1u << CAP_FOWNER;

enum { UID_ARGUMENTS_MAX = 3, RESERVED = 2, PROGRAM_MAX = 64 };

/* The calls that take user ids, and how many. User ids have 32 bits: the kernel looks at the lower half of an argument. */
static const struct {
	uint32_t number;
	unsigned arguments;
} takers[] = {{SYS_setuid, 1}, {SYS_setfsuid, 1}, {SYS_setreuid, 2}, {SYS_setresuid, UID_ARGUMENTS_MAX}};

static int reserve_ids(void)
{
	const uint32_t reserved[RESERVED] = {settings.uid, settings.applet_uid != 0 ? settings.applet_uid : settings.uid};
	struct sock_filter program[PROGRAM_MAX];
	unsigned short length = 0;

	program[length++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
	for (size_t i = 0; i < COUNT_OF(takers); i++) {
		/* Per argument a load and the comparisons, each with its own refusal; at the end the others' way out. */
		uint8_t skip = (uint8_t)(takers[i].arguments * (1 + 2 * RESERVED) + 1);

		program[length++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, takers[i].number, 0, skip);
		for (unsigned argument = 0; argument < takers[i].arguments; argument++) {
			uint32_t at = (uint32_t)(offsetof(struct seccomp_data, args) + 8 * argument);

			program[length++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, at);
			for (size_t r = 0; r < RESERVED; r++) {
				program[length++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, reserved[r], 0, 1);
				program[length++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM);
			}
		}
		program[length++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
	}
	program[length++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
	return (int)syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &(struct sock_fprog){length, program});
}

const char *capable_become(int kind)
{
	struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
	struct __user_cap_data_struct data[2] = {0};
	uint64_t wanted = settings.root_capabilities;

	if (kind == KIND_APPLET)
		wanted &= of_applets;
	for (int i = 0; i < 2; i++)
		data[i].effective = data[i].permitted = (uint32_t)(wanted >> (32 * i));
	if (syscall(SYS_capset, &header, data) != 0)
		return "cannot set capabilities";
	if (kind == KIND_APPLET)
		return NULL;
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || (settings.uid != 0 && reserve_ids() != 0))
		return "cannot reserve the platform's ids";
	return NULL;
}
