// A program with memory of some kind, whose content it knows: memory KIND MIB FILE.
// It writes "ok" to FILE once all is touched, and to FILE.1, FILE.2 … after each SIGUSR1 if all is as it was.
#define _GNU_SOURCE
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <unistd.h>

static void say(const char *file, int n, const char *what) {
	char name[256], tmp[300];
	if (n) snprintf(name, sizeof name, "%s.%d", file, n);
	else snprintf(name, sizeof name, "%s", file);
	snprintf(tmp, sizeof tmp, "%s.new", name);
	FILE *f = fopen(tmp, "w");
	if (!f || fputs(what, f) < 0 || fclose(f) || rename(tmp, name)) exit(1);
}

static uint64_t next(uint64_t *s) {
	*s ^= *s << 13, *s ^= *s >> 7, *s ^= *s << 17;
	return *s;
}

static int leaderless(void *unused) {
	for (;;) pause();
	return 0;
}

int main(int argc, char **argv) {
	if (argc != 4) return 2;
	size_t mib = strtoul(argv[2], NULL, 10), n = mib << 17;
	int flags = MAP_PRIVATE | MAP_ANONYMOUS, fd = -1;
	const char *kind = argv[1];
	sigset_t set;
	sigemptyset(&set);
	sigaddset(&set, SIGUSR1);
	sigprocmask(SIG_BLOCK, &set, NULL);
	if (!strcmp(kind, "ranges")) { // MIB thousand of them, in each of 8 processes
		for (int i = 0; i < 7 && fork(); i++) {}
		for (size_t i = 0; i < mib * 1000; i++)
			if (mmap(NULL, 4096, i % 2 ? PROT_READ : PROT_NONE, flags, -1, 0) == MAP_FAILED) break;
		char own[256];
		snprintf(own, sizeof own, "%s.%d", argv[3], getpid());
		say(own, 0, "ok");
		for (;;) pause();
	}
	if (!strcmp(kind, "odd")) { // processes in states of their own: stopped, traced, ended, waiting for a vfork, without a leader
		if (fork() == 0) {
			raise(SIGSTOP);
			for (;;) pause();
		}
		if (fork() == 0) {
			ptrace(PTRACE_TRACEME, 0, 0, 0);
			raise(SIGSTOP);
			for (;;) pause();
		}
		if (fork() == 0) _exit(0);
		if (fork() == 0) {
			if (vfork() == 0) for (;;) pause();
			_exit(0);
		}
		if (fork() == 0) {
			static char stack[1 << 16];
			clone(leaderless, stack + sizeof stack, CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_THREAD, NULL);
			syscall(SYS_exit, 0);
		}
		usleep(200000);
		say(argv[3], 0, "ok");
		for (;;) pause();
	}
	if (!strcmp(kind, "memfd")) {
		fd = memfd_create("x", 0);
		if (fd < 0 || ftruncate(fd, mib << 20)) return 1;
		flags = MAP_SHARED;
	}
	uint64_t *p = mmap(NULL, mib << 20, PROT_READ | PROT_WRITE, flags, fd, 0), s = 88172645463325252u;
	if (p == MAP_FAILED) return 1;
	for (size_t i = 0; i < n; i++) p[i] = next(&s);
	if (!strcmp(kind, "locked") && mlock(p, mib << 20)) return 1;
	if (!strcmp(kind, "forked") && fork() == 0) for (;;) pause(); // and shares all of it
	say(argv[3], 0, "ok");
	for (int round = 1;; round++) {
		int sig;
		sigwait(&set, &sig);
		const char *what = "ok";
		s = 88172645463325252u;
		for (size_t i = 0; i < n; i++)
			if (p[i] != next(&s)) what = "changed";
		say(argv[3], round, what);
	}
}
