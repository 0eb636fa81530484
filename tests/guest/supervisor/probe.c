/* Asks the kernel one thing and prints what it said. probe NUMBER [ARGUMENT...]: a system call, its result or -errno.
 * probe eat MIB: touch that much memory. probe fork N: the number of children that could be made. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int eat(size_t bytes)
{
	char *memory = malloc(bytes);

	if (!memory)
		return 1;
	for (size_t at = 0; at < bytes; at += 4096)
		memory[at] = 1;
	return puts("ate") < 0;
}

static int fork_many(int wanted)
{
	int made = 0;

	while (made < wanted) {
		pid_t pid = fork();
		if (pid == 0) {
			pause();
			_exit(0);
		}
		if (pid < 0)
			break;
		made++;
	}
	return printf("%d\n", made) < 0;
}

int main(int argc, char **argv)
{
	long arguments[7] = {0};

	if (argc == 3 && strcmp(argv[1], "eat") == 0)
		return eat(strtoul(argv[2], NULL, 10) << 20);
	if (argc == 3 && strcmp(argv[1], "fork") == 0)
		return fork_many(atoi(argv[2]));
	for (int i = 1; i < argc && i < 8; i++)
		arguments[i - 1] = (long)strtoul(argv[i], NULL, 0);
	long result = syscall(arguments[0], arguments[1], arguments[2], arguments[3], arguments[4], arguments[5], arguments[6]);
	return printf("%ld\n", result < 0 ? -errno : result) < 0;
}
