// What root inside a sandbox tries with system calls that busybox has no command for.
// Exits 0 if it got through.
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

// A writable clone of a read-only mount.
static int writable_dev(void) {
	struct { uint64_t set, clear, propagation, userns; } attr = {0, 1 /* MOUNT_ATTR_RDONLY */, 0, 0};
	int d = syscall(467 /* open_tree_attr */, AT_FDCWD, "/dev", 1 /* OPEN_TREE_CLONE */, &attr, sizeof attr);
	return d >= 0 && mkdirat(d, "x", 0755) == 0;
}

static int limits_of_init(void) {
	struct rlimit64 l = {0, 0};
	return syscall(SYS_prlimit64, 1, RLIMIT_DATA, &l, NULL) == 0;
}

// More inotify instances than are good for the others.
static int many_watchers(void) {
	for (int i = 0; i < 400; i++)
		if (inotify_init1(0) < 0) return 0;
	return 1;
}

static int many_terminals(void) {
	for (int i = 0; i < 400; i++)
		if (open("/dev/ptmx", O_RDWR | O_NOCTTY) < 0) return 0;
	return 1;
}

int main(int argc, char **argv) {
	if (argc != 2) return 2;
	if (!strcmp(argv[1], "dev")) return !writable_dev();
	if (!strcmp(argv[1], "prlimit")) return !limits_of_init();
	if (!strcmp(argv[1], "inotify")) return !many_watchers();
	if (!strcmp(argv[1], "pty")) return !many_terminals();
	return 2;
}
