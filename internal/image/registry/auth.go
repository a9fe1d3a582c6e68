package registry

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"dsec/api/v1/errs"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
)

const maxAuthFile = 1 << 20

// Auth says who we are to a registry. The zero value is anonymous; otherwise set
// Username and Password, or Token, or ConfigFile.
type Auth struct {
	Username, Password string
	Token              string // a bearer token that the registry takes as it is
	IdentityToken      string // an OAuth2 refresh token
	// ConfigFile is a file as ~/.docker/config.json: what it has for the registry
	// is used, and nothing if it has nothing. Credential helpers are not run.
	ConfigFile string
}

// String never shows secrets.
func (a Auth) String() string {
	switch {
	case a.Token != "" || a.IdentityToken != "":
		return "a token"
	case a.Username != "" || a.Password != "":
		return fmt.Sprintf("user %q", a.Username)
	case a.ConfigFile != "":
		return "file " + a.ConfigFile
	}
	return "no credentials"
}

// GoString never shows secrets either.
func (a Auth) GoString() string { return a.String() }

// For is what a has for the registry of ref, without the file: for another machine to use.
func (a Auth) For(ref string) (Auth, error) {
	r, err := name.ParseReference(ref)
	if err != nil {
		return Auth{}, errs.Wrap(errs.BadRequest, phasePrefix+PhaseResolve, "read the reference "+fmt.Sprintf("%.200q", ref), err)
	}
	c, err := a.resolve(r.Context())
	return Auth{Username: c.Username, Password: c.Password, Token: c.RegistryToken, IdentityToken: c.IdentityToken}, err
}

func (a Auth) resolve(repo name.Repository) (authn.AuthConfig, error) {
	kinds := 0
	for _, set := range []bool{a.Token != "", a.IdentityToken != "", a.Username != "" || a.Password != "", a.ConfigFile != ""} {
		if set {
			kinds++
		}
	}
	switch {
	case kinds > 1:
		return authn.AuthConfig{}, errs.New(errs.BadRequest, phasePrefix+PhaseResolve, "give one of user name with password, token, and file of credentials")
	case a.Token != "":
		return authn.AuthConfig{RegistryToken: a.Token}, nil
	case a.IdentityToken != "":
		return authn.AuthConfig{IdentityToken: a.IdentityToken}, nil
	case a.ConfigFile == "":
		return authn.AuthConfig{Username: a.Username, Password: a.Password}, nil
	}
	p, err := readSmall(a.ConfigFile)
	if err != nil {
		return authn.AuthConfig{}, errs.Wrap(errs.LocalFile, phasePrefix+PhaseResolve, "read credentials", err)
	}
	cfg, err := fromConfigFile(p, repo.RegistryStr(), repo.RepositoryStr())
	if err != nil { // which may quote the file: name it only
		return cfg, errs.Wrap(errs.BadRequest, phasePrefix+PhaseResolve, "read credentials of "+a.ConfigFile, err)
	}
	return cfg, nil
}

func readSmall(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	p, err := io.ReadAll(io.LimitReader(f, maxAuthFile+1))
	if err == nil && len(p) > maxAuthFile {
		err = fmt.Errorf("%s has more than %d bytes", path, maxAuthFile)
	}
	return p, err
}

// configFile is what we read of Docker's configuration.
type configFile struct {
	Auths       map[string]configAuth `json:"auths"`
	CredHelpers map[string]string     `json:"credHelpers"`
	CredsStore  string                `json:"credsStore"`
}

type configAuth struct {
	Auth          string `json:"auth"` // base64 of user:password
	Username      string `json:"username"`
	Password      string `json:"password"`
	IdentityToken string `json:"identitytoken"`
	RegistryToken string `json:"registrytoken"`
}

// fromConfigFile finds what the file has for the repository: the entry whose key
// is the longest that fits. Keys are hosts, with a path in Podman's files, or old
// URLs. Its errors quote nothing of the file.
func fromConfigFile(p []byte, registry, repo string) (authn.AuthConfig, error) {
	none := authn.AuthConfig{}
	var c configFile
	if err := json.Unmarshal(p, &c); err != nil {
		return none, errors.New("it is not JSON as Docker writes it")
	}
	best, length := configAuth{}, -1
	for key, a := range c.Auths {
		k := normalKey(key)
		fits := k == hostAlias(registry) || strings.HasPrefix(hostAlias(registry)+"/"+repo+"/", k+"/")
		if fits && len(k) > length && a != (configAuth{}) {
			best, length = a, len(k)
		}
	}
	if length < 0 {
		helper := c.CredsStore
		for key, h := range c.CredHelpers {
			if normalKey(key) == hostAlias(registry) {
				helper = h
			}
		}
		if helper != "" {
			return none, fmt.Errorf("its credentials for %s are kept by the program docker-credential-%.40s, which is not run: give a user name and password or a token instead", registry, helper)
		}
		return none, nil
	}
	out := authn.AuthConfig{Username: best.Username, Password: best.Password, IdentityToken: best.IdentityToken, RegistryToken: best.RegistryToken}
	if best.Auth != "" {
		raw, err := base64.StdEncoding.DecodeString(best.Auth)
		if err != nil {
			raw, err = base64.RawStdEncoding.DecodeString(best.Auth)
		}
		user, pass, ok := strings.Cut(strings.Trim(string(raw), "\x00"), ":")
		if err != nil || !ok {
			return none, fmt.Errorf("its entry for %s is malformed", registry)
		}
		out.Username, out.Password = user, pass
	}
	return out, nil
}

// normalKey reduces a key of the file to host[:port][/path].
func normalKey(k string) string {
	k = strings.TrimPrefix(strings.TrimPrefix(k, "https://"), "http://")
	k = strings.TrimRight(k, "/")
	host, path, _ := strings.Cut(k, "/")
	if path == "v1" || path == "v2" {
		path = ""
	}
	if path != "" {
		return hostAlias(host) + "/" + path
	}
	return hostAlias(host)
}

// hostAlias: Docker Hub has several names.
func hostAlias(h string) string {
	switch h {
	case "docker.io", "registry-1.docker.io", "index.docker.io":
		return "index.docker.io"
	}
	return h
}
