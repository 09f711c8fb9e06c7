/* Connections from one host to another go over a wire that Python holds (wires.py), and Python can cut it.
 *
 * Preloaded in front of the C library. A host is an address 127.77.S.H. A connection from BATON_WIRE_HOST to another
 * host goes to 127.77.S.1:BATON_WIRE_PORT instead, and where it should have gone stands in the file BATON_WIRE_TABLE, at
 * the number of its own port. Neither root nor a namespace is needed, and the program notices nothing. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#define FIRST_HOST 10 /* the last number of its address */

struct target {
    uint32_t address; /* as on the network, as the port */
    uint16_t port;
    uint16_t unused;
};

static struct target *table;
static struct in_addr here;
static in_port_t wire_port;
static int (*real_connect)(int, const struct sockaddr *, socklen_t);

__attribute__((constructor)) static void open_table(void) {
    real_connect = dlsym(RTLD_NEXT, "connect");
    const char *path = getenv("BATON_WIRE_TABLE"), *host = getenv("BATON_WIRE_HOST"), *port = getenv("BATON_WIRE_PORT");
    if (!path || !host || !port || inet_pton(AF_INET, host, &here) != 1) return;
    int file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0) return;
    void *mapped = mmap(NULL, 65536 * sizeof(struct target), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    wire_port = htons((uint16_t)atoi(port));
    if (mapped != MAP_FAILED) table = mapped;
}

static int is_elsewhere(struct in_addr to) {
    uint32_t there = ntohl(to.s_addr), ours = ntohl(here.s_addr);
    return there != ours && there >> 8 == ours >> 8 && (there & 255) >= FIRST_HOST;
}

/* A socket of IPv6 that is connected to an IPv4 address, as gRPC does it, has the address in its last four bytes. */
static void *ipv4_of(struct sockaddr_in6 *address) {
    return address->sin6_addr.s6_addr + 12;
}

static int connect_6(int fd, const struct sockaddr_in6 *to) {
    struct sockaddr_in6 from = *to, wire = *to;
    socklen_t length = sizeof from;
    memcpy(ipv4_of(&from), &here, 4);
    from.sin6_port = 0;
    if (bind(fd, (struct sockaddr *)&from, sizeof from) && errno != EINVAL) return -1;
    if (getsockname(fd, (struct sockaddr *)&from, &length)) return -1;
    struct target target = {.port = to->sin6_port};
    memcpy(&target.address, ipv4_of((struct sockaddr_in6 *)to), 4);
    table[ntohs(from.sin6_port)] = target;
    ((uint8_t *)ipv4_of(&wire))[3] = 1;
    wire.sin6_port = wire_port;
    return real_connect(fd, (struct sockaddr *)&wire, sizeof wire);
}

static int connect_4(int fd, const struct sockaddr_in *to) {
    struct sockaddr_in from = {.sin_family = AF_INET, .sin_addr = here}, wire = *to;
    socklen_t length = sizeof from;
    if (bind(fd, (struct sockaddr *)&from, sizeof from) && errno != EINVAL) return -1;
    if (getsockname(fd, (struct sockaddr *)&from, &length)) return -1;
    table[ntohs(from.sin_port)] = (struct target){.address = to->sin_addr.s_addr, .port = to->sin_port};
    ((uint8_t *)&wire.sin_addr)[3] = 1;
    wire.sin_port = wire_port;
    return real_connect(fd, (struct sockaddr *)&wire, sizeof wire);
}

/* A second call for a socket that connects already finds it bound, and asks the kernel the same again. */
int connect(int fd, const struct sockaddr *to, socklen_t length) {
    struct in_addr last;
    if (table && to && to->sa_family == AF_INET && is_elsewhere(((const struct sockaddr_in *)to)->sin_addr))
        return connect_4(fd, (const struct sockaddr_in *)to);
    if (table && to && to->sa_family == AF_INET6 && IN6_IS_ADDR_V4MAPPED(&((const struct sockaddr_in6 *)to)->sin6_addr)) {
        memcpy(&last, ipv4_of((struct sockaddr_in6 *)to), 4);
        if (is_elsewhere(last)) return connect_6(fd, (const struct sockaddr_in6 *)to);
    }
    return real_connect(fd, to, length);
}
