package registry

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"dsec/api/v1/errs"
	"dsec/internal/image/source"
)

// FuzzConfigFile reads whatever as a file of credentials; what fails says nothing
// of what is in it.
func FuzzConfigFile(f *testing.F) {
	for _, s := range []string{
		`{"auths":{"https://index.docker.io/v1/":{"auth":"dTpw"}}}`, `{"auths":{"h:5000/a/b":{"username":"u","password":"p"}}}`,
		`{"auths":{"h:5000":{"identitytoken":"t"}},"credsStore":"x"}`, `{"credHelpers":{"h:5000":"gcr"}}`, `{"auths":{"h:5000":{"auth":"%"}}}`, `{}`, `[]`, ``,
	} {
		f.Add([]byte(s), "h:5000", "a/b")
		f.Add([]byte(s), "index.docker.io", "library/x")
	}
	f.Fuzz(func(t *testing.T, p []byte, host, repo string) {
		cfg, err := fromConfigFile(p, host, repo)
		if err != nil && cfg.Password != "" {
			t.Errorf("credentials and %v", err)
		}
		if cfg.Password != "" && !json.Valid(p) {
			t.Error("credentials out of no JSON")
		}
	})
}

// FuzzAnswers reads whatever as what a registry answers.
func FuzzAnswers(f *testing.F) {
	const hash = `"digest":"sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a","size":2`
	for _, s := range []string{
		`{"schemaVersion":2,"config":{"mediaType":"application/vnd.oci.image.config.v1+json",` + hash + `},"layers":[{"mediaType":"application/vnd.oci.image.layer.v1.tar+gzip",` + hash + `}]}`,
		`{"schemaVersion":2,"manifests":[{"mediaType":"application/vnd.oci.image.manifest.v1+json",` + hash + `,"platform":{"os":"linux","architecture":"amd64"}}]}`,
		`{"schemaVersion":1,"fsLayers":[]}`, `{"errors":[{"code":"DENIED","message":"no"}]}`, `{"details":"x"}`, ``,
	} {
		f.Add([]byte(s), "application/vnd.oci.image.index.v1+json", "7", "bytes 5-9/10")
		f.Add([]byte(s), "", "Fri, 01 May 2026 12:00:00 GMT", "bytes */10")
	}
	now := time.Unix(1_700_000_000, 0)
	f.Fuzz(func(t *testing.T, p []byte, header, after, span string) {
		if d := retryAfter(after, now); d < 0 || d > 30*24*time.Hour {
			t.Errorf("retry after %s", d)
		}
		if n, ok := rangeStart(span); ok && (n < 0 || !strings.Contains(span, "-")) {
			t.Errorf("range from %d", n)
		}
		if _, text := parseDiagnosis(p); len(text) > 1200 || strings.ContainsAny(text, "\n\x1b") {
			t.Errorf("%q", text)
		}
		media := mediaTypeOf(header, p)
		check := func(err error) {
			if err != nil && errs.Of(err).Code == errs.InternalError {
				t.Error(err)
			}
		}
		check(refuseOld(media))
		if media.IsIndex() {
			_, err := source.Choose("x", p, "linux/amd64")
			check(err)
		}
		m, err := source.ParseManifest("x", p)
		check(err)
		if err == nil {
			n, err := checkLayers(m)
			check(err)
			if n < 0 {
				t.Errorf("%d bytes", n)
			}
		}
	})
}

func TestTheMostExactEntryCounts(t *testing.T) {
	t.Parallel()
	const file = `{"auths":{
		"docker.io":{"username":"hub","password":"x"},
		"reg.example":{"username":"host","password":"x"},
		"reg.example/team":{"username":"team","password":"x"},
		"https://reg.example/team/app/":{"username":"app","password":"x"},
		"old.example:5000/v2/":{"username":"old","password":"x"}}}`
	for in, want := range map[[2]string]string{
		{"index.docker.io", "library/x"}: "hub", {"reg.example", "other/x"}: "host", {"reg.example", "team/x"}: "team", {"reg.example", "team/app"}: "app",
		{"reg.example", "teams/x"}: "host", {"old.example:5000", "x"}: "old", {"reg.example:5000", "x"}: "", {"example", "x"}: "",
	} {
		cfg, err := fromConfigFile([]byte(file), in[0], in[1])
		if err != nil || cfg.Username != want {
			t.Errorf("%v: %q, %v; want %q", in, cfg.Username, err, want)
		}
	}
}
