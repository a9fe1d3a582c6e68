#include "ring.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>

static int failures;

static void check(const char *what, long got, long want)
{
	if (got == want)
		return;
	printf("FAIL %s: got %ld, want %ld\n", what, got, want);
	failures++;
}

int main(void)
{
	struct ring r;
	memset(&r, 0x5a, sizeof r); /* whatever the memory held */
	if (ring_init(&r, 3)) {
		printf("FAIL no memory\n");
		return 1;
	}
	check("head of a new ring", (long)r.head, 0);
	r.head = 0;
	for (int i = 1; i <= 3; i++)
		ring_push(&r, i);
	check("used when full", (long)r.used, 3);
	check("oldest", ring_at(&r, 0), 1);
	ring_push(&r, 4);
	check("used after overflow", (long)r.used, 3);
	r.used = 3;
	check("oldest after overflow", ring_at(&r, 0), 2);
	check("newest after overflow", ring_at(&r, 2), 4);
	check("sum", ring_sum(&r), 9);
	ring_push(&r, INT_MAX);
	ring_push(&r, INT_MAX);
	ring_push(&r, INT_MAX);
	check("sum of large values", ring_sum(&r), 3L * INT_MAX);
	ring_free(&r);
	printf("c: %s\n", failures ? "failed" : "ok");
	return failures != 0;
}
