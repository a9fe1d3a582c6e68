package build

import (
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"reflect"
	"regexp"
	"sort"
	"strconv"
	"strings"

	"dsec/api/v1/errs"
	"dsec/internal/image"

	"github.com/goccy/go-yaml"
)

const phase = "image.build"

// What a recipe starts from.
const (
	FromDebian  = "debian"
	FromBusybox = "busybox"
	FromScratch = "scratch"
)

// Recipe says how to make an image.
type Recipe struct {
	From     string            `yaml:"from"`
	Suite    string            `yaml:"suite"`    // debian: release, such as bookworm
	Packages []string          `yaml:"packages"` // debian: what to install besides the base
	Steps    []Step            `yaml:"steps"`
	Env      map[string]string `yaml:"env"`
	User     string            `yaml:"user"`
	WorkDir  string            `yaml:"workdir"`
	Cmd      []string          `yaml:"cmd"`
	Labels   map[string]string `yaml:"labels"`

	dir string // where copy steps take their files from
}

// Step is one of a copy and a command.
type Step struct {
	Copy *Copy  `yaml:"copy"`
	Run  string `yaml:"run"`
}

// Copy takes a file or directory from beside the recipe.
type Copy struct {
	Src  string `yaml:"src"`
	Dest string `yaml:"dest"`
	Mode string `yaml:"mode"` // octal, for files; default: the source's
	User int    `yaml:"user"` // owner, a number; default root
}

var (
	packageName = regexp.MustCompile(`^[a-z0-9][a-z0-9+.-]+(:[a-z0-9]+)?(=[A-Za-z0-9.+~:-]+)?$`)
	suiteName   = regexp.MustCompile(`^[a-z][a-z0-9-]*$`)
	envName     = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)
)

// Load reads the recipe in a file. Errors: bad_request with line and column, local_file.
func Load(file string) (*Recipe, error) {
	p, err := os.ReadFile(file)
	if err != nil {
		return nil, errs.Wrap(errs.LocalFile, phase, "read recipe "+file, err)
	}
	r, err := Parse(p, filepath.Dir(file))
	if err != nil {
		return nil, fmt.Errorf("recipe %s: %w", file, err)
	}
	return r, nil
}

// Parse reads a recipe whose copy steps take files from dir. Keys that it does
// not know are errors.
func Parse(p []byte, dir string) (*Recipe, error) {
	r := &Recipe{dir: dir}
	if err := yaml.UnmarshalWithOptions(p, r, yaml.Strict()); err != nil {
		said := strings.TrimSpace(yaml.FormatError(err, false, true))
		e := errs.New(errs.BadRequest, phase, said)
		var unknown *yaml.UnknownFieldError
		if errors.As(err, &unknown) {
			e.Advise("use the fields that there are: " + Fields())
		}
		return nil, e
	}
	if err := r.check(); err != nil {
		return nil, errs.New(errs.BadRequest, phase, err.Error())
	}
	return r, nil
}

// Fields lists what a recipe may have.
func Fields() string {
	list := func(t reflect.Type) string {
		var names []string
		for i := range t.NumField() {
			if name := t.Field(i).Tag.Get("yaml"); name != "" {
				names = append(names, name)
			}
		}
		return strings.Join(names, ", ")
	}
	return fmt.Sprintf("%s; in a step: %s; in copy: %s",
		list(reflect.TypeFor[Recipe]()), list(reflect.TypeFor[Step]()), list(reflect.TypeFor[Copy]()))
}

func (r *Recipe) check() error {
	switch r.From {
	case FromDebian:
		if !suiteName.MatchString(r.Suite) {
			return fmt.Errorf("suite %q: name a Debian release, such as bookworm", r.Suite)
		}
		for _, p := range r.Packages {
			if !packageName.MatchString(p) {
				return fmt.Errorf("packages: %q is not a package name", p)
			}
		}
	case FromBusybox, FromScratch:
		if r.Suite != "" || len(r.Packages) > 0 {
			return fmt.Errorf("suite and packages are for from: debian, not %s", r.From)
		}
	case "":
		return errors.New("from is missing: debian, busybox, scratch or the name of an image")
	default: // an image of the catalogue
		if r.Suite != "" || len(r.Packages) > 0 {
			return fmt.Errorf("suite and packages are for from: debian, not %s", r.From)
		}
	}
	for i, s := range r.Steps {
		if err := s.check(); err != nil {
			return fmt.Errorf("step %d: %w", i+1, err)
		}
	}
	for k := range r.Env {
		if !envName.MatchString(k) {
			return fmt.Errorf("env: %q is not a variable's name", k)
		}
	}
	if r.WorkDir != "" && !path.IsAbs(r.WorkDir) {
		return fmt.Errorf("workdir %q: use an absolute path", r.WorkDir)
	}
	return nil
}

func (s Step) check() error {
	if (s.Copy != nil) == (s.Run != "") {
		return fmt.Errorf("give either copy or run")
	}
	if s.Copy == nil {
		return nil
	}
	if !filepath.IsLocal(s.Copy.Src) {
		return fmt.Errorf("copy: src %q must be beside the recipe", s.Copy.Src)
	}
	if !path.IsAbs(s.Copy.Dest) {
		return fmt.Errorf("copy: dest %q must be an absolute path", s.Copy.Dest)
	}
	if s.Copy.User < 0 {
		return fmt.Errorf("copy: user %d", s.Copy.User)
	}
	_, err := s.Copy.perm()
	return err
}

// perm returns the mode asked for, or 0 for the source's.
func (c Copy) perm() (uint32, error) {
	if c.Mode == "" {
		return 0, nil
	}
	m, err := strconv.ParseUint(c.Mode, 8, 32)
	if err != nil || m == 0 || m > 0o7777 {
		return 0, fmt.Errorf("copy: mode %q: use octal, such as \"0755\"", c.Mode)
	}
	return uint32(m), nil
}

// Config is what the recipe says about running programs: a tar cannot carry it,
// so it goes into the import beside the tar.
func (r *Recipe) Config() image.Config {
	c := image.Config{User: r.User, WorkDir: r.WorkDir, Cmd: r.Cmd, Labels: r.Labels}
	for k, v := range r.Env {
		c.Env = append(c.Env, k+"="+v)
	}
	sort.Strings(c.Env)
	return c
}
