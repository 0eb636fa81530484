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

/* Room for four bytes of each that is read, and for dots. */
static char *escape(char *to, const char *text, size_t bytes)
{
	for (size_t i = 0; i < bytes; i++) {
		unsigned char byte = (unsigned char)text[i];
		if (byte < ' ' || byte == 0x7f || byte == '\\')
			to += sprintf(to, "\\x%02x", byte);
		else
			*to++ = (char)byte;
	}
	return to;
}

/* Empty between entries. */
const char *where_text(void)
{
	static char text[4 * SHOWN_BYTES + 4];
	size_t kept = length < SHOWN_BYTES ? length : SHOWN_BYTES;

	strcpy(escape(text, path, kept), length > kept ? "..." : "");
	return text;
}

const char *printable(const char *text)
{
	static char shown[4 * SHOWN_BYTES + 4];
	size_t bytes = strlen(text), kept = bytes < SHOWN_BYTES ? bytes : SHOWN_BYTES;

	strcpy(escape(shown, text, kept), bytes > kept ? "..." : "");
	return shown;
}
