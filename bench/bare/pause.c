/* Stays until it is killed: the main program of an idle container. */
#include <unistd.h>

int main(void)
{
	for (;;)
		pause();
}
