package etcd

import (
	"context"
	"log/slog"
	"strings"
	"sync/atomic"

	"go.uber.org/zap/zapcore"
)

// slogCore carries etcd's zap log into slog. etcd is talkative: its information and
// warnings are debug to us, its errors warnings. While it is being closed it calls its own
// listeners' end an error: closing makes all of it debug.
type slogCore struct {
	log     *slog.Logger
	closing *atomic.Bool
}

func newSlogCore(log *slog.Logger, closing *atomic.Bool) zapcore.Core {
	return slogCore{log.With("part", "etcd"), closing}
}

func (c slogCore) levelOf(l zapcore.Level) slog.Level {
	if l >= zapcore.ErrorLevel && !c.closing.Load() {
		return slog.LevelWarn
	}
	return slog.LevelDebug
}

func (c slogCore) Enabled(l zapcore.Level) bool {
	return c.log.Enabled(context.Background(), c.levelOf(l))
}

func (c slogCore) With(fields []zapcore.Field) zapcore.Core {
	return slogCore{c.log.With(attrs(fields)...), c.closing}
}

func (c slogCore) Check(e zapcore.Entry, ce *zapcore.CheckedEntry) *zapcore.CheckedEntry {
	if c.Enabled(e.Level) {
		return ce.AddCore(e, c)
	}
	return ce
}

func (c slogCore) Write(e zapcore.Entry, fields []zapcore.Field) error {
	level := c.levelOf(e.Level)
	if tooEarly(e, fields) {
		level = slog.LevelDebug
	}
	c.log.Log(context.Background(), level, e.Message, attrs(fields)...)
	return nil
}

// tooEarly knows the one error that etcd logs on a fresh directory: its version monitor may
// look before raft's first term is on disk. It looks again a few seconds later, and any
// other failure to update the version is still told.
func tooEarly(e zapcore.Entry, fields []zapcore.Field) bool {
	if e.Message != "failed to update storage version" {
		return false
	}
	for _, f := range fields {
		if err, ok := f.Interface.(error); ok {
			return strings.Contains(err.Error(), "missing term information")
		}
	}
	return false
}

func (slogCore) Sync() error { return nil }

func attrs(fields []zapcore.Field) []any {
	enc := zapcore.NewMapObjectEncoder()
	for _, f := range fields {
		f.AddTo(enc)
	}
	out := make([]any, 0, 2*len(enc.Fields))
	for k, v := range enc.Fields {
		out = append(out, k, v)
	}
	return out
}
