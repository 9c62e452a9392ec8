/* Preloaded into every process of a run: copies what each fsync has made durable, so that a power cut can be played.
 *
 * After fsync or fdatasync of a regular file below $CUT_ROOT, the file's bytes are copied to $CUT_KEPT/<inode>. Names are
 * taken as durable at once, which an ordered file system does not promise but mostly keeps.
 * cc -shared -fPIC -O2 -o power_cut.so power_cut.c -ldl
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static void keep(int fd) {
    const char *root = getenv("CUT_ROOT"), *kept = getenv("CUT_KEPT");
    char link[64], path[4096], part[4200], done[4200];
    struct stat about;
    if (!root || !kept || fstat(fd, &about) || !S_ISREG(about.st_mode)) return;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return;
    path[length] = 0;
    if (strncmp(path, root, strlen(root))) return;
    int from = open(link, O_RDONLY | O_CLOEXEC);
    if (from < 0) return;
    snprintf(part, sizeof part, "%s/.%lu.%ld", kept, about.st_ino, syscall(SYS_gettid));
    snprintf(done, sizeof done, "%s/%lu", kept, about.st_ino);
    int to = open(part, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (to >= 0) {
        off_t left = about.st_size;
        while (left > 0) {
            ssize_t sent = sendfile(to, from, NULL, left);
            if (sent <= 0) break;
            left -= sent;
        }
        close(to);
        rename(part, done);
    }
    close(from);
}

int fsync(int fd) {
    int (*real)(int) = dlsym(RTLD_NEXT, "fsync");
    int status = real(fd);
    if (!status) keep(fd);
    return status;
}

int fdatasync(int fd) {
    int (*real)(int) = dlsym(RTLD_NEXT, "fdatasync");
    int status = real(fd);
    if (!status) keep(fd);
    return status;
}
