/* A port of a virtual serial device, found by the name that the host gave it. */
#ifndef BARCHAN_PORT_H
#define BARCHAN_PORT_H

enum { PORT_PATH_MAX = 64 };

/* The device's path, below /dev. 0; -1 with errno set, ENOENT where there is none of that name. */
int port_find(const char *name, char path[PORT_PATH_MAX]);

#endif
