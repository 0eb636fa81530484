/* What a filter of system calls has to know of the machine: whose numbers they are. */
#ifndef BARCHAN_NATIVE_H
#define BARCHAN_NATIVE_H

#include <linux/audit.h>

#if defined(__x86_64__)
#define NATIVE_ARCH AUDIT_ARCH_X86_64
#elif defined(__aarch64__)
#define NATIVE_ARCH AUDIT_ARCH_AARCH64
#else
#error "no system call list for this architecture"
#endif

#define X32_BIT 0x40000000u /* of numbers of another list, which an x86_64 kernel may have, too */

#endif
