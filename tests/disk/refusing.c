/* A library that a test loads before others: system calls on files below one folder fail, from the n-th on or that one alone.
 * arm(folder, kind, n, errno, lasting) begins, calls() tells how many there were since, disarm() ends. With errno 0 the process is killed
 * instead, before the call. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { WRITE = 1, SYNC = 2, MOVE = 4, MAKE = 8 };

static char folder[PATH_MAX];
static int kinds, error_number, lasting, armed;
static long seen, due;

void arm(const char *below, int kind, long nth, int number, int last) {
    strncpy(folder, below, sizeof folder - 1);
    kinds = kind, due = nth, error_number = number, lasting = last;
    __atomic_store_n(&seen, 0, __ATOMIC_SEQ_CST);
    armed = 1;
}
void disarm(void) { armed = 0; }
long calls(void) { return __atomic_load_n(&seen, __ATOMIC_SEQ_CST); }

static int refused(int kind) {
    if (!armed || !(kinds & kind)) return 0;
    long now = __atomic_add_fetch(&seen, 1, __ATOMIC_SEQ_CST);
    if (!(lasting ? now >= due : now == due)) return 0;
    if (!error_number) kill(getpid(), SIGKILL);
    errno = error_number;
    return 1;
}
static int named(int at, const char *path, int kind) {
    char whole[2 * PATH_MAX], place[PATH_MAX];
    if (!armed || !path) return 0;
    if (path[0] == '/') return !strncmp(path, folder, strlen(folder)) && refused(kind);
    if (at == AT_FDCWD) {
        if (!getcwd(place, sizeof place)) return 0;
    } else {
        char link[64];
        snprintf(link, sizeof link, "/proc/self/fd/%d", at);
        ssize_t length = readlink(link, place, sizeof place - 1);
        if (length < 0) return 0;
        place[length] = 0;
    }
    snprintf(whole, sizeof whole, "%s/%s", place, path);
    return !strncmp(whole, folder, strlen(folder)) && refused(kind);
}
static int opened(int fd, int kind) {
    char link[64], place[PATH_MAX];
    if (!armed || !(kinds & kind)) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, place, sizeof place - 1);
    if (length < 0) return 0;
    place[length] = 0;
    return !strncmp(place, folder, strlen(folder)) && refused(kind);
}

#define REAL(name) ((__typeof__(&name))real(&known_##name, #name))
static void *real(void **known, const char *name) {
    if (!*known) *known = dlsym(RTLD_NEXT, name);
    return *known;
}
#define FD_CALL(type, name, kind, failed, parameters, arguments) \
    static void *known_##name;                                    \
    type name parameters { return opened(fd, kind) ? failed : REAL(name) arguments; }

FD_CALL(ssize_t, write, WRITE, -1, (int fd, const void *data, size_t size), (fd, data, size))
FD_CALL(ssize_t, pwrite, WRITE, -1, (int fd, const void *data, size_t size, off_t at), (fd, data, size, at))
FD_CALL(ssize_t, pwrite64, WRITE, -1, (int fd, const void *data, size_t size, off64_t at), (fd, data, size, at))
FD_CALL(ssize_t, writev, WRITE, -1, (int fd, const struct iovec *data, int count), (fd, data, count))
FD_CALL(ssize_t, pwritev, WRITE, -1, (int fd, const struct iovec *data, int count, off_t at), (fd, data, count, at))
FD_CALL(int, posix_fallocate, WRITE, error_number, (int fd, off_t at, off_t size), (fd, at, size))
FD_CALL(int, posix_fallocate64, WRITE, error_number, (int fd, off64_t at, off64_t size), (fd, at, size))
FD_CALL(int, fsync, SYNC, -1, (int fd), (fd))
FD_CALL(int, fdatasync, SYNC, -1, (int fd), (fd))

static void *known_copy_file_range, *known_sendfile, *known_sendfile64;
ssize_t copy_file_range(int from, off64_t *at, int to, off64_t *there, size_t size, unsigned flags) {
    return opened(to, WRITE) ? -1 : REAL(copy_file_range)(from, at, to, there, size, flags);
}
ssize_t sendfile(int to, int from, off_t *at, size_t size);
ssize_t sendfile(int to, int from, off_t *at, size_t size) { return opened(to, WRITE) ? -1 : REAL(sendfile)(to, from, at, size); }
ssize_t sendfile64(int to, int from, off64_t *at, size_t size);
ssize_t sendfile64(int to, int from, off64_t *at, size_t size) { return opened(to, WRITE) ? -1 : REAL(sendfile64)(to, from, at, size); }

static void *known_rename, *known_renameat, *known_link, *known_linkat, *known_mkdir;
int rename(const char *from, const char *to) { return named(AT_FDCWD, to, MOVE) ? -1 : REAL(rename)(from, to); }
int renameat(int from_at, const char *from, int at, const char *to) {
    return named(at, to, MOVE) ? -1 : REAL(renameat)(from_at, from, at, to);
}
int link(const char *from, const char *to) { return named(AT_FDCWD, to, MOVE) ? -1 : REAL(link)(from, to); }
int linkat(int from_at, const char *from, int at, const char *to, int flags) {
    return named(at, to, MOVE) ? -1 : REAL(linkat)(from_at, from, at, to, flags);
}
int mkdir(const char *path, mode_t mode) { return named(AT_FDCWD, path, MAKE) ? -1 : REAL(mkdir)(path, mode); }

#define OPEN(name)                                                                \
    static void *known_##name;                                                     \
    int name(const char *path, int flags, ...) {                                   \
        va_list more;                                                              \
        va_start(more, flags);                                                     \
        mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(more, mode_t) : 0;  \
        va_end(more);                                                              \
        if ((flags & O_CREAT) && named(AT_FDCWD, path, MAKE)) return -1;           \
        return REAL(name)(path, flags, mode);                                      \
    }
OPEN(open)
OPEN(open64)
#define OPENAT(name)                                                               \
    static void *known_##name;                                                     \
    int name(int at, const char *path, int flags, ...) {                           \
        va_list more;                                                              \
        va_start(more, flags);                                                     \
        mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(more, mode_t) : 0;  \
        va_end(more);                                                              \
        if ((flags & O_CREAT) && named(at, path, MAKE)) return -1;                 \
        return REAL(name)(at, path, flags, mode);                                  \
    }
OPENAT(openat)
OPENAT(openat64)
