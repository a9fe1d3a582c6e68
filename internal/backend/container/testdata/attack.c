// What root inside a sandbox tries with system calls that busybox has no command for.
// Exits 0 if it got through.
#define _GNU_SOURCE
#include <fcntl.h>
#include <ftw.h>
#include <linux/filter.h>
#include <linux/fs.h>
#include <linux/seccomp.h>
#include <netinet/in.h>
#include <stdint.h>
#include <stdio.h>
#include <signal.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
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

// One filter tells; many at once hang the kernel.
static struct sock_filter accept_all[] = {BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
static struct sock_fprog filter = {1, accept_all};

static int filtered_socket(void) {
	int s = socket(AF_INET, SOCK_DGRAM, 0);
	return s >= 0 && setsockopt(s, SOL_SOCKET, SO_ATTACH_FILTER, &filter, sizeof filter) == 0;
}

static int filtered_calls(void) {
	return syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &filter) == 0 || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
}

// The same by datagrams that nobody reads, and then how many there were.
static int udp_buffers(void) {
	const long enough = 96 << 20;
	static char data[60000];
	struct sockaddr_in here = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	int from = socket(AF_INET, SOCK_DGRAM, 0), size = 4 << 20, sockets[60];
	long kept = 0, n;
	for (int i = 0; i < 60; i++) {
		socklen_t len = sizeof here;
		here.sin_port = 0;
		sockets[i] = socket(AF_INET, SOCK_DGRAM, 0);
		setsockopt(sockets[i], SOL_SOCKET, SO_RCVBUF, &size, sizeof size);
		if (bind(sockets[i], (struct sockaddr *)&here, len) || getsockname(sockets[i], (struct sockaddr *)&here, &len)) return 0;
		for (int k = 0; k < 100; k++) sendto(from, data, sizeof data, MSG_DONTWAIT, (struct sockaddr *)&here, len);
	}
	for (int i = 0; i < 60; i++)
		while ((n = recv(sockets[i], data, sizeof data, MSG_DONTWAIT)) > 0) kept += n;
	return kept >= enough;
}

// Sockets of a family that only drivers, clusters or the kernel itself need.
static int odd_socket(void) {
	for (int family = 0; family < 64; family++)
		if (family != AF_UNIX && family != AF_INET && family != AF_INET6 && family != AF_NETLINK)
			for (int type = 1; type <= 5; type++)
				if (socket(family, type, 0) >= 0) return 1;
	return 0;
}

static int aio_ring(void) {
	unsigned long ring = 0;
	return syscall(SYS_io_setup, 128, &ring) == 0;
}

// More bytes on their way through loopback than the sandbox's memory limit has for sockets.
static int tcp_buffers(void) {
	const long enough = 96 << 20; // of 128 MiB
	static char data[1 << 16];
	struct sockaddr_in here = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t len = sizeof here;
	int l = socket(AF_INET, SOCK_STREAM, 0);
	if (bind(l, (struct sockaddr *)&here, len) || listen(l, 64) || getsockname(l, (struct sockaddr *)&here, &len)) return 0;
	long sent = 0;
	for (int i = 0; i < 60 && sent < enough; i++) {
		int c = socket(AF_INET, SOCK_STREAM, 0), size = 4 << 20, tries = 0;
		setsockopt(c, SOL_SOCKET, SO_SNDBUF, &size, sizeof size);
		if (connect(c, (struct sockaddr *)&here, len) || accept(l, NULL, NULL) < 0) return 0;
		while (tries < 3) {
			long n = send(c, data, sizeof data, MSG_DONTWAIT);
			if (n > 0) sent += n;
			else usleep(1000), tries++;
		}
	}
	return sent >= enough;
}

// Opens, for writing, a file anywhere in /proc, except of processes, or /sys.
static int found;
static int writable(const char *path, const struct stat *st, int type, struct FTW *at) {
	if (!strncmp(path, "/proc/", 6) && path[6] >= '0' && path[6] <= '9') return 0;
	if (type == FTW_F && S_ISREG(st->st_mode)) {
		int fd = open(path, O_WRONLY | O_NONBLOCK);
		if (fd >= 0) found++, puts(path), close(fd);
	}
	return 0;
}

static int settings(void) {
	nftw("/proc", writable, 20, FTW_PHYS);
	nftw("/sys", writable, 20, FTW_PHYS);
	return found;
}

// Kinds of netlink and internet sockets for drivers and for what needs CAP_NET_ADMIN anyway.
static int odd_protocol(void) {
	static const int netlink[] = {2 /* USERSOCK */, 5, 6 /* XFRM */, 7, 8, 10, 11, 12, 14, 18, 19, 20, 21, 22};
	for (unsigned i = 0; i < sizeof netlink / sizeof *netlink; i++)
		if (socket(AF_NETLINK, SOCK_RAW, netlink[i]) >= 0) return 1;
	for (int protocol = 18; protocol < 260; protocol++)
		for (int type = SOCK_STREAM; type <= SOCK_DGRAM; type++)
			if (protocol != IPPROTO_ICMPV6 && socket(AF_INET, type, protocol) >= 0) return 1;
	return 0;
}

static int line_discipline(void) {
	int null = 27, t = open("/dev/ptmx", O_RDWR | O_NOCTTY);
	return t >= 0 && ioctl(t, TIOCSETD, &null) == 0;
}

static int local_descriptors(void) {
	char buf[64];
	return syscall(SYS_modify_ldt, 0, buf, sizeof buf) >= 0;
}

// PID 1's memory and descriptors, by calls.
static int trace_init(void) {
	char here[8];
	struct iovec local = {here, sizeof here}, remote = {(void *)0x400000, sizeof here};
	int pid1 = syscall(SYS_pidfd_open, 1, 0);
	for (int tid = 1; tid < 8; tid++)
		if (ptrace(PTRACE_SEIZE, tid, 0, 0) == 0 || ptrace(PTRACE_ATTACH, tid, 0, 0) == 0) return 1;
	for (int fd = 0; fd < 64; fd++)
		if (syscall(SYS_pidfd_getfd, pid1, fd, 0) >= 0) return 1;
	return process_vm_readv(1, &local, 1, &remote, 1, 0) > 0 || syscall(SYS_kcmp, 1, 1, 0, 0, 1) >= 0;
}

// Every signal to every thread of PID 1. Never gets through: the test looks whether it lives.
static int signal_init(void) {
	for (int tid = 1; tid < 16; tid++)
		for (int sig = 1; sig <= 64; sig++)
			syscall(SYS_tgkill, 1, tid, sig);
	return 0;
}

// A file that the node could not remove.
static int immutable(void) {
	int flags = FS_IMMUTABLE_FL, appending = FS_APPEND_FL, f = open("/tmp/stays", O_CREAT | O_RDWR, 0644);
	return f >= 0 && (ioctl(f, FS_IOC_SETFLAGS, &flags) == 0 || ioctl(f, FS_IOC_SETFLAGS, &appending) == 0);
}

static int freeze(void) {
	int root = open("/", O_RDONLY), shm = open("/dev/shm", O_RDONLY);
	return ioctl(root, FIFREEZE, 0) == 0 || ioctl(shm, FIFREEZE, 0) == 0;
}

// Timers, each of which has a signal of its own that is counted by user; they stay until killed.
static int many_timers(void) {
	int n = 0;
	timer_t t;
	while (n < 3000 && timer_create(CLOCK_MONOTONIC, NULL, &t) == 0) n++;
	printf("%d\n", n);
	fflush(stdout);
	return pause();
}

int main(int argc, char **argv) {
	if (argc != 2) return 2;
	if (!strcmp(argv[1], "dev")) return !writable_dev();
	if (!strcmp(argv[1], "prlimit")) return !limits_of_init();
	if (!strcmp(argv[1], "inotify")) return !many_watchers();
	if (!strcmp(argv[1], "pty")) return !many_terminals();
	if (!strcmp(argv[1], "socketfilter")) return !filtered_socket();
	if (!strcmp(argv[1], "seccomp")) return !filtered_calls();
	if (!strcmp(argv[1], "families")) return !odd_socket();
	if (!strcmp(argv[1], "aio")) return !aio_ring();
	if (!strcmp(argv[1], "tcp")) return !tcp_buffers();
	if (!strcmp(argv[1], "settings")) return !settings();
	if (!strcmp(argv[1], "protocols")) return !odd_protocol();
	if (!strcmp(argv[1], "ldisc")) return !line_discipline();
	if (!strcmp(argv[1], "ldt")) return !local_descriptors();
	if (!strcmp(argv[1], "trace")) return !trace_init();
	if (!strcmp(argv[1], "signals")) return !signal_init();
	if (!strcmp(argv[1], "immutable")) return !immutable();
	if (!strcmp(argv[1], "freeze")) return !freeze();
	if (!strcmp(argv[1], "timers")) return many_timers();
	if (!strcmp(argv[1], "udp")) return !udp_buffers();
	return 2;
}
