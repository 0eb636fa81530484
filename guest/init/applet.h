/* What the file operations share. They run in a forked child as the asking user, without capabilities: the kernel's
 * permission checks decide, so paths may be followed as that user would. */
#ifndef BARCHAN_APPLET_H
#define BARCHAN_APPLET_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/stat.h>

#include "../common/codec.h"
#include "../common/util.h"

enum { DEPTH_MAX = 1000, COPY_CHUNK = 64 << 10, NAME_BYTES = 256, PATH_BYTES = 4096 };

/* applet.c */
_Noreturn void applet_fail(int error, const char *format, ...) __attribute__((format(printf, 2, 3)));
void out_bytes(const void *data, size_t len);
void out_flush(void);
uint64_t parse_number(const char *text, int base);
typedef void entry_function(int dir, const char *name, unsigned char type, void *context);
int each_entry(int dir, entry_function *function, void *context);
int split_path(const char *path, char parent[PATH_BYTES], char base[NAME_BYTES]);
int open_dir(int at, const char *name);

/* beneath.c */
struct open_how;
int open_beneath_of(int root, const char *name, const struct open_how *how);

/* fsops.c */
void op_stat(char **argv);
void op_list(char **argv);
void op_read(char **argv);
void op_write(char **argv);
void op_mkdir(char **argv);
void make_directories(const char *path);

/* tree.c */
void op_move(char **argv);
void op_remove(char **argv);

/* layer_out.c */
void layer_out(int upper);

/* tar_out.c, tar_in.c, watch.c */
void op_tar_out(char **argv);
void op_tar_in(char **argv);
void op_watch(char **argv);

#endif
