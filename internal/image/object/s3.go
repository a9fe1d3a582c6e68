package object

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"dsec/api/v1/errs"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"
)

// S3Config says where a bucket is and who asks.
type S3Config struct {
	Endpoint  string // URL, such as https://s3.example.org:9000
	Region    string // us-east-1 if empty
	Bucket    string // must exist
	Prefix    string // before every key, "" or ending with a slash
	AccessKey string
	SecretKey string

	// Attempts is how often a request is tried, 5 if 0. Between them is a pause of
	// Backoff (200 ms if 0), doubled each time, half of it random, or what the server
	// asks for.
	Attempts int
	Backoff  time.Duration
	// Timeout is how long a request may go without any progress before it counts as
	// failed, 30 s if 0.
	Timeout time.Duration
	// Transport replaces the HTTP transport.
	Transport http.RoundTripper
}

const (
	// partSize is the largest object that is put in one request; beyond it, a part.
	partSize = 64 << 20

	maxRetryAfter = 30 * time.Second
	pageSize      = 1000
	drain         = 256 << 10 // read on Close to keep the connection
)

// S3 is a store in a bucket.
type S3 struct {
	cfg  S3Config
	core minio.Core
}

// OpenS3 opens the store in an existing bucket and looks whether it may list it.
// Errors: bad_request (configuration), object_not_found (no such bucket),
// store_denied, store_unavailable.
func OpenS3(ctx context.Context, cfg S3Config) (*S3, error) {
	u, err := url.Parse(cfg.Endpoint)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || strings.Trim(u.Path, "/") != "" {
		return nil, errs.New(errs.BadRequest, phase, fmt.Sprintf("S3 endpoint %q is no URL of a scheme and a host", cfg.Endpoint))
	}
	if cfg.Prefix != "" && (CheckPrefix(cfg.Prefix) != nil || !strings.HasSuffix(cfg.Prefix, "/")) {
		return nil, errs.New(errs.BadRequest, phase, fmt.Sprintf("S3 prefix %q is no start of a key with a slash at its end", cfg.Prefix))
	}
	cfg.fill()
	core, err := minio.NewCore(u.Host, &minio.Options{
		Creds:        credentials.NewStaticV4(cfg.AccessKey, cfg.SecretKey, ""),
		Secure:       u.Scheme == "https",
		Region:       cfg.Region,
		BucketLookup: minio.BucketLookupPath,
		Transport:    &retryAfter{next: cfg.Transport},
		MaxRetries:   1, // the store does it, with bounds of its own
	})
	if err != nil {
		return nil, errs.New(errs.BadRequest, phase, "S3 configuration").Because(err)
	}
	s := &S3{cfg: cfg, core: *core}
	return s, s.retry(ctx, "look at bucket "+cfg.Bucket, "", func(ctx context.Context) error {
		_, err := s.page(ctx, cfg.Prefix+"probe/", "", 1)
		return err
	})
}

func (c *S3Config) fill() {
	if c.Region == "" {
		c.Region = "us-east-1"
	}
	if c.Attempts == 0 {
		c.Attempts = 5
	}
	if c.Backoff == 0 {
		c.Backoff = 200 * time.Millisecond
	}
	if c.Timeout == 0 {
		c.Timeout = 30 * time.Second
	}
	if c.Transport == nil {
		c.Transport = &http.Transport{
			Proxy:                 http.ProxyFromEnvironment,
			DialContext:           (&net.Dialer{Timeout: 10 * time.Second, KeepAlive: 15 * time.Second}).DialContext,
			MaxIdleConnsPerHost:   64,
			IdleConnTimeout:       time.Minute,
			TLSHandshakeTimeout:   10 * time.Second,
			ExpectContinueTimeout: time.Second,
			DisableCompression:    true,
		}
	}
}

// CloseIdle closes connections that are not in use.
func (s *S3) CloseIdle() {
	if t, ok := s.cfg.Transport.(interface{ CloseIdleConnections() }); ok {
		t.CloseIdleConnections()
	}
}

// retry does f until it succeeds, fails for good, or has failed often enough.
func (s *S3) retry(ctx context.Context, action, key string, f func(context.Context) error) error {
	pause := s.cfg.Backoff
	for i := 1; ; i++ {
		var asked time.Duration
		err := s.typed(ctx, action, key, f(context.WithValue(ctx, askedKey{}, &asked)))
		var e *errs.Error
		if errors.As(err, &e) && asked > 0 {
			e.After(asked)
		}
		if err == nil || e == nil || e.Code != errs.StoreUnavailable || !e.Retryable || i >= s.cfg.Attempts {
			return err
		}
		wait := pause/2 + rand.N(pause/2+1)
		if asked > 0 {
			wait = min(asked, maxRetryAfter)
		}
		if err := sleep(ctx, wait); err != nil {
			return errs.Wrap(errs.StoreUnavailable, phase, action, err)
		}
		pause *= 2
	}
}

// askedKey finds where a request's context keeps what the server asks for.
type askedKey struct{}

// retryAfter takes the Retry-After header of answers, which the client drops.
type retryAfter struct{ next http.RoundTripper }

func (t *retryAfter) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := t.next.RoundTrip(r)
	if err == nil && resp.StatusCode >= 400 {
		if asked, ok := r.Context().Value(askedKey{}).(*time.Duration); ok {
			if sec, err := strconv.Atoi(resp.Header.Get("Retry-After")); err == nil && sec >= 0 {
				*asked = time.Duration(sec) * time.Second
			}
		}
	}
	return resp, err
}

func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// watched returns a context that ends after the timeout without a call of beat.
func (s *S3) watched(ctx context.Context) (_ context.Context, beat func(), stop func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	t := time.AfterFunc(s.cfg.Timeout, func() { cancel(errStalled) })
	return ctx, func() { t.Reset(s.cfg.Timeout) }, func() { t.Stop(); cancel(context.Canceled) }
}

var errStalled = errors.New("no progress within the time-out")

// Put implements [Store]. Up to 64 MiB are one request; more is an upload in parts,
// which S3 makes visible at its end. What r holds is buffered by parts unless r is
// a [bytes.Reader].
func (s *S3) Put(ctx context.Context, key string, size int64, r io.Reader) error {
	if err := checkPut(key, size); err != nil {
		return err
	}
	if size > partSize {
		return s.putParts(ctx, key, size, r)
	}
	body, err := seekable(key, size, r)
	if err != nil {
		return err
	}
	return s.retry(ctx, "put object "+key, key, func(ctx context.Context) error {
		if _, err := body.Seek(0, io.SeekStart); err != nil {
			return errs.Wrap(errs.InternalError, phase, "read what to put as object "+key, err)
		}
		ctx, beat, stop := s.watched(ctx)
		defer stop()
		send := &sender{beat: beat, r: body}
		defer send.done()
		_, err := s.core.Client.PutObject(ctx, s.cfg.Bucket, s.cfg.Prefix+key, send, size, minio.PutObjectOptions{DisableMultipart: true})
		return cause(ctx, err)
	})
}

// seekable returns size bytes of r so that they can be sent again.
func seekable(key string, size int64, r io.Reader) (io.ReadSeeker, error) {
	if at, ok := r.(*bytes.Reader); ok {
		if n := int64(at.Len()); n != size {
			return nil, wrongSize(key, size, n > size)
		}
		return io.NewSectionReader(at, at.Size()-size, size), nil
	}
	buf := make([]byte, size)
	if err := fill(key, size, r, buf); err != nil {
		return nil, err
	}
	return bytes.NewReader(buf), atEnd(key, size, r)
}

func fill(key string, size int64, r io.Reader, buf []byte) error {
	switch _, err := io.ReadFull(r, buf); {
	case err == io.EOF, err == io.ErrUnexpectedEOF:
		return wrongSize(key, size, false)
	case err != nil:
		return errs.Wrap(errs.InternalError, phase, "read what to put as object "+key, err)
	}
	return nil
}

func atEnd(key string, size int64, r io.Reader) error {
	var b [1]byte
	switch n, err := io.ReadFull(r, b[:]); {
	case n > 0:
		return wrongSize(key, size, true)
	case err != io.EOF:
		return errs.Wrap(errs.InternalError, phase, "read what to put as object "+key, err)
	}
	return nil
}

func (s *S3) putParts(ctx context.Context, key string, size int64, r io.Reader) (err error) {
	action, name := "put object "+key, s.cfg.Prefix+key
	var id string
	err = s.retry(ctx, action, key, func(ctx context.Context) error {
		ctx, _, stop := s.watched(ctx)
		defer stop()
		var err error
		id, err = s.core.NewMultipartUpload(ctx, s.cfg.Bucket, name, minio.PutObjectOptions{})
		return cause(ctx, err)
	})
	if err != nil {
		return err
	}
	defer func() {
		if err == nil {
			return
		}
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.cfg.Timeout)
		defer cancel()
		s.core.AbortMultipartUpload(ctx, s.cfg.Bucket, name, id) //nolint:errcheck // the bucket's rules remove what stays
	}()
	var parts []minio.CompletePart
	buf := make([]byte, partSize)
	for done := int64(0); done < size; {
		p := buf[:min(partSize, size-done)]
		if err := fill(key, size, r, p); err != nil {
			return err
		}
		if done += int64(len(p)); done == size {
			if err := atEnd(key, size, r); err != nil {
				return err
			}
		}
		err := s.retry(ctx, action, key, func(ctx context.Context) error {
			ctx, beat, stop := s.watched(ctx)
			defer stop()
			send := &sender{beat: beat, r: bytes.NewReader(p)}
			defer send.done()
			part, err := s.core.PutObjectPart(ctx, s.cfg.Bucket, name, id, len(parts)+1, send, int64(len(p)), minio.PutObjectPartOptions{})
			if err == nil {
				parts = append(parts, minio.CompletePart{PartNumber: part.PartNumber, ETag: part.ETag})
			}
			return cause(ctx, err)
		})
		if err != nil {
			return err
		}
	}
	return s.retry(ctx, action, key, func(ctx context.Context) error {
		ctx, _, stop := s.watched(ctx)
		defer stop()
		_, err := s.core.CompleteMultipartUpload(ctx, s.cfg.Bucket, name, id, parts, minio.PutObjectOptions{})
		if err != nil && minio.ToErrorResponse(err).Code == minio.NoSuchUpload {
			// The try before may have completed it although its answer was lost.
			if st, serr := s.core.StatObject(ctx, s.cfg.Bucket, name, minio.StatObjectOptions{}); serr == nil && st.Size == size {
				return nil
			}
		}
		return cause(ctx, err)
	})
}

// sender is the body of one attempt. It tells the watchdog that bytes move; and after
// done nothing reads from it any more, as the transport may otherwise go on with the body
// of a request that has failed while the next attempt sends it, or its owner reuses it.
type sender struct {
	beat func()

	mu sync.Mutex
	r  io.ReadSeeker // nil after done
}

func (b *sender) Read(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.r == nil {
		return 0, errOver
	}
	b.beat()
	return b.r.Read(p)
}

func (b *sender) Seek(off int64, whence int) (int64, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.r == nil {
		return 0, errOver
	}
	return b.r.Seek(off, whence)
}

func (b *sender) done() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.r = nil
}

var errOver = errors.New("the request is over")

// Get implements [Store]. A body that breaks off is gone on with.
func (s *S3) Get(ctx context.Context, key string, off, n int64) (io.ReadCloser, error) {
	if err := checkRange(key, off); err != nil {
		return nil, err
	}
	if n == 0 { // HTTP has no empty ranges
		if _, err := s.Stat(ctx, key); err != nil {
			return nil, err
		}
		return http.NoBody, nil
	}
	b := &s3Body{s: s, ctx: ctx, key: key, off: off, left: n}
	if err := s.retry(ctx, "get object "+key, key, b.open); err != nil {
		return nil, err
	}
	return b, nil
}

type s3Body struct {
	s    *S3
	ctx  context.Context
	key  string
	etag string
	off  int64 // of the next byte
	left int64 // of the range; -1 until the answer says

	rc     io.ReadCloser
	cur    context.Context
	beat   func()
	stop   func()
	breaks int // in a row
}

// open asks for what is left of the range.
func (b *s3Body) open(ctx context.Context) error {
	opts := minio.GetObjectOptions{}
	switch {
	case b.left > 0 && b.off > 1<<62-b.left:
		opts.Set("Range", fmt.Sprintf("bytes=%d-", b.off))
	case b.left > 0:
		opts.Set("Range", fmt.Sprintf("bytes=%d-%d", b.off, b.off+b.left-1))
	case b.off > 0:
		opts.Set("Range", fmt.Sprintf("bytes=%d-", b.off))
	}
	if b.etag != "" {
		opts.Set("If-Match", b.etag)
	}
	cur, beat, stop := b.s.watched(ctx)
	rc, info, header, err := b.s.core.GetObject(cur, b.s.cfg.Bucket, b.s.cfg.Prefix+b.key, opts)
	if err != nil {
		stop()
		r := minio.ToErrorResponse(err)
		if r.StatusCode == http.StatusRequestedRangeNotSatisfiable {
			b.rc, b.left, b.stop = http.NoBody, 0, func() {}
			return nil
		}
		return cause(cur, err)
	}
	length, err := strconv.ParseInt(header.Get("Content-Length"), 10, 64)
	from := int64(0)
	if cr := header.Get("Content-Range"); cr != "" {
		if _, serr := fmt.Sscanf(cr, "bytes %d-", &from); serr != nil {
			err = serr
		}
	}
	if err != nil || from != b.off || b.left >= 0 && length > b.left || b.etag != "" && length != b.left {
		rc.Close()
		stop()
		return errs.New(errs.StoreUnavailable, phase, fmt.Sprintf("get object %s: %d bytes from %d were asked for, the answer has %s from %d",
			b.key, b.left, b.off, header.Get("Content-Length"), from))
	}
	b.left, b.etag = length, `"`+info.ETag+`"`
	b.rc, b.cur, b.beat, b.stop = rc, cur, beat, stop
	return nil
}

func (b *s3Body) Read(p []byte) (int, error) {
	for {
		if b.left == 0 {
			return 0, io.EOF
		}
		if len(p) == 0 {
			return 0, nil
		}
		b.beat()
		n, err := b.rc.Read(p[:min(int64(len(p)), b.left)])
		b.off += int64(n)
		b.left -= int64(n)
		if n > 0 {
			b.breaks = 0
			return n, nil
		}
		if err == nil {
			continue
		}
		if err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		err = b.s.typed(b.ctx, "read object "+b.key, b.key, cause(b.cur, err))
		b.rc.Close()
		b.stop()
		if b.breaks++; b.breaks >= b.s.cfg.Attempts || b.ctx.Err() != nil {
			b.rc, b.stop = http.NoBody, func() {}
			return 0, err
		}
		if err := b.s.retry(b.ctx, "read object "+b.key, b.key, b.open); err != nil {
			b.rc, b.stop, b.beat, b.cur = http.NoBody, func() {}, func() {}, b.ctx
			return 0, err
		}
	}
}

func (b *s3Body) Close() error {
	if b.left > 0 && b.left <= drain {
		io.CopyN(io.Discard, b.rc, b.left) //nolint:errcheck // only to keep the connection
	}
	err := b.rc.Close()
	b.stop()
	b.left = 0
	if err != nil {
		return errs.Wrap(errs.StoreUnavailable, phase, "close object "+b.key, err)
	}
	return nil
}

// Stat implements [Store].
func (s *S3) Stat(ctx context.Context, key string) (info Info, err error) {
	if err := CheckKey(key); err != nil {
		return Info{}, err
	}
	err = s.retry(ctx, "look at object "+key, key, func(ctx context.Context) error {
		ctx, _, stop := s.watched(ctx)
		defer stop()
		o, err := s.core.StatObject(ctx, s.cfg.Bucket, s.cfg.Prefix+key, minio.StatObjectOptions{})
		info = Info{Key: key, Size: o.Size, Modified: o.LastModified}
		return cause(ctx, err)
	})
	return info, err
}

// Delete implements [Store].
func (s *S3) Delete(ctx context.Context, key string) error {
	if err := CheckKey(key); err != nil {
		return err
	}
	err := s.retry(ctx, "delete object "+key, key, func(ctx context.Context) error {
		ctx, _, stop := s.watched(ctx)
		defer stop()
		return cause(ctx, s.core.RemoveObject(ctx, s.cfg.Bucket, s.cfg.Prefix+key, minio.RemoveObjectOptions{}))
	})
	if errors.Is(err, errs.ObjectNotFound) {
		return nil
	}
	return err
}

// List implements [Store].
func (s *S3) List(ctx context.Context, prefix string, each func(Info) error) error {
	if err := CheckPrefix(prefix); err != nil {
		return err
	}
	for after, more := "", true; more; {
		var page []minio.ObjectInfo
		err := s.retry(ctx, "list objects "+prefix, "", func(ctx context.Context) (err error) {
			page, err = s.page(ctx, s.cfg.Prefix+prefix, after, pageSize)
			return err
		})
		if err != nil {
			return err
		}
		for _, o := range page {
			after = o.Key
			key := strings.TrimPrefix(o.Key, s.cfg.Prefix)
			if CheckKey(key) != nil {
				continue // of somebody else
			}
			if err := each(Info{Key: key, Size: o.Size, Modified: o.LastModified}); err != nil {
				return err
			}
		}
		more = len(page) == pageSize
	}
	return nil
}

// page lists up to size objects whose keys come after the one given.
func (s *S3) page(ctx context.Context, prefix, after string, size int) ([]minio.ObjectInfo, error) {
	ctx, beat, stop := s.watched(ctx)
	defer stop()
	var page []minio.ObjectInfo
	for o := range s.core.Client.ListObjects(ctx, s.cfg.Bucket, minio.ListObjectsOptions{
		Prefix: prefix, StartAfter: after, Recursive: true, MaxKeys: size,
	}) {
		if o.Err != nil {
			return nil, cause(ctx, o.Err)
		}
		beat()
		if page = append(page, o); len(page) == size {
			break
		}
	}
	return page, cause(ctx, ctx.Err())
}

// typed turns what the client says into an error of the table.
func (s *S3) typed(ctx context.Context, action, key string, err error) error {
	if err == nil {
		return nil
	}
	if cerr := ctx.Err(); cerr != nil {
		return errs.Wrap(errs.StoreUnavailable, phase, action, cerr)
	}
	var e *errs.Error
	if errors.As(err, &e) {
		return err
	}
	r := minio.ToErrorResponse(err)
	switch {
	case r.Code == minio.NoSuchBucket:
		return errs.New(errs.ObjectNotFound, phase, "bucket "+s.cfg.Bucket+" does not exist").Because(err)
	case r.Code == "XAdminUserNotFound": // how some servers say InvalidAccessKeyId
		return errs.New(errs.StoreDenied, phase, action).Because(err)
	case r.StatusCode == http.StatusNotFound && key != "":
		return notFound(key, err)
	case r.Code == "InvalidAccessKeyId", r.Code == "SignatureDoesNotMatch", r.Code == "RequestTimeTooSkewed", r.StatusCode == http.StatusUnauthorized, r.StatusCode == http.StatusForbidden:
		return errs.New(errs.StoreDenied, phase, action).Because(err)
	case r.StatusCode == http.StatusInsufficientStorage, r.Code == "XMinioStorageFull", r.Code == "QuotaExceeded":
		return errs.New(errs.DiskFull, phase, action).Because(err)
	case r.StatusCode == http.StatusTooManyRequests, r.StatusCode == http.StatusServiceUnavailable:
		return errs.New(errs.StoreUnavailable, phase, action+": the store is too busy").Because(err)
	case r.Code == "BadRequest": // the server could not read the request at all: cut off on its way, or too slow
		return errs.New(errs.StoreUnavailable, phase, action).Because(plain(err))
	case r.StatusCode >= 400 && r.StatusCode < 500 && r.StatusCode != http.StatusRequestTimeout && r.StatusCode != http.StatusPreconditionFailed && r.StatusCode != http.StatusConflict:
		e := errs.New(errs.StoreUnavailable, phase, action+": the store refuses the request").Because(err)
		e.Retryable = false
		return e
	}
	return errs.New(errs.StoreUnavailable, phase, action).Because(plain(err))
}

// plain hides context errors of the store's own time-outs, which are not the caller's.
func plain(err error) error {
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return errors.New(err.Error())
	}
	return err
}

// cause replaces an error that the watchdog made by its reason.
func cause(ctx context.Context, err error) error {
	if err != nil && errors.Is(context.Cause(ctx), errStalled) {
		return errStalled
	}
	return err
}
