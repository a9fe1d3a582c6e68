/* The last movements of stock, oldest first; a full ring forgets the oldest. */
#ifndef RING_H
#define RING_H

#include <stddef.h>

struct ring {
	int *slots;
	size_t size, head, used;
};

int ring_init(struct ring *r, size_t size);
void ring_free(struct ring *r);
void ring_push(struct ring *r, int value);
/* ring_at returns the i-th oldest value; i must be below r->used. */
int ring_at(const struct ring *r, size_t i);
long ring_sum(const struct ring *r);

#endif
