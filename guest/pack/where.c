/* The entry at hand, as a person can read it: names are a stranger's, and what is said about them is one line. */
#define _GNU_SOURCE
#include <stdio.h>
#include <string.h>

#include "pack.h"

#define SHOWN_BYTES 300u

static char path[SHOWN_BYTES];
static size_t length; /* may be more than what is kept */

static void add(const char *text)
{
	for (; *text; text++, length++)
		if (length < SHOWN_BYTES)
			path[length] = *text;
}

void where_enter(const char *name)
{
	if (length)
		add("/");
	add(name);
}

void where_leave(const char *name)
{
	length -= strlen(name);
	if (length)
		length--;
}

void where_is(const char *name)
{
	length = 0;
	add(name);
}

/* Empty between entries. */
const char *where_text(void)
{
	static char text[4 * SHOWN_BYTES + 4];
	size_t kept = length < SHOWN_BYTES ? length : SHOWN_BYTES, at = 0;

	for (size_t i = 0; i < kept; i++) {
		unsigned char byte = (unsigned char)path[i];
		if (byte < ' ' || byte == 0x7f || byte == '\\')
			at += (size_t)snprintf(text + at, sizeof(text) - at, "\\x%02x", byte);
		else
			text[at++] = (char)byte;
	}
	strcpy(text + at, length > kept ? "..." : "");
	return text;
}
