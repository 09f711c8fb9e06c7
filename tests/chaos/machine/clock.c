/* A clock that jumps: the time of day as this process reads it, plus the seconds (int64) in the file BATON_CLOCK_FILE.
 *
 * Preloaded in front of the C library. Only the time of day is changed; the monotonic clock goes on, as it does when the
 * clock of a real machine is set. Deadlines that are times of day are taken back to the kernel's time of day. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define TIMES_OF_DAY_S 1000000000 /* a deadline beyond this is a time of day, below it one of the monotonic clock */

static volatile const int64_t none_s = 0;
static volatile const int64_t *offset_s = &none_s;

__attribute__((constructor)) static void open_file(void) {
    const char *path = getenv("BATON_CLOCK_FILE");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *mapped = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (mapped != MAP_FAILED) offset_s = mapped;
}

/* The newest version of a symbol: without a version, dlsym would find that of the first glibc. */
static void *next(const char *name) {
    void *found = NULL;
#ifdef __x86_64__
    found = dlvsym(RTLD_NEXT, name, "GLIBC_2.3.2");
#endif
    return found ? found : dlsym(RTLD_NEXT, name);
}

#define NEXT(name) \
    static typeof(name) *real; \
    if (!real) real = next(#name)

int clock_gettime(clockid_t clock, struct timespec *now) {
    NEXT(clock_gettime);
    int failed = real ? real(clock, now) : (int)syscall(SYS_clock_gettime, clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += *offset_s;
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    NEXT(gettimeofday);
    int failed = real(now, zone);
    if (!failed) now->tv_sec += *offset_s;
    return failed;
}

time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}

static struct timespec kernels(const struct timespec *until) {
    struct timespec right = *until;
    if (right.tv_sec > TIMES_OF_DAY_S) right.tv_sec -= *offset_s;
    return right;
}

int pthread_cond_timedwait(pthread_cond_t *restrict c, pthread_mutex_t *restrict m, const struct timespec *restrict t) {
    NEXT(pthread_cond_timedwait);
    struct timespec until = kernels(t);
    return real(c, m, &until);
}

int pthread_cond_clockwait(
    pthread_cond_t *restrict c, pthread_mutex_t *restrict m, clockid_t clock, const struct timespec *restrict t) {
    NEXT(pthread_cond_clockwait);
    struct timespec until = kernels(t);
    return real(c, m, clock, &until);
}

int pthread_mutex_timedlock(pthread_mutex_t *restrict m, const struct timespec *restrict t) {
    NEXT(pthread_mutex_timedlock);
    struct timespec until = kernels(t);
    return real(m, &until);
}

int sem_timedwait(sem_t *restrict s, const struct timespec *restrict t) {
    NEXT(sem_timedwait);
    struct timespec until = kernels(t);
    return real(s, &until);
}

int sem_clockwait(sem_t *restrict s, clockid_t clock, const struct timespec *restrict t) {
    NEXT(sem_clockwait);
    struct timespec until = kernels(t);
    return real(s, clock, &until);
}
