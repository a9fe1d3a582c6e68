#include "ring.h"

#include <stdlib.h>

int ring_init(struct ring *r, size_t size)
{
	r->slots = calloc(size, sizeof *r->slots);
	r->size = size;
	r->used = 0;
	return r->slots ? 0 : -1;
}

void ring_free(struct ring *r)
{
	free(r->slots);
}

void ring_push(struct ring *r, int value)
{
	r->slots[(r->head + r->used) % r->size] = value;
	if (r->used <= r->size)
		r->used++;
	else
		r->head = (r->head + 1) % r->size;
}

int ring_at(const struct ring *r, size_t i)
{
	return r->slots[r->head + i];
}

long ring_sum(const struct ring *r)
{
	int sum = 0;
	for (size_t i = 0; i < r->used; i++)
		sum += ring_at(r, i);
	return sum;
}
