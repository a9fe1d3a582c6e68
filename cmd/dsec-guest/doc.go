// Command dsec-guest is the agent inside a sandbox: PID 1 of a container.
//
// It is configured by its environment, none of which reaches the sandbox's programs but
// what is meant for them:
//
//	DSEC_GUEST_LISTEN_FD   descriptor of the listening Unix socket that the edge bound
//	DSEC_GUEST_USER        default user; empty: root
//	DSEC_GUEST_CWD         default working directory; empty: the user's home
//	DSEC_GUEST_NODE        name of the node, for the handshake
//	DSEC_GUEST_GENERATION  of the sandbox, for the handshake
//	DSEC_GUEST_OOM_SCORE   oom_score_adj of the sandbox's programs; 0: 300
//	DSEC_ENV_NAME          variable NAME of every program
//	GOMAXPROCS             threads that run at once; the edge sets 2
//
// "dsec-guest --listen PATH" runs it as an ordinary process on a socket of its own, for
// tests.
package main
