// File operations below one folder, counted, and one of them made to fail: preloaded into a process (LD_PRELOAD).
//
//   faults_arm(folder, at, mode, log)   from here on; operation number `at` (from 0) meets its fate, -1: none does
//   faults_count()                      operations so far
//
// `refused` is what the system itself did not do.
//
// mode 0: the process is killed before it; 1: killed after half of it, or after it where it has no half (a write has);
// 2: no space left on the device; 3: input/output error. Every operation is noted in `log`, a file descriptor, once it
// is done.

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

namespace {

constexpr int kMaxFd = 1024;
char g_folder[PATH_MAX];
size_t g_folder_length = 0;
char g_paths[kMaxFd][PATH_MAX];  // of open files below the folder; empty: of another
long g_at = -1, g_count = 0;
int g_mode = 0, g_log = -1;

template <typename F>
F real(const char* name) {
  return reinterpret_cast<F>(dlsym(RTLD_NEXT, name));
}

bool armed() { return g_folder_length > 0; }

bool below(const char* path) {
  if (!armed() || path == nullptr || strncmp(path, g_folder, g_folder_length) != 0) return false;
  return path[g_folder_length] == '/' || path[g_folder_length] == '\0';
}

bool known(int fd) { return armed() && fd >= 0 && fd < kMaxFd && g_paths[fd][0] != '\0'; }

enum class Fate { kGoOn, kTorn, kFail };

Fate next() {
  if (g_count++ != g_at) return Fate::kGoOn;
  if (g_mode == 0) raise(SIGKILL);
  if (g_mode == 1) return Fate::kTorn;
  errno = g_mode == 2 ? ENOSPC : EIO;
  return Fate::kFail;
}

void note(const char* what, const char* path, const char* other = "") {
  char line[3 * PATH_MAX];
  int n = snprintf(line, sizeof line, "%s\t%s\t%s\n", what, path, other);
  static auto real_write = real<ssize_t (*)(int, const void*, size_t)>("write");
  if (g_log >= 0 && real_write(g_log, line, n) != n) _exit(99);
}

// An operation without a half: what it is called, on which path, and how it is done.
template <typename Op>
auto whole(const char* what, const char* path, const char* other, Op op) {
  Fate fate = next();
  if (fate == Fate::kFail) return static_cast<decltype(op())>(-1);
  auto result = op();
  int error = errno;
  note(result >= 0 ? what : "refused", path, other);  // a folder that is there already
  errno = error;
  if (fate == Fate::kTorn) raise(SIGKILL);
  return result;
}

template <typename Op>
int opened(const char* path, int flags, Op op) {
  bool writes = (flags & O_ACCMODE) != O_RDONLY;
  int fd = below(path) && writes ? whole("open", path, "", op) : op();
  if (fd >= 0 && fd < kMaxFd) {
    g_paths[fd][0] = '\0';
    if (below(path)) snprintf(g_paths[fd], PATH_MAX, "%s", path);
  }
  return fd;
}

// path as seen from the folder that a descriptor is of
const char* joined(int folder, const char* path, char* all) {
  if (path[0] == '/' || !known(folder)) return path;
  snprintf(all, 2 * PATH_MAX, "%s/%s", g_paths[folder], path);
  return all;
}

int mode_of(int flags, va_list arguments) { return flags & (O_CREAT | O_TMPFILE) ? va_arg(arguments, int) : 0; }

// half: writes the first half of what is to be written
template <typename Op, typename Half>
ssize_t written(int fd, Op op, Half half) {
  if (!known(fd)) return op();
  Fate fate = next();
  if (fate == Fate::kFail) return -1;
  if (fate == Fate::kTorn) {
    half();
    note("write", g_paths[fd]);
    raise(SIGKILL);
  }
  ssize_t result = op();
  note("write", g_paths[fd]);
  return result;
}

}  // namespace

extern "C" {

void faults_arm(const char* folder, long at, int mode, int log) {
  snprintf(g_folder, sizeof g_folder, "%s", folder);
  g_folder_length = strlen(g_folder);
  g_at = at, g_mode = mode, g_log = log, g_count = 0;
}

long faults_count() { return g_count; }

int open(const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  int mode = mode_of(flags, arguments);
  va_end(arguments);
  static auto next_open = real<int (*)(const char*, int, ...)>("open");
  return opened(path, flags, [&] { return next_open(path, flags, mode); });
}

int open64(const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  int mode = mode_of(flags, arguments);
  va_end(arguments);
  static auto next_open = real<int (*)(const char*, int, ...)>("open64");
  return opened(path, flags, [&] { return next_open(path, flags, mode); });
}

int openat(int folder, const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  int mode = mode_of(flags, arguments);
  va_end(arguments);
  static auto next_open = real<int (*)(int, const char*, int, ...)>("openat");
  char all[2 * PATH_MAX];
  return opened(joined(folder, path, all), flags, [&] { return next_open(folder, path, flags, mode); });
}

int openat64(int folder, const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  int mode = mode_of(flags, arguments);
  va_end(arguments);
  static auto next_open = real<int (*)(int, const char*, int, ...)>("openat64");
  char all[2 * PATH_MAX];
  return opened(joined(folder, path, all), flags, [&] { return next_open(folder, path, flags, mode); });
}

ssize_t write(int fd, const void* data, size_t size) {
  static auto next_write = real<ssize_t (*)(int, const void*, size_t)>("write");
  return written(fd, [&] { return next_write(fd, data, size); }, [&] { return next_write(fd, data, size / 2); });
}

ssize_t writev(int fd, const struct iovec* parts, int n) {
  static auto next_write = real<ssize_t (*)(int, const struct iovec*, int)>("writev");
  return written(fd, [&] { return next_write(fd, parts, n); }, [&] { return next_write(fd, parts, n / 2); });
}

ssize_t pwrite64(int fd, const void* data, size_t size, off64_t at) {
  static auto next_write = real<ssize_t (*)(int, const void*, size_t, off64_t)>("pwrite64");
  return written(
      fd, [&] { return next_write(fd, data, size, at); }, [&] { return next_write(fd, data, size / 2, at); });
}

int ftruncate64(int fd, off64_t size) noexcept {
  static auto next_truncate = real<int (*)(int, off64_t)>("ftruncate64");
  if (!known(fd)) return next_truncate(fd, size);
  return whole("write", g_paths[fd], "", [&] { return next_truncate(fd, size); });
}

int fsync(int fd) {
  static auto next_sync = real<int (*)(int)>("fsync");
  if (!known(fd)) return next_sync(fd);
  return whole("fsync", g_paths[fd], "", [&] { return next_sync(fd); });
}

int close(int fd) {
  static auto next_close = real<int (*)(int)>("close");
  if (fd >= 0 && fd < kMaxFd) g_paths[fd][0] = '\0';
  return next_close(fd);
}

int rename(const char* from, const char* to) noexcept {
  static auto next_rename = real<int (*)(const char*, const char*)>("rename");
  if (!below(to)) return next_rename(from, to);
  return whole("rename", from, to, [&] { return next_rename(from, to); });
}

int mkdir(const char* path, mode_t mode) noexcept {
  static auto next_mkdir = real<int (*)(const char*, mode_t)>("mkdir");
  if (!below(path)) return next_mkdir(path, mode);
  return whole("mkdir", path, "", [&] { return next_mkdir(path, mode); });
}

int unlink(const char* path) noexcept {
  static auto next_unlink = real<int (*)(const char*)>("unlink");
  if (!below(path)) return next_unlink(path);
  return whole("unlink", path, "", [&] { return next_unlink(path); });
}

int unlinkat(int folder, const char* path, int flags) noexcept {
  static auto next_unlink = real<int (*)(int, const char*, int)>("unlinkat");
  if (!known(folder)) return next_unlink(folder, path, flags);
  char all[2 * PATH_MAX];
  return whole("unlink", joined(folder, path, all), "", [&] { return next_unlink(folder, path, flags); });
}

int rmdir(const char* path) noexcept {
  static auto next_rmdir = real<int (*)(const char*)>("rmdir");
  if (!below(path)) return next_rmdir(path);
  return whole("unlink", path, "", [&] { return next_rmdir(path); });
}

ssize_t sendfile64(int out, int in, off64_t* at, size_t size) noexcept {
  static auto next_send = real<ssize_t (*)(int, int, off64_t*, size_t)>("sendfile64");
  return written(out, [&] { return next_send(out, in, at, size); }, [&] { return next_send(out, in, at, size / 2); });
}

FILE* fopen64(const char* path, const char* how) {
  static auto next_fopen = real<FILE* (*)(const char*, const char*)>("fopen64");
  FILE* file = nullptr;
  auto open = [&] { return (file = next_fopen(path, how)) == nullptr ? -1 : 0; };
  below(path) && how[0] != 'r' ? whole("open", path, "", open) : open();
  return file;
}

int chmod(const char* path, mode_t mode) noexcept {
  static auto next_chmod = real<int (*)(const char*, mode_t)>("chmod");
  if (!below(path)) return next_chmod(path, mode);
  return whole("chmod", path, "", [&] { return next_chmod(path, mode); });
}

int link(const char* from, const char* to) noexcept {
  static auto next_link = real<int (*)(const char*, const char*)>("link");
  if (!below(to)) return next_link(from, to);
  return whole("link", from, to, [&] { return next_link(from, to); });
}

int symlink(const char* from, const char* to) noexcept {
  static auto next_link = real<int (*)(const char*, const char*)>("symlink");
  if (!below(to)) return next_link(from, to);
  return whole("link", from, to, [&] { return next_link(from, to); });
}

int truncate64(const char* path, off64_t size) noexcept {
  static auto next_truncate = real<int (*)(const char*, off64_t)>("truncate64");
  if (!below(path)) return next_truncate(path, size);
  return whole("write", path, "", [&] { return next_truncate(path, size); });
}
}
