package serve

import (
	"context"

	"dsec/aether"
	"dsec/aether/msg"
	"dsec/api/v1/errs"
	"dsec/internal/guest/proc"
	"dsec/internal/guest/session"
)

func (g *Guest) sessionOpen(ctx context.Context, _ *aether.Stream, r *msg.SessionOpenRequest) (*msg.SessionInfo, error) {
	s, err := g.Sessions.Open(ctx, session.Request{ID: r.Id, Shell: r.Shell, Cwd: r.Cwd, Env: r.Envs, User: r.User})
	if err != nil {
		return nil, err
	}
	return sessionInfo(s), nil
}

func sessionInfo(s *session.Session) *msg.SessionInfo {
	busy, n := s.State()
	return &msg.SessionInfo{
		Id: s.ID, Pid: uint32(s.Proc.Pid), Shell: s.Shell, Busy: busy, Commands: n,
		OpenedUnixMs: uint64(s.Opened.UnixMilli()), User: s.Proc.User.Name,
	}
}

func sessionResult(r session.Result) *msg.SessionResult {
	return &msg.SessionResult{
		ExitCode: int32(r.Code), TimedOut: r.TimedOut, Ended: r.Ended, DurationUs: uint64(r.Duration.Microseconds()),
		OomKilled: r.OOM.Killed, OomKills: uint64(r.OOM.Kills), MemoryLimitBytes: uint64(r.OOM.Limit),
	}
}

func (g *Guest) sessionRun(ctx context.Context, st *aether.Stream) (aether.Message, error) {
	var r msg.SessionRunRequest
	if err := st.Parse(&r); err != nil {
		return nil, err
	}
	if r.MaxOutput != 0 {
		return nil, errs.New(errs.BadRequest, "guest.session", "max_output is for session.exec")
	}
	s, err := g.Sessions.Find(r.Id)
	if err != nil {
		return nil, err
	}
	res, err := s.Run(ctx, r.Command, millis(r.TimeoutMs), func(p proc.Piece) error { return sendPiece(ctx, st, p, false) })
	if err != nil {
		return nil, err
	}
	return sessionResult(res), nil
}

func (g *Guest) sessionExec(ctx context.Context, _ *aether.Stream, r *msg.SessionRunRequest) (*msg.SessionResult, error) {
	limit, err := outputLimit(r.MaxOutput)
	if err != nil {
		return nil, err
	}
	s, err := g.Sessions.Find(r.Id)
	if err != nil {
		return nil, err
	}
	out, errOut := proc.NewCollector(limit), proc.NewCollector(limit)
	res, err := s.Run(ctx, r.Command, millis(r.TimeoutMs), func(p proc.Piece) error {
		collect(p, out, errOut)
		return nil
	})
	if err != nil {
		return nil, err
	}
	m := sessionResult(res)
	var cut1, cut2 bool
	m.Stdout, cut1 = out.Bytes()
	m.Stderr, cut2 = errOut.Bytes()
	m.Truncated = cut1 || cut2
	return m, nil
}

func (g *Guest) sessionClose(_ context.Context, _ *aether.Stream, r *msg.SessionSelect) (*msg.Empty, error) {
	return &msg.Empty{}, g.Sessions.Close(r.Id)
}

func (g *Guest) sessionList(context.Context, *aether.Stream, *msg.Empty) (*msg.SessionList, error) {
	out := &msg.SessionList{}
	for _, s := range g.Sessions.List() {
		out.Sessions = append(out.Sessions, sessionInfo(s))
	}
	return out, nil
}
