package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"
)

// patience is how many signals are taken before one ends the process at once.
const patience = 3

func main() {
	// A broken pipe is an error of the write, not the end of the process: what run made
	// has to be removed.
	signal.Ignore(syscall.SIGPIPE)
	a := &app{stdin: os.Stdin, stdout: os.Stdout, stderr: os.Stderr}
	ctx, cancel := context.WithCancelCause(context.Background())
	sigs := make(chan os.Signal, 4)
	signal.Notify(sigs, os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	a.signals = newSignals(cancel)
	go func() {
		for n := 1; ; n++ {
			s := (<-sigs).(syscall.Signal)
			if n > patience {
				os.Exit(128 + int(s)) // the clean-up is stuck, and the user knows
			}
			a.signals.deliver(s)
		}
	}()
	code := a.main(ctx, os.Args[1:])
	os.Exit(code)
}
