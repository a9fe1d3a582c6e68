package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"strconv"
	"strings"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/client"
	"dsec/internal/image/build"
)

// keyLen is that of a key that is part of the name of what builds keep for later ones.
const keyLen = 16

// stepsBuild does a recipe's steps in a sandbox of its base. After each step an image is made,
// so that a later build with the same steps up to there begins with it. It belongs to no lineage: what a build
// keeps must hold nothing else back.
type stepsBuild struct {
	a      *app
	c      *client.Client
	name   string
	recipe *build.Recipe
	sf     *specFlags
	cache  bool
}

func (b *stepsBuild) tell(format string, args ...any) {
	fmt.Fprintf(b.a.aside(), "build %s: %s\n", b.name, fmt.Sprintf(format, args...))
}

func (b *stepsBuild) run(ctx context.Context) (*client.Image, error) {
	base, key, err := b.base(ctx)
	if err != nil {
		return nil, err
	}
	if !b.cache && b.recipe.Image() == "" {
		defer func() { // after the sandbox of the steps, which uses it
			cctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), removeTimeout)
			defer cancel()
			if err := b.c.DeleteImage(cctx, base.Name); err != nil {
				b.tell("%s is left: %v", base.Name, err)
			}
		}()
	}
	keys, err := b.recipe.Keys(ctx, key)
	if err != nil {
		return nil, err
	}
	from, done := base.Name, 0
	for n := len(keys); b.cache && n > 0 && done == 0; n-- {
		s, err := b.c.Image(ctx, v1.BuildStepPrefix+keys[n-1][:keyLen])
		if err == nil {
			from, done = s.Name, n
			b.tell("%s as in an earlier build", count(n, "step"))
		} else if !errors.Is(err, errs.ImageNotFound) {
			return nil, err
		}
	}
	spec, err := b.sf.spec(from)
	if err != nil {
		return nil, err
	}
	spec.User, spec.WorkDir, spec.Lease, spec.Env = "0", "/", v1.Seconds(minLease.Seconds()*60), maps.Clone(b.recipe.Env)
	spec.Labels = map[string]string{"job": "build-" + newKey()}
	sb, err := b.c.Create(ctx, spec)
	if err != nil {
		return nil, err
	}
	alive, release := context.WithCancel(ctx)
	defer func() {
		release()
		b.a.removeUnknown(ctx, sb)
	}()
	go sb.KeepAlive(alive) // if it cannot, the sandbox goes, and the step says so
	for n := done; n < len(keys); n++ {
		if err := b.step(ctx, sb, b.recipe.Steps[n]); err != nil {
			return nil, fmt.Errorf("step %d: %w", n+1, err)
		}
		if !b.cache {
			continue
		}
		if _, err := sb.MakeImage(ctx, v1.BuildStepPrefix+keys[n][:keyLen], nil, client.SnapshotOptions{}); err != nil {
			return nil, fmt.Errorf("keep step %d for later builds: %w", n+1, err)
		}
	}
	config := b.config(base)
	return sb.MakeImage(ctx, b.name, &config, client.SnapshotOptions{})
}

// base is the image that the steps start from, and what names it in their keys.
func (b *stepsBuild) base(ctx context.Context) (*client.Image, string, error) {
	if b.recipe.Image() != "" {
		img, err := b.c.Image(ctx, b.recipe.Image())
		if err != nil {
			return nil, "", err
		}
		return img, img.Digest, nil
	}
	name := v1.BuildBasePrefix + b.recipe.BaseKey()[:keyLen]
	if !b.cache { // nobody else's
		name = v1.BuildBasePrefix + newKey()
	}
	if b.cache {
		img, err := b.c.Image(ctx, name)
		if err == nil {
			b.tell("base as in an earlier build")
			return img, img.Digest, nil
		}
		if !errors.Is(err, errs.ImageNotFound) {
			return nil, "", err
		}
	}
	img, err := b.a.buildOnHost(ctx, name, b.recipe.Base())
	if err != nil {
		return nil, "", err
	}
	return img, img.Digest, nil
}

// config is the base's with what the recipe says.
func (b *stepsBuild) config(base *client.Image) v1.ImageConfig {
	c, r := base.Config, b.recipe
	c.Override(r.Env, r.User, r.WorkDir)
	if len(r.Cmd) > 0 {
		c.Cmd, c.Entrypoint = r.Cmd, nil
	}
	if len(r.Labels) > 0 {
		labels := maps.Clone(r.Labels)
		for k, v := range c.Labels {
			if _, has := labels[k]; !has {
				labels[k] = v
			}
		}
		c.Labels = labels
	}
	return c
}

func (b *stepsBuild) step(ctx context.Context, sb *client.Sandbox, s build.Step) error {
	if s.Copy == nil {
		b.tell("run %s", strings.SplitN(strings.TrimSpace(s.Run), "\n", 2)[0])
		return b.command(ctx, sb, s.Run)
	}
	b.tell("copy %s to %s", s.Copy.Src, s.Copy.Dest)
	into := make(chan string, 1)
	pr, pw := io.Pipe()
	defer pr.Close()
	dir, err := b.recipe.CopyTarget(*s.Copy)
	if err != nil {
		return err
	}
	go func() {
		pw.CloseWithError(b.recipe.CopyTar(ctx, *s.Copy, pw, build.Options{}))
		close(into)
	}()
	isNew := false
	if _, err := sb.Files().Stat(ctx, dir); errors.Is(err, errs.PathNotFound) {
		isNew = true
	}
	_, _, err = sb.Files().UnpackFrom(ctx, dir, pr, client.UnpackOptions{KeepOwner: true, Parents: true})
	if err == nil && isNew && s.Copy.User != 0 && dir == s.Copy.Dest {
		err = sb.Files().Chown(ctx, dir, strconv.Itoa(s.Copy.User)+":"+strconv.Itoa(s.Copy.User), false)
	}
	pr.CloseWithError(errors.New("the copy ended"))
	<-into
	return err
}

// keepLines of a command's output go into the error of one that fails.
const keepLines = 6

// lastLines cuts output into lines and keeps the last few.
type lastLines struct {
	tell func(string)
	rest []byte
	last []string
}

const maxBuildLine = 2000

func (l *lastLines) Write(p []byte) (int, error) {
	for _, c := range p {
		if c == '\n' || c == '\r' || len(l.rest) >= maxBuildLine {
			l.end()
		}
		if c != '\n' && c != '\r' {
			l.rest = append(l.rest, c)
		}
	}
	return len(p), nil
}

// end tells what is left.
func (l *lastLines) end() {
	line := strings.TrimSpace(string(l.rest))
	l.rest = l.rest[:0]
	if line == "" {
		return
	}
	l.tell(line)
	if l.last = append(l.last, line); len(l.last) > keepLines {
		l.last = l.last[1:]
	}
}

// command runs a step's command and passes its output on, line by line.
func (b *stepsBuild) command(ctx context.Context, sb *client.Sandbox, command string) error {
	out := &lastLines{tell: func(line string) { b.tell("%s", line) }}
	defer out.end()
	env := map[string]string{"HOME": "/root", "LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"}
	if _, has := b.recipe.Env["PATH"]; !has {
		env["PATH"] = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
	}
	maps.Copy(env, b.recipe.Env)
	p, err := sb.Start(ctx, client.Cmd{Path: "/bin/sh", Args: []string{"-euc", "cd /; " + command}, Env: env, User: "0", Dir: "/"}, client.IO{Stdout: out, Stderr: out})
	if err != nil {
		return err
	}
	exit, err := p.Wait()
	if err != nil {
		return err
	}
	if exit.Err != nil {
		return exit.Err
	}
	if exit.Code == 0 {
		return nil
	}
	out.end()
	said := fmt.Sprintf("%q ended with code %d", strings.SplitN(strings.TrimSpace(command), "\n", 2)[0], exit.Code)
	if exit.OOMKilled {
		said += ": the memory limit killed it; give more with --memory"
	}
	if len(out.last) > 0 {
		said += "; its last lines: " + strings.Join(out.last, " | ")
	}
	return errs.New(errs.BuildFailed, "image.build", said)
}
