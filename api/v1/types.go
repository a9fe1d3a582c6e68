package v1

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"dsec/api/v1/errs"
)

// Image is one catalogue entry: a name and the manifest it points at.
type Image struct {
	Name      string      `json:"name,omitempty"`
	Digest    string      `json:"digest" doc:"sha256 of the manifest."`
	CreatedAt time.Time   `json:"created_at"`
	UsedAt    *time.Time  `json:"used_at,omitempty" doc:"Of what builds keep for later ones: when a build last made or used it, to the hour."`
	Bytes     int64       `json:"bytes" doc:"Of file contents."`
	Files     int64       `json:"files"`
	Layers    []Layer     `json:"layers"`
	Made      []Layer     `json:"made,omitempty" doc:"Layers that the image was made of, if some were merged since. The digest is over these; they need not exist any more."`
	Config    ImageConfig `json:"config"`
	Parts     []ImagePart `json:"parts,omitempty" doc:"Images that a sandbox's was composed of, lowest first."`
	Snapshot  *Snapshot   `json:"snapshot,omitempty" doc:"Where it is from, if it was made of a sandbox."`
	Pack      *PackTimes  `json:"pack,omitempty" doc:"What making it of a sandbox took."`
}

// PackTimes is what making an image of a sandbox took of the sandbox.
type PackTimes struct {
	FrozenMS    float64 `json:"frozen_ms" doc:"The longest time that it stood still."`
	ReadAheadMS float64 `json:"read_ahead_ms" doc:"Before that, while it ran; 0: there was too little to read."`
}

// Snapshot says what a sandbox's snapshot was made of.
type Snapshot struct {
	Source    string            `json:"source" doc:"Id of the sandbox."`
	Parents   []string          `json:"parents" doc:"Digests of the images it was made on: of what the sandbox was composed of, the base first, or the sandbox's last snapshot."`
	Parts     []ImagePart       `json:"parts,omitempty" doc:"Images that the sandbox was composed of, lowest first, if of several: their layers are the lowest here."`
	Labels    map[string]string `json:"labels,omitempty" doc:"Of the sandbox: a sandbox that is made of the snapshot has them too, unless its own say otherwise."`
	Temporary bool              `json:"temporary,omitempty" doc:"It serves a fork and goes with the last child."`
	Entries   int64             `json:"entries" doc:"Names that the newest layer has, of removed files too."`
	Bytes     int64             `json:"bytes" doc:"Of the newest layer's files."`
	LeftOut   []string          `json:"left_out,omitempty" doc:"Paths that were left out, the first hundred."`
	Omitted   int64             `json:"left_out_count,omitempty" doc:"How many there are."`
	Notes     []string          `json:"notes,omitempty" doc:"What could not be kept as it was."`
}

// Prefixes of the names of images that builds keep for later ones.
const (
	BuildBasePrefix = "build-base:" // what a recipe starts from
	BuildStepPrefix = "build-step:" // the result of a step
)

// KeptByBuild tells whether an image of that name is kept by a build.
func KeptByBuild(name string) bool {
	return strings.HasPrefix(name, BuildBasePrefix) || strings.HasPrefix(name, BuildStepPrefix)
}

// SnapshotPrefix begins the names of snapshots in the catalogue.
const SnapshotPrefix = "snap:"

// SnapshotRequest asks for a snapshot of a sandbox.
type SnapshotRequest struct {
	Name     string       `json:"name,omitempty" maxLength:"200" doc:"Without snap:; empty: one is made up."`
	LeaveOut []string     `json:"leave_out,omitempty" maxItems:"1000" doc:"Patterns of paths that it must not have: /etc/app.key, *.pem, .aws/credentials, /var/cache/**. Without a leading slash they hold at any depth."`
	Image    string       `json:"image,omitempty" maxLength:"255" doc:"Name of an image to make instead, which belongs to no lineage; one that has it is replaced. Needs the right image, too."`
	Config   *ImageConfig `json:"config,omitempty" doc:"With image: what it says about running it, instead of what the sandbox's did."`
}

// Kinds of ImagePart.
const (
	KindBase      = "base"
	KindWorkspace = "workspace"
	KindToolkit   = "toolkit"
	KindDiff      = "diff" // of layers: what a sandbox changed
)

// ImagePart is one image of a composition.
type ImagePart struct {
	Kind   string  `json:"kind" enum:"base,workspace,toolkit"`
	Name   string  `json:"name,omitempty"`
	Digest string  `json:"digest"`
	Layers []Layer `json:"layers,omitempty" doc:"Of an image: the part's as it was composed, lowest first. A layer that a higher part has, too, is there only."`
}

// WithoutLayers returns parts by name alone.
func WithoutLayers(parts []ImagePart) []ImagePart {
	parts = slices.Clone(parts)
	for n := range parts {
		parts[n].Layers = nil
	}
	return parts
}

// Digests returns those of all images that i is composed of: its own if of one alone.
func (i *Image) Digests() []string {
	if len(i.Parts) == 0 {
		return []string{i.Digest}
	}
	out := make([]string, 0, len(i.Parts))
	for _, p := range i.Parts {
		if !slices.Contains(out, p.Digest) {
			out = append(out, p.Digest)
		}
	}
	return out
}

// Layer is one EROFS layer: a metadata blob and a data blob.
type Layer struct {
	Kind       string `json:"kind" enum:"base,workspace,toolkit,diff"`
	MetaDigest string `json:"meta_digest"`
	MetaBytes  int64  `json:"meta_bytes"`
	DataDigest string `json:"data_digest,omitempty" doc:"Empty: no file of the layer has contents outside the metadata."`
	DataBytes  int64  `json:"data_bytes"`
	Parent     string `json:"parent,omitempty" doc:"Of a snapshot's layer: digest over the layers that it was made on."`
	View       string `json:"view,omitempty" doc:"And with it."`
	Replaces   string `json:"replaces,omitempty" doc:"Layers that were merged into it, lowest first: digests of metadata and data with a space, between commas."`
	MetaObject string `json:"meta_object,omitempty" doc:"Where the metadata is in the object store."`
	MapObject  string `json:"map_object,omitempty" doc:"Where the object store has the map of the data's chunks."`
}

// ImageConfig is what an image says about running it.
type ImageConfig struct {
	Env        []string          `json:"env,omitempty"`
	Entrypoint []string          `json:"entrypoint,omitempty"`
	Cmd        []string          `json:"cmd,omitempty"`
	User       string            `json:"user,omitempty"`
	WorkDir    string            `json:"work_dir,omitempty"`
	Labels     map[string]string `json:"labels,omitempty"`
	Volumes    []string          `json:"volumes,omitempty"`
}

// Override puts what is given of an environment, user and working directory in the place
// of the configuration's own.
func (c *ImageConfig) Override(env map[string]string, user, workDir string) {
	if len(env) > 0 {
		all := map[string]string{}
		for _, kv := range c.Env {
			k, v, _ := strings.Cut(kv, "=")
			all[k] = v
		}
		maps.Copy(all, env)
		c.Env = make([]string, 0, len(all))
		for _, k := range slices.Sorted(maps.Keys(all)) {
			c.Env = append(c.Env, k+"="+all[k])
		}
	}
	c.User, c.WorkDir = cmp.Or(user, c.User), cmp.Or(workDir, c.WorkDir)
}

// ImageList is the catalogue.
type ImageList struct {
	Items []Image `json:"items"`
}

// RegistryRequest names an image in a registry and how to get there.
type RegistryRequest struct {
	Ref        string `json:"ref" minLength:"1" maxLength:"1024" doc:"As docker pull has it: debian:12, ghcr.io/team/tool@sha256:…" example:"debian:12"`
	Name       string `json:"name,omitempty" maxLength:"255" doc:"In the catalogue; of a pull, empty: the reference."`
	Platform   string `json:"platform,omitempty" maxLength:"64" doc:"Of a pull: os/arch or os/arch/variant, where there are several; empty: the node's." example:"linux/arm64"`
	Username   string `json:"username,omitempty" maxLength:"1024"`
	Password   string `json:"password,omitempty" maxLength:"65536"`
	Token      string `json:"token,omitempty" maxLength:"65536" doc:"A bearer token, instead of user name and password."`
	Identity   string `json:"identity_token,omitempty" maxLength:"65536" doc:"A refresh token, instead of either."`
	PlainHTTP  bool   `json:"plain_http,omitempty" doc:"HTTP instead of HTTPS."`
	SkipVerify bool   `json:"skip_verify,omitempty" doc:"Take any certificate of the registry."`
}

// Pushed is what a push did.
type Pushed struct {
	Ref       string `json:"ref"`
	Digest    string `json:"digest" doc:"Of the manifest."`
	Bytes     int64  `json:"bytes" doc:"Of the layers as the registry has them."`
	SentBytes int64  `json:"sent_bytes" doc:"Of what it did not have."`
	Sent      int    `json:"sent" doc:"Blobs."`
	Skipped   int    `json:"skipped" doc:"Blobs that it had."`
}

// ImageProgress is one line of a running import.
type ImageProgress struct {
	Phase   string   `json:"phase,omitempty" doc:"receive, unpack, write, commit."`
	Done    int64    `json:"done,omitempty"`
	Total   int64    `json:"total,omitempty"`
	Entries int64    `json:"entries,omitempty"`
	Image   *Image   `json:"image,omitempty" doc:"Last line of a success."`
	Pushed  *Pushed  `json:"pushed,omitempty" doc:"Last line of a push's success."`
	Error   *Problem `json:"error,omitempty" doc:"Last line of a failure."`
}

// Node is one edge and its load.
type Node struct {
	ID          string            `json:"id"`
	Epoch       uint64            `json:"epoch" doc:"Sandboxes of an older epoch are lost."`
	Address     string            `json:"address"`
	Hostname    string            `json:"hostname"`
	Version     string            `json:"version"`
	Backends    []Backend         `json:"backends"`
	StartedAt   time.Time         `json:"started_at"`
	Ready       bool              `json:"ready"`
	Capacity    Resources         `json:"capacity" doc:"Of all its sandboxes together, after overcommit."`
	Largest     Resources         `json:"largest" doc:"What one sandbox may have: what the machine has. 0: as much as capacity."`
	Allocated   Resources         `json:"allocated"`
	Labels      map[string]string `json:"labels,omitempty"`
	FreeDisk    int64             `json:"free_disk_bytes"`
	FreeMemory  int64             `json:"free_memory_bytes"`
	Sandboxes   int64             `json:"sandboxes"`
	Paused      int64             `json:"paused" doc:"Of its sandboxes."`
	Swap        Swap              `json:"swap" doc:"Where paused sandboxes' memory goes."`
	Pressure    string            `json:"pressure,omitempty" enum:"admission,pause,evict" doc:"What the node does since it is short of memory; empty: it is not."`
	CreatesOK   int64             `json:"creates_ok"`
	CreatesFail int64             `json:"creates_failed"`
}

// Swap of a node.
type Swap struct {
	TotalBytes int64 `json:"total_bytes" doc:"0: nothing can be paused."`
	UsedBytes  int64 `json:"used_bytes"`
}

// Resources that admission counts.
type Resources struct {
	Slots       int64 `json:"slots"`
	CPUMillis   int64 `json:"cpu_millis"`
	MemoryBytes int64 `json:"memory_bytes"`
}

// NodeList holds all registered edges.
type NodeList struct {
	Items []Node `json:"items"`
}

// Right is one thing a token may do.
type Right string

// Rights. Admin implies all.
const (
	RightRead    Right = "read"    // list and inspect
	RightSandbox Right = "sandbox" // create, use, remove sandboxes
	RightImage   Right = "image"   // import and remove images
	RightAdmin   Right = "admin"   // tokens, nodes, everything
)

// Token is a credential; its secret is shown once, at creation.
type Token struct {
	ID        string     `json:"id"`
	Name      string     `json:"name"`
	Project   string     `json:"project"`
	Rights    []Right    `json:"rights"`
	CreatedAt time.Time  `json:"created_at"`
	ExpiresAt *time.Time `json:"expires_at,omitempty"`
	Secret    string     `json:"secret,omitempty"`
}

// TokenRequest asks for a token.
type TokenRequest struct {
	Name   string  `json:"name" minLength:"1" maxLength:"100"`
	Rights []Right `json:"rights" minItems:"1" enum:"read,sandbox,image,admin"`
	TTL    Seconds `json:"ttl_s,omitempty" minimum:"0" doc:"0: until revoked."`
}

// TokenList holds tokens without their secrets.
type TokenList struct {
	Items []Token `json:"items"`
}

// EventType says what an Event reports.
type EventType string

// Event types.
const (
	EventState   EventType = "state"   // a sandbox was created or changed state
	EventRemoved EventType = "removed" // a sandbox is gone
	EventOOM     EventType = "oom"     // its memory limit killed processes of a sandbox
	EventNode    EventType = "node"    // an edge appeared, changed or was lost
)

// Event is one change, in the order of Revision.
type Event struct {
	Revision uint64    `json:"revision"`
	Time     time.Time `json:"time"`
	Type     EventType `json:"type"`
	Sandbox  *Sandbox  `json:"sandbox,omitempty"`
	Node     *Node     `json:"node,omitempty"`
	Error    *Problem  `json:"error,omitempty" doc:"Alone in the last line of a stream that the server had to end."`
}

// Health of the server.
type Health struct {
	OK      bool              `json:"ok"`
	Version string            `json:"version"`
	Checks  map[string]string `json:"checks" doc:"'ok' or what is wrong, by part."`
}

// Problem is an error as JSON (api/v1/errs has the table).
type Problem struct {
	Status       int               `json:"status" doc:"HTTP status."`
	Code         string            `json:"code"`
	Class        string            `json:"class"`
	Phase        string            `json:"phase,omitempty"`
	Message      string            `json:"message"`
	Hint         string            `json:"hint,omitempty"`
	Node         string            `json:"node,omitempty"`
	Sandbox      string            `json:"sandbox,omitempty"`
	Cause        string            `json:"cause,omitempty"`
	Retryable    bool              `json:"retryable"`
	Infra        bool              `json:"is_infra"`
	RetryAfterMS int64             `json:"retry_after_ms,omitempty"`
	Details      map[string]string `json:"details,omitempty"`
	RequestID    string            `json:"request_id,omitempty"`
}

// Error makes Problem usable as an error (huma asks for it).
func (p *Problem) Error() string { return p.Message + " (" + p.Code + ")" }

// GetStatus returns the HTTP status (huma asks for it).
func (p *Problem) GetStatus() int { return p.Status }

// ProblemOf renders any error; unknown ones as internal_error. ProblemOf(nil) is nil.
func ProblemOf(err error) *Problem {
	e := errs.Of(err)
	if e == nil {
		return nil
	}
	row := errs.Lookup(e.Code)
	p := &Problem{
		Status: row.HTTP, Code: string(e.Code), Class: string(row.Class), Phase: e.Phase, Message: e.Message, Hint: e.Hint(),
		Node: e.Node, Sandbox: e.Sandbox, Retryable: e.Retryable, Infra: e.Infra, RetryAfterMS: e.RetryAfter.Milliseconds(), Details: e.Facts(),
	}
	if e.Cause != nil {
		p.Cause = e.Cause.Error()
	}
	return p
}

// Err turns p back into the typed error. A nil p gives nil.
func (p *Problem) Err() error {
	if p == nil {
		return nil
	}
	e := &errs.Error{
		Code: errs.Code(p.Code), Phase: p.Phase, Message: p.Message, Node: p.Node, Sandbox: p.Sandbox, Retryable: p.Retryable, Infra: p.Infra,
		RetryAfter: time.Duration(p.RetryAfterMS) * time.Millisecond, Details: p.Details,
	}
	if p.Hint != "" && p.Hint != errs.Lookup(e.Code).Hint {
		e.Details = maps.Clone(e.Details)
		e.Advise(p.Hint)
	}
	if p.Cause != "" {
		e.Cause = remoteCause(p.Cause)
	}
	return e
}

type remoteCause string

func (c remoteCause) Error() string { return string(c) }

// InUse is the error for what cannot be removed since others need it.
func InUse(phase, what string, by []string) *errs.Error {
	list := by
	if len(list) > 20 {
		list = append(slices.Clone(list[:20]), fmt.Sprintf("and %d more", len(by)-20))
	}
	names := strings.Join(list, ", ")
	return errs.New(errs.ImageInUse, phase, "the "+what+" is needed by "+names).With("needed_by", names)
}

// EdgeCreate is what the apiserver asks an edge for: a spec with everything resolved.
// It travels in aether/msg.Document.
type EdgeCreate struct {
	ID             string            `json:"id"` // names the edge and its epoch
	IdempotencyKey string            `json:"idempotency_key,omitempty"`
	Spec           Spec              `json:"spec"`
	Image          *Image            `json:"image,omitempty"`
	ForkOf         string            `json:"fork_of,omitempty"`
	SecretEnv      map[string]string `json:"secret_env,omitempty"`
}

// EdgeFork is what the apiserver asks an edge for: children of a sandbox, by the ids that
// they are to have. It travels in aether/msg.Document.
type EdgeFork struct {
	ID        string            `json:"id"`
	Children  []string          `json:"children"`
	Lease     Seconds           `json:"lease_s,omitempty"`
	LeaveOut  []string          `json:"leave_out,omitempty"`
	SecretEnv map[string]string `json:"secret_env,omitempty"`
}

// EdgePause is what the apiserver asks an edge for: sandboxes to pause or to resume. It travels in
// aether/msg.Document; the answer is a Document with a PauseResult for each, as they end.
type EdgePause struct {
	IDs []string    `json:"ids"`
	Why PauseReason `json:"why,omitempty"` // of a pause; empty: request
}

// EdgePaused is an edge's answer for one sandbox of an EdgePause.
type EdgePaused struct {
	PauseResult
	Sandbox *Sandbox `json:"sandbox,omitempty"` // as it is now: whoever asked may list it before the watch tells
}

// EdgeDelete is what the apiserver asks an edge for: sandboxes to remove. It travels in
// aether/msg.Document; the answer is a Document with an EdgeDeleted for each, as they end.
type EdgeDelete struct {
	IDs []string `json:"ids"`
}

// EdgeDeleted is the outcome for one sandbox of an EdgeDelete.
type EdgeDeleted struct {
	DeleteResult
	Sandbox *Sandbox `json:"sandbox,omitempty"` // as it was last
}

// EdgeUsage is what the apiserver asks an edge for: what sandboxes use. It travels in
// aether/msg.Document, as does the answer, a NodeUsage.
type EdgeUsage struct {
	IDs []string `json:"ids,omitempty"` // none: all, as they were within the last second
}

// EdgeHint is what the apiserver tells an edge. It travels in aether/msg.Document.
type EdgeHint struct {
	ID string `json:"id"`
	HintRequest
}

// EdgeSnapshot is what the apiserver asks an edge for. It travels in aether/msg.Document.
type EdgeSnapshot struct {
	ID       string       `json:"id"`
	LeaveOut []string     `json:"leave_out,omitempty"`
	Plain    bool         `json:"plain,omitempty"` // an image that belongs to no lineage
	Config   *ImageConfig `json:"config,omitempty"`
}

// EdgeCollapse is what the apiserver asks an edge for. It travels in aether/msg.Document.
type EdgeCollapse struct {
	Image Image `json:"image"`
	Below int64 `json:"below"` // neighbours that are both smaller are merged
	Least int   `json:"least"` // if the image then has so many layers less
}

// EdgePush is what the apiserver asks an edge for. It travels in aether/msg.Document.
type EdgePush struct {
	Image   Image           `json:"image"`
	Request RegistryRequest `json:"request"`
}

// Formats of an export.
const (
	ExportTar      = "tar"      // the root file system
	ExportDocker   = "docker"   // a docker-archive that is an OCI layout too, with Docker's media types
	ExportOCI      = "oci"      // the same with OCI's
	ExportSnapshot = "snapshot" // the layers as they are, for another cluster
)

// EdgeExport is what the apiserver asks an edge for. It travels in aether/msg.Document.
type EdgeExport struct {
	Image  Image  `json:"image"`
	Format string `json:"format"`
}

// EdgeEvent is one line of an edge's watch stream. Reset says that what the edge
// said before no longer counts: Sandboxes then holds all it has. What does not fit one
// line goes on in the next ones, as long as More says so; Seq is reached with the last.
type EdgeEvent struct {
	Seq       uint64    `json:"seq"`
	Reset     bool      `json:"reset,omitempty"`
	More      bool      `json:"more,omitempty"`
	Sandboxes []Sandbox `json:"sandboxes,omitempty"`
	Removed   []string  `json:"removed,omitempty"`
	Node      *Node     `json:"node,omitempty"` // present when load or capacity changed
}
