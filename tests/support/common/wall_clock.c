/* A library for LD_PRELOAD that gives a process a wall clock of its own: that of the machine and an offset.
 *
 * The offset, in seconds, is a number of 8 bytes in the file ROLE-INDEX of the folder WALL_CLOCK, and may change
 * at any time. Waits until a time of day follow the clock, as they do when the clock of a machine is set: long
 * ones are cut into pieces.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define SECOND 1000000000LL
#define PIECE (SECOND / 10)

static volatile int64_t none = 0;
static volatile int64_t *offset = &none;

__attribute__((constructor)) static void open_offset(void) {
    const char *folder = getenv("WALL_CLOCK"), *role = getenv("KARVAN_ROLE"), *index = getenv("KARVAN_INDEX");
    char path[4096];
    if (!folder || !role) return;
    snprintf(path, sizeof path, "%s/%s-%s", folder, role, index && *index ? index : "0");
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return;
    void *place = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
    if (place != MAP_FAILED) offset = (volatile int64_t *)place;
    close(file);
}

/* A system call; its result, or minus an error. */
static long call(long number, long a, long b, long c, long d, long e, long f) {
#if defined(__x86_64__)
    long result;
    register long fourth __asm__("r10") = d;
    register long fifth __asm__("r8") = e;
    register long sixth __asm__("r9") = f;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(number), "D"(a), "S"(b), "d"(c), "r"(fourth), "r"(fifth), "r"(sixth)
                     : "rcx", "r11", "memory");
    return result;
#elif defined(__aarch64__)
    register long which __asm__("x8") = number;
    register long first __asm__("x0") = a;
    register long second __asm__("x1") = b;
    register long third __asm__("x2") = c;
    register long fourth __asm__("x3") = d;
    register long fifth __asm__("x4") = e;
    register long sixth __asm__("x5") = f;
    __asm__ volatile("svc 0"
                     : "+r"(first)
                     : "r"(which), "r"(second), "r"(third), "r"(fourth), "r"(fifth), "r"(sixth)
                     : "memory");
    return first;
#else
#error "no system calls for this processor"
#endif
}

static long with_errno(long result) {
    if (result >= 0 || result < -4095) return result;
    errno = (int)-result;
    return -1;
}

/* Times of day */

static int64_t machine_time(void) {
    struct timespec now;
    call(SYS_clock_gettime, CLOCK_REALTIME, (long)&now, 0, 0, 0, 0);
    return now.tv_sec * SECOND + now.tv_nsec;
}

int clock_gettime(clockid_t clock, struct timespec *at) {
    long failed = call(SYS_clock_gettime, clock, (long)at, 0, 0, 0, 0);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) at->tv_sec += *offset;
    return (int)with_errno(failed);
}

int gettimeofday(struct timeval *restrict at, void *restrict zone) {
    int64_t now = machine_time();
    (void)zone;
    at->tv_sec = now / SECOND + *offset;
    at->tv_usec = now % SECOND / 1000;
    return 0;
}

time_t time(time_t *at) {
    time_t now = (time_t)(machine_time() / SECOND + *offset);
    if (at) *at = now;
    return now;
}

/* Waits until a time of day */

/* When the next piece of a wait ends by the clock of the machine; returns whether there are more. */
static int next_piece(const struct timespec *until, struct timespec *end) {
    int64_t now = machine_time();
    int64_t left = (until->tv_sec - *offset) * SECOND + until->tv_nsec - now;
    int64_t at = now + (left > PIECE ? PIECE : left > 0 ? left : 0);
    end->tv_sec = at / SECOND;
    end->tv_nsec = at % SECOND;
    return left > PIECE;
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict until) {
    for (;;) {
        struct timespec end;
        int more = next_piece(until, &end);
        if (!sem_clockwait(semaphore, CLOCK_REALTIME, &end)) return 0;
        if (errno != ETIMEDOUT || !more) return -1;
    }
}

int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until) {
    struct timespec end;
    if (condition->__data.__wrefs & 2) return pthread_cond_clockwait(condition, mutex, CLOCK_MONOTONIC, until);
    int more = next_piece(until, &end);
    int failed = pthread_cond_clockwait(condition, mutex, CLOCK_REALTIME, &end);
    return failed == ETIMEDOUT && more ? 0 : failed; /* 0 without a reason: callers wait again */
}

long syscall(long number, ...) {
    long values[6];
    va_list given;
    va_start(given, number);
    for (int each = 0; each < 6; ++each) values[each] = va_arg(given, long);
    va_end(given);
    int more = 0;
    struct timespec end;
    if (number == SYS_futex && values[3] && values[1] & FUTEX_CLOCK_REALTIME) {
        more = next_piece((const struct timespec *)values[3], &end);
        values[3] = (long)&end;
    }
    long result = call(number, values[0], values[1], values[2], values[3], values[4], values[5]);
    if (more && result == -ETIMEDOUT) result = -EINTR; /* callers wait again */
    return with_errno(result);
}
