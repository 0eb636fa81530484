#ifndef BARCHAN_SHIM_H
#define BARCHAN_SHIM_H

#define EXPORT __attribute__((visibility("default"))) /* seen by CRIU in the place of the C library's */

#endif
