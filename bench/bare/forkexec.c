/* The bare cost of running a program: fork, execve, wait. forkexec N PROGRAM prints N durations in nanoseconds. */
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static long long now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (long long)now.tv_sec * 1000000000LL + now.tv_nsec;
}

int main(int argc, char **argv)
{
	char *environment[] = {NULL};

	if (argc != 3)
		return 2;
	for (int i = atoi(argv[1]); i > 0; i--) {
		int status;
		long long start = now_ns();
		pid_t pid = fork();
		if (pid == 0) {
			execve(argv[2], argv + 2, environment);
			_exit(127);
		}
		if (pid < 0 || waitpid(pid, &status, 0) != pid || status != 0)
			return 1;
		printf("%lld\n", now_ns() - start);
	}
	return 0;
}
