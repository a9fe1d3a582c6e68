// Command dsec-guest is the agent inside a sandbox.
//
// "dsec-guest --container" is PID 1 of a container: the edge starts it with a connected
// socket as descriptor 3, over which it first gets its configuration and root (package
// internal/guest/boot) and then serves Aether, and a listening socket as descriptor 4,
// for edges that come later.
//
// "dsec-guest --listen PATH" is an ordinary process on a socket of its own, for tests.
// Its environment then says what an edge would: DSEC_GUEST_USER, DSEC_GUEST_CWD,
// DSEC_GUEST_NODE, DSEC_GUEST_GENERATION, and DSEC_ENV_NAME for the variable NAME of
// every program.
package main
