package build

import (
	"bufio"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"dsec/api/v1/errs"
)

// Files that no program of an image reads: what dpkg leaves out, now and in
// whatever is installed later.
var dpkgLean = []string{
	"path-exclude=/usr/share/doc/*",
	"path-include=/usr/share/doc/*/copyright",
	"path-exclude=/usr/share/man/*",
	"path-exclude=/usr/share/info/*",
	"path-exclude=/usr/share/locale/*",
	"path-include=/usr/share/locale/locale.alias",
	"path-exclude=/usr/bin/*-lto-dump-*", // 30 MiB, for those who debug gcc itself
}

// debian installs a minimal Debian with the recipe's packages from the archives
// that this machine itself uses.
func (b *builder) debian(ctx context.Context) error {
	bin, err := exec.LookPath("mmdebstrap")
	if err != nil {
		return errs.New(errs.NotSupported, phase, "mmdebstrap is not installed here; install the package mmdebstrap").Because(err)
	}
	// A new name: mmdebstrap makes the directory itself.
	if err := os.Remove(b.root); err != nil {
		return errs.Wrap(errs.InternalError, phase, "clear root directory", err)
	}
	args := []string{
		"--mode=root", "--variant=minbase", "--format=directory",
		`--aptopt=Acquire::Languages "none"`,
		"--dpkgopt=force-unsafe-io", // the result is a tar: no need to sync each file
	}
	for _, o := range dpkgLean {
		args = append(args, "--dpkgopt="+o)
	}
	if len(b.recipe.Packages) > 0 {
		args = append(args, "--include="+strings.Join(b.recipe.Packages, ","))
	}
	args = append(args, b.recipe.Suite, b.root)
	sources := aptSources("/etc/apt", hostSuite("/etc/os-release"), b.recipe.Suite)
	b.tell("debian " + b.recipe.Suite + " with " + strings.Join(b.recipe.Packages, " "))
	cmd := exec.CommandContext(ctx, bin, append(args, sources...)...)
	cmd.Env = append(b.env(), "TMPDIR="+filepath.Dir(b.root))
	return b.tool(ctx, "mmdebstrap", cmd)
}

// hostSuite returns the release that this machine runs, or "".
func hostSuite(osRelease string) string {
	p, err := os.ReadFile(osRelease)
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(p)) {
		if v, ok := strings.CutPrefix(strings.TrimSpace(line), "VERSION_CODENAME="); ok {
			return strings.Trim(v, `"`)
		}
	}
	return ""
}

// aptSources reads where the machine gets its own release from, in both of apt's
// formats, and returns the same for suite, as one-line entries. Archives of
// others are left out. Without any, the tool's default serves.
func aptSources(etc, host, suite string) []string {
	var files []string
	for _, pattern := range []string{"sources.list", "sources.list.d/*.list", "sources.list.d/*.sources"} {
		found, _ := filepath.Glob(filepath.Join(etc, pattern)) // the pattern is fine
		files = append(files, found...)
	}
	var out []string
	for _, f := range files {
		p, err := os.ReadFile(f)
		if err != nil {
			continue
		}
		entries := oneLine(string(p))
		if strings.HasSuffix(f, ".sources") {
			entries = deb822(string(p))
		}
		for _, e := range entries {
			if line := e.forSuite(host, suite); line != "" && !slices.Contains(out, line) {
				out = append(out, line)
			}
		}
	}
	return out
}

type aptEntry struct {
	uri, suite, signedBy string
	components           []string
}

func (e aptEntry) forSuite(host, suite string) string {
	pocket, ok := strings.CutPrefix(e.suite, host)
	if !ok || host == "" || pocket != "" && pocket != "-updates" && pocket != "-security" || !slices.Contains(e.components, "main") {
		return ""
	}
	line := "deb "
	if e.signedBy != "" {
		line += "[signed-by=" + e.signedBy + "] "
	}
	return line + e.uri + " " + suite + pocket + " " + strings.Join(e.components, " ")
}

func oneLine(text string) []aptEntry {
	var out []aptEntry
	for line := range strings.Lines(text) {
		line, _, _ = strings.Cut(line, "#")
		f := strings.Fields(line)
		if len(f) < 4 || f[0] != "deb" {
			continue
		}
		var e aptEntry
		f = f[1:]
		if strings.HasPrefix(f[0], "[") {
			for len(f) > 0 {
				o := strings.Trim(f[0], "[]")
				if v, ok := strings.CutPrefix(o, "signed-by="); ok {
					e.signedBy = v
				}
				last := strings.HasSuffix(f[0], "]")
				if f = f[1:]; last {
					break
				}
			}
		}
		if len(f) < 3 {
			continue
		}
		e.uri, e.suite, e.components = f[0], f[1], f[2:]
		out = append(out, e)
	}
	return out
}

func deb822(text string) []aptEntry {
	var out []aptEntry
	fields := map[string]string{}
	flush := func() {
		types := strings.Fields(fields["types"])
		if slices.Contains(types, "deb") && !strings.EqualFold(fields["enabled"], "no") {
			signed := fields["signed-by"]
			if strings.Contains(signed, "\n") || !strings.HasPrefix(signed, "/") {
				signed = "" // a key in the text cannot be named by a path
			}
			for _, uri := range strings.Fields(fields["uris"]) {
				for _, suite := range strings.Fields(fields["suites"]) {
					out = append(out, aptEntry{uri, suite, signed, strings.Fields(fields["components"])})
				}
			}
		}
		clear(fields)
	}
	key := ""
	for sc := bufio.NewScanner(strings.NewReader(text)); sc.Scan(); {
		line := sc.Text()
		switch {
		case strings.HasPrefix(line, "#"):
		case strings.TrimSpace(line) == "":
			flush()
		case line[0] == ' ' || line[0] == '\t':
			fields[key] += "\n" + strings.TrimSpace(line)
		default:
			k, v, _ := strings.Cut(line, ":")
			key = strings.ToLower(strings.TrimSpace(k))
			fields[key] = strings.TrimSpace(v)
		}
	}
	flush()
	return out
}
