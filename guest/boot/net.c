#define _GNU_SOURCE
#include "boot.h"

#include <arpa/inet.h>
#include <net/if.h>
#include <net/route.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#define DEVICE "eth0"

static void put_address(struct sockaddr *to, in_addr_t address)
{
	const struct sockaddr_in value = {.sin_family = AF_INET, .sin_addr.s_addr = address};

	memcpy(to, &value, sizeof value);
}

static in_addr_t address_of(const char *text)
{
	struct in_addr found;

	if (inet_pton(AF_INET, text, &found) != 1) {
		errno = EINVAL;
		die("barchan.net");
	}
	return found.s_addr;
}

static void bring_up(int fd, const char *device)
{
	struct ifreq request = {.ifr_flags = IFF_UP | IFF_RUNNING};

	strcpy(request.ifr_name, device);
	must(ioctl(fd, SIOCSIFFLAGS, &request), device);
}

static void set_address(int fd, const char *given)
{
	char text[NAME_MAX_BYTES];
	struct ifreq request = {.ifr_name = DEVICE};
	char *slash = strchr(strcpy(text, given), '/');
	long bits = slash != NULL ? strtol(slash + 1, NULL, 10) : 0;

	errno = EINVAL;
	if (bits < 1 || bits > 32)
		die("barchan.net");
	*slash = 0;
	put_address(&request.ifr_addr, address_of(text));
	must(ioctl(fd, SIOCSIFADDR, &request), DEVICE);
	put_address(&request.ifr_netmask, htonl(~(uint32_t)0 << (32 - bits)));
	must(ioctl(fd, SIOCSIFNETMASK, &request), DEVICE);
}

static void set_gateway(int fd, const char *given)
{
	struct rtentry route = {.rt_flags = RTF_UP | RTF_GATEWAY};

	put_address(&route.rt_dst, INADDR_ANY);
	put_address(&route.rt_genmask, INADDR_ANY);
	put_address(&route.rt_gateway, address_of(given));
	must(ioctl(fd, SIOCADDRT, &route), "route");
}

void net_set_up(const struct parameters *parameters)
{
	CLEANUP_FD int fd = must(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0), "socket");

	must(sethostname(parameters->hostname, strlen(parameters->hostname)), "hostname");
	bring_up(fd, "lo");
	if (parameters->address[0] == 0)
		return;
	set_address(fd, parameters->address);
	bring_up(fd, DEVICE);
	if (parameters->gateway[0] != 0)
		set_gateway(fd, parameters->gateway);
}
