/* barchan-pack: options, limits, and how it ends. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <unistd.h>

#include "pack.h"

#define USAGE 2

struct options options = {
	.entries_max = UINT64_MAX,
	.depth_max = 2048, /* as deep as one path can name */
	.xattr_bytes_max = UINT64_MAX,
	.text_bytes_max = UINT64_MAX,
};

void fail(enum blame blame, const char *format, ...)
{
	va_list arguments;
	const char *where = blame == BLAME_ROOM ? "" : where_text();

	if (where[0])
		fprintf(stderr, "%s: ", where);
	va_start(arguments, format);
	vfprintf(stderr, format, arguments);
	va_end(arguments);
	fputc('\n', stderr);
	_exit((int)blame);
}

void fail_errno(const char *what)
{
	bool is_room = errno == ENOSPC || errno == EDQUOT;

	fail(is_room ? BLAME_ROOM : BLAME_HOST, "%s: %s", what, strerror(errno));
}

void count_entry(void)
{
	static uint64_t count;

	if (++count > options.entries_max)
		fail(BLAME_INPUT, "more than %llu entries", (unsigned long long)options.entries_max);
}

/* What is kept of an archive until its end: a name, or what a symbolic link says. */
void count_text(const char *text)
{
	static uint64_t total;

	total += strlen(text) + 1;
	if (total > options.text_bytes_max)
		fail(BLAME_INPUT, "more than %llu bytes of names and targets of symbolic links", (unsigned long long)options.text_bytes_max);
}

void check_depth(uint64_t depth)
{
	if (depth > options.depth_max)
		fail(BLAME_INPUT, "directories more than %llu deep", (unsigned long long)options.depth_max);
}

static __attribute__((noreturn)) void usage(void)
{
	fprintf(stderr, "usage: barchan-pack [--mtime SECONDS] [--entries-max N] [--depth-max N] [--xattr-bytes-max N] "
			"[--text-bytes-max N] {DIRECTORY | --tar} IMAGE BYTES_MAX\n");
	exit(USAGE);
}

static uint64_t number(const char *text)
{
	char *end;

	errno = 0;
	uint64_t value = strtoull(text, &end, 10);
	if (errno || end == text || *end || text[0] == '-')
		usage();
	return value;
}

static bool read_options(int argc, char **argv)
{
	static const struct option known[] = {
		{"tar", no_argument, NULL, 't'},
		{"mtime", required_argument, NULL, 'm'},
		{"entries-max", required_argument, NULL, 'e'},
		{"depth-max", required_argument, NULL, 'd'},
		{"xattr-bytes-max", required_argument, NULL, 'x'},
		{"text-bytes-max", required_argument, NULL, 's'},
		{0},
	};
	bool is_tar = false;

	for (int found; (found = getopt_long(argc, argv, "", known, NULL)) != -1;) {
		if (found == 't')
			is_tar = true;
		else if (found == 'm')
			options.has_mtime = true, options.mtime = (time_t)number(optarg);
		else if (found == 'e')
			options.entries_max = number(optarg);
		else if (found == 'd')
			options.depth_max = number(optarg) < options.depth_max ? number(optarg) : options.depth_max;
		else if (found == 'x')
			options.xattr_bytes_max = number(optarg);
		else if (found == 's')
			options.text_bytes_max = number(optarg);
		else
			usage();
	}
	if (argc - optind != (is_tar ? 2 : 3))
		usage();
	options.bytes_max = number(argv[argc - 1]);
	if (options.bytes_max == 0)
		usage();
	return is_tar;
}

static int create(const char *path)
{
	int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);

	if (fd < 0)
		fail_errno(path);
	return fd;
}

/* Beside the image, since both may be large; without a name as soon as it is open. */
static int create_unnamed(const char *image)
{
	char *path;

	if (asprintf(&path, "%s.meta", image) < 0)
		fail_errno(image);
	int fd = create(path);
	if (unlink(path) < 0)
		fail_errno(path);
	free(path);
	return fd;
}

int main(int argc, char **argv)
{
	bool is_tar = read_options(argc, argv);
	const char *image = argv[argc - 2];

	/* What started this and removes what it leaves may be killed. */
	if (prctl(PR_SET_PDEATHSIG, SIGKILL) < 0)
		fail_errno("prctl");
	if (getrandom(&options.hash_key, sizeof(options.hash_key), 0) != sizeof(options.hash_key))
		fail_errno("getrandom");
	int fd = create(image);
	image_open(fd, create_unnamed(image));
	image_close(is_tar ? pack_tar() : pack_tree(argv[argc - 3]));
	if (close(fd) < 0)
		fail_errno("writing the image");
	return 0;
}
